"""The HTTP server's connections: who says nothing takes up no thread, who says half a request takes
one up for a bounded time, and their number is bounded.

cheroot hands each new connection to a thread at once, which waits for the first line; as many
silent connections as there are threads would keep everybody else waiting. Here a new one is watched
with the idle ones until something comes of it, and what comes is awaited with
:mod:`blockflow.control.rest.patience`.
"""

from __future__ import annotations

import math
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from cheroot import wsgi
from cheroot.server import HTTPConnection
from cheroot.workers.threadpool import _SHUTDOWNREQUEST  # type: ignore[attr-defined]

from blockflow.control.rest.patience import Clock, PatientReader, PatientWriter, allowance
from blockflow.control.rest.request import StrictRequest

MAX_CONNECTIONS = 512
_SHARE_OF_DESCRIPTORS = 8
_FEWEST = 4
_AGAIN_S = 0.1
"""Between two tries to take a connection that there is no descriptor or memory for."""


class _Connection(HTTPConnection):
    """Its thread's waits are bounded for a request as a whole, and for its answer.

    Attributes:
        reading, writing: the clocks.
    """

    RequestHandlerClass = StrictRequest

    def __init__(self, server: PatientServer, sock: socket.socket, makefile: object = None) -> None:
        self.reading, self.writing = Clock(server.allowance), Clock(server.allowance)
        super().__init__(server, sock, self._file)

    def _file(self, sock: socket.socket, mode: str, size: int) -> PatientReader | PatientWriter:
        if "r" in mode:
            return PatientReader(sock, self.reading, size)
        return PatientWriter(sock, self.writing, size)

    def communicate(self) -> Any:
        """One request; called by a thread of the server."""
        self.reading.restart()
        self.writing.restart()
        return super().communicate()


class PatientServer(wsgi.Server):
    """Threads are for connections that something was received on.

    Beyond :func:`most_connections`, the one that has been silent for the longest time is ended; a
    new one, where even that takes too long.
    """

    ConnectionClass = _Connection
    _connections: Any  # cheroot's manager of connections, which its stubs leave out
    requests: Any  # and its threads
    _most_waiting = 0

    def prepare(self) -> None:
        try:
            super().prepare()
        except RuntimeError:  # no further thread: those that there are would keep the process
            for _ in range(self.requests.min):
                self.requests.put(_SHUTDOWNREQUEST)
            raise
        accept = self._connections._from_server_socket
        self._connections._from_server_socket = partial(_accepted, accept)

    def allowance(self) -> float:
        """Seconds that a request may take to arrive at present, or its answer to be taken."""
        waiting = self.requests.qsize
        # The most since nobody waited: as the queue gets shorter those that are left in it would
        # otherwise have to wait for ever longer turns.
        self._most_waiting = max(self._most_waiting, waiting) if waiting else 0
        return allowance(self._most_waiting, self.requests.max)

    def process_conn(self, conn: Any) -> None:
        """Called for a new connection, and for a known one that something was received on."""
        if conn.last_used is not None:
            super().process_conn(conn)
            return
        silent = [c for _, c in self._connections._selector.connections if c is not self]
        most = most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        others = len(silent) + self.requests.qsize
        if others >= 2 * most:
            conn.close()
            return
        if others >= most and silent:
            self._end_oldest(silent)
        self._connections.put(conn)

    def _end_oldest(self, silent: list[Any]) -> None:
        # Not closed here, where others may just be about to look at it: it ends as if the peer
        # had hung up.
        oldest = min(silent, key=lambda c: c.last_used)
        oldest.last_used = math.inf
        with suppress(OSError):
            oldest.socket.shutdown(socket.SHUT_RDWR)


def _accepted(accept: Callable[[Any], Any], listener: Any) -> Any:
    """A new connection. One that cannot be taken goes on waiting at the door, and the server would
    try for it again without a pause, as long as there is no room."""
    try:
        return accept(listener)
    except OSError:
        time.sleep(_AGAIN_S)
        raise


def most_connections(descriptors: int) -> int:
    """How many may be open in a process that may have so many descriptors."""
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(_FEWEST, min(MAX_CONNECTIONS, descriptors // _SHARE_OF_DESCRIPTORS))

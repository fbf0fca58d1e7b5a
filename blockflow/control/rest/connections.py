"""The HTTP server's connections: who says nothing takes up no thread, and their number is bounded.

cheroot hands each new connection to a thread at once, which waits for the first line; as many
silent connections as there are threads would keep everybody else waiting. Here a new one is watched
with the idle ones until something comes of it.
"""

from __future__ import annotations

import math
import resource
import socket
from contextlib import suppress
from typing import Any

from cheroot import wsgi

MAX_CONNECTIONS = 512
_SHARE_OF_DESCRIPTORS = 8
_FEWEST = 4


class PatientServer(wsgi.Server):
    """Threads are for connections that something was received on.

    Beyond :func:`most_connections`, the one that has been silent for the longest time is ended; a
    new one, where even that takes too long.
    """

    _connections: Any  # cheroot's manager of connections, which its stubs leave out

    def process_conn(self, conn: Any) -> None:
        """Called for a new connection, and for a known one that something was received on."""
        if conn.last_used is not None:
            super().process_conn(conn)
            return
        silent = [c for _, c in self._connections._selector.connections if c is not self]
        most = most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if len(silent) >= 2 * most:
            conn.close()
            return
        if len(silent) >= most:
            self._end_oldest(silent)
        self._connections.put(conn)

    def _end_oldest(self, silent: list[Any]) -> None:
        # Not closed here, where others may just be about to look at it: it ends as if the peer
        # had hung up.
        oldest = min(silent, key=lambda c: c.last_used)
        oldest.last_used = math.inf
        with suppress(OSError):
            oldest.socket.shutdown(socket.SHUT_RDWR)


def most_connections(descriptors: int) -> int:
    """How many may be open in a process that may have so many descriptors."""
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(_FEWEST, min(MAX_CONNECTIONS, descriptors // _SHARE_OF_DESCRIPTORS))

"""How long a thread of the HTTP server waits for the other side: for a request as a whole, not for
each of its bytes, and the less the more others wait for a thread.

A time-out per ``recv`` is none for who sends a byte every few seconds: as many of those as there
are threads would keep everybody else out, before any token was looked at.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeVar

from cheroot.errors import FatalSSLAlert
from cheroot.makefile import StreamReader, StreamWriter

WHOLE_S = 30.0
"""For a request, head and body together, to arrive; and for its answer to be taken."""

_HURRY_S = 2.0
"""In which all that wait for a thread get one, whatever those do that have one."""

_LOOK_S = 0.05
"""A thread that waits looks so often whether others have come that wait for it."""

T = TypeVar("T")


def allowance(waiting: int, threads: int) -> float:
    """Seconds that a request may take to arrive while so many connections wait for a thread."""
    return _HURRY_S / (1 + waiting / threads) if waiting else WHOLE_S


class Clock:
    """One side's time for one request. ``allowed`` says how much it may have at present."""

    def __init__(self, allowed: Callable[[], float]) -> None:
        self._allowed = allowed
        self._since: float | None = None
        self._most = WHOLE_S

    def restart(self, most: float = WHOLE_S) -> None:
        """The time begins with the next wait."""
        self._since, self._most = None, most

    def left(self) -> float:
        """Seconds; 0 or less = the time is over."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return self._since + min(self._most, self._allowed()) - now


class _PatientIO(socket.SocketIO):
    """A connection's bytes, awaited for as long as the clock allows."""

    def __init__(self, sock: socket.socket, mode: str, clock: Clock) -> None:
        super().__init__(sock, "rb" if "r" in mode else "wb")
        self._peer = sock
        self._clock = clock

    def readinto(self, buffer: Any) -> int:
        return self._patiently(lambda: self._peer.recv_into(buffer))

    def write(self, data: Any) -> int:
        return self._patiently(lambda: self._peer.send(data))

    def _patiently(self, act: Callable[[], T]) -> T:
        while (left := self._clock.left()) > 0:
            self._peer.settimeout(min(left, _LOOK_S))
            try:
                return act()
            except TimeoutError:
                continue
        if isinstance(self._peer, ssl.SSLSocket) and self._peer.version() is None:
            raise FatalSSLAlert("the handshake did not end")  # no answer could be read
        raise TimeoutError("timed out")  # the words by which cheroot knows it


class PatientReader(StreamReader):
    """cheroot's reader, which asks for a whole head or body, with a clock."""

    def __init__(self, sock: socket.socket, clock: Clock, bufsize: int) -> None:
        # Past cheroot's own, which would put a bare socket below.
        super(StreamReader, self).__init__(_PatientIO(sock, "r", clock), bufsize)
        self.bytes_read = 0
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None

    def has_data(self) -> bool:
        # What TLS has decrypted already the selector does not see.
        return bool(super().has_data()) or (self._tls is not None and self._tls.pending() > 0)


class PatientWriter(StreamWriter):
    """cheroot's writer with a clock."""

    def __init__(self, sock: socket.socket, clock: Clock, bufsize: int) -> None:
        super(StreamWriter, self).__init__(_PatientIO(sock, "w", clock), bufsize)
        self.bytes_written = 0
        self._peer = sock

    def close(self) -> None:
        # cheroot leaves this to the finalizer, long after the socket: nobody takes the rest then,
        # and Python from 3.13 on complains on stderr of each that was not taken.
        if self._peer.fileno() < 0:
            self._write_buf.clear()  # type: ignore[attr-defined]  # of _pyio
        super().close()

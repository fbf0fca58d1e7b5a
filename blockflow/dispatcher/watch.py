"""Watch: cuts off connections whose message has no end; what :class:`Unfinished` decides."""

from __future__ import annotations

import logging
import time

from blockflow.dispatcher.descriptors import OwnMemory, bytes_received, end_connection, inode
from blockflow.dispatcher.unfinished import Unfinished
from blockflow.launch.environment import give_memory_back

_LOG = logging.getLogger("blockflow.dispatcher")

_LOOK_NS = 50_000_000
_SOON_NS = 5_000_000
"""... when somebody is suspected."""

_SHARE = 50
"""A look takes some microseconds per connection: of many, no more than a fiftieth of the time."""

_FREED_NS = 1_000_000_000
"""ZeroMQ frees what a connection held some time after its end."""


class Watch:
    """Over the TCP connections of a bound socket; those on unix sockets are of the same user.

    Attributes:
        ended: connections that it has cut off.
    """

    def __init__(self) -> None:
        self.ended = 0
        self._book = Unfinished()
        self._memory = OwnMemory()
        self._inodes: dict[int, int] = {}
        self._due_ns = 0
        self._trim_ns: int | None = None
        self.delivered = self._book.delivered

    def began(self, fd: int) -> None:
        """ZeroMQ has accepted a connection."""
        node = inode(fd)
        if node is not None and bytes_received(fd) is not None:
            self._inodes[fd] = node
            self._book.began(fd)

    def gone(self, fd: int) -> None:
        self._inodes.pop(fd, None)
        self._book.ended(fd)

    def close(self) -> None:
        self._memory.close()

    def next_ms(self) -> int | None:
        """How soon :meth:`look` shall be called again; None = there is nobody to look at."""
        if self._book.suspects:
            return _SOON_NS // 1_000_000
        return _LOOK_NS // 1_000_000 if self._inodes or self._trim_ns is not None else None

    def due(self, now_ns: int) -> bool:
        return now_ns >= self._due_ns and self.next_ms() is not None

    def look(self, now_ns: int, held: int, *, drained: bool) -> None:
        """Look at all connections; see :meth:`Unfinished.look`."""
        begin = time.thread_time_ns()
        received = {fd: bytes_received(fd) for fd in self._inodes}
        known = {fd: n for fd, n in received.items() if n is not None}
        for fd in self._book.look(now_ns, known, self._memory.read(), held, drained=drained):
            self._end(fd, now_ns)
        if self._book.suspects:
            self._due_ns = now_ns + _SOON_NS
        else:
            self._due_ns = now_ns + max(_LOOK_NS, _SHARE * (time.thread_time_ns() - begin))
        freed = self._trim_ns is not None and now_ns >= self._trim_ns
        if freed:
            self._trim_ns = None
        if freed or self._book.unexplained:
            give_memory_back()

    def _end(self, fd: int, now_ns: int) -> None:
        end_connection(fd, self._inodes[fd])
        self.gone(fd)
        self.ended += 1
        self._trim_ns = now_ns + _FREED_NS
        if self.ended & (self.ended - 1) == 0:  # at 1, 2, 4, 8 ...: the log stays bounded
            _LOG.warning("a client's message has no end: cut off (%d so far)", self.ended)

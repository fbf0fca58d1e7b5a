"""Watch: cuts off connections that leave too much unread, and gives memory back after large
messages; what :class:`Unread` and :class:`Heap` decide."""

from __future__ import annotations

import logging
import time

from blockflow.core.text import worth_a_line
from blockflow.dispatcher.descriptors import Doors, OwnMemory, bytes_received
from blockflow.dispatcher.heap import Heap
from blockflow.dispatcher.unread import Unread
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

    Args:
        doors: shuts connections.

    Attributes:
        ended: connections that it has cut off.
    """

    def __init__(self, doors: Doors) -> None:
        self.ended = 0
        self._doors = doors
        self._memory = OwnMemory()
        private = self._memory.read()
        self._book = Unread(private)
        self._heap = Heap(private)
        self._marks: dict[int, int] = {}
        self._due_ns = 0
        self._trim_ns: int | None = None
        self.delivered = self._book.delivered
        self.large = self._heap.passed

    def began(self, fd: int, name: int) -> None:
        """ZeroMQ has accepted a connection; ``name`` is its mark."""
        if bytes_received(fd) is not None:
            self._marks[fd] = name
            self._book.began(fd)

    def gone(self, fd: int) -> None:
        self._marks.pop(fd, None)
        self._book.ended(fd)

    def freed(self, now_ns: int) -> None:
        """What took much memory has been read and thrown away."""
        if self._trim_ns is None:
            self._trim_ns = now_ns + _FREED_NS

    def close(self) -> None:
        self._memory.close()

    def next_ms(self) -> int | None:
        """How soon :meth:`look` shall be called again; None = there is nothing to look at."""
        if self._book.suspects:
            return _SOON_NS // 1_000_000
        wanted = self._marks or self._heap.stirred or self._trim_ns is not None
        return _LOOK_NS // 1_000_000 if wanted else None

    def due(self, now_ns: int) -> bool:
        return now_ns >= self._due_ns and self.next_ms() is not None

    def look(self, now_ns: int, held: int, passing: int = 0, *, drained: bool) -> None:
        """Look at all connections; see :meth:`Unread.look`."""
        begin = time.thread_time_ns()
        if self._book.unexplained:  # or who is judged now would answer for what is only kept
            give_memory_back()
        received = {fd: bytes_received(fd) for fd in self._marks}
        known = {fd: n for fd, n in received.items() if n is not None}
        private = self._memory.read()
        for fd in self._book.look(now_ns, known, private, held, passing, drained=drained):
            self._end(fd, now_ns)
        if self._book.suspects:
            self._due_ns = now_ns + _SOON_NS
        else:
            self._due_ns = now_ns + max(_LOOK_NS, _SHARE * (time.thread_time_ns() - begin))
        freed = self._trim_ns is not None and now_ns >= self._trim_ns
        if freed:
            self._trim_ns = None
        spare = self._heap.look(now_ns, private, held)
        if spare:
            self._book.trimmed()
        if spare or freed:
            give_memory_back()

    def _end(self, fd: int, now_ns: int) -> None:
        self.ended += 1  # before the peer can know it
        self._doors.shut(fd, self._marks[fd])
        self.gone(fd)
        self.freed(now_ns)
        if worth_a_line(self.ended):
            _LOG.warning("a client left too much unread: cut off (%d so far)", self.ended)

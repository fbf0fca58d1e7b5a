"""Unfinished: which connections hold more here than a message may be. Pure: counts come in.

ZeroMQ delivers a message when it is whole. Its size limit is per frame and its high-water mark
counts whole messages, so that it keeps any number of frames of a message that never ends, and tells
nobody. What can be seen from outside: the bytes that a connection has brought since a message of it
was delivered, and how this process has grown meanwhile (a frame without content takes 2 bytes on
the wire and 64 here).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blockflow.core import limits

MESSAGE_BYTES = limits.MAX_MESSAGE_BYTES + 16 * 1024 * 1024
"""One connection may have brought so much of a message: the largest one, and what the kernel
holds of the next."""

TOTAL_BYTES = 1024 * 1024 * 1024
"""... and all of them together; beyond it the one that has brought most is cut off."""

UNEXPLAINED_BYTES = 128 * 1024 * 1024
"""While a message is unfinished, this process may grow by so much more than is known of."""

FRAME_BYTES_PER_BYTE = 64
"""A byte on the wire takes no more memory than this: an empty frame, of 2 bytes, takes 64 here (32
each; encrypted it is longer). As much again is for what is taken for heartbeats of these bytes."""

IDLE_BYTES_S = 128
"""Heartbeats are no part of a message: 16 bytes a second, encrypted 80."""

_ROUNDS = 2
"""ZeroMQ takes messages from its connections in turn: after so many rounds each had its own."""

_PATIENCE_NS = 250_000_000
"""... or when the others' messages are so long that nobody gets his turn."""

_SECOND_NS = 1_000_000_000


@dataclass(slots=True)
class _Connection:
    """What is known of one.

    Attributes:
        since_ns: when it was first looked at after its last message (or after it began).
        base: bytes that it had brought by then.
        private: memory of this process then, without what is known to belong elsewhere.
        queued: bytes of all connections that had come and had not been delivered then.
        unfinished: bytes since then, without heartbeats.
        delivered: bytes of its messages, in all.
        suspected: when it was first found over a bound, and the messages of all that had been
            delivered by then.
    """

    since_ns: int = 0
    base: int = 0
    private: int = 0
    queued: int = 0
    unfinished: int = 0
    delivered: int = 0
    suspected: tuple[int, int] | None = None


class Unfinished:
    """The book of connections, each named by its descriptor.

    Attributes:
        suspects: how many were over a bound at the last look.
        unexplained: ... because of the memory of this process. What the allocator only keeps for
            later use is nobody's: it should be given back before the next look.
    """

    def __init__(self) -> None:
        self.suspects = 0
        self.unexplained = False
        self._connections: dict[int, _Connection] = {}
        self._fresh: set[int] = set()
        self._turns = 0

    def began(self, fd: int) -> None:
        """A connection was accepted; the one that had its descriptor before is no more."""
        self._connections[fd] = _Connection()
        self._fresh.add(fd)

    def ended(self, fd: int) -> None:
        self._connections.pop(fd, None)
        self._fresh.discard(fd)

    def delivered(self, fd: int, nbytes: int) -> None:
        """A whole message of it has arrived: at the next look it begins anew."""
        self._turns += 1
        self._fresh.add(fd)
        link = self._connections.get(fd)  # those of unix sockets are not booked
        if link is not None:
            link.delivered += nbytes

    def look(
        self, now_ns: int, received: Mapping[int, int], private: int, held: int, *, drained: bool
    ) -> list[int]:
        """Judge all connections.

        A whole message may wait to be delivered; so nobody is cut off who has not been over a bound
        before, and had his turn since.

        Args:
            received: bytes that each connection has brought since it began; without those that
                have ended.
            private: memory of this process that it does not share.
            held: what of it is known to belong elsewhere.
            drained: no message waits to be delivered.

        Returns:
            The connections to cut off.
        """
        for fd in [fd for fd in self._connections if fd not in received]:
            self.ended(fd)
        queued = 0
        for fd, link in self._connections.items():
            if fd in self._fresh:
                link.since_ns, link.base, link.suspected = now_ns, received[fd], None
                if drained:  # what frames take on the wire besides their content
                    link.delivered = received[fd]
            idle = IDLE_BYTES_S * (now_ns - link.since_ns) // _SECOND_NS
            link.unfinished = max(0, received[fd] - link.base - idle)
            queued += max(0, received[fd] - link.delivered)
        for fd in self._fresh & self._connections.keys():
            link = self._connections[fd]
            link.private, link.queued = private - held, queued
        self._fresh.clear()
        return self._convicted(self._over(private - held, queued), now_ns, drained)

    def _over(self, private: int, queued: int) -> set[int]:
        """Who is over a bound."""
        links = self._connections
        over = {fd for fd, link in links.items() if link.unfinished > MESSAGE_BYTES}
        if sum(link.unfinished for link in links.values()) > TOTAL_BYTES:
            over.add(max(links, key=lambda fd: links[fd].unfinished))
        grown = self._grown(private, queued)
        if grown:
            over.add(max(grown, key=lambda fd: links[fd].unfinished))
        self.unexplained = bool(grown)
        self.suspects = len(over)
        return over

    def _grown(self, private: int, queued: int) -> list[int]:
        """Those during whose message this process has grown beyond the bound, and by no more than
        what they have brought can take: memory grows for other reasons as well."""
        growth = {
            fd: private - link.private - (queued - link.queued)
            for fd, link in self._connections.items()
            if link.unfinished
        }
        grown = [fd for fd, nbytes in growth.items() if nbytes > UNEXPLAINED_BYTES]
        most = FRAME_BYTES_PER_BYTE * sum(self._connections[fd].unfinished for fd in grown)
        return [fd for fd in grown if growth[fd] <= most]

    def _convicted(self, over: set[int], now_ns: int, drained: bool) -> list[int]:
        out = []
        rounds = _ROUNDS * len(self._connections)
        for fd, link in self._connections.items():
            if fd not in over:
                link.suspected = None
            elif link.suspected is None:
                link.suspected = now_ns, self._turns
            else:
                since_ns, turns = link.suspected
                waited = now_ns - since_ns >= _PATIENCE_NS
                if drained or waited or self._turns - turns >= rounds:
                    out.append(fd)
        return out

"""Unread: which connections hold more here than they may. Pure: counts come in.

ZeroMQ delivers a message when it is whole. Its size limit is per frame, and a high-water mark,
which would count whole messages, must not be set (:mod:`blockflow.tensormq.sockets`). So it keeps
whatever comes, any number of frames of a message that never ends and any number of messages, and
tells nobody. What can be seen from outside: the bytes that a connection has brought and that were
not delivered yet, and how this process has grown meanwhile (a frame without content takes 2 bytes
on the wire and 64 here).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from blockflow.core import limits
from blockflow.tensormq.sockets import CURVE_BYTES

CONNECTION_BYTES = limits.MAX_MESSAGE_BYTES + 16 * 1024 * 1024
"""So much may wait to be read of what one connection has brought: the largest message, and what the
kernel holds of the next. Who keeps to
:data:`~blockflow.core.limits.MAX_UNANSWERED_BYTES` is never beyond it."""

TOTAL_BYTES = 1024 * 1024 * 1024
"""... and of all of them together; beyond it the one that has brought most is cut off."""

UNEXPLAINED_BYTES = 128 * 1024 * 1024
"""While something of a connection is unread, this process may grow by so much more than is known
of."""

FRAME_BYTES_PER_BYTE = 64
"""A byte on the wire takes no more memory than this: an empty frame, of 2 bytes, takes 64 here (32
each; encrypted it is longer). As much again is for what is taken for heartbeats of these bytes."""

IDLE_BYTES_S = 128
"""Heartbeats are no part of a message: 16 bytes a second, encrypted 80."""

_LITTLE_BYTES = 1024 * 1024
"""Who has left no more than this unread is as good as read; and so much may be taken for
heartbeats at once."""

_ROUNDS = 2
"""ZeroMQ takes messages from its connections in turn: after so many rounds each had its own."""

_PATIENCE_NS = 250_000_000
"""... or when the others' messages are so long that nobody gets his turn."""

_SECOND_NS = 1_000_000_000

_SHORT_BYTES, _LONG_BYTES, _SHORTEST = 2, 9, 255
"""Flags and length of a frame."""


def wire_bytes(frames: Iterable[int], *, encrypted: bool) -> int:
    """What the frames of a message, of these lengths, take on the wire (ZMTP 3.1; with CURVE each
    is the payload of a command)."""
    total = 0
    for nbytes in frames:
        body = nbytes + CURVE_BYTES if encrypted else nbytes
        total += body + (_SHORT_BYTES if body <= _SHORTEST else _LONG_BYTES)
    return total


@dataclass(slots=True)
class _Connection:
    """What is known of one.

    Attributes:
        since_ns: when all that it had brought had been read (or when it began).
        excess: memory of this process that was nobody's, as far as is known, when it had left
            nothing unread, or little of what it had just brought; at first, when it began.
        unread: bytes that have come and were not delivered, without heartbeats.
        delivered: bytes that were, in all.
        suspected: when it was first found over a bound, and the messages of all that had been
            delivered by then.
    """

    since_ns: int = 0
    excess: int = 0
    unread: int = 0
    delivered: int = 0
    suspected: tuple[int, int] | None = None


class Unread:
    """The book of connections, each named by its descriptor.

    Args:
        private: memory of this process that it does not share, at its start.

    Attributes:
        suspects: how many were over a bound at the last look.
        unexplained: ... because of the memory of this process. What the allocator only keeps for
            later use is nobody's: it should be given back before the next look.
    """

    def __init__(self, private: int = 0) -> None:
        self.suspects = 0
        self.unexplained = False
        self._connections: dict[int, _Connection] = {}
        self._fresh: set[int] = set()
        self._turns = 0
        self._excess = private
        self._kept = 0

    def began(self, fd: int) -> None:
        """A connection was accepted; the one that had its descriptor before is no more."""
        self._connections[fd] = _Connection(excess=self._excess)
        self._fresh.add(fd)

    def ended(self, fd: int) -> None:
        self._connections.pop(fd, None)
        self._fresh.discard(fd)

    def delivered(self, fd: int, nbytes: int) -> None:
        """A whole message of it has been read, which took so many bytes on the wire."""
        self._turns += 1
        self._fresh.add(fd)
        link = self._connections.get(fd)  # those of unix sockets are not booked
        if link is not None:
            link.delivered += nbytes

    def trimmed(self) -> None:
        """What the allocator has kept is being given back. To whom the next burst belongs cannot be
        told by memory that was here before: buffers of messages under way take more of it than has
        come of them. No more than all together may bring: who comes and goes could raise it each
        time."""
        self._kept = min(self._excess, TOTAL_BYTES)

    def look(
        self,
        now_ns: int,
        received: Mapping[int, int],
        private: int,
        held: int,
        passing: int = 0,
        *,
        drained: bool,
    ) -> list[int]:
        """Judge all connections.

        What has just come may be read in a moment; so nobody is cut off who has not been over a
        bound before, and had his turn since.

        Args:
            received: bytes that each connection has brought since it began; without those that
                have ended.
            private: memory of this process that it does not share.
            held: what of it is known to belong elsewhere.
            passing: what of it may belong elsewhere besides, for a moment.
            drained: no message waits to be delivered.

        Returns:
            The connections to cut off.
        """
        for fd in [fd for fd in self._connections if fd not in received]:
            self.ended(fd)
        queued = 0
        for fd, link in self._connections.items():
            if drained and fd in self._fresh:
                link.since_ns, link.delivered = now_ns, received[fd]
            # A message of an earlier connection may have been laid on this one.
            link.delivered = min(link.delivered, received[fd])
            idle = IDLE_BYTES_S * (now_ns - link.since_ns) // _SECOND_NS
            link.unread = max(0, received[fd] - link.delivered - idle)
            if idle > _LITTLE_BYTES and not link.unread:  # days of it would hide an endless message
                link.since_ns, link.delivered = now_ns, received[fd]
            queued += received[fd] - link.delivered
        # What is unread grows and shrinks within memory that the allocator keeps.
        self._excess = max(private - held - queued, self._kept)
        for fd, link in self._connections.items():
            # Who has been idle is not to answer for what others have taken meanwhile.
            if link.unread <= (_LITTLE_BYTES if fd in self._fresh else 0):
                link.excess = self._excess
        self._fresh.clear()
        return self._convicted(self._over(passing), now_ns, drained)

    def _over(self, passing: int) -> set[int]:
        """Who is over a bound."""
        links = self._connections
        over = {fd for fd, link in links.items() if link.unread > CONNECTION_BYTES}
        if sum(link.unread for link in links.values()) > TOTAL_BYTES:
            over.add(max(links, key=lambda fd: links[fd].unread))
        grown = self._grown(passing)
        if grown:
            over.add(max(grown, key=lambda fd: links[fd].unread))
        self.unexplained = bool(grown)
        self.suspects = len(over)
        return over

    def _grown(self, passing: int) -> list[int]:
        """Those of whom something was unread while this process has grown beyond the bound, and by
        no more than that can take: memory grows for other reasons as well."""
        links = self._connections.items()
        growth = {fd: self._excess - link.excess for fd, link in links if link.unread}
        grown = [fd for fd, nbytes in growth.items() if nbytes > UNEXPLAINED_BYTES + passing]
        most = FRAME_BYTES_PER_BYTE * sum(self._connections[fd].unread for fd in grown)
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

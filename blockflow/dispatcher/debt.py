"""Debt: what a client has not taken of its replies, and when it is too slow. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

SLOW_CLIENT_BYTES = 8 * 1024 * 1024
"""A client that lets more bytes of replies than this pile up is cut off ..."""

CROWDED_NS = 500_000_000
"""... if it takes nothing for this long: one that asks for much at once and reads is not slow, and
the first word of a distant one takes a while."""

SLOW_CLIENT_NS = 2_000_000_000
"""So is any that takes nothing for this long."""

SLOWEST_NS_PER_BYTE = 250
"""A large frame may take a second more for every 4 MB: to a distant client it is one write."""


class Tracker(Protocol):
    """Of a frame (``zmq.MessageTracker``)."""

    @property
    def done(self) -> bool:
        """ZeroMQ has written it."""


@dataclass(slots=True)
class Debt:
    """What a client has not taken yet.

    Attributes:
        since_ns: when it last took a frame.
        waiting: messages that its connection would not take, ``nbytes`` of them.
        posted: frames that ZeroMQ has not written yet with their trackers, ``posted_bytes``.
        taken: bytes, by the kernel's count, at the latest look while it was crowded.
        moved_ns: when that was another count; None = it was not crowded.
    """

    since_ns: int
    nbytes: int = 0
    posted_bytes: int = 0
    waiting: deque[list[Any]] = field(default_factory=deque)
    posted: deque[tuple[Tracker, int]] = field(default_factory=deque)
    taken: int | None = None
    moved_ns: int | None = None

    @property
    def owed(self) -> int:
        """Bytes."""
        return self.nbytes + self.posted_bytes

    @property
    def crowded(self) -> bool:
        """More is owed than it may be for long. One message may be larger than the bound: a lone
        one is bounded by the message limit."""
        return len(self.waiting) + len(self.posted) > 1 and self.owed > SLOW_CLIENT_BYTES

    def settle(self, now_ns: int) -> bool:
        """Take off what ZeroMQ has written; True when nothing is left."""
        posted = self.posted
        while posted and posted[0][0].done:
            self.posted_bytes -= posted.popleft()[1]
            self.since_ns = now_ns
        return not posted and not self.waiting

    def hopeless(self, now_ns: int, taken: int | None) -> bool:
        """Whether the client is to be cut off; asked again and again.

        Args:
            taken: what its connection has taken in all, None where the kernel does not count (unix
                sockets); read while it is ``crowded`` only.
        """
        head_ns = SLOWEST_NS_PER_BYTE * self.posted[0][1] if self.posted else 0
        if now_ns - self.since_ns > SLOW_CLIENT_NS + head_ns:
            return True
        if not self.crowded:
            self.moved_ns = None
            return False
        if self.moved_ns is None or taken != self.taken:
            self.taken, self.moved_ns = taken, now_ns
        # Without a count, only whole frames show that it reads.
        patience_ns = CROWDED_NS if taken is not None else CROWDED_NS + head_ns
        return now_ns - max(self.moved_ns, self.since_ns) > patience_ns

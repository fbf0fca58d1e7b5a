"""Debt: what a client has not taken of its replies, and when it is too slow. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from blockflow.tensormq.sockets import SLOWEST_NS_PER_BYTE

SLOW_CLIENT_BYTES = 8 * 1024 * 1024
"""A client that lets more bytes of replies than this pile up is cut off ..."""

CROWDED_NS = 500_000_000
"""... if it takes nothing for this long: one that asks for much at once and reads is not slow, and
the first word of a distant one takes a while, as does one of a radio link that has lost some. Where
all clients together owe too much, so may any that takes nothing for this long."""

SLOW_CLIENT_NS = 2_000_000_000
"""So is any that takes nothing for this long."""

STANDSTILL_NS = 250_000_000
"""Debts are looked at ten times a second. When the last look is longer ago than this, the process
stood still, and no client could take anything from it: that time is not theirs."""


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
        taken: bytes, by the kernel's count, at the latest look while it was counted.
        moved_ns: when that was another count; None = it was not counted.
        looked_ns: when :meth:`hopeless` was asked last.
        stands: it took nothing for :data:`CROWDED_NS` while it was counted.
    """

    since_ns: int
    nbytes: int = 0
    posted_bytes: int = 0
    waiting: deque[list[Any]] = field(default_factory=deque)
    posted: deque[tuple[Tracker, int]] = field(default_factory=deque)
    taken: int | None = None
    moved_ns: int | None = None
    stands: bool = False
    looked_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self.looked_ns = self.since_ns

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

    def hopeless(
        self, now_ns: int, taken: int | None, *, pressed: bool = False, busy_ns: int = 0
    ) -> bool:
        """Whether the client is to be cut off; asked again and again.

        Args:
            taken: what its connection has taken in all, None where the kernel does not count (unix
                sockets), or it could take nothing yet; read while it is ``crowded`` or ``pressed``
                only.
            pressed: all clients together owe too much: it shall be known whether it ``stands``.
            busy_ns: so long ZeroMQ may write nothing, whoever reads.
        """
        self._look(now_ns)
        # To a distant client a large frame is one write.
        head_ns = SLOWEST_NS_PER_BYTE * self.posted[0][1] if self.posted else 0
        if now_ns - self.since_ns > SLOW_CLIENT_NS + head_ns + busy_ns:
            return True
        if not self.crowded and not pressed:
            self.moved_ns, self.stands = None, False
            return False
        if self.moved_ns is None or taken != self.taken:
            self.taken, self.moved_ns = taken, now_ns
        # Without a count, only whole frames show that it reads.
        unseen_ns = busy_ns if taken is not None else busy_ns + head_ns
        still_ns = now_ns - max(self.moved_ns, self.since_ns)
        self.stands = still_ns > CROWDED_NS + unseen_ns
        return self.crowded and self.stands

    def _look(self, now_ns: int) -> None:
        still_ns = now_ns - self.looked_ns
        self.looked_ns = now_ns
        if still_ns > STANDSTILL_NS:
            self.since_ns = min(now_ns, self.since_ns + still_ns)
            if self.moved_ns is not None:
                self.moved_ns = min(now_ns, self.moved_ns + still_ns)

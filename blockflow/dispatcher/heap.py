"""Heap: when the Dispatcher gives back what large messages have left. Pure.

Its allocator keeps what it has once had (:data:`~blockflow.launch.environment.MALLOC`): made
for forwards, which need it again at once. Messages come in bursts, and after one there may be a
gigabyte that nobody uses. Given back too early, the next message pays for its pages anew; so it is
given back when no large one has passed for a while, and of an unbroken stream seldom.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized

LARGE_BYTES = 64 * 1024
"""Smaller messages leave nothing worth looking for."""

KEPT_BYTES = 64 * 1024 * 1024
"""So much more than at its least this process may keep for what comes next."""

QUIET_NS = 1_000_000_000
"""So long no large message has passed ..."""

LONGEST_NS = 30_000_000_000
"""... or so long they have without a pause."""

SPACING_NS = 10_000_000_000
"""Between two trims: who sends a large message every other second would pay for each."""

AGAIN = 3
"""So often a trim that has left much is repeated: ZeroMQ keeps what was under way to a peer that
has gone until all that this one had sent is read."""


def is_large(frames: Iterable[Sized]) -> bool:
    """Whether a message of these frames is to be told to :meth:`Heap.passed`."""
    return max(map(len, frames), default=0) >= LARGE_BYTES


class Heap:
    """What this process has beyond its least, and whether that is worth a trim.

    Args:
        private: memory of this process that it does not share, at its start.
    """

    def __init__(self, private: int) -> None:
        self._least = private
        self._since_ns: int | None = None
        self._last_ns = 0
        self._trimmed_ns: int | None = None
        self._again = 0

    @property
    def stirred(self) -> bool:
        """Large messages have passed since the last decision, or the last trim may have come too
        early: :meth:`look` is wanted."""
        return self._since_ns is not None or self._again > 0

    def passed(self, now_ns: int) -> None:
        """A large message has come or gone."""
        self._last_ns = now_ns
        if self._since_ns is None:
            self._since_ns = now_ns

    def look(self, now_ns: int, private: int, held: int) -> bool:
        """Whether to trim now.

        Args:
            private: memory of this process that it does not share.
            held: what of it is in use: inputs that are kept, replies that are not taken yet.
        """
        spare = private - held
        self._least = min(self._least, spare)
        kept = spare - self._least > KEPT_BYTES
        if not kept:
            self._again = 0
        trimmed = self._trimmed_ns
        spaced = trimmed is None or now_ns - trimmed >= SPACING_NS
        if self._since_ns is None:
            if self._again == 0 or not spaced:
                return False
            self._again -= 1
            self._trimmed_ns = now_ns
            return True
        if held > KEPT_BYTES:  # they are under way yet
            self._last_ns = now_ns
        quiet = now_ns - self._last_ns >= QUIET_NS
        if not quiet and now_ns - self._since_ns < LONGEST_NS:
            return False
        if not spaced:
            return False
        self._since_ns = None if quiet else now_ns
        if not kept:
            return False
        self._again = AGAIN if quiet else 0
        self._trimmed_ns = now_ns
        return True

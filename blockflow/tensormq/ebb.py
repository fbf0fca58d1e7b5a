"""Ebb: how much of an arena is kept when a burst is over. Pure.

An arena is pre-faulted as it grows, and a load that goes on shall find it as it was. So what was
needed within a whole window is kept, and everything while that is half of what there is, or more.
"""

from __future__ import annotations

WINDOW_NS = 60_000_000_000
"""What nobody has needed for so long is given back, at the end of the window after its last use.
Its pages are made anew at about a millisecond per MiB: large tensors that come every few seconds
shall not pay for that each time."""


class Ebb:
    """The most that was needed lately.

    Attributes:
        peak: highest end of an extent that was in use since the window began; raised by the owner.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._due_ns = 0

    def due(self, now_ns: int) -> bool:
        """Whether the window is over: then :meth:`look`. Who is asked seldom has longer ones."""
        return now_ns >= self._due_ns

    def look(self, now_ns: int, end: int, committed: int) -> int | None:
        """Begin a new window.

        Args:
            end: of the highest extent in use now.
            committed: what the arena has.

        Returns:
            How much of it to keep; None = all.
        """
        needed, self.peak = self.peak, end
        self._due_ns = now_ns + WINDOW_NS
        return None if 2 * needed > committed else needed

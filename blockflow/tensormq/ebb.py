"""Ebb: how much of an arena is kept when a burst is over. Pure.

An arena is pre-faulted as it grows, and a load that goes on shall find it as it was. So what was
needed within a whole window is kept, and everything while that is half of what there is, or more.
"""

from __future__ import annotations

WINDOW_NS = 60_000_000_000
"""What nobody has needed for so long is given back, at the end of the window after its last use.
Its pages are made anew at about a millisecond per MiB: large tensors that come every few seconds
shall not pay for that each time."""

SCARCE_NS = 5_000_000_000
"""The window where others may need the memory."""

_FREE = 4


def window_ns(*rooms: tuple[int, int]) -> int:
    """The window, by what is left and what there is in all of each room that the arenas' memory is
    taken from; a size of 0 is none."""
    return SCARCE_NS if any(_FREE * left < size for left, size in rooms) else WINDOW_NS


class Ebb:
    """The most that was needed lately.

    Attributes:
        peak: highest end of an extent that was in use since the window began; raised by the owner.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._begun_ns = 0
        self._due_ns = 0

    def due(self, now_ns: int) -> bool:
        """Whether a window may be over: then :meth:`look`. Who is asked seldom has longer ones."""
        return now_ns >= self._due_ns

    def look(self, now_ns: int, end: int, committed: int, window: int) -> int | None:
        """Begin a new window, unless the present one goes on.

        Args:
            end: of the highest extent in use now.
            committed: what the arena has.
            window: as of :func:`window_ns`, by what is left now.

        Returns:
            How much of it to keep; None = all.
        """
        self._due_ns = now_ns + SCARCE_NS
        if now_ns < self._begun_ns + window:
            return None
        needed, self.peak, self._begun_ns = self.peak, end, now_ns
        return None if 2 * needed > committed else needed

"""What it is worth to let newcomers join a batch under way; and how fast they come.

Both papers join whenever a bound allows it. On hardware that gains little from a batch that only
delays those under way: then joining has to pay.
"""

from __future__ import annotations

from collections import deque

from blockflow.batching.costs import Line, at

_LOOK_BACK = 16
_CARRIED_ON = 2
"""A moment saved now is saved for the next batch, and a part of it for the one after, and so on: in
all about twice the next batch."""


class Arrivals:
    """The rate of the last few arrivals, in rows."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=_LOOK_BACK)
        self._rows = 0

    def add(self, rows: int, now: int) -> None:
        recent = self._recent
        if len(recent) == _LOOK_BACK:
            self._rows -= recent[0][1]
        recent.append((now, rows))
        self._rows += rows

    def rate(self, now: int) -> float:
        """Rows per nanosecond since the oldest of them, that one not counted."""
        recent = self._recent
        if len(recent) < 2 or now <= recent[0][0]:
            return 0.0
        return (self._rows - recent[0][1]) / (now - recent[0][0])


def gain(
    lines: tuple[Line, Line, Line], ahead: int, joining: int, behind: int, rate: float
) -> float:
    """What a join saves in the sum of all rows' times, in ns, by prediction; negative if it costs.

    Together, the newcomers catch up while the others rest, and the joint batch runs the rest.
    Apart, those under way end first; then the newcomers run all of the way, with whoever has come
    meanwhile. The rows ahead pay the delay; the newcomers and who comes next gain what the engine
    is spared.

    Args:
        lines: times of the part to catch up with, of the rest, and of the whole way.
        ahead: rows under way.
        joining: rows that would join.
        behind: rows that wait besides.
        rate: rows that arrive per nanosecond.
    """
    catch_up, rest, whole = lines
    alone = at(rest, ahead)
    together = at(catch_up, joining) + at(rest, ahead + joining)
    mates = max(joining, min(int(joining + behind + rate * alone), len(whole) - 1))
    later = at(whole, mates)
    spared = alone + later * joining / mates - together
    others = _CARRIED_ON * (behind + rate * (alone + later))
    return (joining + others) * spared - ahead * (together - alone)

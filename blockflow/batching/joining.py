"""What it is worth to let newcomers join a batch under way; and how fast they come.

Both papers join whenever a bound allows it. On hardware that gains little from a batch that only
delays those under way: then joining has to pay.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from blockflow.batching.costs import Line, at

_LOOK_BACK = 16
_BUSIEST = 0.85
"""As if no more came than keeps the engine so busy with what each row costs it: above, no queue has
an end, and nothing but the batch size would count."""


class Arrivals:
    """The rate of the last few arrivals, in rows."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=_LOOK_BACK)

    def add(self, rows: int, now: int) -> None:
        self._recent.append((now, rows))

    def rate(self, now: int) -> float:
        """Rows per nanosecond since the oldest of them, that one not counted."""
        recent = self._recent
        if len(recent) < 2 or now <= recent[0][0]:
            return 0.0
        since, uncounted = recent[0]
        return (sum([rows for _, rows in recent]) - uncounted) / (now - since)


class Lines(NamedTuple):
    """Predicted times by rows, each for the length that its batch is padded to.

    Attributes:
        catch_up: of the part that newcomers catch up with.
        alone: of the rest, for those under way.
        together: of the rest, for all of them.
        whole: of the whole way.
    """

    catch_up: Line
    alone: Line
    together: Line
    whole: Line


def gain(lines: Lines, ahead: int, joining: int, behind: int, rate: float) -> float:
    """What a join saves in the sum of all rows' times, in ns, by prediction; negative if it costs.

    Together, the newcomers catch up while the others rest, and the joint batch runs the rest.
    Apart, those under way end first; then the newcomers run all of the way, with whoever has come
    meanwhile. Either way counts the rows that are here, for as long as it takes, and then what
    those cost who wait when the engine is free again (:class:`_Ahead`).

    Args:
        lines: predicted times.
        ahead: rows under way.
        joining: rows that would join.
        behind: rows that wait besides.
        rate: rows that arrive per nanosecond.
    """
    alone = at(lines.alone, ahead)
    together = at(lines.catch_up, joining) + at(lines.together, ahead + joining)
    later = _Ahead.of(
        lines.whole, (joining + behind + rate * alone, behind + rate * together), rate
    )
    here = ahead + joining + behind
    apart = later.cost(here, alone, joining + behind + later.rate * alone)
    return apart - later.cost(here, together, behind + later.rate * together)


def together(lines: Lines, ahead: int, joining: int, behind: int) -> int:
    """What it saves in the sum of the times of all rows that wait for a stage, in ns, that two
    batches there run on as one, instead of one after the other.

    Args:
        lines: of the rest of their way; what newcomers would catch up with counts for nothing.
        ahead: rows of the batch that would run first.
        joining: rows of the other.
        behind: rows that wait there besides.
    """
    first, both = at(lines.alone, ahead), at(lines.together, ahead + joining)
    after = first + at(lines.whole, joining)
    return ahead * first + (joining + behind) * after - (ahead + joining + behind) * both


class _Ahead(NamedTuple):
    """What the rows that wait when the engine gets free will cost: themselves, and whoever comes
    after them.

    An engine that is never idle and takes all that waits as one batch of ``fixed + each * b`` ns
    has ``rate * (fixed + each * b)`` rows in the next one. The rows in the system, less their mean,
    summed up over all batches to come, are a quadratic in b: ``square * b**2 + linear * b``
    satisfies ``V(b) = (b - mean) t + rate t**2 / 2 + V(rate t)`` with t the time of b rows. A delay
    alone costs only those who wait for it: it shifts all later batches, and their arrivals with
    them. A batch that is smaller by a row saves that row's ``each``, and what would have come in
    that time, and so on.

    Attributes:
        rate: of arrivals.
        stay: mean time of a row in the system, ns.
        square, linear: of V, above.
    """

    rate: float
    stay: float
    square: float
    linear: float

    @classmethod
    def of(cls, whole: Line, queues: tuple[float, float], rate: float) -> _Ahead:
        """With the line of ``whole`` between the two queues that are compared."""
        low = max(1.0, min(queues))
        high = max(*queues, low + 1.0)
        least = _between(whole, low)
        each = max(0.0, (_between(whole, high) - least) / (high - low))
        fixed = max(0.0, least - each * low)
        rate = min(rate, _BUSIEST / each) if each else rate
        q = rate * each
        # A row waits for half a batch, if one is under way at all, and then for its own.
        usual = rate * fixed / (1 - q)
        stay = 1.5 * fixed / (1 - q) if usual >= 1 else (1 + usual / 2) * (fixed + each)
        square = each * (1 + q / 2) / (1 - q * q)
        linear = (fixed * (1 + q) - stay * q + 2 * square * q * rate * fixed) / (1 - q)
        return cls(rate, stay, square, linear)

    def cost(self, here: int, time_ns: int, queue: float) -> float:
        """``here`` rows for so long, with who comes meanwhile; then a batch of the queue."""
        till_then = (here - self.rate * self.stay + self.rate * time_ns / 2) * time_ns
        if queue >= 1:
            return till_then + (self.square * queue + self.linear) * queue
        # Perhaps nobody waits: the next comes alone, after a rest that costs nobody anything.
        return till_then + self.square + self.linear - (1 - queue) * self.stay


def _between(line: Line, rows: float) -> float:
    """``line`` at a mean number of rows."""
    whole = int(rows)
    low = at(line, whole)
    return low + (at(line, whole + 1) - low) * (rows - whole)

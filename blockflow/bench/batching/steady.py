"""Steady: a visit that something else on the machine disturbed is repeated, and that is said.

Before and after every visit the fixed work of ``calibration.py`` is timed for a moment, and a visit
tells how late its own sender was. What took much longer than it usually does, or was not sent when
it was due, says nothing of the policies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from blockflow.bench.batching.figures import DISTURBED, note
from blockflow.bench.batching.traffic import Cell
from blockflow.bench.calibration import calibrate
from blockflow.bench.results import Figure
from blockflow.bench.statistics import percentile

SLOW_LIMIT = 0.25
"""The fixed work's median moves by some per cent on a quiet machine; beyond this it is not."""
LAG_LIMIT_MS = 100.0
"""A sender that is later than this sends other queries than it was given."""
USUAL = 20
"""The percentile of all timings of the fixed work that counts as usual: most of a run may be
disturbed, and a single lucky moment is not taken for the machine's pace."""
_WORK_S = 0.03
_PAUSE_S = 2.0
_SHARE = 4
_LEAST = 3

T = TypeVar("T")


@dataclass(slots=True)
class Tally:
    """What became of an experiment's visits.

    Attributes:
        visits: that count, those that were kept although disturbed among them.
        discarded: what was measured, and how it was disturbed, of those that were repeated.
        kept: likewise, of those that count all the same.
        slowest: the fixed work's longest time beside its usual one.
    """

    visits: int = 0
    discarded: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    slowest: float = 1.0

    @property
    def may_repeat(self) -> bool:
        """A machine that has become slower for good must not have every visit repeated."""
        return len(self.discarded) < _LEAST + self.visits / _SHARE

    def figures(self, experiment: str) -> list[Figure]:
        """How many visits were disturbed, and a sentence for people."""
        told = [
            Figure.of(
                DISTURBED,
                mode,
                float(len(which)),
                "1",
                self.visits,
                {"experiment": experiment, "which": which},
            )
            for mode, which in (("discarded", self.discarded), ("kept", self.kept))
        ]
        text = (
            f"{self.visits} visits; {len(self.discarded)} more were discarded and repeated because "
            f"something else disturbed them, {len(self.kept)} count although disturbed; the fixed "
            f"work took at most {self.slowest:.2f} times its usual time"
        )
        return [*told, note(experiment, text)]


class Steady:
    """Runs visits, and repeats those that were disturbed.

    Args:
        patience: how often one visit is repeated at most.
        work: times the fixed work; milliseconds.
        pause: waits so many seconds before a repetition.
    """

    def __init__(
        self,
        patience: int,
        work: Callable[[], float] | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._patience = patience
        self._work = work or _fixed_work_ms
        self._pause = pause
        self._seen: list[float] = []
        self._tally = Tally()

    def visit(self, run: Callable[[], T], what: str) -> T:
        """What ``run`` returns, undisturbed if patience allows; ``what`` names it in the tally."""
        tally = self._tally
        for left in range(self._patience, -1, -1):
            before = self._slowdown()
            value = run()
            slow = max(before, self._slowdown())
            tally.slowest = max(tally.slowest, slow)
            why = disturbance(slow, value.lag_ms if isinstance(value, Cell) else 0.0)
            if not why:
                break
            if not left or not tally.may_repeat:
                tally.kept.append(f"{what}: {why}")
                break
            tally.discarded.append(f"{what}: {why}")
            self._pause(_PAUSE_S)
        tally.visits += 1
        return value

    def take(self) -> Tally:
        """What became of the visits since the last call."""
        tally, self._tally = self._tally, Tally()
        return tally

    def _slowdown(self) -> float:
        """The fixed work's time now, beside its usual one in this run."""
        now = self._work()
        self._seen.append(now)
        return now / percentile(self._seen, USUAL)


def disturbance(slow: float, lag_ms: float) -> str:
    """What disturbed a visit; "" where nothing did.

    Args:
        slow: the fixed work's time beside its usual one.
        lag_ms: how late the sender was, 99th percentile.
    """
    if slow > 1 + SLOW_LIMIT:
        return f"fixed work {slow:.2f} times as long"
    if lag_ms > LAG_LIMIT_MS:
        return f"sender {lag_ms:.0f} ms late"
    return ""


def _fixed_work_ms() -> float:
    return percentile(calibrate(_WORK_S), 50)

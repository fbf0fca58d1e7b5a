"""Choice: which candidate ``auto`` shall mean on this machine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite, log

from blockflow.bench.profiling.plan import Cell
from blockflow.bench.profiling.session import Outcome
from blockflow.core.errors import BlockError

EQUALLY_FAST = 0.03
"""Candidates within this share of the fastest count as equally fast; the most exact is taken."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One candidate's verdict.

    Attributes:
        row_ms: time per row, geometric mean of the medians over the common cells; None: none.
        ratio: to the reference's, cell by cell, geometric mean: 0.5 is twice as fast.
        verdict: why it was taken or not, for a person.
    """

    outcome: Outcome
    row_ms: float | None
    ratio: float | None
    verdict: str
    chosen: bool = False


def choose(outcomes: Sequence[Outcome], cells: Sequence[Cell], tolerance: float) -> list[Judged]:
    """Judge all candidates; exactly one is chosen.

    The fastest by the geometric mean, over the cells, of its time in relation to the reference's,
    among those whose error is within the tolerance.

    Args:
        outcomes: the reference first.
        cells: that count.
        tolerance: largest allowed max |y - ref| / max |ref|.

    Raises:
        BlockError: BLOCK_FAILED when the reference could not be measured: nothing to compare with.
    """
    base = outcomes[0]
    if base.reason or not all(c in base.points for c in cells) or not isfinite(base.error or 0.0):
        why = base.reason or "its outputs are not finite, or not all of it was measured"
        raise BlockError(
            "BLOCK_FAILED",
            f"the reference ({base.candidate.label}) cannot be compared with: {why}",
        )
    ratios = {
        i: _geometric([o.points[c].p50_ms / base.points[c].p50_ms for c in cells])
        for i, o in enumerate(outcomes)
        if not o.reason and all(c in o.points for c in cells) and _within(o, tolerance)
    }
    fastest = min(ratios.values())
    level = [i for i, r in ratios.items() if r <= fastest * (1 + EQUALLY_FAST)]
    chosen = min(level, key=lambda i: (outcomes[i].error or 0.0, ratios[i]))
    out = []
    for i, o in enumerate(outcomes):
        measured = all(c in o.points for c in cells)
        out.append(
            Judged(
                o,
                _geometric([o.points[c].row_ms for c in cells]) if measured else None,
                _geometric([o.points[c].p50_ms / base.points[c].p50_ms for c in cells])
                if measured
                else None,
                _verdict(o, i == chosen, i in level, measured, tolerance),
                i == chosen,
            )
        )
    return out


def _within(o: Outcome, tolerance: float) -> bool:
    return o.error is not None and o.error <= tolerance


def _verdict(o: Outcome, chosen: bool, level: bool, measured: bool, tolerance: float) -> str:
    if o.reason:
        return o.reason
    if not measured:
        return "not measured in every cell"
    if o.error is None:
        return "not compared with the reference"
    if not isfinite(o.error):
        return "its outputs are not finite"
    if o.error > tolerance:
        return f"error {_above(o.error, tolerance)} exceeds the tolerance {tolerance:g}"
    if chosen:
        return "chosen"
    return "as fast, less exact" if level else "slower"


def _geometric(values: Sequence[float]) -> float:
    return exp(sum(log(v) for v in values) / len(values))


def _above(value: float, bound: float) -> str:
    """In as many digits, two at least, as it takes to read that it is above ``bound``."""
    texts = (f"{value:.{digits}g}" for digits in range(2, 18))
    return next((text for text in texts if float(text) > bound), str(value))

"""Plan: which cells are measured, when a cell is sure enough, and what its runs come to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from blockflow.bench.statistics import Interval, median_interval, percentile
from blockflow.core.model import TensorSpec
from blockflow.core.profile import Point

VISITS = 3
"""A cell is measured in at least so many visits, between which other candidates run: what the
machine does to one visit it does not do to all of one candidate's."""
_LEAST_RUNS = 3
_LENGTHS = 4
_FAR_OUT = 3.0


class Cell(NamedTuple):
    """One point to measure. ``length`` is None for blocks of fixed dims."""

    threads: int
    rows: int
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a cell is measured.

    Attributes:
        confidence: enough when the median's 95% interval is within plus or minus this share.
        min_runs: forwards at least, unless the time runs out before.
        max_runs: forwards at most.
        seconds: time per cell and candidate at most (three runs are made whatever they take).
    """

    confidence: float = 0.02
    min_runs: int = 9
    max_runs: int = 500
    seconds: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence {self.confidence} is not between 0 and 1")
        if not (_LEAST_RUNS <= self.min_runs <= self.max_runs):
            raise ValueError(f"runs {self.min_runs}..{self.max_runs}: at least {_LEAST_RUNS}")
        if not 0 < self.seconds <= 3600:
            raise ValueError(f"{self.seconds} seconds per cell")

    @classmethod
    def of(cls, made: Mapping[str, Any]) -> Effort | None:
        """Of the settings that lie with a profile; None where they are no such."""
        try:
            return cls(**{f.name: made[f.name] for f in fields(cls)})
        except (KeyError, TypeError, ValueError):
            return None

    def covered_by(self, made: Mapping[str, Any]) -> bool:
        """Whether points measured with the settings ``made`` are good enough for these."""
        confidence, seconds = made.get("confidence"), made.get("seconds")
        return (
            isinstance(confidence, int | float)
            and isinstance(seconds, int | float)
            and confidence <= self.confidence
            and seconds >= self.seconds
        )


def doubling(largest: int) -> list[int]:
    """1, 2, 4, ... and ``largest`` itself."""
    out = [1]
    while out[-1] * 2 < largest:
        out.append(out[-1] * 2)
    return out if largest <= 1 else [*out, largest]


def variable_dim(spec: TensorSpec) -> str | None:
    """The dim that becomes the table's second axis: the first dynamic one beside the rows."""
    return spec.dynamic[0] if spec.dynamic else None


def lengths_of(spec: TensorSpec) -> list[int | None]:
    """Lengths to measure unless others are asked for: up to four, a factor of four apart."""
    name = variable_dim(spec)
    if name is None:
        return [None]
    lo, hi = spec.ranges.get(name, (1, 1024))
    out = [hi]
    while len(out) < _LENGTHS and out[0] // 4 > lo:
        out.insert(0, out[0] // 4)
    return [*out]


def binding_of(spec: TensorSpec, cell: Cell) -> dict[str, int]:
    """Values of all named dims for a cell; further dynamic dims have their largest value."""
    binding = {n: spec.ranges.get(n, (1, 1024))[1] for n in spec.dynamic}
    name = variable_dim(spec)
    if name is not None and cell.length is not None:
        binding[name] = cell.length
    return {**binding, "rows": cell.rows}


def cells_of(
    threads: Sequence[int], rows: Sequence[int], lengths: Sequence[int | None]
) -> list[Cell]:
    """All cells: thread counts apart, small batches first (the first figures come early)."""
    return [Cell(t, r, n) for t in sorted(set(threads)) for r in sorted(set(rows)) for n in lengths]


def is_warm(times: Sequence[float]) -> bool:
    """Whether a block runs at its pace: three runs in a row brought no new best by over 3%."""
    return len(times) > 3 and min(times[-3:]) >= 0.97 * min(times[:-3])


def interval_of(visits: Sequence[Sequence[float]]) -> Interval:
    """The median of all forwards, with an interval that also holds the visits' medians as far as
    they tell it: the forwards of one visit are no independent samples of what a machine does."""
    within = median_interval(list(chain.from_iterable(visits)))
    between = median_interval([median(v) for v in visits])
    return replace(within, low=min(within.low, between.low), high=max(within.high, between.high))


def next_visit(visits: Sequence[Sequence[float]], effort: Effort) -> int:
    """How many forwards the next visit to a cell makes; 0 = the cell is done.

    Args:
        visits: the times of the forwards so far, in milliseconds, by visit.
    """
    times = list(chain.from_iterable(visits))
    n, spent_s = len(times), sum(times) / 1e3
    if n >= effort.max_runs or (spent_s >= effort.seconds and n >= _LEAST_RUNS):
        return 0
    sure = n >= effort.min_runs and len(visits) >= VISITS
    if sure and interval_of(visits).relative_width <= effort.confidence:
        return 0
    mean_ms = sum(times) / n if n else 0.0
    # a visit takes a sixth of the time, so that even a slow cell has several
    fits = int(effort.seconds * 1e3 / 6 / mean_ms) if mean_ms else _LEAST_RUNS
    most = max(effort.min_runs, effort.max_runs // 4)
    return min(max(fits, 1), most, effort.max_runs - n)


def point_of(cell: Cell, visits: Sequence[Sequence[float]]) -> Point:
    """What the visits' runs come to. Outliers (above the third quartile by three times the distance
    of the quartiles: Tukey's "far out") are counted and kept."""
    times = list(chain.from_iterable(visits))
    middle = interval_of(visits)
    mean = sum(times) / len(times)
    q1, q3 = percentile(times, 25), percentile(times, 75)
    return Point(
        threads=cell.threads,
        rows=cell.rows,
        length=cell.length,
        runs=len(times),
        mean_ms=mean,
        p50_ms=middle.value,
        p90_ms=percentile(times, 90),
        p99_ms=percentile(times, 99),
        low_ms=middle.low,
        high_ms=middle.high,
        spread=sum(abs(t - mean) for t in times) / len(times) / mean,
        outliers=sum(t > q3 + _FAR_OUT * (q3 - q1) for t in times),
    )


def expected_s(cell: Cell, row_ms: float, effort: Effort) -> float:
    """About how long a cell will take, from a time per row seen before."""
    run_s = cell.rows * row_ms / 1e3
    return min(max(effort.seconds, _LEAST_RUNS * run_s), effort.max_runs * run_s)

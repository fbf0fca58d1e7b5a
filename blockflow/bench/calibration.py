"""Calibration: fixed work, timed before and after a benchmark, says how steady the machine is.

The work is the same on every run: an interpreter's loop and a pass over memory, about a
millisecond each. Its absolute time is of no interest; its spread and its drift are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from blockflow.bench.results import Figure
from blockflow.bench.statistics import percentile

NAME = "fixed work"
_LOOP = 20_000
_FLOATS = 512 * 1024
DRIFT_LIMIT = 0.05
"""A larger change of the fixed work between begin and end is said aloud."""


@dataclass(frozen=True, slots=True)
class Steadiness:
    """How the fixed work went at the begin and at the end of a run, in milliseconds.

    ``spread`` is half the distance of p10 and p90 as a share of the median, the worse of both
    times; ``drift`` the change of the median.
    """

    begin_ms: float
    end_ms: float
    spread: float

    @property
    def drift(self) -> float:
        return self.end_ms / self.begin_ms - 1

    @property
    def steady(self) -> bool:
        return abs(self.drift) <= DRIFT_LIMIT

    def sentence(self) -> str:
        """For a person: what this means for the run's figures."""
        text = f"fixed work: spread {self.spread:.1%}, drift {self.drift:+.1%} from begin to end"
        if self.steady:
            return text
        return text + ": the machine changed; read the ratios, not the milliseconds"


def calibrate(seconds: float = 0.5) -> list[float]:
    """Repeat the fixed work for ``seconds`` (at least five times); milliseconds of each."""
    buffer = np.ones(_FLOATS, dtype=np.float32)
    times: list[float] = []
    end = time.monotonic() + seconds
    while len(times) < 5 or time.monotonic() < end:
        start = time.monotonic_ns()
        total = 0
        for i in range(_LOOP):
            total += i
        np.add(buffer, 1.0, out=buffer)
        times.append((time.monotonic_ns() - start) / 1e6)
    return times


def calibration_figures(found: Steadiness) -> list[Figure]:
    """For the result file: the fixed work at begin and end, and the spread."""
    values = (("begin", found.begin_ms, "ms"), ("end", found.end_ms, "ms"))
    return [
        *(Figure(NAME, when, None, value, None, value, unit, 1) for when, value, unit in values),
        Figure.of(NAME, "spread", found.spread, "x"),
    ]


def steadiness_of(figures: Iterable[Figure]) -> Steadiness | None:
    """Inverse of :func:`calibration_figures`; None where a run was not calibrated."""
    values = {f.mode: f.value for f in figures if f.name == NAME}
    if not values:
        return None
    return Steadiness(values["begin"], values["end"], values["spread"])


def compare(begin: Sequence[float], end: Sequence[float]) -> Steadiness:
    """Judge two calibrations of one run."""

    def spread(times: Sequence[float]) -> float:
        return (percentile(times, 90) - percentile(times, 10)) / 2 / percentile(times, 50)

    worst = max(spread(begin), spread(end))
    return Steadiness(percentile(begin, 50), percentile(end, 50), worst)

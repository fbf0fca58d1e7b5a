"""What a benchmark may say: percentiles, medians with intervals, paired ratios, verdicts. Pure.

A machine that others share drifts, so two ways are compared by pairs: both sides of a ratio are
measured in the same round, and the median of the ratios is the figure. Its interval lies between
order statistics: how many of n samples are below the median is binomial, whatever their
distribution, and what that leaves between two ranks is interpolated (Hettmansperger and Sheather,
"Confidence intervals based on interpolated order statistics", Statistics & Probability Letters 4,
1986). The percentile bootstrap, which is the usual other way, is too narrow for a median of few:
of seven samples its 95% interval misses the median in one of nine cases.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, comb
from statistics import linear_regression

import numpy as np

LEVEL = 0.95
"""How often an interval holds the true median. Of five samples not even the extremes do so that
often, but 93.75%."""

MIN_PAIRS = 5
"""With fewer an interval says nothing (:class:`Interval`), and nobody concludes anything."""

_ROUNDING = 1e-12
_MANY = 1000
_Z = 1.96
"""Standard deviations on either side that hold ``LEVEL`` of a normal variable."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the bounds of its interval (``LEVEL``), from ``n`` samples or pairs.

    With fewer than :data:`MIN_PAIRS` no interval means much: the bounds are then the extremes.
    """

    value: float
    low: float
    high: float
    n: int

    @property
    def relative_width(self) -> float:
        """Half the interval as a share of the value: 0.02 reads as "plus or minus 2%"."""
        return (self.high - self.low) / 2 / abs(self.value) if self.value else 0.0


class Verdict(enum.StrEnum):
    """What a figure says about a goal."""

    MET = "met"
    MISSED = "missed"
    NOISE = "within noise"


def percentile(samples: Sequence[float], p: float) -> float:
    """The sample at percentile ``p`` (0..100) by the nearest rank; samples need no order.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    # Rounded: 55% as a share is 55.00000000000001 again, and of 100 samples not the 56th.
    rank = max(1, ceil(round(len(ordered) * p / 100, 6)))
    return ordered[rank - 1]


def median_interval(samples: Sequence[float]) -> Interval:
    """The median with its interval.

    Raises:
        ValueError: there are no samples.
    """
    if not len(samples):
        raise ValueError("no samples")
    values = np.sort(np.asarray(samples, dtype=np.float64))
    middle, n = float(np.median(values)), len(values)
    if n < MIN_PAIRS:
        return Interval(middle, float(values[0]), float(values[-1]), n)
    if n > _MANY:
        # Binomial ranks of many are as good as normal, and two neighbours as good as the same.
        half = _Z * n**0.5 / 2
        low, high = values[[int(n / 2 - half), int(np.ceil(n / 2 + half))]]
        return Interval(middle, float(low), float(high), n)
    rank, share = _ranks(n)
    low = _between(values[rank], values[rank + 1], share)
    high = _between(values[-1 - rank], values[-2 - rank], share)
    return Interval(middle, low, high, n)


def _between(a: float, b: float, share: float) -> float:
    """So far on the way from ``a`` to ``b``; of two equal ones, infinite or not, the same."""
    return float(a if a == b else a + share * (b - a))


@lru_cache
def _ranks(n: int) -> tuple[int, float]:
    """Where the lower bound of so many sorted samples lies: a rank from 0, and what share of the
    way to the next one; the upper bound is its mirror image."""
    outside, rank = 2 / 2**n, 0  # that the median is beyond one of both extremes
    while (more := outside + 2 * comb(n, rank + 1) / 2**n) <= 1 - LEVEL:
        outside, rank = more, rank + 1
    share = max(0.0, (1 - LEVEL - outside) / (more - outside))
    k = rank + 1
    return rank, (n - k) * share / (k + (n - 2 * k) * share)


def ratio_interval(base: Sequence[float], other: Sequence[float]) -> Interval:
    """Median of ``other / base``, pair by pair: ``base[i]`` and ``other[i]`` are of one round.

    Raises:
        ValueError: different lengths, no pairs, or a base that is not positive.
    """
    if len(base) != len(other):
        raise ValueError(f"{len(base)} and {len(other)} samples are not pairs")
    if any(b <= 0 for b in base):
        raise ValueError("a ratio needs positive values below the line")
    return median_interval([o / b for b, o in zip(base, other, strict=True)])


def difference_interval(base: Sequence[float], other: Sequence[float]) -> Interval:
    """Median of ``other - base``, pair by pair.

    Raises:
        ValueError: different lengths or no pairs.
    """
    if len(base) != len(other):
        raise ValueError(f"{len(base)} and {len(other)} samples are not pairs")
    return median_interval([o - b for b, o in zip(base, other, strict=True)])


def noise_of(same: Interval) -> float:
    """How far apart two equal things looked: ``same`` is the ratio of a way to itself.

    The farther bound from 1, as a share: nothing smaller can be told apart in this run.
    """
    return max(abs(same.low - 1), abs(same.high - 1))


def judge(figure: Interval, goal: float, noise: float = 0.0, *, at_least: bool = False) -> Verdict:
    """Whether ``figure`` reaches ``goal``, or whether this run cannot tell.

    Args:
        figure: a ratio or a duration, with its interval.
        goal: the most that it may be (with ``at_least``: the least).
        noise: the run's own (:func:`noise_of`): a band of this share around the goal in which
            nothing is concluded, beside the interval itself.
        at_least: the goal is a lower bound.

    From fewer than :data:`MIN_PAIRS` samples nothing is concluded.
    """
    if figure.n < MIN_PAIRS:
        return Verdict.NOISE
    below, above = goal * (1 - noise), goal * (1 + noise)
    if figure.low >= above if at_least else figure.high <= below:
        return Verdict.MET
    if figure.high < below if at_least else figure.low > above:
        return Verdict.MISSED
    return Verdict.NOISE


def judge_value(value: float, goal: float, *, at_least: bool = False) -> Verdict:
    """As :func:`judge`, of what is counted or looked at once: no interval, and no noise."""
    return Verdict.MET if (value >= goal if at_least else value <= goal) else Verdict.MISSED


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 = all have the same (or nothing), 1/n = one has everything.

    R. Jain, D. Chiu, W. Hawe, "A Quantitative Measure of Fairness", DEC-TR-301, 1984.
    """
    squares = sum(x * x for x in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def warm_up(samples: Sequence[float]) -> int:
    """How many samples at the begin belong to the warm-up; a third of them at most.

    The cut with the smallest standard error of what is left (MSER: White, "An effective truncation
    heuristic for bias reduction in simulation output", Simulation 69, 1997).
    """
    best, cut = float("inf"), 0
    for first in range(len(samples) // 3 + 1):
        rest = samples[first:]
        mean = sum(rest) / len(rest)
        error = sum((x - mean) ** 2 for x in rest) / len(rest) ** 2
        # Equal samples are not to be cut for the sake of a rounding error.
        if error < best - _ROUNDING * mean * mean:
            best, cut = error, first
    return cut


def warm_up_of(series: Iterable[Sequence[float]]) -> int:
    """Rounds at the begin that belong to the :func:`warm_up` of any way that took part in them.

    A third of them at most, and never so many that nothing could be concluded from the rest.
    """
    found = list(series)
    count = min((len(samples) for samples in found), default=0)
    cut = max((warm_up(samples) for samples in found), default=0)
    return min(cut, max(0, count - MIN_PAIRS))


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Slope of the least-squares line through the points.

    Raises:
        ValueError: fewer than two different ``xs``.
    """
    return linear_regression(xs, ys).slope

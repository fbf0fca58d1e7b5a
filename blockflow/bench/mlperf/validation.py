"""What the validation tests conclude: the answers are the same, and so is the speed. Pure.

MLPerf Inference Benchmark (Reddi et al., 2020), section 4.7.4; MLCommons' compliance tests TEST01,
TEST04 and TEST05 are their present form. Times on a shared machine say little one by one: two ways
are compared by pairs of runs, and where the noise is as large as the difference nothing is
concluded (:mod:`blockflow.bench.statistics`, whose intervals are for a single look).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import isfinite
from statistics import median
from typing import Any

import numpy as np

from blockflow.bench.mlperf.accuracy import decode
from blockflow.bench.numerals import beside, given, plain
from blockflow.bench.statistics import Interval, percentile

TOLERANCE = 0.10
"""A way that is quicker by more than this share is too quick; MLCommons allows the same."""

DEVIATION = 0.05
"""Answers may differ by this share of the answer's largest element: rows that run in another batch
are rounded otherwise, and reduced precision rounds more."""


LOOKS = {6: 0, 11: 1, 16: 2}
"""Pairs of runs after which a test may end: so many of the ratios on either side lie beyond the
interval. The true median lies there by chance in 3.1, 1.2 and 0.4% of the cases, so in less than
5% at any look. With 95% at each (5, 10 and 15 pairs) it was 12%, of 20,000 simulated tests."""


class Check(StrEnum):
    """What is looked for."""

    ACCURACY = "accuracy"
    """Answers in performance mode are those of accuracy mode (TEST01)."""
    CACHING = "caching"
    """Inputs that come again are not answered sooner (TEST04)."""
    SEEDS = "seeds"
    """Queries in another order are not answered later (TEST05)."""


class Outcome(StrEnum):
    """What a test says."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    UNDECIDED = "UNDECIDED"
    """Nothing was shown: the noise is too large, or there is nothing to compare."""


Answer = tuple[str, int, bytes]
"""Task, row of its data, elements of the output."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two runs' answers agree.

    Attributes:
        compared: answers that both runs logged.
        largest: deviation of any of them, as a share of its answer's largest element.
        example: one that differs, for people; '' if none does.
        unseen: tasks of which no answer was compared; what others answer says nothing of them.
    """

    compared: int
    differing: int
    largest: float
    example: str = ""
    unseen: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        if self.differing:
            return Outcome.FAILED
        return Outcome.PASSED if self.compared and not self.unseen else Outcome.UNDECIDED

    def figures(self) -> dict[str, Any]:
        """For programs; JSON knows no infinity, which is how far other elements are off."""
        return {**asdict(self), "largest": self.largest if isfinite(self.largest) else None}

    def sentence(self) -> str:
        """For a person."""
        if not self.compared:
            return "LoadGen logged no answer of the performance run: run it for longer"
        if self.unseen and not self.differing:
            return (
                f"of the performance run LoadGen logged no answer of {', '.join(self.unseen)}, and "
                f"{self.compared} of other tasks that are those of the accuracy run: run it for "
                "longer"
            )
        if not self.differing:
            return (
                f"{self.compared} answers of the performance run are those of the accuracy run "
                f"(largest deviation {self.largest:.2g})"
            )
        return (
            f"{self.differing} of {self.compared} answers of the performance run are not those of "
            f"the accuracy run: {self.example}"
        )


def compare_answers(
    logged: Iterable[Answer],
    reference: Mapping[str, Mapping[int, bytes]],
    dtypes: Mapping[str, str],
) -> Agreement:
    """Compare what a performance run answered with what the accuracy run did.

    Args:
        logged: of the performance run.
        reference: task -> row -> elements, of the accuracy run.
        dtypes: of each task's output; every task is to be seen.
    """
    compared = differing = 0
    unseen = dict.fromkeys(dtypes)
    largest, example = 0.0, ""
    for task, row, answer in logged:
        expected = reference[task].get(row)
        if expected is None:
            continue
        compared += 1
        unseen.pop(task, None)
        found = _deviation(answer, expected, dtypes[task])
        largest = max(largest, found)
        if found > DEVIATION:
            differing += 1
            told = "other elements" if found == float("inf") else f"off by {found:.0%}"
            example = example or f"{task}, row {row}: {told}"
    return Agreement(compared, differing, largest, example, tuple(unseen))


def _deviation(answer: bytes, expected: bytes, dtype: str) -> float:
    """Largest difference of two answers as a share of the expected one's largest element."""
    if answer == expected:
        return 0.0
    if len(answer) != len(expected):
        return float("inf")
    got, want = (decode(x, dtype).astype(np.float64) for x in (answer, expected))
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return float("inf")
    got, want = got[finite], want[finite]
    if not np.isfinite(got).all():
        return float("inf")
    difference = float(np.abs(got - want).max(initial=0.0))
    scale = float(np.abs(want).max(initial=0.0))
    if difference == 0:
        return 0.0
    return difference / scale if scale else float("inf")


@dataclass(frozen=True, slots=True)
class Speed:
    """How much longer one way takes than the other.

    Attributes:
        ratio: of the two, pair by pair; above 1 the second way is quicker. Its interval is that of
            a look (:data:`LOOKS`).
        noise: of either way from round to round, as a share.
        tolerance: what is allowed.
    """

    ratio: Interval
    noise: float
    tolerance: float

    @property
    def outcome(self) -> Outcome:
        """An accusation needs more than a pass: the noise must not explain it either."""
        allowed = 1 + self.tolerance
        if self.ratio.high <= allowed:
            return Outcome.PASSED
        guilty = self.ratio.low > allowed * (1 + self.noise)
        return Outcome.FAILED if guilty else Outcome.UNDECIDED

    def sentence(self, slow: str, quick: str) -> str:
        """For a person, who is told what the two ways are."""
        ratio, allowed = self.ratio, 1 + self.tolerance
        low, high = beside(ratio.low, allowed), beside(ratio.high, allowed)
        text = (
            f"{slow} takes {plain(ratio.value)} times as long as {quick} "
            f"({low}-{high}, {ratio.n} pairs of runs; "
            f"{given(allowed)} is allowed, noise {self.noise:.1%})"
        )
        if self.outcome is Outcome.UNDECIDED:
            text += ": too close for this machine's noise; run it for longer, or on a quiet machine"
        return text


def compare_speed(
    slow: Sequence[float], quick: Sequence[float], tolerance: float, beyond: int = 0
) -> Speed:
    """Whether the second way is quicker than the first by more than is allowed.

    Args:
        slow, quick: costs by round, in any unit: entry i of both is of one round.
        tolerance: share by which the second may be quicker.
        beyond: ratios on either side that the interval leaves out.

    Raises:
        ValueError: no rounds, not pairs, or costs that are not positive; nothing is left.
    """
    if min((*slow, *quick), default=0) <= 0:
        raise ValueError("a ratio needs positive values")
    ratios = sorted(s / q for s, q in zip(slow, quick, strict=True))
    if 2 * beyond >= len(ratios):
        raise ValueError(f"nothing is left of {len(ratios)} without {beyond} on either side")
    ratio = Interval(median(ratios), ratios[beyond], ratios[-1 - beyond], len(ratios))
    return Speed(ratio, max(_spread(slow), _spread(quick)), tolerance)


def _spread(costs: Sequence[float]) -> float:
    """Half the distance of the quartiles as a share of the median."""
    return (percentile(costs, 75) - percentile(costs, 25)) / 2 / percentile(costs, 50)

"""Two revisions, visit by visit: the order, the warm-up, the noise, the verdict. Pure.

The arms take turns as A B B A A B B A ...: a machine that drifts steadily hits both alike, and
every round but the first begins with the arm that ended the last one, so that neighbouring visits
of the same arm show what equal things differ by.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from blockflow.bench.results import Figure
from blockflow.bench.statistics import (
    MIN_PAIRS,
    Interval,
    Verdict,
    judge,
    noise_of,
    ratio_interval,
    warm_up,
)

_TIMES = frozenset({"ms", "us", "s"})
_PER_SECOND = "/s"
"""End of the unit of a rate: requests (``1/s``), rows, bytes."""

_SIZES = frozenset({"B", "KiB", "MiB", "GiB", "MB"})


class Arm(enum.StrEnum):
    """What is compared: the revision to compare with, and the working tree as it is."""

    BASE = "base"
    TREE = "tree"


class Change(enum.StrEnum):
    """What became of a metric from the base to the tree. Less memory counts as faster."""

    FASTER = "faster"
    SLOWER = "slower"
    NOISE = "within noise"

    def word(self, unit: str) -> str:
        """For a person."""
        if unit in _SIZES and self is not Change.NOISE:
            return "smaller" if self is Change.FASTER else "larger"
        return str(self)


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a benchmark, told apart from its neighbours.

    Attributes:
        text: name, mode, batch and labels, as tables show it.
        unit: of the number.
        more_is_better: a rate rather than a time.
    """

    text: str
    unit: str
    more_is_better: bool

    @classmethod
    def of(cls, figure: Figure) -> Metric:
        more = figure.unit.endswith(_PER_SECOND) or bool(figure.labels.get("at_least"))
        parts = [figure.name, figure.mode]
        if figure.batch is not None:
            parts.append(f"{figure.batch} row{'s' * (figure.batch != 1)}")
        # Goals and verdicts are about the figure; what is text or a whole number tells which it is.
        about = {k: v for k, v in figure.labels.items() if k not in _ABOUT}
        parts += [str(v) for v in about.values() if isinstance(v, str | int)]
        return cls(", ".join(parts), figure.unit, more)


_ABOUT = frozenset({"goal", "at_least", "verdict", "noise", "reason"})


@dataclass(frozen=True, slots=True)
class Visit:
    """One run of the benchmark in one arm.

    Attributes:
        arm: whose.
        fixed_ms: the fixed work (:mod:`blockflow.bench.calibration`) just before it.
        values: what it found.
    """

    arm: Arm
    fixed_ms: float
    values: Mapping[Metric, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric in both arms.

    Attributes:
        metric: which.
        base, tree: medians over the visits that count; None where the arm does not have it.
        ratio: tree / base by pairs, with its interval; None where there is none.
        noise: a share: no smaller change can be told from none in this run.
        change: the verdict.
        warm_up: rounds left out at the begin.
        note: why there is no verdict.
    """

    metric: Metric
    base: float | None
    tree: float | None
    ratio: Interval | None = None
    noise: float = 0.0
    change: Change = Change.NOISE
    warm_up: int = 0
    note: str = ""


def order(rounds: int) -> Iterator[Arm]:
    """A B B A A B B A ...: ``2 * rounds`` visits."""
    for number in range(rounds):
        yield from (Arm.BASE, Arm.TREE) if number % 2 == 0 else (Arm.TREE, Arm.BASE)


def compare_arms(visits: Sequence[Visit]) -> list[Comparison]:
    """Every metric of either arm, in the order in which they were found.

    Args:
        visits: in the order of :func:`order`; an unpaired last one does not count.
    """
    rounds = [
        {v.arm: v for v in visits[i : i + 2]} for i in range(0, len(visits) - len(visits) % 2, 2)
    ]
    metrics = dict.fromkeys(m for pair in rounds for v in pair.values() for m in v.values)
    return [_compare(metric, rounds) for metric in metrics]


def _compare(metric: Metric, rounds: Sequence[Mapping[Arm, Visit]]) -> Comparison:
    series = {
        arm: [pair[arm].values[metric] for pair in rounds if metric in pair[arm].values]
        for arm in Arm
    }
    for arm in Arm:
        if not series[arm]:
            other = Arm.TREE if arm is Arm.BASE else Arm.BASE
            middle = {arm: None, other: _median(series[other])}
            note = f"not in the {arm}, nothing to compare with"
            return Comparison(metric, middle[Arm.BASE], middle[Arm.TREE], note=note)
    whole = [p for p in rounds if all(metric in v.values for v in p.values())]
    base, tree = ([p[arm].values[metric] for p in whole] for arm in Arm)
    if len(whole) < len(rounds):
        note = f"missing in {len(rounds) - len(whole)} of {len(rounds)} rounds"
        return Comparison(metric, _median(series[Arm.BASE]), _median(series[Arm.TREE]), note=note)
    if min(*base, *tree) <= 0:
        note = "no ratio (not positive)"
        return Comparison(metric, _median(base), _median(tree), note=note)
    cut = max(warm_up(base), warm_up(tree))
    kept = whole[cut:]
    base, tree = base[cut:], tree[cut:]
    ratio = ratio_interval(base, tree)
    noise = max(_self_noise(metric, kept, cut), _machine_noise(metric, kept))
    middle_base, middle_tree = _median(base), _median(tree)
    if len(kept) < MIN_PAIRS:
        note = f"too few rounds to conclude ({len(kept)} count, {MIN_PAIRS} are needed)"
        return Comparison(metric, middle_base, middle_tree, ratio, noise, warm_up=cut, note=note)
    change = Change.NOISE
    # An interval that only touches 1 would meet a goal; it is no change.
    if not ratio.low <= 1 <= ratio.high:
        change = _CHANGES[judge(ratio, 1.0, noise, at_least=metric.more_is_better)]
    return Comparison(metric, middle_base, middle_tree, ratio, noise, change, cut)


_CHANGES: Mapping[Verdict, Change] = {
    Verdict.MET: Change.FASTER,
    Verdict.MISSED: Change.SLOWER,
    Verdict.NOISE: Change.NOISE,
}


def _self_noise(metric: Metric, kept: Sequence[Mapping[Arm, Visit]], cut: int) -> float:
    """How far an arm seemed to be from itself, in neighbouring visits."""
    earlier, later = [], []
    for i in range(1, len(kept)):
        # Round cut + i begins with the arm that ended the one before it.
        arm = Arm.BASE if (cut + i) % 2 == 0 else Arm.TREE
        earlier.append(kept[i - 1][arm].values[metric])
        later.append(kept[i][arm].values[metric])
    return noise_of(ratio_interval(earlier, later)) if earlier else 0.0


def _machine_noise(metric: Metric, kept: Sequence[Mapping[Arm, Visit]]) -> float:
    """How far the arms' fixed work was apart: it is the same work. Says nothing of memory."""
    if metric.unit not in _TIMES and not metric.unit.endswith(_PER_SECOND):
        return 0.0
    base, tree = ([p[arm].fixed_ms for p in kept] for arm in Arm)
    return noise_of(ratio_interval(base, tree))


def _median(samples: Sequence[float]) -> float:
    middle = sorted(samples)
    half = len(middle) // 2
    return middle[half] if len(middle) % 2 else (middle[half - 1] + middle[half]) / 2

"""Two revisions, visit by visit: the order, the warm-up, the noise, the verdict. Pure.

The arms take turns as A B B A A B B A ...: a machine that drifts steadily hits both alike, and
every round but the first begins with the arm that ended the last one, so that neighbouring visits
of the same arm show what equal things differ by.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from blockflow.bench.results import BETTER, MORE_IS_BETTER, Figure
from blockflow.bench.statistics import (
    MIN_PAIRS,
    Interval,
    Verdict,
    judge,
    noise_of,
    ratio_interval,
    warm_up_of,
)

_TIMES = frozenset({"ms", "us", "s"})
_SIZES = frozenset({"B", "KiB", "MiB", "GiB", "MB"})


def _rate(unit: str) -> bool:
    """Of requests (``1/s``), rows, bytes."""
    return unit.endswith("/s")


class Arm(enum.StrEnum):
    """What is compared: the revision to compare with, and the working tree as it is."""

    BASE = "base"
    TREE = "tree"


class Change(enum.StrEnum):
    """What became of a metric from the base to the tree. Less memory counts as faster.

    DIFFERENT is said of a metric of which nobody has said which way is better.
    """

    FASTER = "faster"
    SLOWER = "slower"
    DIFFERENT = "different"
    NOISE = "within noise"

    def word(self, unit: str) -> str:
        """For a person."""
        words = _SIZE_WORDS if unit in _SIZES else {} if unit in _TIMES or _rate(unit) else _WORDS
        return words.get(self, str(self))


_SIZE_WORDS: Mapping[Change, str] = {Change.FASTER: "smaller", Change.SLOWER: "larger"}
_WORDS: Mapping[Change, str] = {Change.FASTER: "better", Change.SLOWER: "worse"}
"""Of what is neither a time nor a rate nor a size: ratios, shares, energy."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a benchmark, told apart from its neighbours.

    Attributes:
        text: name, mode, batch and labels, as tables show it.
        more_is_better: a rate rather than a time; None where neither the figure nor its unit says
            so. Not part of what tells metrics apart: an older revision may not say it.
    """

    text: str
    unit: str
    more_is_better: bool | None = field(compare=False)

    @classmethod
    def of(cls, figure: Figure) -> Metric:
        parts = [figure.name, figure.mode]
        if figure.batch is not None:
            parts.append(f"{figure.batch} row{'s' * (figure.batch != 1)}")
        # What was found besides differs from visit to visit: text or a whole number tells which
        # figure it is, but neither yes or no nor a count of something.
        parts += [str(v) for k, v in _which(figure).items() if isinstance(v, str | int)]
        return cls(", ".join(parts), figure.unit, _more_is_better(figure))


_ABOUT = frozenset({"goal", "at_least", "verdict", "noise", "reason", "failed", BETTER})
_FOUND = frozenset(
    {
        *("limit", "first half", "max", "visits", "seconds", "faults", "beyond_lag", "reader_cut"),
        *("files", "segments", "processes", "descriptors"),
    }
)
"""Labels that hold numbers which were found, beside the figure's own."""

_MOMENT = "at_s"
"""Label of what was seen at one moment of a run: no other run has it."""


def _which(figure: Figure) -> dict[str, Any]:
    """The labels that may say which figure it is."""
    apart = _ABOUT | _FOUND
    return {k: v for k, v in figure.labels.items() if k not in apart and not isinstance(v, bool)}


def metrics_of(figures: Iterable[Figure]) -> dict[Metric, float]:
    """The metrics of one visit.

    Figures that are alike but for a fraction in their labels (a gap, a delay) are told apart by it;
    of those that nothing tells apart there is no metric, nor of moments of a run.
    """
    alike: dict[Metric, list[Figure]] = {}
    for figure in figures:
        if _MOMENT not in figure.labels:
            alike.setdefault(Metric.of(figure), []).append(figure)
    found: dict[Metric, float] = {}
    for metric, those in alike.items():
        apart = {replace(metric, text=metric.text + _fractions(f, those)): f for f in those}
        if len(apart) == len(those):
            found |= {one: f.value for one, f in apart.items()}
    return found


def _fractions(figure: Figure, alike: Sequence[Figure]) -> str:
    """``, gap 1.5``: the labels with fractions that tell it from those that are alike."""
    names = [k for k, v in _which(figure).items() if isinstance(v, float)]
    told = [k for k in names if len({f.labels.get(k) for f in alike}) > 1]
    return "".join(f", {k} {figure.labels[k]:g}" for k in told)


def _more_is_better(figure: Figure) -> bool | None:
    """As the figure says, else as its goal says, else as its unit says."""
    labels = figure.labels
    if BETTER in labels:
        return labels[BETTER] == MORE_IS_BETTER[BETTER]
    if "goal" in labels or "at_least" in labels:
        return bool(labels.get("at_least"))
    if _rate(figure.unit):
        return True
    return False if figure.unit in _TIMES or figure.unit in _SIZES else None


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
        base, tree: medians over the visits that count; None where the arm does not have it.
        ratio: tree / base by pairs, with its interval; None where there is none.
        noise: a share: no smaller change can be told from none in this run.
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
    seen = [m for pair in rounds for arm in Arm for m in (pair[arm].values if arm in pair else ())]
    metrics = dict.fromkeys(seen)
    return [_compare(_directed(metric, seen), rounds) for metric in metrics]


def _directed(metric: Metric, seen: Sequence[Metric]) -> Metric:
    """With the direction that either revision tells, the tree's before the base's."""
    told = [m.more_is_better for m in seen if m == metric and m.more_is_better is not None]
    return replace(metric, more_is_better=told[-1]) if told else metric


def _compare(metric: Metric, rounds: Sequence[Mapping[Arm, Visit]]) -> Comparison:
    series = {
        arm: [pair[arm].values[metric] for pair in rounds if metric in pair[arm].values]
        for arm in Arm
    }
    for arm in Arm:
        if not series[arm]:
            other = Arm.TREE if arm is Arm.BASE else Arm.BASE
            middle = {arm: None, other: median(series[other])}
            note = f"not in the {arm}, nothing to compare with"
            return Comparison(metric, middle[Arm.BASE], middle[Arm.TREE], note=note)
    whole = [p for p in rounds if all(metric in v.values for v in p.values())]
    base, tree = ([p[arm].values[metric] for p in whole] for arm in Arm)
    if len(whole) < len(rounds):
        note = f"missing in {len(rounds) - len(whole)} of {len(rounds)} rounds"
        return Comparison(metric, median(series[Arm.BASE]), median(series[Arm.TREE]), note=note)
    if min(*base, *tree) <= 0:
        note = "no ratio (not positive)"
        return Comparison(metric, median(base), median(tree), note=note)
    cut = warm_up_of((base, tree))
    kept = whole[cut:]
    base, tree = base[cut:], tree[cut:]
    ratio = ratio_interval(base, tree)
    noise = max(_self_noise(metric, kept, cut), _machine_noise(metric, kept))
    middle_base, middle_tree = median(base), median(tree)
    if len(kept) < MIN_PAIRS:
        note = f"too few rounds to conclude ({len(kept)} count, {MIN_PAIRS} are needed)"
        return Comparison(metric, middle_base, middle_tree, ratio, noise, warm_up=cut, note=note)
    change = Change.NOISE
    # An interval that only touches 1 would meet a goal; it is no change.
    if not ratio.low <= 1 <= ratio.high:
        change = _CHANGES[judge(ratio, 1.0, noise, at_least=bool(metric.more_is_better))]
        if metric.more_is_better is None and change is not Change.NOISE:
            change = Change.DIFFERENT
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
    if metric.unit not in _TIMES and not _rate(metric.unit):
        return 0.0
    base, tree = ([p[arm].fixed_ms for p in kept] for arm in Arm)
    return noise_of(ratio_interval(base, tree))

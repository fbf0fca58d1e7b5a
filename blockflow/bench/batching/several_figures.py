"""Several tasks on one input: the figures, and how they follow from visits. Pure.

Answers are counted: a request that names eight tasks brings eight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from blockflow.bench.batching.figures import (
    OF_BOUND,
    SATURATED,
    SATURATED_RATIO,
    ratio_figure,
)
from blockflow.bench.batching.plan import SEVERAL
from blockflow.bench.grid import Grid, Rows, bounds, digits, ms, with_bounds
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.statistics import ratio_interval

ALL, EACH, FULL_MODELS, BOUND = (
    "one request for all",
    "a request per task",
    "full models",
    "in process",
)
ALONE, ALONE_RATIO = "all answers on one input", "all answers on one input, ratio"
GOAL = 0.9
"""Of the bound, as for the other deployments of a shared trunk."""

Rates = Mapping[str, Sequence[float]]


def rate_figures(rates: Rates, own: str, tasks: int) -> list[Figure]:
    """Answers per second by arm, beside the bound and beside each other.

    Args:
        rates: arm -> of each visit; the bound among them.
        own: from which submodule on each task has blocks of its own.
        tasks: that an input is for.
    """
    labels = {"experiment": SEVERAL, "own": own, "tasks": tasks}
    out = [
        interval_figure(SATURATED, arm, None, values, "1/s", labels)
        for arm, values in rates.items()
    ]
    share = ratio_interval(rates[BOUND], rates[ALL])
    out.append(ratio_figure(OF_BOUND, ALL, BOUND, share, labels, goal=GOAL, at_least=True))
    return out + [
        ratio_figure(SATURATED_RATIO, ALL, base, ratio_interval(rates[base], rates[ALL]), labels)
        for base in (FULL_MODELS, EACH)
    ]


def alone_figures(times_ms: Rates, own: str, tasks: int) -> list[Figure]:
    """The time until an input has all its answers, with nothing else under way.

    Args:
        times_ms: arm -> of each visit.
        own, tasks: as above.
    """
    labels = {"experiment": SEVERAL, "own": own, "tasks": tasks}
    out = [interval_figure(ALONE, arm, 1, values, "ms", labels) for arm, values in times_ms.items()]
    return out + [
        ratio_figure(ALONE_RATIO, ALL, base, ratio_interval(times_ms[base], times_ms[ALL]), labels)
        for base in (FULL_MODELS, EACH)
    ]


def several_grid(found: Iterable[Figure]) -> Grid:
    """What a request that names all tasks brings, beside others that bring the same answers."""
    mine = [f for f in found if f.labels.get("experiment") == SEVERAL]
    by = {(f.name, f.mode, f.labels.get("own"), f.labels.get("base")): f for f in mine}
    rows = Rows()
    for rate in (f for f in mine if f.name == SATURATED):
        own, arm = rate.labels["own"], rate.mode
        ratio = by.get((SATURATED_RATIO, ALL, own, arm))
        share = by.get((OF_BOUND, arm, own, BOUND))
        alone = by.get((ALONE, arm, own, None))
        shorter = by.get((ALONE_RATIO, ALL, own, arm))
        rows.row(
            own,
            arm,
            digits(rate.value),
            bounds(rate.low, rate.high),
            with_bounds(ratio.value, ratio.low, ratio.high, 2) if ratio else "",
            f"{share.value:.2f}" if share else "",
            ms(alone.value if alone else None),
            with_bounds(shorter.value, shorter.low, shorter.high, 2) if shorter else "",
            str(rate.n),
        )
    heads = ("own from", "requests", "answers/s", "95%", "all at once, x this", "of bound")
    more = ("alone, ms", "all at once, x this ", "n")
    title = "Several tasks on one input"
    return Grid(title, (*heads, *more), rows, frozenset({"own from", "requests"}))

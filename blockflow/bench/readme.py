"""The figures in README.md: what a crossing costs and what a shared trunk saves, a sentence each,
written between marks. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from blockflow.bench.batching.figures import MEMORY_RATIO, SATURATED_RATIO
from blockflow.bench.batching.plan import HEADS, SEVERAL, SHARED
from blockflow.bench.batching.several_figures import ALL, ALONE_RATIO, FULL_MODELS
from blockflow.bench.grid import digits
from blockflow.bench.passage import Passage
from blockflow.bench.pipeline_figures import (
    APART,
    HOP,
    LESS,
    RATIO,
    TENSORMQ,
    TENSORMQ_AWAKE,
    ZEROMQ,
)
from blockflow.bench.results import Figure

PAGE = "README.md"
COSTS = Passage("figures of make bench")
SAVINGS = Passage("figures of make bench-batching")
_WIDTH = 100


def costs(figures: Iterable[Figure], machine: Mapping[str, object]) -> str:
    """What four processes cost beside one, a hop, and whole tensors, by rows per request.

    Args:
        figures: of ``make bench``.
    """
    found = {(f.name, f.mode, f.batch): f for f in figures}
    sizes = sorted({rows for name, mode, rows in found if (name, mode) == (HOP, TENSORMQ) and rows})

    def by_rows(name: str, mode: str, text: Callable[[float], str]) -> str:
        return _listed([text(found[name, mode, rows].value) for rows in sizes])

    awake = ""
    if all((HOP, TENSORMQ_AWAKE, rows) in found for rows in sizes):
        awake = (
            f" ({by_rows(HOP, TENSORMQ_AWAKE, _hundredths)} with idle cores kept awake: a task's "
            "`cpu_latency_us`)"
        )
    return textwrap.fill(
        f"With {_listed([str(s) for s in sizes])} rows the four processes took "
        f"{by_rows(RATIO, TENSORMQ, _hundredths)} times as long as the one (bare processes that "
        f"take turns, without BlockFlow: {by_rows(RATIO, APART, _hundredths)}), on "
        f"{machine.get('cores', '?')} cores ({machine.get('cpu', 'unknown CPU')}). A hop cost "
        f"{by_rows(HOP, TENSORMQ, _hundredths)} ms{awake}, one with whole tensors "
        f"{by_rows(LESS, ZEROMQ, digits)} times as much.",
        _WIDTH,
    )


def savings(figures: Iterable[Figure], machine: Mapping[str, object]) -> str:
    """What tasks on one trunk save beside whole models, where each input is for all of them.

    Args:
        figures: of ``make bench-batching``.

    Returns:
        "" where no such thing was measured.
    """
    found = list(figures)
    memory = {f.labels["experiment"]: f.value for f in found if f.name == MEMORY_RATIO}
    mine = [f for f in found if f.labels.get("experiment") == SEVERAL]
    ratios = {
        (f.name, f.labels["own"]): f
        for f in mine
        if f.mode == ALL and f.labels.get("base") == FULL_MODELS
    }
    if not ratios:
        return ""
    early, late = dict.fromkeys(own for _, own in ratios)  # in the order of measuring
    parts = []
    for own, experiment in ((late, HEADS), (early, SHARED)):
        more = ratios[SATURATED_RATIO, own]
        parts.append(
            f"{digits(more.value)} times as many answers per second, the answers on a single input "
            f"in {_hundredths(ratios[ALONE_RATIO, own].value)} of the time, and "
            f"{_hundredths(memory[experiment])} of the memory"
        )
    tasks = ratios[SATURATED_RATIO, late].labels["tasks"]
    return textwrap.fill(
        f"{tasks} tasks on each input that share all of ResNet-50 but its classifier, beside "
        f"{tasks} whole models: {parts[0]}. With the last stage (`{early}`) of their own as well: "
        f"{parts[1]}. ({machine.get('cores', '?')} cores, {machine.get('cpu', 'unknown CPU')})",
        _WIDTH,
        break_on_hyphens=False,
    )


def _hundredths(value: float) -> str:
    return f"{value:.2f}"


def _listed(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))

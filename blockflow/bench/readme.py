"""The figures of ``make bench`` in README.md: one sentence, written between two marks. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from blockflow.bench.grid import digits
from blockflow.bench.passage import Passage
from blockflow.bench.pipeline_figures import APART, HOP, LESS, RATIO, TENSORMQ, ZEROMQ
from blockflow.bench.results import Figure

PAGE = "README.md"
COSTS = Passage("figures of make bench")
_WIDTH = 100


def costs(figures: Iterable[Figure], machine: Mapping[str, object]) -> str:
    """What four processes cost beside one, a hop, and whole tensors, by rows per request.

    Args:
        figures: of ``make bench``.
        machine: that they are of.
    """
    found = {(f.name, f.mode, f.batch): f for f in figures}
    sizes = sorted({rows for name, mode, rows in found if (name, mode) == (HOP, TENSORMQ) and rows})

    def by_rows(name: str, mode: str, text: Callable[[float], str]) -> str:
        return _listed([text(found[name, mode, rows].value) for rows in sizes])

    return textwrap.fill(
        f"With {_listed([str(s) for s in sizes])} rows the four processes took "
        f"{by_rows(RATIO, TENSORMQ, _hundredths)} times as long as the one (bare processes that "
        f"take turns, without BlockFlow: {by_rows(RATIO, APART, _hundredths)}), on "
        f"{machine.get('cores', '?')} cores ({machine.get('cpu', 'unknown CPU')}). A hop cost "
        f"{by_rows(HOP, TENSORMQ, _hundredths)} ms, one with whole tensors "
        f"{by_rows(LESS, ZEROMQ, digits)} times as much.",
        _WIDTH,
    )


def _hundredths(value: float) -> str:
    return f"{value:.2f}"


def _listed(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))

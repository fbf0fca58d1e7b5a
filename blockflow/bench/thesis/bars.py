"""Bars of figures in groups, with their intervals, and the thesis's figure as a mark on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blockflow.bench.canvas import PALETTE, new_page
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ
from blockflow.bench.results import Figure
from blockflow.bench.statistics import Interval

WAY_COLOURS = {TENSORMQ: PALETTE[0], ZEROMQ: PALETTE[1]}
"""The same in every picture in which ways are lines."""

_WIDTH = 0.85


def draw_bars(
    figures: Sequence[Figure],
    unit: str,
    *,
    group: Callable[[Figure], str] = lambda f: f.name,
    log: bool = False,
) -> Any:
    """A page with a group per ``group(figure)`` and a colour per mode, in the figures' order.

    Args:
        group: what stands below a group of bars.
    """
    page = new_page(9, 4)
    ax = page.subplots()
    groups: dict[str, list[Figure]] = {}
    for f in figures:
        groups.setdefault(group(f), []).append(f)
    modes = list(dict.fromkeys(f.mode for f in figures))
    width = _WIDTH / max(map(len, groups.values()))
    alone = all(len(mine) == 1 for mine in groups.values())
    marks: list[tuple[float, float]] = []
    named: set[str] = set()
    for at, mine in enumerate(groups.values()):
        for i, f in enumerate(mine):
            x = at + (i - (len(mine) - 1) / 2) * width
            low, high = (f.value if v is None else v for v in (f.low, f.high))
            errors = [[max(0.0, f.value - low)], [max(0.0, high - f.value)]]
            colour = PALETTE[0] if alone else PALETTE[modes.index(f.mode) % len(PALETTE)]
            label = None if alone or f.mode in named else f.mode
            named.add(f.mode)
            ax.bar(x, f.value, width * 0.95, color=colour, label=label, yerr=errors, ecolor="#444")
            if "thesis" in f.labels:
                marks.append((x, f.labels["thesis"]))
    if marks:
        label = "the thesis's"
        ax.plot([x for x, _ in marks], [y for _, y in marks], "k_", ms=12, mew=2, label=label)
    if log:
        ax.set_yscale("log")
    ax.set_xticks(range(len(groups)), list(groups), fontsize=8)
    ax.set_ylabel(unit)
    if ax.get_legend_handles_labels()[0]:
        page.legend(loc="outside upper center", ncols=6, fontsize=8, frameon=False)
    ax.grid(alpha=0.25, axis="y")
    ax.set_axisbelow(True)
    return page


def draw_line(ax: Any, xs: Sequence[float], found: Sequence[Interval], **style: Any) -> None:
    """Values with their intervals, joined."""
    apart = [f.value - f.low for f in found], [f.high - f.value for f in found]
    ax.errorbar(xs, [f.value for f in found], apart, fmt="o-", **style)

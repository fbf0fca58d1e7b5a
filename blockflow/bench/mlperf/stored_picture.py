"""The picture of LoadGen's stored results: latency by share, the search for a rate, and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from blockflow.bench.canvas import new_page
from blockflow.bench.mlperf.figures import BLOCK, RUN, run_of
from blockflow.bench.mlperf.pictures import COLOURS, PARTS
from blockflow.bench.mlperf.settings import Scenario
from blockflow.bench.mlperf.tables import label_of
from blockflow.bench.results import Figure

_DPI = 100
_BAR = 0.2
"""Inches."""


def draw(found: Sequence[Figure]) -> Any:
    """Left: the percentiles that LoadGen logs. Middle: rates that a search has tried, where there
    was one. Right: mean time per block, of scenarios in which requests wait for nobody.

    Raises:
        SystemError_: MISSING_EXTRA without matplotlib.
    """
    runs = [f for f in found if f.name == RUN and f.labels.get("latency_ms")]
    searches = [f for f in runs if f.labels.get("search")]
    shown = {run_of(f) for f in runs if f.mode != Scenario.OFFLINE}
    blocks = [f for f in found if f.name == BLOCK and run_of(f) in shown]
    page = new_page(12, max(4.0, _BAR * len(blocks)), _DPI)
    left, *middle, right = page.subplots(1, 3 if searches else 2)
    for f, colour in zip(runs, cycle(COLOURS), strict=False):
        points = sorted((float(p), v) for p, v in f.labels["latency_ms"].items())
        shares, times = [p for p, _ in points], [v for _, v in points]
        left.plot(times, shares, "o-", color=colour, ms=3, label=label_of(f))
    left.set(xscale="log", xlabel="ms", ylabel="percent of the samples within")
    left.legend(fontsize=7, frameon=False)
    for axes in middle:
        _searches(axes, searches)
    _blocks(right, blocks)
    for axes in (left, *middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    return page


def _searches(axes: Any, searches: Sequence[Figure]) -> None:
    for f, colour in zip(searches, cycle(COLOURS), strict=False):
        for verdict, mark in (("VALID", "o"), ("INVALID", "x")):
            tried = [t for t in f.labels["search"] if t["verdict"] == verdict]
            times = [t["ms"] for t in tried]
            axes.plot([t["rate"] for t in tried], times, mark, color=colour, label=verdict)
        if f.labels["bound_ms"] is not None:
            axes.axhline(f.labels["bound_ms"], color=colour, linestyle=":", label="bound")
    axes.set(xlabel="queries per second offered", ylabel="ms at the percentile")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False)


def _blocks(axes: Any, blocks: Sequence[Figure]) -> None:
    names = [f"{f.mode}, {label_of(f)}" for f in blocks]
    edge = [0.0] * len(names)
    for part, colour in zip(PARTS, COLOURS, strict=False):
        widths = [float(f.labels[part]) for f in blocks]
        axes.barh(range(len(names)), widths, left=edge, color=colour, label=part)
        edge = [a + b for a, b in zip(edge, widths, strict=True)]
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.invert_yaxis()
    axes.set(xlabel="mean ms per request")
    axes.legend(fontsize=7, frameon=False)

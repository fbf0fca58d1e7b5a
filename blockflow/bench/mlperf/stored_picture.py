"""The picture of LoadGen's stored results: latency by share, the search for a rate, and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockflow.bench.canvas import PALETTE, new_page
from blockflow.bench.mlperf.figures import BLOCK, RUN, run_of
from blockflow.bench.mlperf.pictures import COLOURS, PARTS
from blockflow.bench.mlperf.settings import Scenario
from blockflow.bench.mlperf.tables import label_of
from blockflow.bench.results import Figure

_DPI = 100
_BAR = 0.2
"""Inches."""

_STYLES = ("-", "--", ":")
"""Of runs whose colour stands for another one already."""


def draw(found: Sequence[Figure]) -> Any:
    """Left: the percentiles that LoadGen logs. Middle: rates that a search has tried, where there
    was one. Right: mean time per block. What is sent all at once, offline, has no latency that says
    anything."""
    runs = [
        f
        for f in found
        if f.name == RUN and f.mode != Scenario.OFFLINE and f.labels.get("latency_ms")
    ]
    searches = [f for f in runs if f.labels.get("search")]
    shown = {run_of(f) for f in runs}
    blocks = [f for f in found if f.name == BLOCK and run_of(f) in shown]
    page = new_page(12, max(4.0, _BAR * len(blocks)), _DPI)
    left, *middle, right = page.subplots(1, 3 if searches else 2)
    for n, f in enumerate(runs):
        points = sorted((float(p), v) for p, v in f.labels["latency_ms"].items())
        shares, times = [p for p, _ in points], [v for _, v in points]
        style = _STYLES[n // len(PALETTE) % len(_STYLES)]
        left.plot(times, shares, f"o{style}", color=_colour(n), ms=3, label=label_of(f))
    left.set(xscale="log", xlabel="ms", ylabel="percent of the samples within")
    _legend_below(left)
    for axes in middle:
        _searches(axes, searches)
    _blocks(right, blocks)
    return page


def _searches(axes: Any, searches: Sequence[Figure]) -> None:
    for n, f in enumerate(searches):
        marks = {
            mark: [t for t in f.labels["search"] if t["verdict"] == verdict]
            for verdict, mark in (("VALID", "o"), ("INVALID", "x"))
        }
        for mark, tried in marks.items():
            # The name stands once: at the first mark that there is.
            name = label_of(f) if tried is next(filter(None, marks.values()), None) else None
            rates, times = [t["rate"] for t in tried], [t["ms"] for t in tried]
            axes.plot(rates, times, mark, color=_colour(n), label=name)
        if f.labels["bound_ms"] is not None:
            axes.axhline(f.labels["bound_ms"], color=_colour(n), linestyle=":")
    axes.set(
        yscale="log",
        xlabel="queries per second offered (o VALID, x INVALID)",
        ylabel="ms at the percentile (dotted: its bound)",
    )
    _legend_below(axes)


def _colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def _legend_below(axes: Any) -> None:
    """Beside no line: runs are many, and their curves are everywhere."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=7, frameon=False)


def _blocks(axes: Any, blocks: Sequence[Figure]) -> None:
    runs = [label_of(f) for f in blocks]
    names = [
        f.mode if n and runs[n - 1] == run else f"{run}: {f.mode}"
        for n, (f, run) in enumerate(zip(blocks, runs, strict=True))
    ]
    edge = [0.0] * len(names)
    for part, colour in zip(PARTS, COLOURS, strict=False):
        widths = [float(f.labels[part]) for f in blocks]
        axes.barh(range(len(names)), widths, left=edge, color=colour, label=part)
        edge = [a + b for a, b in zip(edge, widths, strict=True)]
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.invert_yaxis()
    axes.set(xlabel="mean ms per request")
    axes.legend(fontsize=7, frameon=False)

"""Plots of a call: latency, rate, where the time went and how large the batches were."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from blockflow.bench.canvas import new_page, save_page
from blockflow.bench.mlperf.result import ScenarioResult
from blockflow.bench.numerals import given

PARTS = ("transit", "wait", "overhead", "compute")
"""Of a request's time at a block."""

LATENCY, RATE, BLOCKS, BATCHES = FILES = ("latency.png", "rate.png", "blocks.png", "batches.png")
"""Beside the report, as far as there is something to draw."""

COLOURS = ("#17779b", "#e4572e", "#6a994e", "#5a4a78", "#f2b134")
_POINTS = 1001
"""Of a curve: a run may have millions of samples."""


def draw(results: Sequence[ScenarioResult], out: Path) -> list[tuple[str, str]]:
    """Latency by share of samples, latency by throughput where the rate was searched, time and
    batches per block. Pictures of an earlier call that this one has not, go.

    Returns:
        title and file's name of each picture.

    Raises:
        SystemError_: MISSING_EXTRA without matplotlib.
    """
    found = []
    timed = [r for r in results if r.result.settings.mode == "performance"]
    if any(r.result.latencies for r in timed):
        save_page(_latency_page(timed), out / LATENCY)
        found.append(("Latency: share of samples that were answered, or failed, within", LATENCY))
    for r in timed:
        if r.search:  # the server scenario: there is one
            save_page(_rate_page(r), out / RATE)
            found.append(("Latency by throughput", RATE))
    if any(r.result.blocks for r in timed):
        save_page(_block_page(timed), out / BLOCKS)
        found.append(("Time per block", BLOCKS))
    if any(r.result.batches for r in timed):
        save_page(_batch_page(timed), out / BATCHES)
        found.append(("Batch sizes", BATCHES))
    for name in set(FILES) - {name for _, name in found}:
        (out / name).unlink(missing_ok=True)
    return found


def _legend(page: Any, axes: Any) -> None:
    """Below the plots, where it covers none of them."""
    page.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )


def _latency_page(results: Sequence[ScenarioResult]) -> Any:
    page = new_page(8, 4.5)
    axes = page.subplots()
    for r, colour in zip(results, cycle(COLOURS), strict=False):
        for task, style in zip(r.result.latencies, cycle(("-", "--", ":", "-.")), strict=False):
            if not len(r.result.latencies[task]):
                continue
            shares = np.linspace(0, 1, _POINTS)
            samples = np.quantile(r.result.latencies[task], shares, method="inverted_cdf")
            label = f"{r.result.settings.scenario}, {task}"
            axes.step(samples, shares, style, color=colour, label=label, where="post")
    axes.set(
        xscale="log",
        xlabel="ms from LoadGen's call to the response, or the failure",
        ylabel="share",
    )
    axes.set_ylim(0, 1.01)
    axes.grid(alpha=0.3)
    _legend(page, axes)
    return page


def rate_points(searched: ScenarioResult) -> dict[str, list[tuple[float, float, bool]]]:
    """Of every run of a search, per task: queries per second that were answered of all tasks, ms
    at the percentile by which the task is judged, and whether the run was VALID; in the order of
    the offered rates.

    Above what the system can do more is offered and no more answered: the curve turns upwards; or
    back and down, where it refuses most of it at once, for the ms are those of failures as well.
    """
    found: dict[str, list[tuple[float, float, bool]]] = {}
    for r in sorted(searched.search, key=lambda r: r.settings.rate):
        for task in r.verdict.tasks:
            if r.verdict.metric is not None and task.seen_ms is not None:
                point = (r.verdict.metric.value, task.seen_ms, r.verdict.valid)
                found.setdefault(task.task, []).append(point)
    return found


def _rate_page(searched: ScenarioResult) -> Any:
    page = new_page(8, 4.5)
    axes = page.subplots()
    targets = searched.result.settings.targets
    for (task, points), colour in zip(rate_points(searched).items(), cycle(COLOURS), strict=False):
        name = f"{task} p{100 * targets[task].percentile:g}"
        axes.plot(
            [x for x, _, _ in points], [y for _, y, _ in points], "-", color=colour, alpha=0.4
        )
        for valid, mark, word in ((True, "o", "VALID"), (False, "x", "INVALID")):
            some = [(x, y) for x, y, was_valid in points if was_valid is valid]
            xs, ys = [x for x, _ in some], [y for _, y in some]
            axes.plot(xs, ys, mark, color=colour, label=f"{name}, {word}")
        bound = targets[task].latency_ms
        if bound is not None:
            label = f"{task} bound {given(bound)} ms"
            axes.axhline(bound, color=colour, linestyle=":", label=label)
    axes.set(
        xlabel="queries per second answered",
        ylabel="ms to the response, or the failure",
        yscale="log",
    )
    axes.grid(alpha=0.3)
    _legend(page, axes)
    return page


def _block_page(results: Sequence[ScenarioResult]) -> Any:
    """A part of the page per scenario: their times may be orders of magnitude apart."""
    shown = [r.result for r in results if r.result.blocks]
    counts = [len(r.blocks) for r in shown]
    page = new_page(8, 1.0 * len(shown) + 0.3 * sum(counts))
    rows = page.subplots(len(shown), 1, squeeze=False, height_ratios=counts)
    for (axes,), result in zip(rows, shown, strict=True):
        names = [b.block for b in result.blocks]
        left = [0.0] * len(names)
        for part, colour in zip(PARTS, COLOURS, strict=False):
            widths = [float(getattr(b, f"{part}_ms")) for b in result.blocks]
            axes.barh(names, widths, left=left, color=colour, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_title(str(result.settings.scenario), loc="left", fontsize=9)
    rows[-1][0].set(xlabel="mean ms per request")
    _legend(page, rows[0][0])
    return page


def _batch_page(results: Sequence[ScenarioResult]) -> Any:
    """Means over the run, and the lowest and highest mean of its seconds."""
    shown = [r.result for r in results if r.result.batches]
    counts = [len(r.batches) for r in shown]
    page = new_page(8, 1.0 * len(shown) + 0.3 * sum(counts))
    rows = page.subplots(len(shown), 1, squeeze=False, height_ratios=counts)
    for (axes,), result in zip(rows, shown, strict=True):
        names = [b.block for b in result.batches]
        means = [b.mean for b in result.batches]
        axes.barh(names, means, color=COLOURS[0], height=0.6)
        for i, b in enumerate(result.batches):
            low, high = min((*b.looks, b.mean)), max((*b.looks, b.mean))
            axes.plot((low, high), (i, i), "-|", color=COLOURS[1], linewidth=1.5)
        axes.set_xlim(left=0)
        axes.invert_yaxis()
        axes.set_title(str(result.settings.scenario), loc="left", fontsize=9)
    rows[-1][0].set(xlabel="rows per batch: mean of the run, and range of its seconds")
    return page

"""``make bench-plots``: pictures of what the benchmarks have written to their result files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console

from blockflow.bench import gpu_figures, overload_figures
from blockflow.bench.batching import figures as batching
from blockflow.bench.batching.plan import EXPERIMENTS, HEADS, SHARED
from blockflow.bench.canvas import PALETTE, new_page, save_page
from blockflow.bench.chaos import report as chaos
from blockflow.bench.echo_chain import CONDITIONS, HANDLES, WARM, WAYS
from blockflow.bench.grid import size_text
from blockflow.bench.hop_figures import BARE, BASELINES, HOP
from blockflow.bench.mlperf import stored_picture
from blockflow.bench.options import nonsense
from blockflow.bench.pipeline_figures import (
    BOUND,
    ONE_WORKER,
    RATIO,
    TENSORMQ,
    THROUGHPUT,
    Book,
)
from blockflow.bench.results import Figure, ResultFile
from blockflow.core.errors import BlockFlowError

_DPI = 100

_CHARACTER = 0.07
"""Inches, of the small print below a plot, with what stands beside the names."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture: its file's name, the result file that it shows, and who draws it."""

    name: str
    results: str
    draw: Callable[[Sequence[Figure]], Any]


def draw_hops(found: Sequence[Figure]) -> Any:
    """Left: one hop by size and way, warm. Right: the hop by handle in all conditions."""
    page = new_page(10, 4.2, _DPI)
    left, right = page.subplots(1, 2, width_ratios=(3, 2))
    by = {(f.mode, f.labels["condition"], f.labels["bytes"]): f for f in found if f.name == HOP}
    sizes = sorted({size for _, _, size in by if size})
    names = [*(w.name for w in WAYS), *BASELINES]
    for name, colour in zip(names, PALETTE, strict=True):
        points = [(s, by[name, WARM, s]) for s in sizes if (name, WARM, s) in by]
        if points:
            xs = [s for s, _ in points]
            left.plot(xs, [f.p50_ms for _, f in points], "o-", color=colour, label=name, ms=3)
            lows, highs = [f.p10_ms for _, f in points], [f.p90_ms for _, f in points]
            left.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
    bare = by.get((BARE, WARM, 0))
    if bare is not None:
        left.axhline(bare.p50_ms, color="black", linestyle=":", linewidth=1, label=BARE)
    left.set(xscale="log", yscale="log", xlabel="size of the tensor", ylabel="ms per hop, warm")
    left.set_xticks(sizes, [size_text(s) for s in sizes], rotation=45, fontsize=7)
    left.minorticks_off()
    left.legend(fontsize=7, frameon=False)
    for condition, colour in zip(CONDITIONS, PALETTE, strict=False):
        points = [(s, by[k]) for s in sizes if (k := (HANDLES.name, condition, s)) in by]
        xs = [s for s, _ in points]
        label = f"handle, {condition}"
        right.plot(xs, [f.p50_ms for _, f in points], "o-", color=colour, label=label, ms=3)
        bare = by.get((BARE, condition, 0))
        if bare is not None:
            right.axhline(bare.p50_ms, color=colour, linestyle=":", label=f"bare, {condition}")
    right.set(xscale="log", xlabel="size of the tensor", ylabel="ms per hop")
    right.set_ylim(bottom=0)
    right.set_xticks(sizes, [size_text(s) for s in sizes], rotation=45, fontsize=7)
    right.minorticks_off()
    right.legend(fontsize=7, frameon=False, loc="lower right", ncols=3)
    return _tidy(page)


def draw_ratios(found: Sequence[Figure]) -> Any:
    """Latency of the ways in workers as a multiple of the in-process sum, per engine and batch."""
    book = Book(found)
    ways = [w for w in (TENSORMQ, ONE_WORKER) if any(w == way for _, _, way in book.rows_of(RATIO))]
    places = list(dict.fromkeys((engine, rows) for engine, rows, _ in book.rows_of(RATIO)))
    page = _page_of(places)
    ax = page.subplots()
    for i, (way, colour) in enumerate(zip(ways, PALETTE, strict=False)):
        for at, (engine, rows) in enumerate(places):
            figure = book.at(RATIO, engine, rows, way)
            if figure is None:
                continue
            x = at + (i - (len(ways) - 1) / 2) * 0.25
            ends = [figure.interval.low, figure.interval.high]
            ax.plot([x, x], ends, color=colour, linewidth=2, alpha=0.5)
            ax.plot([x], [figure.value], "o", color=colour, label=way if at == 0 else None)
    ax.axhline(1.0, color="black", linestyle=":", linewidth=1)
    ax.set_xticks(range(len(places)), _places(places), fontsize=7)
    ax.set_ylabel("x in-process (95%)")
    ax.legend(fontsize=8, frameon=False)
    return _tidy(page)


def draw_throughput(found: Sequence[Figure]) -> Any:
    """Rows per second beside the bound, per engine and batch."""
    book = Book(found)
    keys = book.rows_of(THROUGHPUT)
    ways = sorted({way for _, _, way in keys}, key=lambda way: (way != BOUND, way))
    places = list(dict.fromkeys((engine, rows) for engine, rows, _ in keys))
    page = _page_of(places)
    ax = page.subplots()
    width = 0.8 / max(1, len(ways))
    for i, (way, colour) in enumerate(zip(ways, ("#bdbdbd", *PALETTE), strict=False)):
        values = [book.at(THROUGHPUT, engine, rows, way) for engine, rows in places]
        xs = [at + (i - (len(ways) - 1) / 2) * width for at in range(len(places))]
        heights = [0.0 if f is None else f.value for f in values]
        bars = ax.bar(xs, heights, width, color=colour, label=way)
        ax.bar_label(bars, labels=[f"{h:.3g}" if h else "" for h in heights], fontsize=6)
    ax.set_xticks(range(len(places)), _places(places), fontsize=7)
    ax.set_ylabel("rows/s")
    ax.legend(fontsize=8, frameon=False)
    return _tidy(page)


def draw_batching(found: Sequence[Figure]) -> Any:
    """Mean time (solid) and 99th percentile (dotted) by load, per experiment and policy."""
    page = new_page(10, 3.6, _DPI)
    times = [f for f in found if f.name == batching.TIME]
    present = [e for e in EXPERIMENTS if any(f.labels["experiment"] == e for f in times)]
    # One colour for a policy in all of them; LBCI's is beside others than DVABatch's are.
    last = sorted(times, key=lambda f: f.labels["experiment"] == "lbci")
    colours = dict(zip(dict.fromkeys(f.mode for f in last), cycle(PALETTE), strict=False))
    for ax, experiment in zip(
        page.subplots(1, max(1, len(present)), squeeze=False)[0], present, strict=False
    ):
        mine = [f for f in times if f.labels["experiment"] == experiment]
        for arm in dict.fromkeys(f.mode for f in mine):
            points, colour = [f for f in mine if f.mode == arm], colours[arm]
            xs = [f.labels["x_serial"] for f in points]
            ax.plot(xs, [f.value for f in points], "o-", color=colour, label=arm, ms=3)
            ax.plot(xs, [f.p99_ms for f in points], ":", color=colour, linewidth=1)
        ax.set(title=experiment, xlabel="load, x serial capacity", yscale="log")
        low, high = ax.get_ylim()
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}" if high < 30 * low else "")
        ax.tick_params(axis="y", which="both", labelsize=7)
        ax.legend(fontsize=7, frameon=False)
    page.axes[0].set_ylabel("ms: mean, p99 dotted")
    return _tidy(page)


def draw_peaks(found: Sequence[Figure]) -> Any:
    """Left: the peak within the bound per model and policy. Right: the shared trunk, saturated."""
    page = new_page(10, 3.6, _DPI)
    left, right = page.subplots(1, 2, width_ratios=(3, 2))
    trunks = (SHARED, HEADS)
    peaks = [f for f in found if f.name == batching.PEAK and f.labels["experiment"] not in trunks]
    places = list(dict.fromkeys(f.labels["experiment"] for f in peaks))
    arms = list(dict.fromkeys(f.mode for f in peaks))
    width = 0.8 / max(1, len(arms))
    for i, (arm, colour) in enumerate(zip(arms, PALETTE, strict=False)):
        mine = [f for f in peaks if f.mode == arm]
        xs = [
            places.index(f.labels["experiment"]) + (i - (len(arms) - 1) / 2) * width for f in mine
        ]
        bars = left.bar(xs, [f.value for f in mine], width, color=colour, label=arm)
        left.bar_label(bars, labels=[f"{f.value:.3g}" for f in mine], fontsize=6)
    left.set_xticks(range(len(places)), places)
    left.set_ylabel("rows/s within the bound")
    if arms:
        left.legend(fontsize=7, frameon=False)
    rates = [f for f in found if f.name == batching.SATURATED]
    shared = [f for f in rates if f.labels["experiment"] == SHARED]
    # Lying, as their names are long.
    bars = right.barh([f.mode for f in shared], [f.value for f in shared], color=PALETTE[0])
    right.bar_label(bars, labels=[f"{f.value:.3g}" for f in shared], fontsize=7)
    right.invert_yaxis()
    right.tick_params(axis="y", labelsize=7)
    right.set_xlabel("shared trunk, rows/s")
    return _tidy(page)


def draw_gpu(found: Sequence[Figure]) -> Any:
    """Left: what a hop costs by rows, beside the aim. Middle: a client's latency by their number.
    Right: throughput beside the bound."""
    page = new_page(10, 3.6, _DPI)
    left, middle, right = page.subplots(1, 3, width_ratios=(4, 4, 3))
    left.set_yscale("symlog", linthresh=gpu_figures.HOP_AIM)  # noise may be below nothing
    for way, colour in zip(gpu_figures.WAYS, PALETTE, strict=False):
        hops = [f for f in found if f.name == gpu_figures.HOP and f.mode == way]
        for f in hops:
            left.plot([f.batch, f.batch], [f.low, f.high], color=colour, linewidth=2, alpha=0.5)
        label = f"{way} (95%)"
        left.plot([f.batch for f in hops], [f.value for f in hops], "o-", color=colour, label=label)
        mine = [f for f in found if f.name == gpu_figures.CLIENTS and f.mode == way]
        counts = [f.labels["clients"] for f in mine]
        middle.plot(counts, [f.p50_ms for f in mine], "o-", color=colour, label=way, ms=3)
        lows, highs = [f.p10_ms for f in mine], [f.p90_ms for f in mine]
        middle.fill_between(counts, lows, highs, color=colour, alpha=0.15, linewidth=0)
    left.axhline(gpu_figures.HOP_AIM, color="black", linestyle=":", linewidth=1, label="aim")
    rows = sorted({f.batch for f in found if f.name == gpu_figures.HOP if f.batch is not None})
    left.set(xscale="log", xlabel="rows per request", ylabel="ms per hop")
    left.yaxis.set_major_formatter("{x:g}")
    left.set_xticks(rows, [str(n) for n in rows])
    left.minorticks_off()
    left.legend(fontsize=7, frameon=False)
    middle.set(xlabel="clients, one request each", ylabel="ms: p50, p10 to p90")
    middle.legend(fontsize=7, frameon=False)
    rates = [f for f in found if f.name == gpu_figures.SATURATION]
    colours = {gpu_figures.BOUND: "#bdbdbd"} | dict(zip(gpu_figures.WAYS, PALETTE, strict=False))
    bars = right.bar([f.mode for f in rates], [f.value for f in rates])
    for bar, f in zip(bars, rates, strict=True):
        bar.set_color(colours[f.mode])
    right.bar_label(bars, labels=[f"{f.value:.3g}" for f in rates], fontsize=7)
    right.set_ylabel("rows/s, saturated")
    return _tidy(page)


def _page_of(places: Sequence[tuple[str, int]]) -> Any:
    """As wide as their names need, however many engines were measured."""
    longest = max((len(engine) for engine, _ in places), default=0)
    return new_page(max(10, _CHARACTER * longest * len(places)), 3.8, _DPI)


def _places(places: Sequence[tuple[str, int]]) -> list[str]:
    return [f"{engine}\n{rows} row{'s' * (rows > 1)}" for engine, rows in places]


def _tidy(page: Any) -> Any:
    for ax in page.axes:
        ax.grid(alpha=0.25, axis="y")
        ax.set_axisbelow(True)
    return page


PLOTS: Mapping[str, Plot] = {
    p.name: p
    for p in (
        Plot("hops.png", "hops.jsonl", draw_hops),
        Plot("pipeline.png", "pipeline.jsonl", draw_ratios),
        Plot("throughput.png", "pipeline.jsonl", draw_throughput),
        Plot("gpu.png", "gpu.jsonl", draw_gpu),
        Plot("batching.png", "batching.jsonl", draw_batching),
        Plot("batching-peaks.png", "batching.jsonl", draw_peaks),
        Plot("mlperf.png", "mlperf.jsonl", stored_picture.draw),
        Plot("overload.png", "overload.jsonl", overload_figures.draw),
        Plot("chaos.png", "chaos.jsonl", chaos.draw),
        Plot("kills.png", "kills.jsonl", chaos.draw),
        Plot("soak.png", "soak.jsonl", chaos.draw),
    )
}
"""A further benchmark adds its picture here."""


def draw_all(results: Path, out: Path) -> Iterable[Path]:
    """Draw what there are results for; the files that were written.

    Raises:
        SystemError_: MISSING_EXTRA without matplotlib.
        RequestError: INVALID_REQUEST for a file that holds no figures.
        OSError: a file cannot be read or written.
    """
    for plot in PLOTS.values():
        file = ResultFile(results / plot.results, plot.results)
        if not file.path.exists():
            continue
        try:
            found = [Figure.from_dict(line) for line in file.read()]
        except (ValueError, TypeError, AttributeError) as exc:
            raise nonsense(f"this is no file of figures: {exc!r}", str(file.path)) from exc
        save_page(plot.draw(found), out / plot.name)
        yield out / plot.name


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m blockflow.bench.plots", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of figures")
    parser.add_argument("--out", type=Path, help="folder for the pictures (default: the same)")
    args = parser.parse_args(argv)
    console = Console()
    try:
        drawn = list(draw_all(args.results, args.out or args.results))
    except (BlockFlowError, OSError) as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    for path in drawn:
        console.print(str(path), highlight=False)
    if not drawn:
        lacking = f"no figures of a whole run in {args.results}/ (quick runs are not drawn)"
        console.print(f"{lacking}: run a benchmark first", highlight=False)
    return 0 if drawn else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

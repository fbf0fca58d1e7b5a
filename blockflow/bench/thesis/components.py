"""Where a block's time goes, and how it is distributed (figures 4.4, 4.5, B.1 and B.2).

Inference is the engine's forward; overhead everything else in a block but waiting, its way there
included (section 4.2.1). One synchronous client, whole tensors and handles in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from blockflow.bench.canvas import PALETTE, new_page
from blockflow.bench.grid import Grid, Rows, digits, with_bounds
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ, Sample
from blockflow.bench.results import Figure, interval_figure, latency_figure
from blockflow.bench.statistics import median_interval, percentile
from blockflow.bench.thesis.bars import WAY_COLOURS
from blockflow.bench.thesis.beside import Rounds, beside_grid, quoted, thesis
from blockflow.bench.thesis.experiment import Context, Data, Experiment, Findings, Plot, Settings
from blockflow.bench.thesis.offline_table import OFFLINE_SUM_MS
from blockflow.bench.thesis.one_client import TWICE, Series, by_all_ways, compute_ms, overhead_ms

INFERENCE, OVERHEAD, WAITING = "inference", "overhead", "waiting"
PIPELINE_INFERENCE, PIPELINE_OVERHEAD = "inference, all blocks", "overhead, all blocks"
SPREAD = "overhead, all blocks: p90 - p10"
RATIO = "ratio"

WAYS = (ZEROMQ, TENSORMQ)
_TEXT = "text of figure 4.5"
_OVERHEAD_MS: Mapping[str, float] = {TENSORMQ: 2.55, ZEROMQ: 21.18}

Part = Callable[[tuple[float, float, float, float]], float]
PARTS: Mapping[str, Part] = {
    INFERENCE: lambda hop: hop[3],
    OVERHEAD: lambda hop: hop[0] + hop[2],
    WAITING: lambda hop: hop[1],
}
"""Of a hop: (transit, wait, overhead, compute)."""

_BINS = 30
_TAIL = 98.0
"""Percent of the samples that a plot shows: a shared machine has stragglers of any size."""


def run(context: Context) -> Findings:
    def done(found: Mapping[int, Series]) -> Findings:
        return findings(found[1], context.settings)

    rounds = context.pick(150, 6)
    return by_all_ways(context, "one inference by each way", {1: 1}, rounds, done)


def findings(found: Series, settings: Settings) -> Findings:
    """Figures, tables, plots and the line. Pure."""
    overheads, inferences = found.rounds(overhead_ms), found.rounds(compute_ms)
    cut = max(overheads.cut, inferences.cut)
    kept = {way: found.samples[way][cut:] for way in (*WAYS, TWICE)}
    blocks = [f"block{i + 1}" for i in range(len(kept[TENSORMQ][0].hops))]
    figures = [*_per_block(kept, blocks, settings), *_pipelines(overheads, inferences, settings)]
    whole = [f for f in figures if "block" not in f.labels]
    return Findings(
        says=_says(overheads, inferences, settings),
        figures=figures,
        tables=[
            _block_grid([f for f in figures if "block" in f.labels], blocks),
            beside_grid("Figure 4.5: all blocks of the pipeline", whole),
        ],
        plots=[
            Plot("Figure 4.4: time components per block", "blocks", _draw_blocks(figures, blocks)),
            Plot("Figure 4.5: all blocks of the pipeline", "pipeline", _draw_pipeline(kept)),
            Plot(
                "Figure B.1: inference time per block",
                "inference",
                _draw_parts(kept, blocks, INFERENCE),
            ),
            Plot(
                "Figure B.2: overhead per block",
                "overhead",
                _draw_parts(kept, blocks, OVERHEAD),
            ),
        ],
        data=[
            Data(
                "hops",
                ("way", "round", "block", "transit_ms", "wait_ms", "overhead_ms", "compute_ms"),
                [
                    (way, i, block, *hop)
                    for way, samples in found.samples.items()
                    for i, sample in enumerate(samples)
                    for block, hop in zip(blocks, sample.hops, strict=True)
                ],
            )
        ],
        notes=[
            "Figures 4.4, B.1 and B.2 have no numbers in the thesis's text; their shape is what "
            "can be compared. A request that is alone waits for nobody: waiting is the scheduler.",
            f"The distributions are drawn up to each way's {_TAIL:g}th percentile.",
        ],
    )


def _per_block(
    kept: Mapping[str, Sequence[Sample]], blocks: Sequence[str], settings: Settings
) -> Iterator[Figure]:
    for way in WAYS:
        for i, block in enumerate(blocks):
            for name, part in PARTS.items():
                source = {INFERENCE: "figures 4.4, B.1", OVERHEAD: "figures 4.4, B.2"}.get(name, "")
                times = [part(sample.hops[i]) for sample in kept[way]]
                labels = {**settings.labels, "block": block}
                yield thesis(latency_figure(name, way, 1, times, labels), None, source)


def _pipelines(overheads: Rounds, inferences: Rounds, settings: Settings) -> Iterator[Figure]:
    for way in WAYS:
        made = latency_figure(PIPELINE_INFERENCE, way, 1, inferences.of(way), settings.labels)
        yield thesis(made, OFFLINE_SUM_MS, _TEXT, "the offline sum")
        made = latency_figure(PIPELINE_OVERHEAD, way, 1, overheads.of(way), settings.labels)
        yield thesis(made, _OVERHEAD_MS[way], _TEXT)
        times = overheads.of(way)
        spread = percentile(times, 90) - percentile(times, 10)
        yield Figure.of(SPREAD, way, spread, "ms", len(times), settings.labels, batch=1)
    for name, rounds, printed in (
        (PIPELINE_OVERHEAD, overheads, round(_OVERHEAD_MS[ZEROMQ] / _OVERHEAD_MS[TENSORMQ], 1)),
        (PIPELINE_INFERENCE, inferences, 1.0),
    ):
        labels = {**settings.labels, "noise": rounds.noise}
        ratio = rounds.ratio(TENSORMQ, ZEROMQ)
        made = interval_figure(f"{name}: {ZEROMQ} / {TENSORMQ}", RATIO, 1, ratio, "x", labels)
        yield thesis(made, printed, _TEXT)


def _says(overheads: Rounds, inferences: Rounds, settings: Settings) -> str:
    ours, theirs = (digits(percentile(overheads.of(w), 50)) for w in (TENSORMQ, ZEROMQ))
    printed = quoted(settings.labels, " and ".join(f"{_OVERHEAD_MS[w]:g}" for w in WAYS[::-1]))
    return (
        f"overhead of all blocks {ours} ms with handles, {theirs} ms "
        f"with whole tensors{printed}: whole tensors are "
        f"{overheads.compared(TENSORMQ, ZEROMQ, 'dearer', 'cheaper')}; their inference times: "
        f"{inferences.compared(TENSORMQ, ZEROMQ)}"
    )


def _block_grid(figures: Sequence[Figure], blocks: Sequence[str]) -> Grid:
    by = {(f.name, f.mode, f.labels["block"]): f for f in figures}
    rows = Rows()
    for way in WAYS:
        rows.section(way)
        for block in blocks:
            parts = [by[name, way, block] for name in PARTS]
            cells = [with_bounds(f.value, f.low, f.high, 2) for f in parts]
            over = by[OVERHEAD, way, block]
            rows.row(way, block, *cells, digits(over.p90_ms or 0.0), str(over.n))
    heads = ("way", "block", *(f"{name} ms" for name in PARTS), "overhead p90", "n")
    return Grid("Figure 4.4: median per block (95%)", heads, rows, frozenset({"way", "block"}))


# --- plots ---------------------------------------------------------------------------------------


def _draw_blocks(figures: Sequence[Figure], blocks: Sequence[str]) -> Any:
    """Stacked bars per block, whole tensors beside handles."""
    page = new_page(9, 4)
    ax = page.subplots()
    by = {(f.name, f.mode, f.labels.get("block")): f.value for f in figures}
    for i, way in enumerate(WAYS):
        xs = [b + (i - 0.5) * 0.4 for b in range(len(blocks))]
        low = np.zeros(len(blocks))
        for j, name in enumerate(PARTS):
            values = np.array([by[name, way, block] for block in blocks])
            label = name if i == 0 else None
            ax.bar(xs, values, 0.36, bottom=low, color=PALETTE[j + 2], label=label)
            low += values
        for x, y in zip(xs, low, strict=True):
            ax.text(x, y, way, ha="center", va="bottom", fontsize=7)
    ax.set_xticks(range(len(blocks)), blocks)
    ax.set_ylabel("ms, median")
    ax.legend(fontsize=8, frameon=False)
    return page


def _draw_pipeline(kept: Mapping[str, Sequence[Sample]]) -> Any:
    """The distributions of the sums: inference on the left, overhead on the right."""
    page = new_page(9, 3.6)
    left, right = page.subplots(1, 2)
    for ax, name, number in (
        (left, PIPELINE_INFERENCE, compute_ms),
        (right, PIPELINE_OVERHEAD, overhead_ms),
    ):
        for way in WAYS:
            _histogram(ax, [number(s) for s in kept[way]], way, WAY_COLOURS[way])
        ax.set(title=name, xlabel="ms")
    left.set_ylabel("density")
    left.legend(fontsize=8, frameon=False)
    return page


def _draw_parts(kept: Mapping[str, Sequence[Sample]], blocks: Sequence[str], name: str) -> Any:
    """A distribution per block and way."""
    page = new_page(2.6 * len(blocks), 3.2)
    row = page.subplots(1, len(blocks), squeeze=False)[0]
    for i, (ax, block) in enumerate(zip(row, blocks, strict=True)):
        for way in WAYS:
            times = [PARTS[name](s.hops[i]) for s in kept[way]]
            _histogram(ax, times, way, WAY_COLOURS[way])
        ax.set(title=block, xlabel=f"{name}, ms")
    row[0].legend(fontsize=8, frameon=False)
    return page


def _histogram(ax: Any, times: Sequence[float], label: str, colour: str) -> None:
    """An empirical density (the thesis's ePDF), and the median."""
    limit = percentile(times, _TAIL)
    shown = [t for t in times if t <= limit]
    # Of one shape: as bars, which have an artist each, most of the time of a run went into drawing.
    style = {"histtype": "stepfilled", "color": colour, "alpha": 0.55, "label": label}
    ax.hist(shown, bins=_BINS, density=True, **style)
    ax.axvline(median_interval(times).value, color=colour, linewidth=1)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)


EXPERIMENT = Experiment(
    "components",
    ("figure 4.4", "figure 4.5", "figure B.1", "figure B.2"),
    "Inference and overhead per block, and their distributions",
    run,
)

"""The pipeline computing time by batch size (figures 4.7 and 4.8).

A handle is as small for 32 rows as for one, so what it costs must not grow with the batch; what a
whole tensor costs grows with its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from blockflow.bench.canvas import PALETTE, label_ticks, new_page
from blockflow.bench.grid import Grid, digits, with_bounds
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ
from blockflow.bench.results import Figure, interval_figure, latency_figure
from blockflow.bench.thesis.bars import WAY_COLOURS
from blockflow.bench.thesis.beside import AGAIN, Rounds, beside_grid, thesis
from blockflow.bench.thesis.experiment import Context, Data, Experiment, Findings, Plot, Settings
from blockflow.bench.thesis.offline_table import OFFLINE_SUM_MS
from blockflow.bench.thesis.one_client import (
    OFFLINE,
    TWICE,
    Series,
    by_all_ways,
    overhead_ms,
    pipeline_ms,
)
from blockflow.bench.thesis.pipeline_time import TENSORMQ_MS, ZEROMQ_MS

TIME, OVERHEAD, RATIO = "pipeline computing time", "overhead, all blocks", "ratio"
GROWTH = "overhead, to that of the smallest batch"

_SOURCE = "figure 4.7"
_WAYS = (ZEROMQ, TENSORMQ, OFFLINE)
_PRINTED: Mapping[tuple[str, str], float] = {
    (TIME, ZEROMQ): ZEROMQ_MS,
    (TIME, TENSORMQ): TENSORMQ_MS,
    (TIME, OFFLINE): OFFLINE_SUM_MS,
    (OVERHEAD, ZEROMQ): 21.18,
    (OVERHEAD, TENSORMQ): 2.55,
}
"""At batch 1. The figures' other points have no numbers in the text."""

FULL, QUICK = ({1: 16, 2: 8, 4: 4, 8: 2, 16: 1, 32: 1}, 24), ({1: 2, 4: 1}, 6)
"""Rows of the batches with the inferences in a row that make a sample; rounds. A small batch is
over before its noise is: as many rows make a sample of each."""

Found = Mapping[int, Series]


def run(context: Context) -> Findings:
    bursts, rounds = context.pick(FULL, QUICK)
    done = partial(findings, settings=context.settings)
    return by_all_ways(context, "batches of every size", bursts, rounds, done)


def findings(found: Found, settings: Settings) -> Findings:
    """Figures, table, plots and the line. Pure."""
    figures = list(_figures(found, settings))
    growths = list(_growths(found, settings))
    return Findings(
        says=_says(found),
        figures=[*figures, *growths],
        tables=[
            _grid(figures, list(found)),
            beside_grid(f"Batch {max(found)} beside batch {min(found)}", growths),
        ],
        plots=[
            Plot("Figure 4.7: by batch size", "time", _draw(figures, TIME)),
            Plot("Figure 4.8, as overhead: by batch size", "overhead", _draw(figures, OVERHEAD)),
        ],
        data=[
            Data(
                "inferences",
                ("rows", "way", "round", "computing_ms", "overhead_ms"),
                [
                    (rows, way, i, pipeline_ms(sample), overhead_ms(sample))
                    for rows, series in found.items()
                    for way, samples in series.samples.items()
                    for i, sample in enumerate(samples)
                ],
            )
        ],
        notes=[
            "All sizes and ways take turns. A sample is the middle of some inferences in a row: in "
            f"a full run {', '.join(f'{n} of {rows}' for rows, n in FULL[0].items())} rows.",
            "On a GPU the forward hardly grows with small batches, so there the overhead decides; "
            "on a CPU the forward itself grows with the rows. The thesis prints batch 1 only.",
        ],
    )


def _figures(found: Found, settings: Settings) -> Iterator[Figure]:
    for rows, series in found.items():
        alone = rows == 1  # the thesis prints no others
        times, overheads = series.rounds(pipeline_ms), _overheads(series)
        for way in _WAYS:
            for name, rounds in ((TIME, times), (OVERHEAD, overheads)):
                if way not in rounds.samples:
                    continue
                made = latency_figure(name, way, rows, rounds.of(way), settings.labels)
                yield thesis(made, _PRINTED[name, way] if alone else None, _SOURCE)
        for name, rounds in ((TIME, times), (OVERHEAD, overheads)):
            labels = {**settings.labels, "of_what": name, "noise": rounds.noise}
            ratio = rounds.ratio(TENSORMQ, ZEROMQ)
            made = interval_figure(RATIO, f"{ZEROMQ} / {TENSORMQ}", rows, ratio, "x", labels)
            printed = _PRINTED[name, ZEROMQ] / _PRINTED[name, TENSORMQ]
            yield thesis(made, round(printed, 1) if alone else None, _SOURCE)


def _overheads(series: Series) -> Rounds:
    """Without the offline sum: calls in one process have none."""
    found = series.rounds(overhead_ms).samples
    return Rounds({way: samples for way, samples in found.items() if way != OFFLINE})


def _ends(found: Found) -> Rounds:
    """Overheads with the smallest and with the largest batch: rounds of both sizes."""
    return Rounds(
        {
            _end(way, rows): [overhead_ms(s) for s in found[rows].samples[way]]
            for rows in (min(found), max(found))
            for way in (ZEROMQ, TENSORMQ, TWICE)
        }
    )


def _end(way: str, rows: int) -> str:
    return f"{rows} rows by {way}"


def _growths(found: Found, settings: Settings) -> Iterator[Figure]:
    """How many times as much overhead the largest batch has as the smallest."""
    ends = _ends(found)
    labels = {**settings.labels, "from_rows": min(found), "noise": ends.noise}
    for way in (ZEROMQ, TENSORMQ):
        ratio = ends.ratio(_end(way, min(found)), _end(way, max(found)))
        made = interval_figure(GROWTH, way, max(found), ratio, "x", labels)
        yield thesis(made, None, "figure 4.8")


def _says(found: Found) -> str:
    first, last = min(found), max(found)
    ends, by = _ends(found), {rows: _overheads(found[rows]) for rows in (first, last)}

    def growth(way: str) -> str:
        medians = " to ".join(digits(rounds.median(way).value) for rounds in by.values())
        return f"{medians} ms, {ends.compared(_end(way, first), _end(way, last), 'more', 'less')}"

    ratio = by[last].compared(TENSORMQ, ZEROMQ, "dearer", "cheaper")
    return (
        f"from batch {first} to {last} the overhead of all blocks goes with handles from "
        f"{growth(TENSORMQ)}, and with whole tensors from {growth(ZEROMQ)}; at batch {last} whole "
        f"tensors are {ratio}; equal requests were apart by {ends.noise:.0%}"
    )


def _grid(figures: Sequence[Figure], batches: Sequence[int]) -> Grid:
    by = {(f.name, f.labels.get("of_what", f.mode), f.batch): f for f in figures}
    rows = []
    for batch in batches:
        cells = [_cell(by.get((TIME, way, batch))) for way in _WAYS]
        cells += [_cell(by.get((OVERHEAD, way, batch))) for way in (ZEROMQ, TENSORMQ)]
        ratio = by[RATIO, OVERHEAD, batch]
        cells.append(with_bounds(ratio.value, ratio.low, ratio.high, 1))
        rows.append((str(batch), *cells))
    heads = (
        *("rows", ZEROMQ, TENSORMQ, OFFLINE),
        *(f"overhead {ZEROMQ}", f"overhead {TENSORMQ}", "ratio (95%)"),
    )
    return Grid("Figure 4.7: ms by batch size [thesis]", heads, rows)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    printed = figure.labels.get("thesis")
    return digits(figure.value) + ("" if printed is None else f" [{digits(printed)}]")


def _draw(figures: Sequence[Figure], name: str) -> Any:
    """A line per way, with its interval."""
    page = new_page(8, 4)
    ax = page.subplots()
    mine = [f for f in figures if f.name == name and not f.mode.endswith(AGAIN)]
    for way, colour in {**WAY_COLOURS, OFFLINE: PALETTE[2]}.items():
        points = [f for f in mine if f.mode == way]
        if not points:
            continue
        xs, ys = [f.batch for f in points], [f.value for f in points]
        ax.plot(xs, ys, "o-", color=colour, label=way, ms=4)
        lows, highs = [f.low for f in points], [f.high for f in points]
        ax.fill_between(xs, lows, highs, color=colour, alpha=0.2, linewidth=0)
        marks = [(f.batch, f.labels["thesis"]) for f in points if "thesis" in f.labels]
        if marks:
            label = f"{way}, the thesis's"
            ax.plot(*zip(*marks, strict=True), "_", color=colour, label=label, ms=14, mew=3)
    batches = sorted({f.batch for f in mine if f.batch is not None})
    ax.set(xscale="log", yscale="log", xlabel="rows per request", ylabel=f"{name}, ms")
    ax.set_xticks(batches, [str(b) for b in batches])
    ax.minorticks_off()
    label_ticks(ax.yaxis)
    ax.legend(fontsize=8, frameon=False)
    ax.grid(alpha=0.25)
    return page


EXPERIMENT = Experiment(
    "batches",
    ("figure 4.7", "figure 4.8"),
    "Pipeline time and overhead for batches of 1 to 32",
    run,
)

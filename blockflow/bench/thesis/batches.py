"""The pipeline computing time by batch size (figures 4.7 and 4.8).

A handle is as small for 32 rows as for one, so what it costs must not grow with the batch; what a
whole tensor costs grows with its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blockflow.bench.canvas import new_page
from blockflow.bench.grid import Grid, digits, with_bounds
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ
from blockflow.bench.results import Figure, interval_figure, latency_figure
from blockflow.bench.statistics import percentile
from blockflow.bench.thesis.bars import COLOURS
from blockflow.bench.thesis.beside import AGAIN, Rounds, thesis
from blockflow.bench.thesis.experiment import Context, Data, Experiment, Findings, Plot, Settings
from blockflow.bench.thesis.offline import OFFLINE_SUM_MS, THESIS_MODEL
from blockflow.bench.thesis.one_client import OFFLINE, Series, bench, overhead_ms, pipeline_ms
from blockflow.bench.thesis.pipeline_time import TENSORMQ_MS, ZEROMQ_MS

TIME, OVERHEAD, RATIO = "pipeline computing time", "overhead, all blocks", "ratio"

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

FULL: Mapping[int, int] = {1: 16, 2: 12, 4: 10, 8: 8, 16: 6, 32: 6}
QUICK: Mapping[int, int] = {1: 6, 4: 6}
"""Rows -> rounds."""

Found = Mapping[int, Series]


def run(context: Context) -> Findings:
    """Measure."""
    found: dict[int, Series] = {}
    with bench(context) as ways:
        for rows, rounds in context.pick(FULL, QUICK).items():

            def keep(series: Series, rows: int = rows) -> None:
                context.keep(list(_figures({rows: series}, context.settings)))

            with context.step(f"batches of {rows}", rounds) as advance:
                found[rows] = ways.measure(rows, rounds, advance, keep)
            keep(found[rows])
    return findings(found, context.settings)


def findings(found: Found, settings: Settings) -> Findings:
    """Figures, table, plots and the line. Pure."""
    figures = list(_figures(found, settings))
    return Findings(
        says=_says(found),
        figures=figures,
        tables=[_grid(figures, list(found))],
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
            "On a GPU the forward hardly grows with small batches, so there the overhead decides; "
            "on a CPU the forward itself grows with the rows. The thesis prints batch 1 only.",
        ],
    )


def _figures(found: Found, settings: Settings) -> Iterator[Figure]:
    for rows, series in found.items():
        known = settings.model == THESIS_MODEL and rows == 1
        times, overheads = series.rounds(pipeline_ms), _overheads(series)
        for way in _WAYS:
            for name, rounds in ((TIME, times), (OVERHEAD, overheads)):
                if way not in rounds.samples:
                    continue
                made = latency_figure(name, way, rows, rounds.of(way), settings.labels)
                yield thesis(made, _PRINTED[name, way] if known else None, _SOURCE)
        for name, rounds in ((TIME, times), (OVERHEAD, overheads)):
            labels = {**settings.labels, "of_what": name, "noise": rounds.noise}
            ratio = rounds.ratio(TENSORMQ, ZEROMQ)
            made = interval_figure(RATIO, f"{ZEROMQ} / {TENSORMQ}", rows, ratio, "x", labels)
            printed = _PRINTED[name, ZEROMQ] / _PRINTED[name, TENSORMQ]
            yield thesis(made, round(printed, 1) if known else None, _SOURCE)


def _overheads(series: Series) -> Rounds:
    """Without the offline sum: calls in one process have none."""
    found = series.rounds(overhead_ms).samples
    return Rounds({way: samples for way, samples in found.items() if way != OFFLINE})


def _says(found: Found) -> str:
    first, last = min(found), max(found)
    by = {rows: _overheads(found[rows]) for rows in (first, last)}

    def growth(way: str) -> str:
        begin, end = (digits(percentile(by[rows].of(way), 50)) for rows in (first, last))
        return f"{begin} to {end} ms"

    ratio = by[last].compared(TENSORMQ, ZEROMQ, "dearer", "cheaper")
    return (
        f"from batch {first} to {last} the overhead of all blocks goes from {growth(TENSORMQ)} "
        f"with handles and from {growth(ZEROMQ)} with whole tensors; at batch {last} whole tensors "
        f"are {ratio}"
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
    for way, colour in zip(_WAYS, COLOURS, strict=False):
        points = [f for f in mine if f.mode == way]
        if not points:
            continue
        xs, ys = [f.batch for f in points], [f.value for f in points]
        ax.plot(xs, ys, "o-", color=colour, label=way, ms=4)
        lows, highs = [f.low for f in points], [f.high for f in points]
        ax.fill_between(xs, lows, highs, color=colour, alpha=0.2, linewidth=0)
        marks = [(f.batch, f.labels["thesis"]) for f in points if "thesis" in f.labels]
        ax.plot([x for x, _ in marks], [y for _, y in marks], "_", color=colour, ms=14, mew=3)
    batches = sorted({f.batch for f in mine if f.batch is not None})
    ax.set(xscale="log", yscale="log", xlabel="rows per request", ylabel=f"{name}, ms")
    ax.set_xticks(batches, [str(b) for b in batches])
    ax.minorticks_off()
    ax.legend(fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    return page


EXPERIMENT = Experiment(
    "batches",
    ("figure 4.7", "figure 4.8"),
    "Pipeline time and overhead for batches of 1 to 32",
    run,
)

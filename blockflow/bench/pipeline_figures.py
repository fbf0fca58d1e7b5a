"""From the samples of the pipeline benchmark to figures, tables and verdicts. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockflow.bench.calibration import NAME as CALIBRATION
from blockflow.bench.calibration import steadiness_of
from blockflow.bench.grid import Grid, Rows, bounds, digits, ms, size_text, with_bounds
from blockflow.bench.kpi_reader import BYTES, COPIES, COPIES_IN, Counted, copies_text
from blockflow.bench.results import (
    LESS_IS_BETTER,
    MORE_IS_BETTER,
    Figure,
    interval_figure,
    latency_figure,
)
from blockflow.bench.statistics import (
    judge,
    judge_value,
    noise_of,
    ratio_interval,
    warm_up_of,
)

IN_PROCESS, AGAIN = "in-process", "in-process, again"
APART = "apart"
"""A process per block, which only computes, called in turn: what taking turns costs by itself."""
TENSORMQ, ZEROMQ, ONE_WORKER = "tensormq", "zeromq", "one-worker"
AWAKE = ", awake"
"""Behind a way's name: on its blocks, a task that keeps idle cores awake meanwhile."""
TENSORMQ_AWAKE, ONE_WORKER_AWAKE = TENSORMQ + AWAKE, ONE_WORKER + AWAKE
IN_LANES, REPLICATED, BOUND = "in lanes", "replicated", "bound"
"""Under load: one worker with all blocks and a lane per core; such a worker of one lane per core;
as many in-process pipelines as cores."""


LATENCY = "latency"
COMPUTE = "compute"
HOP = "overhead per hop"
RATIO = "latency to in-process"
COMPUTE_RATIO = "compute to in-process"
TO_APART = "latency to apart"
LESS = "zeromq overhead to tensormq"
ACCOUNTED = "accounted share"
MEMORY = "memory (PSS)"
THROUGHPUT = "throughput"
TO_BOUND = "throughput to bound"
NOT_RUN = "not run"

_LOW_PRECISION_AIM = 1.15
_AIMS: Mapping[tuple[str, int], float] = {
    (way + more, rows): goal
    for more in ("", AWAKE)
    for way, rows, goal in (
        (TENSORMQ, 1, 1.05),
        (TENSORMQ, 8, 1.03),
        (ONE_WORKER, 1, 1.02),
        (ONE_WORKER, 8, 1.02),
    )
}
"""Most that a way may take of the in-process time, by way and rows, at fp32."""

_NO_COPIES = ("onnxruntime", "openvino")
"""Engines that are to pass tensors on without copying any, at every precision."""

_THROUGHPUT_AIM = 0.97
_SHORT = {RATIO: "latency", TO_BOUND: "throughput"}
"""What has an aim here; those of ``make bench`` are its own (pipeline_aims)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One inference, in milliseconds.

    Attributes:
        total: end to end, by the caller's clock.
        hops: (transit, wait, overhead, compute) per block.
        edge: the Dispatcher's own share and the way of the result back to it.
    """

    total: float
    hops: tuple[tuple[float, float, float, float], ...]
    edge: float = 0.0

    @property
    def compute(self) -> float:
        """All forwards together."""
        return sum(h[3] for h in self.hops)

    @property
    def hop_overhead(self) -> float:
        """Mean over the hops of transit + overhead."""
        return statistics.fmean(t + o for t, _, o, _ in self.hops)

    @property
    def accounted(self) -> float:
        """Share of the end-to-end time that the stamped parts add up to.

        What is missing is the way between the client and the Dispatcher.
        """
        return (sum(sum(h) for h in self.hops) + self.edge) / self.total


@dataclass(slots=True)
class Series:
    """All that was measured of one engine with one batch size.

    Attributes:
        rows: per request.
        latency: way -> samples, one per round, side by side; rounds that belong to the warm-up of
            any way (MSER) do not count.
        rates: way -> rows per second, one per round.
        counted: way -> copies and bytes per hop.
        memory: way -> MiB.
        tags: labels of every figure: engine, precision, model.
    """

    rows: int
    tags: Mapping[str, Any]
    latency: dict[str, list[Sample]] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    counted: dict[str, Counted] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)

    def runs(self, way: str) -> list[Sample]:
        """The rounds that count."""
        totals = ([s.total for s in samples] for samples in self.latency.values())
        return self.latency[way][warm_up_of(totals) :]

    @property
    def noise(self) -> float:
        """How far the in-process way seemed to be from itself."""
        if AGAIN not in self.latency:
            return 0.0
        return noise_of(ratio_interval(*self._totals(AGAIN)))

    def figures(self) -> list[Figure]:
        out: list[Figure] = []
        for way in self.latency:
            out += self._latency(way)
        for way, rates in self.rates.items():
            out.append(interval_figure(THROUGHPUT, way, self.rows, rates, "1/s", self.tags))
            if way != BOUND and BOUND in self.rates:
                ratio = ratio_interval(self.rates[BOUND], rates)
                labels = {**self.tags, "goal": _THROUGHPUT_AIM, "at_least": True}
                labels["verdict"] = str(judge(ratio, _THROUGHPUT_AIM, at_least=True))
                out.append(interval_figure(TO_BOUND, way, self.rows, ratio, "x", labels))
        for way, count in self.counted.items():
            for name, value, unit in count.named():
                out.append(Figure.of(name, way, value, unit, 1, self.tags, batch=self.rows))
        for way, mib in self.memory.items():
            out.append(Figure.of(MEMORY, way, mib, "MiB", 1, self.tags, batch=self.rows))
        return out

    def _latency(self, way: str) -> list[Figure]:
        rows, tags, runs = self.rows, self.tags, self.runs(way)
        out = [
            latency_figure(LATENCY, way, rows, [s.total for s in runs], tags),
            latency_figure(COMPUTE, way, rows, [s.compute for s in runs], tags),
        ]
        if way == IN_PROCESS:
            return out
        # Paired by round: both sides of a ratio saw the same state of the machine.
        found = ratio_interval(*self._totals(way))
        labels = dict(tags)
        goal = _AIMS.get((way, rows))
        if goal is not None:
            four = way in (TENSORMQ, TENSORMQ_AWAKE)
            if tags.get("precision") == "bf16" and four and rows == 1:
                goal = _LOW_PRECISION_AIM
            labels |= {"goal": goal, "verdict": str(judge(found, goal, self.noise))}
        labels |= {"noise": self.noise, **LESS_IS_BETTER}
        out.append(interval_figure(RATIO, way, rows, found, "x", labels))
        if way in (AGAIN, APART):
            return out
        less_tags, more_tags = {**tags, **LESS_IS_BETTER}, {**tags, **MORE_IS_BETTER}
        if APART in self.latency and way in (TENSORMQ, TENSORMQ_AWAKE, ZEROMQ):
            alike = ratio_interval([s.total for s in self.runs(APART)], [s.total for s in runs])
            out.append(interval_figure(TO_APART, way, rows, alike, "x", less_tags))
        if way == ZEROMQ and TENSORMQ in self.latency:
            hops = [s.hop_overhead for s in self.runs(TENSORMQ)]
            less = ratio_interval(hops, [s.hop_overhead for s in runs])
            out.append(interval_figure(LESS, way, rows, less, "x", more_tags))
        base = [s.compute for s in self.runs(IN_PROCESS)]
        compute = ratio_interval(base, [s.compute for s in runs])
        return [
            *out,
            latency_figure(HOP, way, rows, [s.hop_overhead for s in runs], tags),
            interval_figure(COMPUTE_RATIO, way, rows, compute, "x", less_tags),
            interval_figure(ACCOUNTED, way, rows, [s.accounted for s in runs], "x", tags),
        ]

    def _totals(self, way: str) -> tuple[list[float], list[float]]:
        base = [s.total for s in self.runs(IN_PROCESS)]
        return base, [s.total for s in self.runs(way)]


class Book:
    """Figures by name, engine, batch and way, for tables."""

    def __init__(self, figures: Iterable[Figure]) -> None:
        self.figures = list(figures)
        self._by = {(f.name, engine_of(f), f.batch, f.mode): f for f in self.figures}

    def at(self, name: str, engine: str, rows: int | None, way: str) -> Figure | None:
        return self._by.get((name, engine, rows, way))

    def rows_of(self, name: str) -> list[tuple[str, int, str]]:
        """(engine, rows, way) of every figure of a name, in the order of their measurement."""
        found = (
            (engine_of(f), f.batch, f.mode)
            for f in self.figures
            if f.name == name and f.batch is not None
        )
        return list(dict.fromkeys(found))


def engine_of(figure: Figure) -> str:
    return str(figure.labels.get("engine", ""))


def latency_grid(found: Iterable[Figure]) -> Grid:
    """One row per engine, batch size and way."""
    book = Book(found)
    rows = Rows()
    for engine, batch, way in book.rows_of(LATENCY):
        rows.section((engine, batch))
        latency, hop = book.at(LATENCY, engine, batch, way), book.at(HOP, engine, batch, way)
        ratio = book.at(RATIO, engine, batch, way)
        compute = book.at(COMPUTE_RATIO, engine, batch, way)
        apart = book.at(TO_APART, engine, batch, way)
        share = book.at(ACCOUNTED, engine, batch, way)
        rows.row(
            engine,
            str(batch),
            way,
            ms(latency.p50_ms if latency else None),
            ms(latency.p90_ms if latency else None),
            ms(hop.p50_ms if hop else None),
            _ratio(ratio),
            f"{compute.value:.3f}" if compute else "",
            f"{apart.value:.3f}" if apart else "",
            f"{share.value:.3f}" if share else "",
            str(latency.n) if latency else "",
        )
    times = ("p50", "p90", "hop")
    heads = ("engine", "rows", "way", *times, "total x (95%)", "comp.", "apart", "parts", "n")
    return Grid("Latency, one request at a time, ms", heads, rows, frozenset({"engine", "way"}))


def throughput_grid(found: Iterable[Figure]) -> Grid:
    """Requests outstanding all the time, beside as many in-process pipelines as cores."""
    book = Book(found)
    rows = Rows()
    for engine, batch, way in book.rows_of(THROUGHPUT):
        rate, ratio = book.at(THROUGHPUT, engine, batch, way), book.at(TO_BOUND, engine, batch, way)
        if rate is None:
            continue
        rows.row(
            engine,
            str(batch),
            way,
            digits(rate.value),
            bounds(rate.low, rate.high),
            _ratio(ratio),
            str(rate.n),
        )
    heads = ("engine", "rows", "way", "rows/s", "95%", "of the bound (95%)", "n")
    return Grid("Throughput, 8 requests outstanding", heads, rows, frozenset({"engine", "way"}))


def cost_grid(found: Iterable[Figure]) -> Grid:
    """What the workers count, and what they weigh."""
    book = Book(found)
    rows = Rows()
    seen = [*book.rows_of(COPIES), *book.rows_of(MEMORY)]
    for engine, batch, way in dict.fromkeys(seen):
        inputs, outputs, sent, memory = (
            book.at(name, engine, batch, way) for name in (COPIES_IN, COPIES, BYTES, MEMORY)
        )
        rows.row(
            engine,
            str(batch),
            way,
            copies_text(inputs, outputs),
            size_text(round(sent.value)) if sent else "",
            f"{memory.value:.0f}" if memory else "",
        )
    heads = ("engine", "rows", "way", "copies/hop", "bytes/hop", "PSS MiB")
    return Grid("Copies and bytes per hop; memory", heads, rows, frozenset({"engine", "way"}))


def aim_grid(found: Iterable[Figure]) -> Grid:
    """The aims of ``make bench-pipeline`` and what this run says of them."""
    book = Book(found)
    rows = [
        (engine_of(f), str(f.batch), f"{f.mode}: {_SHORT[f.name]}", *verdict_cells(f))
        for f in book.figures
        if f.name in _SHORT and "verdict" in f.labels
    ]
    rows += _copies_judged(book)
    heads = ("engine", "rows", "aim", *VERDICT_HEADS)
    return Grid("Aims", heads, rows, frozenset({"engine", "aim", "verdict"}))


def _copies_judged(book: Book) -> list[tuple[str, ...]]:
    """A count has no interval: one copy is one too many."""
    rows: list[tuple[str, ...]] = []
    for engine, batch, way in book.rows_of(COPIES):
        if way != TENSORMQ or not engine.startswith(_NO_COPIES):
            continue
        counts = (book.at(name, engine, batch, way) for name in (COPIES_IN, COPIES))
        copies = sum(f.value for f in counts if f is not None)
        cells = (f"{copies:.3f}", "", goal_text(0, at_least=False), "")
        rows.append((engine, str(batch), f"{way}: copies", *cells, str(judge_value(copies, 0))))
    return rows


VERDICT_HEADS = ("measured", "95%", "goal", "noise", "verdict")


def verdict_cells(figure: Figure) -> tuple[str, ...]:
    """A judged figure in the columns of ``VERDICT_HEADS``."""
    labels = figure.labels
    noise = labels.get("noise")
    return (
        f"{figure.value:.3f}",
        bounds(figure.low, figure.high),
        goal_text(labels["goal"], at_least=bool(labels.get("at_least"))),
        "" if noise is None else f"{noise:.1%}",
        str(labels["verdict"]),
    )


def goal_text(goal: float, *, at_least: bool) -> str:
    return f"{'>=' if at_least else '<='} {goal:g}"


def _ratio(figure: Figure | None) -> str:
    return "" if figure is None else with_bounds(figure.value, figure.low, figure.high)


def start_grid(found: Sequence[Figure]) -> Grid:
    """One more worker, the client, a bare message: figures without a batch size."""
    rows = []
    for f in found:
        if f.batch is not None or "engine" in f.labels or "verdict" in f.labels:
            continue
        if f.name == CALIBRATION:
            continue
        first = f.p50_ms if f.unit == "ms" else None
        last = f.p90_ms if f.unit == "ms" else f.value
        unit = f.unit
        rows.append((f.name, ms(first), ms(last), unit, str(f.n)))
    heads = ("figure", "p50", "p90 or largest", "unit", "n")
    title = "One more worker; the client; a bare message"
    return Grid(title, heads, rows, frozenset({"figure", "unit"}))


def missing_grid(found: Iterable[Figure]) -> Grid:
    """The engines that could not run here, and why."""
    rows = [(f.mode, str(f.labels["reason"])) for f in found if f.name == NOT_RUN]
    heads = ("engine", "not run here")
    return Grid("Not run", heads, rows, frozenset(heads))


def remarks(found: Sequence[Figure]) -> list[str]:
    """What a reader must know beside the tables."""
    out = [f"{engine} was not run: {why}" for engine, why in missing_grid(found).rows]
    steady = steadiness_of(found)
    if steady is not None:
        out.append(steady.sentence())
    return out

"""What ``make bench-gpu`` concludes from its samples: figures, the tables, and the aims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from blockflow.bench.grid import BREAK, Grid, digits, ms, with_bounds
from blockflow.bench.results import Figure, interval_figure, latency_figure
from blockflow.bench.statistics import (
    Interval,
    difference_interval,
    judge,
    median_interval,
    ratio_interval,
)

IN_PROCESS, SUM, TENSORMQ, ZEROMQ = "in-process", "sum of blocks", "tensormq", "zeromq"
WAYS = (TENSORMQ, ZEROMQ)

LATENCY = "latency"
HOP = "overhead per hop"
RATIO = "latency to in-process"
LESS = "zeromq overhead to tensormq"
COPIES = "copies per request"
CLIENTS = "latency by clients"
CLIENT_RATE = "throughput by clients"
SATURATION = "saturation"
SATURATION_RATIO = "saturation to bound"
GROWTH = "memory growth past it"
ENERGY = "energy per inference"

# The thesis (section 4.2): 0.51 ms per hop on average, 8.3 times less than with whole tensors, and
# memory that grew without bound past saturation.
AIMS: Mapping[str, str] = {
    HOP: "<= 0.15 ms",
    RATIO: "<= 1.15, 1.03 (32 rows)",
    LESS: ">= 8.3",
    SATURATION_RATIO: ">= 0.95",
    GROWTH: "<= 1 MiB",
    COPIES: "1 in, 1 out",
}


@dataclass(slots=True)
class Samples:
    """Milliseconds by batch size; the samples of one index are of one round, interleaved.

    Attributes:
        ways: way -> batch -> latencies; ``in-process`` is one pipeline with one wait at its end,
            ``sum of blocks`` waits after each block (the thesis's offline sum, section 4.2).
        copies: way -> (to the device, to the host) per request, all workers together.
    """

    blocks: int
    ways: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    copies: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, way: str, batch: int, value_ms: float) -> None:
        self.ways.setdefault(way, {}).setdefault(batch, []).append(value_ms)


@dataclass(frozen=True, slots=True)
class Load:
    """One way under load.

    Attributes:
        rows_per_s: medians of rounds. bound: of the in-process pipeline, round by round.
        growth_mib: GPU memory of its workers at the end less that at saturation; None if unknown.
        mj_per_row: energy of the device; None if unknown.
    """

    rows_per_s: Sequence[float]
    bound: Sequence[float]
    growth_mib: float | None
    mj_per_row: float | None


def latency_figures(found: Samples) -> list[Figure]:
    """Latencies, what a hop costs, and how the ways compare."""
    out: list[Figure] = []
    base = found.ways[IN_PROCESS]
    for way, by_batch in found.ways.items():
        for batch, values in by_batch.items():
            out.append(latency_figure(LATENCY, way, batch, values))
            if way not in WAYS:
                continue
            cost = difference_interval(base[batch], values)
            out.append(interval_figure(HOP, way, batch, _scaled(cost, 1 / found.blocks), "ms"))
            out.append(interval_figure(RATIO, way, batch, ratio_interval(base[batch], values), "x"))
    for batch in base:
        less = _times_less(found, batch)
        if less is not None:
            out.append(interval_figure(LESS, TENSORMQ, batch, less, "x"))
    for way, (to_device, to_host) in found.copies.items():
        for direction, value in (("in", to_device), ("out", to_host)):
            out.append(
                Figure(COPIES, way, None, None, None, value, "1", 1, labels={"way": direction})
            )
    return out


def _scaled(found: Interval, factor: float) -> Interval:
    return Interval(found.value * factor, found.low * factor, found.high * factor, found.n)


def _times_less(found: Samples, batch: int) -> Interval | None:
    """How many times more overhead whole tensors cost; None where a way was not run or no overhead
    can be told from none."""
    base = found.ways[IN_PROCESS][batch]
    ways = [found.ways.get(way, {}).get(batch) for way in WAYS]
    if None in ways:
        return None
    handles, whole = (
        [value - b for value, b in zip(values or [], base, strict=True)] for values in ways
    )
    # A round in which handles cost less than nothing measured the noise: it says nothing of ratios.
    pairs = [(h, w) for h, w in zip(handles, whole, strict=True) if h > 0]
    if 2 * len(pairs) < len(handles):
        return None
    return median_interval([w / h for h, w in pairs])


def load_figures(loads: Mapping[str, Load]) -> list[Figure]:
    """Saturation, memory past it, and energy."""
    out: list[Figure] = []
    for way, load in loads.items():
        rate = median_interval(load.rows_per_s)
        out.append(interval_figure(SATURATION, way, None, rate, "rows/s"))
        share = ratio_interval(load.bound, load.rows_per_s)
        out.append(interval_figure(SATURATION_RATIO, way, None, share, "x"))
        for name, value, unit in (
            (GROWTH, load.growth_mib, "MiB"),
            (ENERGY, load.mj_per_row, "mJ"),
        ):
            if value is not None:
                out.append(Figure(name, way, None, None, None, value, unit, 1))
    return out


def client_figures(
    way: str, clients: int, samples_ms: Sequence[float], rows_per_s: float
) -> list[Figure]:
    """One number of clients that ask one after the other's answer."""
    labels = {"clients": clients}
    return [
        latency_figure(CLIENTS, way, 1, samples_ms, labels),
        Figure(
            CLIENT_RATE, way, 1, None, None, rows_per_s, "rows/s", len(samples_ms), labels=labels
        ),
    ]


# --- tables --------------------------------------------------------------------------------------


def latency_grid(found: Iterable[Figure]) -> Grid:
    """One row per batch and way."""
    by = {(f.name, f.mode, f.batch): f for f in found}
    batches = sorted({f[2] for f in by if f[0] == LATENCY and f[2] is not None})
    rows: list[tuple[str, ...]] = []
    for batch in batches:
        for way in (IN_PROCESS, SUM, *WAYS):
            latency = by.get((LATENCY, way, batch))
            if latency is None:
                continue
            hop, ratio = by.get((HOP, way, batch)), by.get((RATIO, way, batch))
            rows.append(
                (
                    str(batch),
                    way,
                    ms(latency.p50_ms),
                    ms(latency.p90_ms),
                    "" if hop is None else with_bounds(hop.value, hop.low, hop.high),
                    "" if ratio is None else with_bounds(ratio.value, ratio.low, ratio.high),
                )
            )
        rows.append(BREAK)
    heads = ("rows", "way", "p50 ms", "p90 ms", "per hop ms", "to in-process")
    return Grid("ResNet-50 in 4 blocks on one GPU, one client", heads, rows, frozenset({"way"}))


def client_grid(found: Iterable[Figure]) -> Grid:
    """One row per number of clients; a column pair per way."""
    by = {(f.name, f.mode, f.labels.get("clients")): f for f in found}
    counts = sorted({int(c) for name, _, c in by if name == CLIENTS and c is not None})
    rows = []
    for count in counts:
        cells = [str(count)]
        for way in WAYS:
            latency, rate = by.get((CLIENTS, way, count)), by.get((CLIENT_RATE, way, count))
            cells += ["" if latency is None else ms(latency.p50_ms)]
            cells += ["" if rate is None else digits(rate.value)]
        rows.append(tuple(cells))
    heads = ("clients", *(f"{way} {what}" for way in WAYS for what in ("p50 ms", "rows/s")))
    return Grid("One request each at a time, batch 1", heads, rows)


def load_grid(found: Iterable[Figure]) -> Grid:
    """One row per way."""
    by = {(f.name, f.mode): f for f in found if "way" not in f.labels}
    copies = {(f.mode, f.labels["way"]): f for f in found if f.name == COPIES}
    rows = []
    for way in WAYS:
        cells = [way]
        for name in (SATURATION, SATURATION_RATIO, GROWTH, ENERGY):
            figure = by.get((name, way))
            cells.append("unknown" if figure is None else digits(figure.value))
        for direction in ("in", "out"):
            figure = copies.get((way, direction))
            cells.append("unknown" if figure is None else digits(figure.value))
        rows.append(tuple(cells))
    heads = ("way", "rows/s", "to bound", "growth MiB", "mJ/row", "copies in", "copies out")
    return Grid("Under load, and what is copied per request", heads, rows, frozenset({"way"}))


def aim_grid(found: Iterable[Figure]) -> Grid:
    """What was aimed at, and what was found."""
    figures = [f for f in found if f.mode == TENSORMQ]
    rows = []
    for name, aim in AIMS.items():
        mine = [f for f in figures if f.name == name]
        verdict = _verdict(name, mine) if mine else "not measured"
        worst = max(mine, key=lambda f: f.value, default=None)
        if name in (LESS, SATURATION_RATIO):
            worst = min(mine, key=lambda f: f.value, default=None)
        value = "" if worst is None else f"{digits(worst.value)} {worst.unit}"
        rows.append((name, aim, value, verdict))
    heads = ("figure", "aim", "worst", "verdict")
    return Grid("Aims", heads, rows, frozenset({"figure", "aim", "verdict"}))


def _verdict(name: str, figures: Sequence[Figure]) -> str:
    goals = {HOP: 0.15, LESS: 8.3, SATURATION_RATIO: 0.95, GROWTH: 1.0, COPIES: 1.0}
    verdicts = []
    for f in figures:
        goal = {1: 1.15, 32: 1.03}.get(f.batch or 0) if name == RATIO else goals[name]
        if goal is None:
            continue
        low = f.value if f.low is None else f.low
        high = f.value if f.high is None else f.high
        found = Interval(f.value, low, high, f.n)
        verdicts.append(str(judge(found, goal, at_least=name in (LESS, SATURATION_RATIO))))
    for worst in ("missed", "within noise", "met"):
        if worst in verdicts:
            return worst
    return "not measured"

"""What ``make bench-gpu`` concludes from its samples: figures, the tables, and the aims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from blockflow.bench.grid import Grid, Rows, digits, ms, with_bounds
from blockflow.bench.results import LESS_IS_BETTER, Figure, interval_figure, latency_figure
from blockflow.bench.statistics import (
    Interval,
    difference_interval,
    judge,
    judge_value,
    median_interval,
    ratio_interval,
)

IN_PROCESS, SUM, TENSORMQ, ZEROMQ = "in-process", "sum of blocks", "tensormq", "zeromq"
BOUND = "bound"
"""Under load: what processes with all blocks, which only compute, come to."""
WAYS = (TENSORMQ, ZEROMQ)

LATENCY = "latency"
EDGE = "to and from the Dispatcher"
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

HOP_AIM = 0.15
"""Milliseconds."""

_MORE = {"at_least": True}
"""Of figures of which more is better, though their units do not tell."""

# The thesis (section 4.2): 0.51 ms per hop on average, 8.3 times less than with whole tensors, and
# memory that grew without bound past saturation.
AIMS: Mapping[str, str] = {
    HOP: f"<= {HOP_AIM} ms",
    RATIO: "<= 1.15, 1.03 (32 rows)",
    LESS: ">= 8.3",
    SATURATION_RATIO: ">= 0.95",
    GROWTH: "<= 1 MiB",
    COPIES: "1 in, 1 out",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One inference, in milliseconds.

    Attributes:
        total: from the host's tensor to the host's result, by the caller's clock.
        edge: of it, the client's way to the Dispatcher and back and the Dispatcher's own share
            before the first block: no hop between blocks, and no part of an in-process run.
    """

    total: float
    edge: float = 0.0


@dataclass(slots=True)
class Samples:
    """Inferences by batch size; the samples of one index are of one round, interleaved.

    Attributes:
        ways: way -> batch -> samples; ``in-process`` is one pipeline with one wait at its end,
            ``sum of blocks`` waits after each block (the thesis's offline sum, section 4.2).
        copies: way -> (to the device, to the host) per request, all workers together.
    """

    blocks: int
    ways: dict[str, dict[int, list[Sample]]] = field(default_factory=dict)
    copies: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, way: str, batch: int, sample: Sample) -> None:
        self.ways.setdefault(way, {}).setdefault(batch, []).append(sample)

    def inner(self, way: str, batch: int) -> list[float]:
        """What is left of the totals without the edges; empty where the way was not run."""
        return [s.total - s.edge for s in self.ways.get(way, {}).get(batch, ())]


@dataclass(frozen=True, slots=True)
class Memory:
    """GPU memory of one worker, in bytes.

    Attributes:
        process: all of it, as NVML says; None in a container, which hides whose memory is whose.
        pool: what torch has reserved; None unknown. The slab, which is no part of it, has its full
            size from its first tensor on.
    """

    process: int | None
    pool: int | None


def growth_mib(before: Sequence[Memory], after: Sequence[Memory]) -> float | None:
    """How much more a way's workers have, in MiB: all of it if that is known of each of them both
    times, else of their pools; None if not even these are."""

    def summed(values: Sequence[int | None]) -> int | None:
        known = [v for v in values if v is not None]
        return sum(known) if values and len(known) == len(values) else None

    for kind in (lambda m: m.process, lambda m: m.pool):
        first, last = summed([kind(m) for m in before]), summed([kind(m) for m in after])
        if first is not None and last is not None:
            return (last - first) / 2**20
    return None


@dataclass(frozen=True, slots=True)
class Load:
    """One way under load.

    Attributes:
        rows_per_s: by round. bound: of processes that only compute, in the same rounds.
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
    alone = found.ways[IN_PROCESS]
    for way, by_batch in found.ways.items():
        for batch, samples in by_batch.items():
            totals = [s.total for s in samples]
            out.append(latency_figure(LATENCY, way, batch, totals))
            if way not in WAYS:
                continue
            base = [s.total for s in alone[batch]]
            cost = difference_interval(base, found.inner(way, batch))
            out.append(interval_figure(HOP, way, batch, _scaled(cost, 1 / found.blocks), "ms"))
            ratio = ratio_interval(base, totals)
            out.append(interval_figure(RATIO, way, batch, ratio, "x", LESS_IS_BETTER))
            out.append(latency_figure(EDGE, way, batch, [s.edge for s in samples]))
    for batch in alone:
        less = _times_less(found, batch)
        if less is not None:
            out.append(interval_figure(LESS, TENSORMQ, batch, less, "x", _MORE))
    for way, (to_device, to_host) in found.copies.items():
        for direction, value in (("in", to_device), ("out", to_host)):
            out.append(Figure.of(COPIES, way, value, "1", 1, {"way": direction}))
    return out


def _scaled(found: Interval, factor: float) -> Interval:
    return Interval(found.value * factor, found.low * factor, found.high * factor, found.n)


def _times_less(found: Samples, batch: int) -> Interval | None:
    """How many times more overhead whole tensors cost; None where a way was not run or no overhead
    can be told from none."""
    base = found.inner(IN_PROCESS, batch)
    ways = [found.inner(way, batch) for way in WAYS]
    if not all(ways):
        return None
    handles, whole = ([value - b for value, b in zip(values, base, strict=True)] for values in ways)
    # A round in which handles cost less than nothing measured the noise: it says nothing of ratios.
    pairs = [(h, w) for h, w in zip(handles, whole, strict=True) if h > 0]
    if 2 * len(pairs) < len(handles):
        return None
    return median_interval([w / h for h, w in pairs])


def load_figures(loads: Mapping[str, Load]) -> list[Figure]:
    """Saturation, memory past it, and energy."""
    out: list[Figure] = []
    for load in list(loads.values())[:1]:  # they have the same one
        out.append(interval_figure(SATURATION, BOUND, None, load.bound, "rows/s"))
    for way, load in loads.items():
        out.append(interval_figure(SATURATION, way, None, load.rows_per_s, "rows/s"))
        share = ratio_interval(load.bound, load.rows_per_s)
        out.append(interval_figure(SATURATION_RATIO, way, None, share, "x", _MORE))
        for name, value, unit in (
            (GROWTH, load.growth_mib, "MiB"),
            (ENERGY, load.mj_per_row, "mJ"),
        ):
            if value is not None:
                out.append(Figure.of(name, way, value, unit))
    return out


def client_figures(
    way: str, clients: int, samples_ms: Sequence[float], rows_per_s: float
) -> list[Figure]:
    """One number of clients that ask one after the other's answer."""
    labels = {"clients": clients}
    return [
        latency_figure(CLIENTS, way, 1, samples_ms, labels),
        Figure.of(CLIENT_RATE, way, rows_per_s, "rows/s", len(samples_ms), labels, batch=1),
    ]


# --- tables --------------------------------------------------------------------------------------


def latency_grid(found: Iterable[Figure]) -> Grid:
    """One row per batch and way."""
    by = {(f.name, f.mode, f.batch): f for f in found}
    batches = sorted({f[2] for f in by if f[0] == LATENCY and f[2] is not None})
    rows = Rows()
    for batch in batches:
        rows.section(batch)
        for way in (IN_PROCESS, SUM, *WAYS):
            latency = by.get((LATENCY, way, batch))
            if latency is None:
                continue
            hop, ratio = by.get((HOP, way, batch)), by.get((RATIO, way, batch))
            edge = by.get((EDGE, way, batch))
            rows.row(
                str(batch),
                way,
                ms(latency.p50_ms),
                ms(latency.p90_ms),
                "" if hop is None else with_bounds(hop.value, hop.low, hop.high),
                "" if ratio is None else with_bounds(ratio.value, ratio.low, ratio.high),
                "" if edge is None else ms(edge.p50_ms),
            )
    heads = ("rows", "way", "p50 ms", "p90 ms", "per hop ms", "to in-process", "edge")
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
    rows: list[tuple[str, ...]] = []
    most = by.get((SATURATION, BOUND))
    if most is not None:
        rows.append((BOUND, digits(most.value), *[""] * 5))
    for way in WAYS:
        cells = [way]
        for name in (SATURATION, SATURATION_RATIO, GROWTH, ENERGY):
            figure = by.get((name, way))
            cells.append("unknown" if figure is None else _with_spread(figure))
        for direction in ("in", "out"):
            figure = copies.get((way, direction))
            cells.append("unknown" if figure is None else digits(figure.value))
        rows.append(tuple(cells))
    heads = ("way", "rows/s", "to bound", "growth MiB", "mJ/row", "copies in", "copies out")
    return Grid("Under load, and what is copied per request", heads, rows, frozenset({"way"}))


def _with_spread(figure: Figure) -> str:
    """A share with its interval; of a rate the shares say it, the others have none."""
    if figure.name != SATURATION_RATIO:
        return digits(figure.value)
    return with_bounds(figure.value, figure.low, figure.high)


def aim_grid(found: Iterable[Figure]) -> Grid:
    """What was aimed at, and what was found."""
    figures = [f for f in found if f.mode == TENSORMQ]
    rows = []
    for name, aim in AIMS.items():
        mine = [f for f in figures if f.name == name and _goal(f) is not None]
        verdict = _verdict(name, mine) if mine else "not measured"
        if any("at_least" in f.labels for f in mine):
            worst = min(mine, key=lambda f: f.value, default=None)
        else:
            worst = max(mine, key=lambda f: f.value, default=None)
        value = "" if worst is None else f"{digits(worst.value)} {worst.unit}"
        rows.append((name, aim, value, verdict))
    heads = ("figure", "aim", "worst", "verdict")
    return Grid("Aims", heads, rows, frozenset({"figure", "aim", "verdict"}))


_GOALS = {HOP: HOP_AIM, LESS: 8.3, SATURATION_RATIO: 0.95, GROWTH: 1.0, COPIES: 1.0}
_RATIO_GOALS = {1: 1.15, 32: 1.03}
"""By rows."""


def _goal(figure: Figure) -> float | None:
    """None where nothing is aimed at."""
    if figure.name == RATIO:
        return _RATIO_GOALS.get(figure.batch or 0)
    return _GOALS.get(figure.name)


def _verdict(name: str, figures: Sequence[Figure]) -> str:
    """The worst one of figures that have goals."""
    verdicts = set()
    for f in figures:
        goal = _goal(f) or 0.0
        at_least = "at_least" in f.labels
        # What was counted has no interval.
        counted = f.low is None or f.high is None
        verdict = (
            judge_value(f.value, goal, at_least=at_least)
            if counted
            else judge(f.interval, goal, at_least=at_least)
        )
        verdicts.add(str(verdict))
    return next(v for v in ("missed", "within noise", "met") if v in verdicts)

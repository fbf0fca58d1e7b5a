"""What the overload benchmark has found: its figures, its remarks, its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from blockflow.bench.canvas import new_page
from blockflow.bench.grid import Grid, Rows, digits, ms
from blockflow.bench.results import Figure, latency_figure
from blockflow.bench.statistics import percentile

GOODPUT, ANSWER, REJECTION, MEMORY = "goodput", "answer", "rejection", "memory"
IN_FLIGHT, QUEUED = "in flight", "queued"
OUTCOMES = ("ok", "rejected", "late", "failed")
WARM_UP = 0.25
"""The first part of a load's time fills queues and teaches the limit; it does not count."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request: due and done in seconds of its load, and one of :data:`OUTCOMES`; how late it was
    sent, and the machine was to wake a thread that waited, at worst, meanwhile or just before.

    Its time begins when it was due: one that a system holds up, or a busy machine, is no quicker
    for being sent later ("coordinated omission").
    """

    due_s: float
    done_s: float
    outcome: str
    lag_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Depth:
    """How much waits at ``at_s`` of a load: requests that the Dispatcher has admitted and not
    answered, and those of them that lie in workers' queues."""

    at_s: float
    in_flight: int
    queued: int


@dataclass(slots=True)
class Load:
    """One offered load.

    Attributes:
        times: it is this multiple of the capacity.
        offered: requests per second.
        seconds: that they were offered.
        started_s: when it began, in seconds of the benchmark.
        ended: all its requests.
        limit: credits in force at its end.
        depths: samples along it.
    """

    times: float
    offered: float
    seconds: float
    started_s: float
    ended: list[Ended] = field(default_factory=list)
    limit: int = 0
    depths: list[Depth] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.times:g}x"

    def counted(self) -> list[Ended]:
        """Those that were done within the time that counts."""
        begin = WARM_UP * self.seconds
        return [e for e in self.ended if begin <= e.done_s < self.seconds]

    def per_s(self, outcome: str) -> float:
        """Requests per second that ended so."""
        found = sum(e.outcome == outcome for e in self.counted())
        return found / ((1 - WARM_UP) * self.seconds)

    def took_ms(self, outcome: str) -> list[float]:
        return [1e3 * (e.done_s - e.due_s) for e in self.counted() if e.outcome == outcome]

    def beyond_lag_ms(self, outcome: str) -> list[float]:
        """What they took without the machine's own lag, and the sender's."""
        found = [e for e in self.counted() if e.outcome == outcome]
        return [1e3 * max(0.0, e.done_s - e.due_s - e.lag_s) for e in found]

    def depth_figures(self) -> list[Figure]:
        """What waited in the second half of the time that counts, beside the first; the most."""
        begin = WARM_UP * self.seconds
        middle = (begin + self.seconds) / 2
        first = [d for d in self.depths if begin <= d.at_s < middle]
        second = [d for d in self.depths if middle <= d.at_s < self.seconds]
        if not first or not second:
            return []
        out = []
        n = len(first) + len(second)
        for name, of in (
            (IN_FLIGHT, attrgetter("in_flight")),
            (QUEUED, attrgetter("queued")),
        ):
            early, late = [of(d) for d in first], [of(d) for d in second]
            labels = {"first half": percentile(early, 50), "max": max(early + late)}
            value = percentile(late, 50)
            out.append(Figure.of(name, self.label, value, "1", n, labels, batch=1))
        return out


Memory = Sequence[tuple[float, float]]
"""(second of the benchmark, resident MiB of all processes) in order."""


def figures(loads: Sequence[Load], memory: Memory) -> list[Figure]:
    """Per load its goodput with the other outcomes, answers and rejections; memory over time."""
    out: list[Figure] = []
    for load in loads:
        labels = {o: round(load.per_s(o), 2) for o in OUTCOMES[1:]}
        labels |= {"offered": round(load.offered, 2), "limit": load.limit, "times": load.times}
        labels |= {"seconds": load.seconds, "started_s": round(load.started_s, 2)}
        ok = load.per_s("ok")
        out.append(Figure.of(GOODPUT, load.label, ok, "1/s", len(load.ended), labels, batch=1))
        for name, outcome in ((ANSWER, "ok"), (REJECTION, "rejected")):
            took = load.took_ms(outcome)
            if took:
                beyond = percentile(load.beyond_lag_ms(outcome), 99)
                labels = {"beyond_lag": round(beyond, 3)}
                out.append(latency_figure(name, load.label, 1, took, labels))
        out += load.depth_figures()
    for at, mib in memory:
        labels = {"at_s": round(at, 2)}
        out.append(Figure.of(MEMORY, "all", mib, "MiB", 1, labels))
    return out


def remarks(loads: Sequence[Load], memory: Memory) -> list[str]:
    """The figures beside what is promised."""
    peak = max(load.per_s("ok") for load in loads)
    lines = []
    for load in loads:
        share = 100 * load.per_s("ok") / peak if peak else 0.0
        line = f"{load.label}: {share:.0f}% of the peak's goodput, limit {load.limit}"
        rejected = load.took_ms("rejected")
        if rejected:
            line += f", rejections p99 {percentile(rejected, 99):.1f} ms"
        lines.append(line)
    if memory:
        first, last = quarters([mib for _, mib in memory])
        lines.append(f"resident memory: {first:.0f} MiB in the first quarter, {last:.0f} at last")
    return lines


def quarters(mib: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last quarter of the samples."""
    quarter = max(1, len(mib) // 4)
    return percentile(mib[:quarter], 50), percentile(mib[-quarter:], 50)


def load_grid(found: Sequence[Figure]) -> Grid:
    """One row per offered load."""
    at = {(f.name, f.mode): f for f in found}
    rates = [f for f in found if f.name == GOODPUT]
    peak = max((f.value for f in rates), default=0.0)
    rows = Rows()
    for f in rates:
        answer, refusal = at.get((ANSWER, f.mode)), at.get((REJECTION, f.mode))
        rows.row(
            f.mode,
            digits(f.labels["offered"]),
            digits(f.value),
            f"{f.value / peak:.0%}" if peak else "",
            *(digits(f.labels[o]) for o in OUTCOMES[1:]),
            ms(None if answer is None else answer.p50_ms),
            ms(None if answer is None else answer.p99_ms),
            ms(None if refusal is None else refusal.p99_ms),
            str(f.labels["limit"]),
        )
    heads = ("load", "offered/s", "answered/s", "of the peak", "rejected/s", "late/s", "failed/s")
    more = ("answer p50 ms", "p99 ms", "rejection p99 ms", "limit")
    return Grid("overload", (*heads, *more), rows, frozenset({"load"}))


def draw(found: Sequence[Figure]) -> Any:
    """Left: what became of the offered load. Right: memory over time, with the loads' begins."""
    page = new_page(10, 3.8, 100)
    left, right = page.subplots(1, 2)
    rates = [f for f in found if f.name == GOODPUT]
    offered = [f.labels["offered"] for f in rates]
    colours = {"ok": "#17779b", "rejected": "#f2b134", "late": "#e4572e", "failed": "#5a4a78"}
    for outcome, colour in colours.items():
        ys = [f.value if outcome == "ok" else f.labels[outcome] for f in rates]
        if any(ys):
            left.plot(offered, ys, "o-", color=colour, label=outcome, ms=3)
    left.set(xlabel="offered, requests per second", ylabel="requests per second")
    left.set_ylim(bottom=0)
    left.legend(fontsize=8, frameon=False)
    memory = [f for f in found if f.name == MEMORY]
    right.plot([f.labels["at_s"] for f in memory], [f.value for f in memory], color="#17779b")
    for f in rates:
        right.axvline(f.labels["started_s"], color="#bdbdbd", linewidth=0.8)
        right.annotate(f.mode, (f.labels["started_s"], 0), fontsize=7)
    right.set(xlabel="seconds", ylabel="resident MiB, all processes")
    right.set_ylim(bottom=0)
    return page

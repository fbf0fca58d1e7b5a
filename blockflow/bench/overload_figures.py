"""What the overload benchmark has found: its figures, its remarks, its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blockflow.bench.canvas import new_page
from blockflow.bench.results import Figure, latency_figure
from blockflow.bench.statistics import percentile

GOODPUT, ANSWER, REJECTION, MEMORY = "goodput", "answer", "rejection", "memory"
OUTCOMES = ("ok", "rejected", "late", "failed")
_WARM_UP = 0.25
"""The first part of a load's time fills queues and teaches the limit; it does not count."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request: sent and done in seconds of its load, and one of :data:`OUTCOMES`."""

    sent_s: float
    done_s: float
    outcome: str


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
    """

    times: float
    offered: float
    seconds: float
    started_s: float
    ended: list[Ended] = field(default_factory=list)
    limit: int = 0

    @property
    def label(self) -> str:
        return f"{self.times:g}x"

    def counted(self) -> list[Ended]:
        """Those that were done within the time that counts."""
        begin = _WARM_UP * self.seconds
        return [e for e in self.ended if begin <= e.done_s < self.seconds]

    def per_s(self, outcome: str) -> float:
        """Requests per second that ended so."""
        found = sum(e.outcome == outcome for e in self.counted())
        return found / ((1 - _WARM_UP) * self.seconds)

    def took_ms(self, outcome: str) -> list[float]:
        return [1e3 * (e.done_s - e.sent_s) for e in self.counted() if e.outcome == outcome]


Memory = Sequence[tuple[float, float]]
"""(second of the benchmark, resident MiB of all processes) in order."""


def figures(loads: Sequence[Load], memory: Memory) -> list[Figure]:
    """Per load its goodput with the other outcomes, answers and rejections; memory over time."""
    out: list[Figure] = []
    for load in loads:
        labels = {o: round(load.per_s(o), 2) for o in OUTCOMES[1:]}
        labels |= {"offered": round(load.offered, 2), "limit": load.limit, "times": load.times}
        ok = load.per_s("ok")
        out.append(
            Figure(GOODPUT, load.label, 1, None, None, ok, "1/s", len(load.ended), labels=labels)
        )
        for name, outcome in ((ANSWER, "ok"), (REJECTION, "rejected")):
            took = load.took_ms(outcome)
            if took:
                out.append(latency_figure(name, load.label, 1, took))
    for at, mib in memory:
        labels = {"at_s": round(at, 2)}
        out.append(Figure(MEMORY, "all", None, None, None, mib, "MiB", 1, labels=labels))
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
        quarter = max(1, len(memory) // 4)
        first = percentile([mib for _, mib in memory[:quarter]], 50)
        last = percentile([mib for _, mib in memory[-quarter:]], 50)
        lines.append(f"resident memory: {first:.0f} MiB in the first quarter, {last:.0f} at last")
    return lines


def draw(loads: Sequence[Load], memory: Memory) -> Any:
    """Left: what became of the offered load. Right: memory over time, with the loads' beginnings.

    Raises:
        SystemError_: MISSING_EXTRA without matplotlib.
    """
    page = new_page(10, 3.8, 100)
    left, right = page.subplots(1, 2)
    offered = [load.offered for load in loads]
    colours = {"ok": "#17779b", "rejected": "#f2b134", "late": "#e4572e", "failed": "#5a4a78"}
    for outcome, colour in colours.items():
        rates = [load.per_s(outcome) for load in loads]
        if any(rates):
            left.plot(offered, rates, "o-", color=colour, label=outcome, ms=3)
    left.set(xlabel="offered, requests per second", ylabel="requests per second")
    left.set_ylim(bottom=0)
    left.legend(fontsize=8, frameon=False)
    right.plot([at for at, _ in memory], [mib for _, mib in memory], color="#17779b")
    for load in loads:
        right.axvline(load.started_s, color="#bdbdbd", linewidth=0.8)
        right.annotate(load.label, (load.started_s, 0), fontsize=7)
    right.set(xlabel="seconds", ylabel="resident MiB, all processes")
    right.set_ylim(bottom=0)
    return page

"""Comparison: the outcomes of all seeds, gathered by policy and rate.

Every seed gives one figure; shown are the median of the seeds and its interval. Two
policies meet the same queries under the same seed, so their ratio is taken seed by seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.simulation.experiment import Cell, Experiment
from blockflow.bench.simulation.outcome import Outcome
from blockflow.bench.simulation.text import policy_label
from blockflow.bench.statistics import Interval, median_interval, ratio_interval

_LATENCIES = ("mean", "p50", "p90", "p99", "wait", "compute")


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """One task under one policy at one rate: all seeds' counts, and medians over the seeds in which
    it had queries, or results; None where there is no such seed."""

    offered: int
    results: int
    served: Interval | None
    mean_ms: Interval | None
    p99_ms: Interval | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "offered": self.offered,
            "results": self.results,
            "mean_ms": None if self.mean_ms is None else asdict(self.mean_ms),
            "p99_ms": None if self.p99_ms is None else asdict(self.p99_ms),
        }


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy at one rate.

    Attributes:
        number: of the policy, from 1, in the order in which they were named.
        policy: its label.
        rate: queries per second.
        load: rate / capacity without batching.
        outcomes: one per seed, in the order of the seeds.
        versus: mean latency relative to the first policy, over the seeds in which both had
            results; None for the first policy itself, or without such a seed.
    """

    number: int
    policy: str
    rate: float
    load: float
    outcomes: tuple[Outcome, ...]
    versus: Interval | None

    def latency(self, which: str) -> Interval | None:
        """``mean``, ``p50``, ``p90`` or ``p99``, or the mean ``wait`` or ``compute``, in
        milliseconds; None when nothing was served."""
        values = [getattr(o.times, f"{which}_ms") for o in self.outcomes if o.results]
        return median_interval(values) if values else None

    def of(self, value: Callable[[Outcome], float]) -> Interval:
        """Any figure of an outcome."""
        return median_interval([value(o) for o in self.outcomes])

    def share(self, value: Callable[[Outcome], float]) -> Interval | None:
        """A share of the queries that came; None when none came."""
        values = [value(o) for o in self.outcomes if o.offered]
        return median_interval(values) if values else None

    @property
    def batches(self) -> dict[str, dict[int, int]]:
        """block -> rows -> batches, of all seeds together."""
        total: dict[str, Counter[int]] = {}
        for o in self.outcomes:
            for block, sizes in o.batches.items():
                total.setdefault(block, Counter()).update(sizes)
        return {block: dict(sorted(sizes.items())) for block, sizes in total.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form: medians over the seeds with their bounds. Without a rate (a trace says
        when queries come, or clients that wait do) ``rate`` and ``load`` are None."""
        rate, load = (self.rate, self.load) if self.rate else (None, None)
        out: dict[str, Any] = {"policy": self.policy, "rate": rate, "load": load}
        for which in _LATENCIES:
            found = self.latency(which)
            out[f"{which}_ms"] = None if found is None else asdict(found)
        out["versus_first"] = None if self.versus is None else asdict(self.versus)
        for name, value in SHARES.items():
            out[name] = asdict(self.of(value))
        for name, value in OF_OFFERED.items():
            part = self.share(value)
            out[name] = None if part is None else asdict(part)
        out["batches"] = self.batches
        out["busy"] = {
            name: self.of(lambda o, name=name: o.busy[name]).value  # type: ignore[misc]
            for name in self.outcomes[0].busy
        }
        out["tasks"] = {name: self.task(name).to_dict() for name in self.outcomes[0].tasks}
        return out

    def task(self, name: str) -> TaskEntry:
        """One task's part of this entry."""
        mine = [o.tasks[name] for o in self.outcomes]
        served = [t.results / t.offered for t in mine if t.offered]
        times = [t.times for t in mine if t.results]
        return TaskEntry(
            sum(t.offered for t in mine),
            sum(t.results for t in mine),
            median_interval(served) if served else None,
            median_interval([t.mean_ms for t in times]) if times else None,
            median_interval([t.p99_ms for t in times]) if times else None,
        )


SHARES: Mapping[str, Callable[[Outcome], float]] = {
    "throughput": lambda o: o.throughput,
    "rows_per_s": lambda o: o.rows_per_s,
    "rows_per_batch": lambda o: o.rows_per_batch,
    "busiest": lambda o: max(o.busy.values()),
    "fairness": lambda o: o.fairness,
}
"""Figures of an outcome that every entry has, by their name in the JSON form."""

OF_OFFERED: Mapping[str, Callable[[Outcome], float]] = {
    "over_bound": lambda o: o.over,
    "expired": lambda o: o.expired / o.offered,
    "rejected": lambda o: o.rejected / o.offered,
}
"""Further ones, which say nothing where no query came."""

_UNITS = {"throughput": "1/s", "rows_per_s": "1/s"}


def compare(
    experiment: Experiment, outcomes: Mapping[Cell, Outcome], capacity: float
) -> list[Entry]:
    """All entries, by rate and then by policy."""
    labels = [policy_label(p) for p in experiment.policies]
    entries = []
    for r, rate in enumerate(experiment.rates):
        first = [outcomes[Cell(0, r, seed)] for seed in experiment.seeds]
        for p, label in enumerate(labels):
            mine = tuple(outcomes[Cell(p, r, seed)] for seed in experiment.seeds)
            versus = _versus(first, mine) if p else None
            entries.append(Entry(p + 1, label, rate, rate / capacity, mine, versus))
    return entries


def _versus(first: Sequence[Outcome], mine: Sequence[Outcome]) -> Interval | None:
    pairs = [(a, b) for a, b in zip(first, mine, strict=True) if a.results and b.results]
    if not pairs:
        return None
    return ratio_interval([a.times.mean_ms for a, _ in pairs], [b.times.mean_ms for _, b in pairs])


def figures(entries: Sequence[Entry]) -> list[Figure]:
    """The entries as a benchmark's figures; the mean latency also has the percentiles."""
    out: list[Figure] = []
    for entry in entries:
        labels = {"rate": entry.rate, "load": round(entry.load, 4)}
        found = {w: f for w in _LATENCIES if (f := entry.latency(w)) is not None}  # all, or none
        if found:
            mean, p50, p90, p99, *_ = found.values()
            made = interval_figure("simulated latency", entry.policy, None, mean, "ms", labels)
            out.append(replace(made, p50_ms=p50.value, p90_ms=p90.value, p99_ms=p99.value))
            out += [
                interval_figure(f"{which}_ms", entry.policy, None, found[which], "ms", labels)
                for which in ("wait", "compute")
            ]
        if entry.versus is not None:
            out.append(
                interval_figure("latency ratio", entry.policy, None, entry.versus, "x", labels)
            )
        out += [
            interval_figure(name, entry.policy, None, entry.of(value), _UNITS.get(name, ""), labels)
            for name, value in SHARES.items()
        ]
        out += [
            interval_figure(name, entry.policy, None, part, "", labels)
            for name, value in OF_OFFERED.items()
            if (part := entry.share(value)) is not None
        ]
    return out

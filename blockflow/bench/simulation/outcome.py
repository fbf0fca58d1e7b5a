"""Outcome: one run in figures, as plain data that travels as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from blockflow.bench.simulation.request import Exit, Request
from blockflow.bench.simulation.simulator import Simulator
from blockflow.bench.statistics import jain, percentile

_NS = 1e6


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of the queries that had a result; all 0 where none had.

    Attributes:
        wait_ms: mean time in queues.
        compute_ms: mean time in forwards.
        mean_ms, p50_ms, p90_ms, p99_ms, max_ms: from arrival to exit.
    """

    mean_ms: float = 0.0
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0
    wait_ms: float = 0.0
    compute_ms: float = 0.0

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Times:
        if not requests:
            return cls()
        n = len(requests)
        totals = sorted((r.left_ns - r.came_ns) / _NS for r in requests)
        return cls(
            sum(totals) / n,
            percentile(totals, 50),
            percentile(totals, 90),
            percentile(totals, 99),
            totals[-1],
            sum(r.wait_ns for r in requests) / n / _NS,
            sum(r.compute_ns for r in requests) / n / _NS,
        )


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """One task's share of a run."""

    offered: int
    results: int
    times: Times


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the queries that came after the warm-up.

    Attributes:
        offered: how many came; every one of them had a result, expired or was rejected.
        results, expired, rejected: how many of each.
        times: of the results.
        throughput: results per second of the time in which queries came.
        rows_per_s: their rows.
        over: share of ``offered`` without a result within the bound.
        tasks: by task.
        fairness: Jain's index over the tasks of results / offered: 1 = all fare alike.
        batches: rows -> batches, by block, the warm-up included.
        busy: share of the time with a forward under way, by worker, until the last query left and
            the last forward ended.
        stalls: batches that waited for a slot.
        queries: all that came, the warm-up included.
        virtual_s: until the last query left.
    """

    offered: int
    results: int
    expired: int
    rejected: int
    times: Times
    throughput: float
    rows_per_s: float
    over: float
    tasks: Mapping[str, TaskOutcome]
    fairness: float
    batches: Mapping[str, Mapping[int, int]]
    busy: Mapping[str, float]
    stalls: int
    queries: int
    virtual_s: float

    @property
    def rows_per_batch(self) -> float:
        """Mean over all batches of all blocks."""
        count = sum(n for sizes in self.batches.values() for n in sizes.values())
        rows = sum(r * n for sizes in self.batches.values() for r, n in sizes.items())
        return rows / count if count else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Inverse of :meth:`to_dict`, also after JSON has made text of the row counts."""
        return _FORM.validate_python(data)


_FORM = TypeAdapter(Outcome)


def outcome(simulator: Simulator, warmup_s: float, end_s: float, bound_ms: float) -> Outcome:
    """Figures of a finished run.

    Args:
        simulator: after its run.
        warmup_s: queries that came before it are left out.
        end_s: until when queries came.
        bound_ms: the time that a result should take at most.
    """
    requests = [r for r in simulator.requests if r.came_ns >= warmup_s * 1e9]
    answered = [r for r in requests if r.exit is Exit.RESULT]
    in_time = [r for r in answered if r.left_ns - r.came_ns <= bound_ms * _NS]
    # Throughput counts what leaves while queries come, whenever it came.
    served = [
        r
        for r in simulator.requests
        if r.exit is Exit.RESULT and warmup_s * 1e9 <= r.left_ns <= end_s * 1e9
    ]
    span_s = end_s - warmup_s
    tasks = {}
    for task in simulator.system.tasks:
        mine = [r for r in answered if r.task == task.name]
        offered = sum(r.task == task.name for r in requests)
        tasks[task.name] = TaskOutcome(offered, len(mine), Times.of(mine))
    batches: dict[str, Counter[int]] = {}
    for worker in simulator.workers:
        for number, sizes in worker.batches.items():
            batches.setdefault(worker.stages[number].block, Counter()).update(sizes)
    exits = Counter(r.exit for r in requests)
    # A forward may end after all of its queries have expired.
    last = max([simulator.last_exit_ns, *(w.last_end_ns for w in simulator.workers)])
    return Outcome(
        offered=len(requests),
        results=len(answered),
        expired=exits[Exit.EXPIRED],
        rejected=exits[Exit.REJECTED],
        times=Times.of(answered),
        throughput=len(served) / span_s,
        rows_per_s=sum(r.rows for r in served) / span_s,
        over=1.0 - len(in_time) / len(requests) if requests else 0.0,
        tasks=tasks,
        fairness=jain([t.results / t.offered for t in tasks.values() if t.offered]),
        batches={block: dict(sorted(sizes.items())) for block, sizes in batches.items()},
        busy={w.name: w.busy_ns / last / w.lanes if last else 0.0 for w in simulator.workers},
        stalls=sum(w.stalls for w in simulator.workers),
        queries=len(simulator.requests),
        virtual_s=simulator.last_exit_ns / 1e9,
    )

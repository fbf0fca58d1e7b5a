"""The Collector of the thesis (section 4.2): what became of each request, and the figures of it."""

from __future__ import annotations

import csv
import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blockflow.client.result import BlockTiming

OK = "OK"


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times are milliseconds of its collector's clock.

    ``intended_ms`` is when it was due to be sent and ``sent_ms`` when it was: the difference is the
    generator's own lag. ``latency_ms`` counts from the intended time, so that a generator held up
    by a slow system cannot hide it ("coordinated omission"). ``outcome`` is OK or an error code.
    """

    task: str
    rows: int
    intended_ms: float
    sent_ms: float
    done_ms: float
    outcome: str
    timings: tuple[BlockTiming, ...] = ()
    total_ms: float = 0.0

    @property
    def latency_ms(self) -> float:
        return self.done_ms - self.intended_ms

    def to_dict(self) -> dict[str, Any]:
        out = {
            "task": self.task,
            "rows": self.rows,
            "intended_ms": self.intended_ms,
            "sent_ms": self.sent_ms,
            "done_ms": self.done_ms,
            "latency_ms": self.latency_ms,
            "outcome": self.outcome,
            "total_ms": self.total_ms,
        }
        return out | {"timings": [t.to_dict() for t in self.timings]}


@dataclass(frozen=True, slots=True)
class BlockMeans:
    """Means over the answered requests that visited a block, in milliseconds."""

    block: str
    count: int
    transit_ms: float
    wait_ms: float
    overhead_ms: float
    compute_ms: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run or several: latencies of the answered requests, throughput over all.

    ``throughput`` is answered requests per second and ``rows_per_s`` their rows, both over
    ``duration_s``: from the first intended send to the last end of a request, pauses between runs
    included. ``lag_p99_ms`` is how late the generator itself was.
    """

    count: int
    ok: int
    errors: dict[str, int]
    duration_s: float
    throughput: float
    rows_per_s: float
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    lag_p99_ms: float
    blocks: tuple[BlockMeans, ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Collector:
    """Gathers records; any number of generators, in any threads, may share one.

    It has the clock of their times, so that runs beside and after one another have their places on
    one time line. Records come in the threads of clients too, which must wait for no lock here: a
    signal's handler that closes such a client may have come while its thread held it. What is done
    to the list is one step of the interpreter.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for the first moment alone
        self._records: list[Record] = []
        self._zero_ns: int | None = None

    def now_ms(self) -> float:
        """Milliseconds since the first call, which gives 0: the start of the first run."""
        if self._zero_ns is None:
            with self._lock:
                if self._zero_ns is None:
                    self._zero_ns = time.monotonic_ns()
                    return 0.0
        return (time.monotonic_ns() - self._zero_ns) / 1e6

    def add(self, record: Record) -> None:
        self._records.append(record)

    def records(self, task: str | None = None) -> tuple[Record, ...]:
        """All records so far, in order of completion; of one task, when named."""
        rows = tuple(self._records)
        return rows if task is None else tuple(r for r in rows if r.task == task)

    def summary(self, task: str | None = None) -> Summary:
        """Figures over all records, or over one task's."""
        return summarize(self.records(task))

    def to_json(self) -> str:
        """One JSON document: summary and records."""
        records = self.records()
        body = {"summary": summarize(records).to_dict(), "records": [r.to_dict() for r in records]}
        return json.dumps(body)

    def write_jsonl(self, path: Path | str) -> None:
        """One record per line."""
        lines = (json.dumps(r.to_dict()) + "\n" for r in self.records())
        Path(path).write_text("".join(lines), encoding="utf-8")

    def write_csv(self, path: Path | str) -> None:
        """One record per row; the blocks' times are summed over the path."""
        parts = ("transit_ms", "wait_ms", "overhead_ms", "compute_ms")
        head = list(Record("", 0, 0.0, 0.0, 0.0, "").to_dict())
        with open(path, "w", newline="", encoding="utf-8") as file:
            out = csv.writer(file)
            out.writerow([*head[:-1], *parts])
            for r in self.records():
                plain = list(r.to_dict().values())[:-1]
                out.writerow([*plain, *(sum(getattr(t, p) for t in r.timings) for p in parts)])


def summarize(records: Sequence[Record]) -> Summary:
    """Figures of some records; all zero for none."""
    good = [r for r in records if r.outcome == OK]
    errors: dict[str, int] = {}
    for r in records:
        if r.outcome != OK:
            errors[r.outcome] = errors.get(r.outcome, 0) + 1
    start = min((r.intended_ms for r in records), default=0.0)
    duration_s = (max((r.done_ms for r in records), default=0.0) - start) / 1e3
    latencies = sorted(r.latency_ms for r in good)
    lags = sorted(r.sent_ms - r.intended_ms for r in records)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Summary(
        count=len(records),
        ok=len(good),
        errors=errors,
        duration_s=duration_s,
        throughput=len(good) * per_s,
        rows_per_s=sum(r.rows for r in good) * per_s,
        mean_ms=sum(latencies) / len(latencies) if latencies else 0.0,
        p50_ms=percentile(latencies, 50),
        p90_ms=percentile(latencies, 90),
        p99_ms=percentile(latencies, 99),
        max_ms=latencies[-1] if latencies else 0.0,
        lag_p99_ms=percentile(lags, 99),
        blocks=block_means(t for r in good for t in r.timings),
    )


def block_means(timings: Iterable[BlockTiming]) -> tuple[BlockMeans, ...]:
    """Means per block, in order of first appearance."""
    by_block: dict[str, list[BlockTiming]] = {}
    for t in timings:
        by_block.setdefault(t.block, []).append(t)
    return tuple(
        BlockMeans(
            block,
            len(ts),
            sum(t.transit_ms for t in ts) / len(ts),
            sum(t.wait_ms for t in ts) / len(ts),
            sum(t.overhead_ms for t in ts) / len(ts),
            sum(t.compute_ms for t in ts) / len(ts),
        )
        for block, ts in by_block.items()
    )


def percentile(ordered: Sequence[float], p: float) -> float:
    """Nearest-rank percentile (0 < p <= 100) of sorted values; 0.0 for none."""
    if not ordered:
        return 0.0
    return ordered[max(1, -int(-len(ordered) * p // 100)) - 1]

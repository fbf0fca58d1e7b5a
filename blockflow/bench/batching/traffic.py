"""Traffic: sends a list of queries to a running system at their times, and tells what came back."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from queue import SimpleQueue
from typing import Any

import numpy as np

from blockflow.bench.in_process import example
from blockflow.bench.simulation.arrivals import Arrival, Mix, parse_arrivals
from blockflow.bench.simulation.workload import Workload
from blockflow.bench.statistics import slope
from blockflow.client import Client
from blockflow.client.collector import OK, Record
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec

DEADLINE_S = limits.MAX_DEADLINE_MS / 1e3
"""Late is measured, not cut off."""

Inputs = Callable[[Arrival], Any]

_LEAST = 2
_ENOUGH = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """What became of one visit's queries.

    Attributes:
        times_ms: of those answered, from when they were due.
        offered: how many there were.
        over: share of them without an answer within the bound.
        rows_per_s: answered, from the first due to the last answer.
        lag_ms: how late the sender itself was, 99th percentile.
        failed: error codes.
        later_ms: as ``times_ms``, of those that were due in the later half.
        growth: by what share of the arrivals the number under way grew, over the last three
            quarters of them: 0.1 where a tenth of what came was not kept up with.
        due_per_s: rows that were due per second: nobody can answer more. 0 for a single query.
    """

    times_ms: tuple[float, ...]
    offered: int
    over: float
    rows_per_s: float
    lag_ms: float = 0.0
    failed: tuple[str, ...] = ()
    later_ms: tuple[float, ...] = ()
    growth: float = 0.0
    due_per_s: float = 0.0

    @property
    def mean_ms(self) -> float:
        return sum(self.times_ms) / len(self.times_ms) if self.times_ms else float("inf")

    @classmethod
    def of(cls, records: Sequence[Record], bound_ms: float) -> Cell:
        """Figures of a visit; there is at least one record."""
        good = [r for r in records if r.outcome == OK]
        first = min(r.intended_ms for r in records)
        last = max(r.done_ms for r in records)
        due = max(r.intended_ms for r in records)
        lags = sorted(r.sent_ms - r.intended_ms for r in records)
        return cls(
            times_ms=tuple(r.latency_ms for r in good),
            offered=len(records),
            over=1 - sum(r.latency_ms <= bound_ms for r in good) / len(records),
            rows_per_s=sum(r.rows for r in good) * 1e3 / max(last - first, 1e-6),
            lag_ms=lags[max(0, -(-len(lags) * 99 // 100) - 1)],
            failed=tuple(sorted({r.outcome for r in records} - {OK})),
            later_ms=tuple(r.latency_ms for r in good if r.intended_ms >= (first + due) / 2),
            growth=growth(records),
            due_per_s=sum(r.rows for r in records) * 1e3 / (due - first) if due > first else 0.0,
        )


def growth(records: Sequence[Record]) -> float:
    """By what share of the arrivals the number under way grows: a least-squares line through it, at
    the moments when queries were due, without the first quarter, in which a queue only fills up."""
    due = sorted(r.intended_ms for r in records)
    done = sorted(r.done_ms for r in records)
    if len(due) < _ENOUGH or due[0] == due[-1]:
        return 0.0
    under_way = [i + 1 - bisect_right(done, at) for i, at in enumerate(due)]
    since = len(due) // 4
    per_ms = (len(due) - 1) / (due[-1] - due[0])
    return slope(due[since:], under_way[since:]) / per_ms


def poisson(mix: Mix, rate: float, seconds: float, seed: int, multiple: int = 1) -> list[Arrival]:
    """Queries of a Poisson process, the same as a simulated run with this seed has.

    Args:
        rate: per second.
        seconds: no query comes later.
        seed: of times and draws.
        multiple: their number is one of this, at least once, so that a batch of fixed size is never
            left waiting for queries that will not come.
    """
    found: list[Arrival] = []
    while len(found) < multiple:
        found = list(Workload(parse_arrivals("poisson"), mix, rate, seconds, seed).queries())
        seconds *= 2
    return found[: len(found) // multiple * multiple]


def inputs_for(spec: TensorSpec, below: int) -> Inputs:
    """A function from a query to its tensor; seeded, and the same for all arms.

    ``below`` bounds the numbers of an integer tensor, which are at least 1: 0 may mean padding.
    """
    made: dict[tuple[int, int | None], Any] = {}

    def make(query: Arrival) -> Any:
        key = query.rows, query.length
        if key not in made:
            if np.issubdtype(np.dtype(spec.dtype), np.integer):
                named = {"rows": query.rows} | dict.fromkeys(spec.dynamic, query.length or 1)
                rng = np.random.default_rng(query.rows)
                made[key] = rng.integers(1, below, spec.resolve(named), dtype=spec.dtype)
            else:
                made[key] = example(spec, query.rows)
        return made[key]

    return make


class Hopeless:
    """Whether a visit's 99th percentile cannot keep a bound any more, whatever is still to come:
    more are late than one in a hundred of all, or one has failed.

    Args:
        bound_ms: that it should keep.
        offered: how many queries the visit has.
    """

    def __init__(self, bound_ms: float, offered: int) -> None:
        self._bound_ms = bound_ms
        self._allowed = offered // 100

    def __call__(self, record: Record) -> bool:
        """After one more answer."""
        self._allowed -= record.latency_ms > self._bound_ms
        return self._allowed < 0 or record.outcome != OK


def replay(
    client: Client,
    queries: Sequence[Arrival],
    inputs: Inputs,
    enough: Callable[[Record], bool] | None = None,
) -> list[Record]:
    """Send each query when it is due, whatever became of those before; wait for all answers.

    Once ``enough`` says so of an answer, nothing more is sent; what is under way is waited for.
    """
    tensors = [inputs(q) for q in queries]
    records: list[Record] = []
    landed = threading.Semaphore(0)
    over = threading.Event()
    sent = 0
    origin = time.monotonic_ns()

    def now_ms() -> float:
        return (time.monotonic_ns() - origin) / 1e6

    def done(future: Future[Any], query: Arrival, sent_ms: float) -> None:
        error = future.exception()
        code = OK
        if error is not None:
            code = error.code if isinstance(error, BlockFlowError) else "INTERNAL"
        due_ms = query.at_ns / 1e6
        record = Record(query.task, query.rows, due_ms, sent_ms, now_ms(), code)
        records.append(record)
        if enough is not None and enough(record):
            over.set()
        landed.release()

    for query, x in zip(queries, tensors, strict=True):
        if over.wait(max(0.0, (query.at_ns - (time.monotonic_ns() - origin)) / 1e9)):
            break
        sent_ms = now_ms()
        pending: Future[Any] = client.submit(query.task, x, deadline_s=DEADLINE_S)
        sent += 1
        pending.add_done_callback(partial(done, query=query, sent_ms=sent_ms))
    for _ in range(sent):
        landed.acquire()
    return records


def saturate(
    client: Client,
    queries: Sequence[Arrival],
    inputs: Inputs,
    outstanding: int,
    seconds: float,
    multiple: int = 1,
    together: Sequence[str] = (),
) -> float:
    """Rows per second with so many of ``queries``, again and again, under way all the time.

    Counted from when each has been answered once (they begin together, and at first travel
    together) to the last answer that had successors under way. The number that is sent is one of
    ``multiple``, so that a batch of fixed size is not left waiting in the end.

    With tasks ``together`` each query names all of these instead of its own, and its rows count
    once per answer.

    Raises:
        BlockFlowError: a query failed.
    """
    landed: SimpleQueue[tuple[int, Future[Any]]] = SimpleQueue()
    sent = 0

    def send() -> None:
        nonlocal sent
        query = queries[sent % len(queries)]
        sent += 1
        tasks = together or query.task
        pending: Future[Any] = client.submit(tasks, inputs(query), deadline_s=DEADLINE_S)
        brings = query.rows * max(1, len(together))
        pending.add_done_callback(lambda done: landed.put((brings, done)))

    for _ in range(outstanding):
        send()
    rows: list[int] = []
    at: list[float] = []
    early = left = outstanding
    end = math.inf
    while left:
        # Whoever is answered first: waiting for the oldest would leave others unreplaced.
        count, pending = landed.get()
        pending.result()
        now = time.monotonic()
        if len(at) >= _LEAST and now >= end:
            if sent % multiple:
                send()
            else:
                left -= 1  # it has no successor
            continue
        if early:
            early -= 1
            end = now + seconds
        else:
            rows.append(count)
            at.append(now)
        send()
    return pace(at, rows)


def pace(at: Sequence[float], rows: Sequence[int]) -> float:
    """Rows per second of answers at these times, which come by the batch: the slope of a line
    through their running sum.

    From the first answer to the last would be from the beginning of one batch's answers to the end
    of another's, a batch more than was computed meanwhile: of ten batches a tenth too much, and
    nothing where each row is answered by itself. That would be the larger batch's gain.
    """
    return slope(at, list(accumulate(rows)))

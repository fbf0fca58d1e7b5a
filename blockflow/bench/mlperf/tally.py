"""Tally: what became of every sample, besides LoadGen's own log; and when a run is given up."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from blockflow.bench.mlperf.allowance import Allowance
from blockflow.bench.numerals import plain
from blockflow.client.collector import BlockMeans
from blockflow.client.result import BlockTiming

GIVE_UP_AFTER = 200
"""Failures in a row after which a run, long since INVALID, is not worth going on with."""

GIVE_UP_AFTER_S = 10.0
"""And as long, or two deadlines of a request, without an answer: then a few are enough."""

A_FEW = 3

GONE = frozenset({"CONNECTION_LOST", "NOT_RUNNING", "UNAUTHORIZED"})
"""Codes after one of which it is given up at once: nobody is there to measure."""

TOO_FAST = frozenset({"OVERLOADED", "DEADLINE_EXCEEDED"})
"""Codes that say no more than that the rate is too high: what was asked is INVALID, and all else
may go on. A run that is given up for late answers has the latter."""

_PARTS = ("transit_ms", "wait_ms", "overhead_ms", "compute_ms")


@dataclass(slots=True)
class Counts:
    """Samples: ``issued`` by LoadGen, ``answered``, ``failed`` by code, ``retried`` when full; and
    LoadGen's ``queries`` that asked for each task."""

    issued: int = 0
    answered: int = 0
    retried: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    queries: dict[str, int] = field(default_factory=dict)

    @property
    def failures(self) -> int:
        return sum(self.failed.values())

    @property
    def lost(self) -> int:
        """Neither answered nor failed when the run ended."""
        return self.issued - self.answered - self.failures

    def to_dict(self) -> dict[str, Any]:
        return {
            "issued": self.issued,
            "answered": self.answered,
            "failed": dict(self.failed),
            "lost": self.lost,
            "retried": self.retried,
            "queries": dict(self.queries),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Counts:
        """Inverse of :meth:`to_dict`."""
        return cls(
            int(data["issued"]),
            int(data["answered"]),
            int(data["retried"]),
            {str(code): int(n) for code, n in data["failed"].items()},
            {str(task): int(n) for task, n in data["queries"].items()},
        )


class Tally:
    """Gathers outcomes from any thread.

    Args:
        tasks: their names; latencies are kept per task.
        deadline_s: of each request.
        now: the clock, in seconds.
        allowance: of late answers, after which the run is given up; None: it never is for these.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        deadline_s: float,
        now: Callable[[], float] = time.monotonic,
        allowance: Allowance | None = None,
    ) -> None:
        self._patience_s = max(GIVE_UP_AFTER_S, 2 * deadline_s)
        self._now = now
        self._allowance = allowance
        self._lock = threading.RLock()
        self._counts = Counts()
        self._latencies = {task: array("d") for task in tasks}
        self._queries_ms = array("d")
        self._blocks: dict[str, list[float]] = {}
        self._in_a_row = 0
        self._answered_at = self._failing_since = float("-inf")
        self.first_error = ""
        self.code = ""
        self.given_up = threading.Event()
        self.reason = ""

    def issued(self, samples: int, tasks: Iterable[str]) -> None:
        """A query of LoadGen asks for so many samples of these tasks."""
        with self._lock:
            self._counts.issued += samples
            for task in tasks:
                self._counts.queries[task] = self._counts.queries.get(task, 0) + 1

    def refused(self) -> None:
        """A request was refused for want of room and goes again."""
        with self._lock:
            self._counts.retried += 1

    def answered(
        self, task: str, samples: int, latency_ms: float, timings: Sequence[BlockTiming]
    ) -> None:
        with self._lock:
            self._in_a_row = 0
            self._answered_at = self._now()
            self._counts.answered += samples
            self._latencies[task].extend([latency_ms] * samples)
            self._check_late(task, samples, latency_ms)
            for t in timings:
                sums = self._blocks.setdefault(t.block, [0.0] * (1 + len(_PARTS)))
                sums[0] += 1
                for i, part in enumerate(_PARTS, start=1):
                    sums[i] += getattr(t, part)

    def failed(self, task: str, samples: int, latency_ms: float, code: str, why: str) -> None:
        with self._lock:
            failed = self._counts.failed
            failed[code] = failed.get(code, 0) + samples
            self._latencies[task].extend([latency_ms] * samples)
            self.first_error = self.first_error or why
            if not self._in_a_row:
                # Offline a request's time begins with the run: it says nothing about the last ones.
                self._failing_since = max(self._now() - latency_ms / 1e3, self._answered_at)
            self._in_a_row += 1
            unanswered_s = self._now() - self._failing_since
            if code in GONE:
                self._give_up(code, why)
            elif self._allowance is not None and code in TOO_FAST:
                self._give_up(code, f"a single failure makes the run INVALID: {why}")
            elif self._in_a_row >= GIVE_UP_AFTER or (
                self._in_a_row >= A_FEW and unanswered_s >= self._patience_s
            ):
                self._give_up(
                    code,
                    f"{self._in_a_row} failures in a row, no answer for {plain(unanswered_s)} s; "
                    f"the first: {self.first_error}",
                )

    def ended(self, query_ms: float) -> None:
        """A query of several samples has its last answer, or failure."""
        with self._lock:
            self._queries_ms.append(query_ms)

    def give_up(self, code: str, why: str) -> None:
        """Nothing more can be measured."""
        with self._lock:
            self._give_up(code, why)

    def _check_late(self, task: str, samples: int, latency_ms: float) -> None:
        if self._allowance is None:
            return
        why = self._allowance.spent(task, samples, latency_ms)
        if why:
            self._give_up("DEADLINE_EXCEEDED", f"it cannot become VALID: {why}")

    def _give_up(self, code: str, why: str) -> None:
        if not self.given_up.is_set():
            self.code, self.reason = code, why
            self.given_up.set()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Nothing is counted meanwhile: what is read are the same samples, whose answers still come
        in when a run is given up."""
        with self._lock:
            yield

    def counts(self) -> Counts:
        """A copy of the counts so far."""
        with self._lock:
            return Counts.from_dict(self._counts.to_dict())

    def blocks(self) -> tuple[BlockMeans, ...]:
        """Mean times per block, over the requests that visited it."""
        with self._lock:
            return tuple(
                BlockMeans(block, int(s[0]), *(part / s[0] for part in s[1:]))
                for block, s in self._blocks.items()
            )

    def latencies(self) -> dict[str, list[float]]:
        """Milliseconds from LoadGen's call to the response, per task, failures included."""
        with self._lock:
            return {task: list(found) for task, found in self._latencies.items()}

    def queries_ms(self) -> list[float]:
        """Milliseconds of each query of several samples, to its last response."""
        with self._lock:
            return list(self._queries_ms)

"""What the system does before LoadGen comes: how quick one request is, how many a second there are.

LoadGen prepares all queries of a run beforehand and wants to be told what to expect; a search wants
a rate to begin with; and a bound that not even a lone request keeps is refused here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from blockflow.bench.mlperf.library import Library
from blockflow.bench.mlperf.settings import RunSettings, Scenario, Target
from blockflow.bench.mlperf.sut import Array, Sender, Sut, TaskData
from blockflow.bench.mlperf.tally import GONE, Tally
from blockflow.bench.numerals import beside, given
from blockflow.bench.options import nonsense
from blockflow.core.errors import BlockFlowError, make_error

WARM_UP = 8
ALONE = 40
"""Requests one after the other, per task."""

ALONE_S = 5.0
"""After so long one answer is enough, or one failure."""

FAILURES = 3
"""In a row, after which no more are waited for: each may take a deadline."""

LEAST_S = 0.3
"""The throughput is measured over at least so long."""

MOST_SAMPLES = 1 << 16


@dataclass(frozen=True, slots=True)
class Calibration:
    """``fastest_ms`` of a lone request per task; ``rate`` single requests and ``offline`` samples
    per second with many under way."""

    fastest_ms: Mapping[str, float]
    rate: float
    offline: float

    @property
    def expected_ms(self) -> float:
        """Shorter than what LoadGen will see, so that it prepares enough queries."""
        return min(self.fastest_ms.values()) / 2


def calibrate(
    client: Sender, library: Library, data: Mapping[str, TaskData], settings: RunSettings
) -> Calibration:
    """Measure both; a second or two. Single failures are the run's to judge, not this one's.

    Raises:
        BlockFlowError: not one request succeeded; the first one's error.
    """
    fastest = {task: _alone(client, task, data[task], settings) for task in library.tasks}
    ones = {t: TaskData(d.rows, d.dtype, 1) for t, d in data.items()}
    rate = _throughput(client, library, ones, settings)
    grouped = any(d.most > 1 for d in data.values()) and settings.scenario is Scenario.OFFLINE
    return Calibration(
        fastest, rate, _throughput(client, library, data, settings) if grouped else rate
    )


def check_bounds(found: Calibration, targets: Mapping[str, Target]) -> None:
    """Raise INVALID_REQUEST for a bound below the fastest answer to a lone request."""
    for task, target in targets.items():
        bound, fastest = target.latency_ms, found.fastest_ms[task]
        if bound is not None and bound < fastest:
            raise nonsense(
                f"no load can keep {given(bound)} ms: the fastest of {ALONE} requests that had the "
                f"system to themselves took {beside(fastest, bound)} ms",
                f"--target-latency-ms {task}",
                "choose a larger bound, or profile and speed up the blocks",
            )


def _alone(client: Sender, task: str, data: TaskData, settings: RunSettings) -> float:
    rows = cycle(range(len(data.rows)))
    until = time.monotonic() + ALONE_S
    first: BlockFlowError | None = None
    cold = best = float("inf")
    failures = 0
    for i in range(WARM_UP + ALONE):
        x = data.tensor([next(rows)])
        begin = time.monotonic()
        try:
            _submit(client, task, x, data, settings).result()
        except BlockFlowError as exc:
            first = first or exc
            failures += 1
            if exc.code in GONE or failures == FAILURES:
                break
        else:
            failures = 0
            took_ms = (time.monotonic() - begin) * 1e3
            cold = min(cold, took_ms)
            if i >= WARM_UP or begin >= until:
                best = min(best, took_ms)
        if time.monotonic() >= until and (failures or best < float("inf")):
            break
    if cold == float("inf") and first is not None:
        raise first
    return min(best, cold)


def _submit(
    client: Sender, task: str, x: Array, data: TaskData, settings: RunSettings
) -> Future[Any]:
    dtype = "bfloat16" if data.dtype == "bfloat16" else None
    return client.submit(task, x, deadline_s=settings.deadline_s, dtype=dtype)


def _throughput(
    client: Sender, library: Library, data: Mapping[str, TaskData], settings: RunSettings
) -> float:
    """Answered samples per second, sent as in the offline scenario: what is refused or fails at
    once is no throughput."""
    offline = RunSettings(
        Scenario.OFFLINE,
        settings.mode,
        settings.targets,
        0.0,
        1,
        deadline_s=settings.deadline_s,
        in_flight=settings.in_flight,
    )
    tally = Tally(library.tasks, settings.deadline_s)
    sut = Sut(client, library, data, offline, tally, lambda ids, outputs: None)
    indices = _endless(library)
    samples, before = 4 * settings.in_flight, 0
    while True:
        part = [next(indices) for _ in range(samples)]
        begin = time.monotonic()
        sut.issue(range(samples), part)
        seconds = time.monotonic() - begin
        counts = tally.counts()
        answered, before = counts.answered - before, counts.answered
        if not answered:
            why = f"not one request was answered: {tally.first_error}"
            raise make_error(next(iter(counts.failed)), why)
        if seconds >= LEAST_S or samples >= MOST_SAMPLES:
            return answered / seconds
        samples *= 2


def _endless(library: Library) -> Iterator[int]:
    return cycle(range(len(library)))

"""What ``make bench-gpu`` sends to its system, and what the device takes meanwhile."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from blockflow.bench.gpu_figures import Sample
from blockflow.client import Client
from blockflow.core.errors import BlockFlowError
from blockflow.launch.gpu_kpi import GpuProbe

_ENERGY_S = 0.25
_DEADLINE_S = 60.0


class Energy:
    """What the device takes while something goes on, whoever uses it."""

    def __init__(self, probe: GpuProbe) -> None:
        self._probe = probe
        self._due = 0.0
        self._before: float | None = None

    def start(self) -> None:
        self._before = self._sample()

    def tend(self) -> None:
        """Now and then: a device without a counter of its own has to be asked for its power."""
        if time.monotonic() >= self._due:
            self._sample()

    def stop(self) -> float | None:
        """Joules since the start; None where the device tells none."""
        after = self._sample()
        if self._before is None or after is None or after <= self._before:
            return None
        return after - self._before

    def _sample(self) -> float | None:
        self._due = time.monotonic() + _ENERGY_S
        joules = self._probe.sample(time.monotonic_ns(), 0).get("gpu_energy_j")
        return None if joules is None else float(joules)


def images(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, 3, 224, 224), dtype=np.float32)


def once(client: Client, way: str, x: np.ndarray) -> Sample:
    """One request."""
    start = time.monotonic_ns()
    result = client.infer(way, x, deadline_s=_DEADLINE_S)
    total = (time.monotonic_ns() - start) / 1e6
    edge = (result.upload.ms or 0.0) + result.ingress_ms + (result.download.ms or 0.0)
    return Sample(total, edge)


@dataclass(frozen=True, slots=True)
class Flooded:
    """What was answered in how long, and what the device took meanwhile (None: not known)."""

    rows: int
    seconds: float
    joules: float | None = None

    @property
    def rate(self) -> float:
        return self.rows / self.seconds

    @property
    def mj_per_row(self) -> float | None:
        return None if self.joules is None else self.joules * 1e3 / self.rows


def flood(
    client: Client,
    way: str,
    x: np.ndarray,
    seconds: float,
    outstanding: int,
    energy: Energy | None = None,
) -> Flooded:
    """With so many requests under way all the time; rejected ones are asked again.

    Counted from when each has been answered once (they begin together, and at first travel
    together) to the last answer within ``seconds``; ``energy``, too, for what goes into those
    before and after belongs to no row that is counted.

    Raises:
        BlockFlowError: a request failed otherwise.
    """
    landed: SimpleQueue[Future[Any]] = SimpleQueue()

    def send() -> None:
        pending: Future[Any] = client.submit(way, x, deadline_s=_DEADLINE_S)
        pending.add_done_callback(landed.put)

    def next_answer() -> int:
        """Its rows; 0 where it was refused."""
        error = landed.get().exception()
        if error is None:
            return len(x)
        if isinstance(error, BlockFlowError) and error.retryable:
            return 0
        raise error

    for _ in range(outstanding):
        send()
    for _ in range(outstanding):
        next_answer()
        send()
    if energy is not None:
        energy.start()
    rows, took, start = 0, 0.0, time.monotonic()
    while not rows or took < seconds:
        rows += next_answer()
        took = time.monotonic() - start
        send()
        if energy is not None:
            energy.tend()
    joules = None if energy is None else energy.stop()
    for _ in range(outstanding):
        next_answer()
    return Flooded(rows, took, joules)

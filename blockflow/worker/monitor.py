"""KpiMonitor: the monitor thread. On and off while the worker runs.

It samples the process, asks the data thread for the stages' figures, and sends both to the
Controller. While nothing happens on the CPU there is little to tell: then once a second is enough,
and between that the data thread sleeps: many idle workers cost their machine little.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from blockflow.core.launchspec import StageSpec
from blockflow.core.metrics import StageKpi
from blockflow.launch.process_kpi import ProcessSampler
from blockflow.tensormq.channel import Usage
from blockflow.tensormq.memory import TensorMemory
from blockflow.wire.control import Stats
from blockflow.worker.copies import InputCopies
from blockflow.worker.sampling import StageSample
from blockflow.worker.stage import StageSnapshot

MAX_HZ = 100.0
_MIN_HZ = 0.001
"""More seldom than that nothing is sampled; and no clock waits for ever longer times."""
_ANSWER_S = 1.0
_IDLE_NS = 1_000_000_000


class AskKpi:
    """Message to the data thread: :meth:`KpiMonitor.answer` is wanted."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Answer of the data thread: figures of its stages, and counters of the worker."""

    sample: StageSample
    counters: Mapping[str, int]


class KpiMonitor:
    """Owns the monitor thread.

    Args:
        incarnation: of this worker.
        specs: its stages.
        copied: of its stages' inputs; shown with their figures.
        device: for GPU figures.
        memory: of this worker; what is shown of its arena and of its device, if it has them.
        mark: differs from the one before when something has happened at a stage.
        ask: makes the data thread call :meth:`answer`.
        send: takes the Stats message.
    """

    def __init__(
        self,
        incarnation: int,
        specs: Mapping[int, StageSpec],
        copied: Mapping[int, InputCopies],
        device: str,
        memory: TensorMemory,
        mark: Callable[[], object],
        ask: Callable[[], None],
        send: Callable[[Stats], None],
    ) -> None:
        self._incarnation = incarnation
        self._specs = specs
        self._copied = copied
        self._device = device
        self._memory = memory
        self._mark = mark
        self._ask = ask
        self._send = send
        self._period_s = 0.0
        self._closing = False
        self._change = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._asked: object = None
        self._told: object = None
        self._told_ns = 0
        self._thread = threading.Thread(target=self._run, name="bf-monitor", daemon=True)

    def start(self, hz: float) -> None:
        self.set_rate(hz)
        self._thread.start()

    def set_rate(self, hz: float) -> None:
        """``hz`` samples per second, 0 = off."""
        with self._change:
            self._period_s = 1.0 / min(max(hz, _MIN_HZ), MAX_HZ) if hz > 0 else 0.0
            self._change.notify()

    def answer(self, snapshot: Snapshot) -> None:
        """Called by the data thread."""
        with self._change:
            self._snapshot = snapshot
            self._change.notify()

    def close(self) -> None:
        with self._change:
            self._closing = True
            self._change.notify()
        if self._thread.is_alive():
            self._thread.join(1.0)

    # --- the monitor thread ----------------------------------------------------------------------

    def _run(self) -> None:
        gpu, slots = self._memory.device, self._memory.slots
        sampler = ProcessSampler(self._device, "" if gpu is None else gpu.facts.uuid)
        due = time.monotonic()
        while True:
            with self._change:
                while not self._closing:
                    left = due - time.monotonic() if self._period_s else None
                    if left is not None and left <= 0:
                        break
                    self._change.wait(left)
                    if self._period_s:  # a new rate may bring the next sample closer
                        due = min(due, time.monotonic() + self._period_s)
                if self._closing:
                    return
                self._snapshot = None
            usage = None if slots is None else slots.usage()
            if self._worth_asking(usage):
                self._ask()
                snapshot = self._answered()
                if snapshot is None or snapshot.sample.news:
                    self._asked = None  # there may be more to tell
                if snapshot is not None and self._worth_telling(snapshot, usage):
                    self._send(self._stats(sampler, snapshot, usage))
            with self._change:
                due = time.monotonic() + (self._period_s or 0.0)

    def _answered(self) -> Snapshot | None:
        with self._change:
            self._change.wait_for(lambda: self._snapshot or self._closing, _ANSWER_S)
            return self._snapshot

    def _worth_asking(self, usage: Usage | None) -> bool:
        """Whether :meth:`_worth_telling` may say yes. To ask is to wake the data thread."""
        before, self._asked = self._asked, (self._mark(), usage)
        return before != self._asked or self._due()

    def _due(self) -> bool:
        """It is long ago that something was told, or there always is something: a device's own
        figures (clocks, power) change whatever this worker does."""
        old = time.monotonic_ns() - self._told_ns >= _IDLE_NS
        return old or self._memory.device is not None

    def _worth_telling(self, snapshot: Snapshot, usage: Usage | None) -> bool:
        """Whether anything has happened since the last time, or that was long ago."""
        happened = (dict(snapshot.counters), usage)
        if happened == self._told and not snapshot.sample.news and not self._due():
            return False
        self._told, self._told_ns = happened, time.monotonic_ns()
        return True

    def _stats(self, sampler: ProcessSampler, snapshot: Snapshot, usage: Usage | None) -> Stats:
        now = time.monotonic_ns()
        figures: dict[str, Any] = {}
        extra: dict[str, object] = dict(snapshot.counters)
        if usage is not None:
            figures = {
                "arena_bytes": usage.capacity,
                "arena_used": usage.used,
                "arena_committed": usage.committed,
                "slots": usage.slots,
                "slots_used": usage.slots_used,
            }
            extra["slot_stalls"] = usage.stalls
        kpis = {n: self._kpi(n, s) for n, s in snapshot.sample.stages.items()}
        extra |= self._memory.extra()
        figures |= self._memory.figures()
        times = dict(self._memory.device_times)  # which the data thread may clear
        kpis = {
            n: replace(k, device=times[n].summary()) if n in times else k for n, k in kpis.items()
        }
        process = sampler.sample(now, rows=snapshot.sample.rows, **figures)
        stages = [k.to_dict() for k in kpis.values()]
        return Stats(self._incarnation, now, stages, process.to_dict(), extra)

    def _kpi(self, stage: int, snapshot: StageSnapshot) -> StageKpi:
        copied = self._copied[stage]
        return replace(
            snapshot.kpi(self._specs[stage]),
            copies_in=copied.copies,
            bytes_copied_in=copied.nbytes,
        )

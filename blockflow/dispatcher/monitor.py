"""StatsThread: reports the Dispatcher's figures without disturbing its data thread.

While nothing happens there is little to tell, and once a second is enough: as in a worker.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from blockflow.dispatcher.stats import Sample
from blockflow.launch.process_kpi import ProcessSampler
from blockflow.tensormq.channel import Usage
from blockflow.wire.control import ControlMessage, Stats

_PATIENCE_S = 0.5
_MIN_HZ, _MAX_HZ = 0.001, 50.0
_IDLE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Asks the data thread for a copy of its figures; it answers with ``answer.put``."""

    answer: queue.SimpleQueue[Sample] = field(default_factory=queue.SimpleQueue)


class StatsThread:
    """Samples at ``hz``; reading /proc and sorting histograms happen here.

    Args:
        ask: hands a :class:`Snapshot` to the data thread.
        tell: sends to the Controller, from any thread.
        usage: the arena's figures, from any thread.
    """

    def __init__(
        self,
        incarnation: int,
        hz: float,
        ask: Callable[[Snapshot], None],
        tell: Callable[[ControlMessage], None],
        usage: Callable[[], Usage],
    ) -> None:
        self._incarnation = incarnation
        self._hz = hz
        self._ask = ask
        self._tell = tell
        self._usage = usage
        self._told: object = None
        self._told_ns = 0
        self._changed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="bf-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def set_rate(self, hz: float) -> None:
        """Samples per second from now on; 0 = off."""
        self._hz = min(max(hz, _MIN_HZ), _MAX_HZ) if hz > 0 else 0.0
        self._changed.set()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._ended = True
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(2 * _PATIENCE_S)

    def _run(self) -> None:
        sampler = ProcessSampler()
        while not self._ended:
            hz = self._hz
            if self._changed.wait(1.0 / hz if hz > 0 else None):
                self._changed.clear()
                continue
            self._sample(sampler)

    def _sample(self, sampler: ProcessSampler) -> None:
        snapshot = Snapshot()
        self._ask(snapshot)
        try:
            figures = snapshot.answer.get(timeout=_PATIENCE_S)
        except queue.Empty:  # the data thread is busy for once: the next sample tells more
            return
        now = time.monotonic_ns()
        usage = self._usage()
        if not self._worth_telling(figures, usage, now):
            return
        process = sampler.sample(
            now,
            arena_bytes=usage.capacity,
            arena_used=usage.used,
            arena_committed=usage.committed,
            slots=usage.slots,
            slots_used=usage.slots_used,
        )
        self._tell(Stats(self._incarnation, now, [], process.to_dict(), figures.to_dict()))

    def _worth_telling(self, figures: Sample, usage: Usage, now_ns: int) -> bool:
        """Whether anything has happened since the last time, or that was long ago."""
        happened = (figures.common(), usage)
        if not figures.news and happened == self._told and now_ns - self._told_ns < _IDLE_NS:
            return False
        self._told, self._told_ns = happened, now_ns
        return True

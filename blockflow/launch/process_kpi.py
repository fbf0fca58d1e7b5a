"""ProcessSampler: one process's own resources as a ProcessKpi, cheap enough for 4 Hz.

Cheap figures are read at each sample. What is dear is read more seldom, and the dearer it is the
more so: USS and PSS, for which the kernel walks every page (milliseconds; on some machines a dozen
of them for a worker), and the core clock, for which there is a file per core. GPU figures come from
NVML when the process computes on one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from blockflow.core.metrics import ProcessKpi
from blockflow.core.scarcity import SCARCE
from blockflow.launch.gpu_kpi import GpuProbe

_MOVED_BYTES = 1 << 20

_UNSEEN = (psutil.Error, OSError)
"""What ``/proc`` fails with: no descriptor or memory is left to look with, or the kernel says no
for once. Figures are worth no thread, and nobody would begin its monitor's again."""


@dataclass(frozen=True, slots=True)
class Pause:
    """How long what is dear is left alone after it was done.

    Attributes:
        least_ns: so long however little it costs.
        times: so many times what it has cost; with 200 it takes half a percent of a core at most.
    """

    least_ns: int
    times: int

    def over(self, since_ns: int, cost_ns: int) -> bool:
        """Whether it may be done again, so long after it was begun at that cost."""
        return since_ns >= max(self.least_ns, self.times * cost_ns)


CLOCK = Pause(1_000_000_000, 1000)
MOVING = Pause(1_000_000_000, 200)
"""Between two walks while the resident memory moves; people watch it."""
RESTING = Pause(5_000_000_000, 2000)
"""While it stays: shares change when others come and go."""


def private_and_shared(pid: int) -> tuple[int, int]:
    """(USS, PSS) of a process in bytes from ``smaps_rollup``; (0, 0) where it cannot be read."""
    pss = uss = 0
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as f:
            for line in f:
                if line.startswith(b"Pss:"):
                    pss = int(line.split()[1])
                elif line.startswith((b"Private_Clean:", b"Private_Dirty:")):
                    uss += int(line.split()[1])
    except OSError:
        return 0, 0
    return uss * 1024, pss * 1024


def resident(pid: int) -> int:
    """RSS of a process in bytes; 0 where it cannot be read."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except _UNSEEN:
        return 0


class MemoryWalk:
    """USS and PSS of a process, no older than its memory and the cost of a walk call for.

    Attributes:
        pid: of the process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._at_ns: int | None = None
        self._cost_ns = self._rss = 0
        self._found = 0, 0

    def look(self, now_ns: int, rss: int) -> tuple[int, int]:
        """(USS, PSS) in bytes as of the last walk, which is a new one if it is time for that.

        Args:
            rss: resident memory of the process now, in bytes.
        """
        pause = MOVING if abs(rss - self._rss) >= _MOVED_BYTES else RESTING
        if self._at_ns is None or pause.over(now_ns - self._at_ns, self._cost_ns):
            self._at_ns, self._rss = now_ns, rss
            began = time.thread_time_ns()
            self._found = private_and_shared(self.pid)
            self._cost_ns = time.thread_time_ns() - began
        return self._found


class ProcessSampler:
    """Samples the calling process; used from one thread.

    Args:
        device: ``cpu`` or ``cuda:N``; the latter adds GPU figures.
        gpu_uuid: of that device, if it is known.
    """

    def __init__(self, device: str = "cpu", gpu_uuid: str = "") -> None:
        self._process: psutil.Process | None = None
        self._gpu = GpuProbe(device, gpu_uuid)
        self._walk = MemoryWalk(os.getpid())
        self._clock_ns: int | None = None
        self._clock_cost_ns = 0
        self._mhz = 0.0
        self._own = {"pid": os.getpid(), "rss": 0, "pss": 0, "uss": 0, "threads": 0, "fds": 0}
        self._cpu_percent = 0.0
        with suppress(*_UNSEEN):
            self._begin()

    def sample(
        self,
        now_ns: int,
        *,
        arena_bytes: int = 0,
        arena_used: int = 0,
        arena_committed: int = 0,
        slots: int = 0,
        slots_used: int = 0,
        torch_allocated: int | None = None,
        torch_reserved: int | None = None,
        rows: int = 0,
        copies: Mapping[str, int] | None = None,
    ) -> ProcessKpi:
        """One sample; the caller adds what only it knows (arena, torch).

        Args:
            rows: computed since the start, for the energy per row.
            copies: counts of copies to and from the device, by the KPIs' names.
        """
        with suppress(*_UNSEEN):  # else the figures of the last look stand
            self._look(now_ns)
        return ProcessKpi(
            **self._own,
            cpu_percent=self._cpu_percent,
            cpu_mhz=self._mhz,
            arena_bytes=arena_bytes,
            arena_used=arena_used,
            arena_committed=arena_committed,
            slots=slots,
            slots_used=slots_used,
            torch_allocated=torch_allocated,
            torch_reserved=torch_reserved,
            **(copies or {}),
            **self._gpu.sample(now_ns, rows),  # type: ignore[arg-type]
        )

    def _begin(self) -> psutil.Process:
        process = psutil.Process()
        process.cpu_percent(None)  # the first call only sets the reference point
        self._process = process
        return process

    def _look(self, now_ns: int) -> None:
        """Take the process's own figures. Raises what is in :data:`_UNSEEN`."""
        process = self._process or self._begin()
        with process.oneshot():
            rss = process.memory_info().rss
            uss, pss = self._walk.look(now_ns, rss)
            self._look_at_clock(now_ns)
            self._own |= {
                "rss": rss,
                "pss": pss,
                "uss": uss,
                "threads": process.num_threads(),
                "fds": process.num_fds() - 1,  # the one by which they are counted
            }
            self._cpu_percent = process.cpu_percent(None)

    def _look_at_clock(self, now_ns: int) -> None:
        """That of the cores, in MHz; 0.0 where the machine does not say."""
        if self._clock_ns is None or CLOCK.over(now_ns - self._clock_ns, self._clock_cost_ns):
            self._clock_ns = now_ns
            began = time.thread_time_ns()
            try:
                freq = psutil.cpu_freq()
            except (NotImplementedError, ValueError, OSError) as exc:
                # A virtual machine lacks one of the files, or a core has just been taken away.
                if isinstance(exc, OSError) and exc.errno in SCARCE:
                    raise
                freq = None
            self._clock_cost_ns = time.thread_time_ns() - began
            self._mhz = float(freq.current) if freq else 0.0

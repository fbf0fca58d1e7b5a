"""ProcessSampler: one process's own resources as a ProcessKpi, cheap enough for 4 Hz.

Cheap figures are read at each sample, the core clock at most once a second. So are USS and PSS, for
which the kernel walks every page (milliseconds; on some machines a dozen of them for a worker): as
long as the resident memory stays the same, every five seconds. GPU figures come from NVML when the
process computes on one.
"""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from blockflow.core.metrics import ProcessKpi
from blockflow.launch.gpu_kpi import GpuProbe

_SLOW_NS = 1_000_000_000
_MEMORY_NS = 5_000_000_000
_MOVED_BYTES = 1 << 20


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


class ProcessSampler:
    """Samples the calling process; used from one thread.

    Args:
        device: ``cpu`` or ``cuda:N``; the latter adds GPU figures.
        gpu_uuid: of that device, if it is known.
    """

    def __init__(self, device: str = "cpu", gpu_uuid: str = "") -> None:
        self._process = psutil.Process()
        self._process.cpu_percent(None)  # the first call only sets the reference point
        self._gpu = GpuProbe(device, gpu_uuid)
        self._slow_at = self._memory_at = -_MEMORY_NS
        self._uss = self._pss = self._rss = 0
        self._mhz = 0.0

    def sample(
        self,
        now_ns: int,
        *,
        arena_bytes: int = 0,
        arena_used: int = 0,
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
        if now_ns - self._slow_at >= _SLOW_NS:
            self._slow_at = now_ns
            self._read_memory(now_ns)
            freq = psutil.cpu_freq()
            self._mhz = float(freq.current) if freq else 0.0
        with self._process.oneshot():
            return ProcessKpi(
                pid=self._process.pid,
                cpu_percent=self._process.cpu_percent(None),
                cpu_mhz=self._mhz,
                rss=self._process.memory_info().rss,
                pss=self._pss,
                uss=self._uss,
                threads=self._process.num_threads(),
                fds=self._process.num_fds(),
                arena_bytes=arena_bytes,
                arena_used=arena_used,
                slots=slots,
                slots_used=slots_used,
                torch_allocated=torch_allocated,
                torch_reserved=torch_reserved,
                **(copies or {}),
                **self._gpu.sample(now_ns, rows),  # type: ignore[arg-type]
            )

    def _read_memory(self, now_ns: int) -> None:
        rss = self._process.memory_info().rss
        moved = abs(rss - self._rss) >= _MOVED_BYTES
        if moved or now_ns - self._memory_at >= _MEMORY_NS:
            self._memory_at, self._rss = now_ns, rss
            self._uss, self._pss = private_and_shared(self._process.pid)

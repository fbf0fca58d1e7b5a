"""ProcessSampler: one process's own resources as a ProcessKpi, cheap enough for 4 Hz.

Cheap figures are read at each sample; USS and PSS (the kernel walks every mapping for them) and the
core clock at most once a second. GPU figures come from NVML when the process computes on one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import psutil

from blockflow.core.metrics import ProcessKpi

_LOG = logging.getLogger("blockflow.launch")
_SLOW_NS = 1_000_000_000


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


class GpuProbe:
    """NVML figures of one device; every field is None where NVML or the device is missing."""

    def __init__(self, device: str) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if not device.startswith("cuda"):
            return
        _, _, index = device.partition(":")
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(int(index or 0))
            self._nvml = pynvml
        except Exception as exc:  # an absent package, driver or device: no figures
            _LOG.info("no GPU figures for %s: %s", device, exc)

    def sample(self) -> dict[str, float | int | None]:
        """Fields of :class:`ProcessKpi` that start with ``gpu_``; empty without a GPU."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return {}
        pid = os.getpid()

        def used_by_me() -> int | None:
            for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if p.pid == pid:
                    return int(p.usedGpuMemory) if p.usedGpuMemory is not None else None
            return None

        readers: dict[str, Callable[[], float | int | None]] = {
            "gpu_util_percent": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "gpu_memory": used_by_me,
            "gpu_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "gpu_temperature_c": lambda: float(
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
        }
        out: dict[str, float | int | None] = {}
        for name, read in readers.items():
            try:
                out[name] = read()
            except nvml.NVMLError:  # not every card knows every figure
                out[name] = None
        return out


class ProcessSampler:
    """Samples the calling process; used from one thread.

    Args:
        device: ``cpu`` or ``cuda:N``; the latter adds GPU figures.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._process = psutil.Process()
        self._process.cpu_percent(None)  # the first call only sets the reference point
        self._gpu = GpuProbe(device)
        self._slow_at = -_SLOW_NS
        self._uss = self._pss = 0
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
    ) -> ProcessKpi:
        """One sample; the caller adds what only it knows (arena, torch)."""
        if now_ns - self._slow_at >= _SLOW_NS:
            self._slow_at = now_ns
            self._uss, self._pss = private_and_shared(self._process.pid)
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
                **self._gpu.sample(),  # type: ignore[arg-type]
            )

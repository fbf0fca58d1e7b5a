"""GpuProbe: a GPU's figures by NVML for the process that computes on it, cheap enough for 4 Hz."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

_LOG = logging.getLogger("blockflow.launch")

WINDOW_NS = 5_000_000_000
"""Energy per row is a mean over so long."""

Figure = float | int | None


class EnergyMeter:
    """Energy of a device since the first sample, and per row over the last :data:`WINDOW_NS`.

    Pure. From the device's own counter where it has one; else the integral of its power over time
    by the trapezoidal rule, which at 4 Hz misses what comes and goes between two samples.

    Attributes:
        joules: since the first sample; None while neither was ever told (an instance of a divided
            GPU has neither): nought would look like a measurement.
    """

    def __init__(self) -> None:
        self.joules: float | None = None
        self._counter: float | None = None
        self._power: tuple[int, float] | None = None
        self._window: deque[tuple[int, float, int]] = deque()

    def add(self, now_ns: int, counter_j: float | None, power_w: float | None, rows: int) -> None:
        """One sample.

        Args:
            counter_j: the device's energy counter, None without. power_w: its power, None without.
            rows: that this process has computed since its start.
        """
        joules = self.joules or 0.0
        if counter_j is not None:
            if self._counter is not None:
                joules += max(0.0, counter_j - self._counter)
            self._counter = counter_j
        # A counter that was not read for once has it all the next time.
        elif power_w is not None and self._counter is None:
            if self._power is not None:
                before_ns, before_w = self._power
                joules += (now_ns - before_ns) / 1e9 * (before_w + power_w) / 2
            self._power = now_ns, power_w
        elif self.joules is None:
            return
        self.joules = joules
        self._window.append((now_ns, joules, rows))
        while len(self._window) > 2 and self._window[1][0] <= now_ns - WINDOW_NS:
            self._window.popleft()

    @property
    def mj_per_row(self) -> float | None:
        """Millijoules of the whole device for each row of this process; None when none was run, or
        no energy is known."""
        if not self._window:
            return None
        (_, before_j, before), (_, now_j, now) = self._window[0], self._window[-1]
        return (now_j - before_j) * 1e3 / (now - before) if now > before else None


class GpuProbe:
    """NVML figures of one device; no figures where NVML or the device is missing.

    Args:
        device: ``cuda:N``; anything else has no figures.
        uuid: of the device, if the caller knows it. NVML counts all devices of the machine, CUDA
            those that ``CUDA_VISIBLE_DEVICES`` leaves and in an order of its own, so the number
            alone may name another one: there are no figures where it might.
    """

    def __init__(self, device: str, uuid: str = "") -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._energy = EnergyMeter()
        if not device.startswith("cuda"):
            return
        _, _, index = device.partition(":")
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = _handle(pynvml, int(index or 0), uuid, os.environ)
            self._nvml = pynvml
        except Exception as exc:  # an absent package, driver or device: no figures
            _LOG.info("no GPU figures for %s: %s", device, exc)

    def sample(self, now_ns: int, rows: int) -> dict[str, Figure]:
        """Fields of ProcessKpi that start with ``gpu_``; empty without a GPU.

        ``gpu_memory`` is this process's, and None where process ids are hidden (containers). All
        others are the whole device's, whoever uses it.
        """
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return {}
        readers: dict[str, Callable[[], Figure]] = {
            "gpu_util_percent": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "gpu_memory": lambda: _memory_of(nvml, handle, os.getpid()),
            "gpu_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "gpu_memory_clock_mhz": lambda: float(
                nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)
            ),
            "gpu_temperature_c": lambda: float(
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
        }
        out = {name: self._read(read) for name, read in readers.items()}
        counter = self._read(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000.0)
        self._energy.add(now_ns, counter, out["gpu_power_w"], rows)
        out["gpu_energy_j"] = self._energy.joules
        out["gpu_mj_per_row"] = self._energy.mj_per_row
        return out

    def _read(self, read: Callable[[], Figure]) -> Figure:
        try:
            return read()
        except (self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError):
            return None  # not every card knows every figure, nor every driver

    def close(self) -> None:
        if self._nvml is not None:
            self._read(self._nvml.nvmlShutdown)
            self._nvml = None


def _memory_of(nvml: Any, handle: Any, pid: int) -> int | None:
    # NVML has a list of its own for clients of the multi-process service.
    for running in (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetMPSComputeRunningProcesses,
    ):
        for process in running(handle):
            if process.pid == pid:
                return None if process.usedGpuMemory is None else int(process.usedGpuMemory)
    return None


def _handle(nvml: Any, index: int, uuid: str, environment: Mapping[str, str]) -> Any:
    visible = [v.strip() for v in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    name = uuid or (visible[index] if visible != [""] and index < len(visible) else "")
    if name.isdecimal():
        index = int(name)
    elif name:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            # The driver's number does not say that it is an instance's (MIG); NVML's name does.
            if not name.startswith("GPU-"):
                raise
            return nvml.nvmlDeviceGetHandleByUUID("MIG-" + name.removeprefix("GPU-"))
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        # CUDA counts the fastest card first, NVML by bus: the same where all cards are.
        cards = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        if len({nvml.nvmlDeviceGetName(card) for card in cards}) > 1:
            raise LookupError(
                "the cards differ, and CUDA may count them otherwise than NVML: "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )
    return nvml.nvmlDeviceGetHandleByIndex(index)

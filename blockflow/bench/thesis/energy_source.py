"""Where energy can be read: the processor's own counters (RAPL, by Linux powercap), and NVML.

RAPL counts microjoules per package, and for some processors per package's memory, in
``/sys/class/powercap/intel-rapl:*`` (AMD's too). Since 2020 only root may read them
(CVE-2020-8694), and virtual machines have none. The counters begin again at a maximum.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from blockflow.core.errors import make_error
from blockflow.launch.gpu_kpi import GpuProbe

POWERCAP = Path("/sys/class/powercap")


class EnergySource(ABC):
    """Something that says how much energy has gone into a part of the machine.

    Attributes:
        part: what it counts, for a reader.
    """

    part: str

    @abstractmethod
    def joules(self) -> float:
        """Since it was opened. Called every few seconds at least, from one thread at a time.

        Raises:
            SystemError_: INTERNAL when it cannot be read any more.
        """

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Let go of what it holds."""


def grown(before: int, now: int, maximum: int) -> int:
    """How far a counter has come that begins again after ``maximum``."""
    return now - before if now >= before else now + maximum - before


@dataclass(slots=True)
class Zone:
    """One RAPL counter and how far it has come since ``last`` was first read, in microjoules."""

    file: Path
    maximum: int
    last: int
    total: int = 0


class Rapl(EnergySource):
    """Counters of the processor's packages, and of their memory where that is counted."""

    def __init__(self, zones: list[Zone], names: list[str]) -> None:
        self._zones = zones
        self.part = f"RAPL: {', '.join(names)}"

    @classmethod
    def find(cls, root: Path = POWERCAP) -> Rapl | str:
        """All that are below ``root``; or why there is no energy to read."""
        zones, names = [], []
        for folder in sorted(root.glob("intel-rapl:*")):
            try:
                name = (folder / "name").read_text().strip()
                # Cores and graphics are within a package, and psys counts everything again.
                if not name.startswith(("package", "dram")):
                    continue
                file = folder / "energy_uj"
                maximum = int((folder / "max_energy_range_uj").read_text())
                zones.append(Zone(file, maximum, int(file.read_text())))
            except PermissionError:
                return f"the RAPL counters are root's to read ({folder}/energy_uj)"
            except (OSError, ValueError) as exc:
                return f"the RAPL counters cannot be read: {exc}"
            names.append(name)
        if not zones:
            return f"no RAPL counters in {root} (virtual machines usually have none)"
        return cls(zones, names)

    def joules(self) -> float:
        for zone in self._zones:
            try:
                now = int(zone.file.read_text())
            except (OSError, ValueError) as exc:
                raise make_error(
                    "INTERNAL", f"RAPL cannot be read any more: {exc}", where=str(zone.file)
                ) from exc
            zone.total += grown(zone.last, now, zone.maximum)
            zone.last = now
        return sum(z.total for z in self._zones) / 1e6


class Nvml(EnergySource):
    """A whole GPU: its own counter, or its power integrated over time."""

    def __init__(self, device: str, probe: GpuProbe) -> None:
        self._probe = probe
        self.part = f"NVML: {device}, the whole GPU"

    @classmethod
    def find(cls, device: str) -> Nvml | str:
        """The GPU ``cuda:N``; or why there is no energy to read."""
        probe = GpuProbe(device)
        # Without a power there would be an energy of 0, which looks like a measurement.
        if probe.sample(time.monotonic_ns(), 0).get("gpu_power_w") is None:
            probe.close()
            return f"NVML gives no power of {device}"
        return cls(device, probe)

    def joules(self) -> float:
        return float(self._probe.sample(time.monotonic_ns(), 0)["gpu_energy_j"] or 0.0)

    def close(self) -> None:
        self._probe.close()


def find_source(device: str, root: Path = POWERCAP) -> EnergySource | str:
    """Of the part that computes, the GPU ``cuda:N`` or the processor; or why there is none."""
    return Nvml.find(device) if device.startswith("cuda") else Rapl.find(root)

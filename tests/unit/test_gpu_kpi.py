"""GPU figures against a stand-in for NVML: what is read, what is missing, and energy."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from blockflow.launch.gpu_kpi import EnergyMeter, GpuProbe
from blockflow.launch.process_kpi import ProcessSampler

SECOND = 1_000_000_000


class FakeNvml:
    """Two cards; figures by name; what is set to an error raises as a card that lacks it does."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    class NVMLLibraryMismatchError(Exception):
        pass

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.lacks: set[str] = set()
        self.cards = ["H200", "H200"]
        self.energy_mj = 1_000_000
        self.power_mw = 300_000
        self.down = 0

    def _get(self, name: str, value: Any) -> Any:
        if name in self.lacks:
            raise (self.NVMLLibraryMismatchError if name == "power" else self.NVMLError)(name)
        return value

    def nvmlInit(self) -> None:
        self._get("init", None)

    def nvmlShutdown(self) -> None:
        self.down += 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self.asked.append(index)
        return index

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.cards[handle]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return self._get(uuid, uuid)

    def nvmlDeviceGetUtilizationRates(self, _: Any) -> Any:
        return SimpleNamespace(gpu=self._get("util", 87))

    def nvmlDeviceGetComputeRunningProcesses(self, _: Any) -> list[Any]:
        mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=self._get("memory", 512 << 20))
        return [SimpleNamespace(pid=1, usedGpuMemory=1), mine]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, _: Any) -> list[Any]:
        return []

    def nvmlDeviceGetClockInfo(self, _: Any, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, _: Any, kind: int) -> int:
        return self._get("temperature", 55)

    def nvmlDeviceGetPowerUsage(self, _: Any) -> int:
        return self._get("power", self.power_mw)

    def nvmlDeviceGetTotalEnergyConsumption(self, _: Any) -> int:
        return self._get("energy", self.energy_mj)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    made = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)  # type: ignore[arg-type]
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return made


def test_all_figures_of_a_card(nvml: FakeNvml) -> None:
    probe = GpuProbe("cuda:1")
    assert nvml.asked[-1] == 1
    probe.sample(0, 0)
    nvml.energy_mj += 5_000
    assert probe.sample(SECOND, 10) == {
        "gpu_util_percent": 87.0,
        "gpu_memory": 512 << 20,
        "gpu_clock_mhz": 1980.0,
        "gpu_memory_clock_mhz": 3201.0,
        "gpu_temperature_c": 55.0,
        "gpu_power_w": 300.0,
        "gpu_energy_j": 5.0,
        "gpu_mj_per_row": 500.0,
    }
    probe.close()
    probe.close()
    assert nvml.down == 1 and probe.sample(2 * SECOND, 10) == {}


def test_what_a_card_does_not_know_is_none(nvml: FakeNvml) -> None:
    nvml.lacks = {"memory", "temperature", "power", "energy"}
    probe = GpuProbe("cuda:0")
    for rows in (5, 10):  # computed rows make no energy of nought per row
        found = probe.sample(rows, rows)
        assert [k for k, v in found.items() if v is None] == [
            "gpu_memory",
            "gpu_temperature_c",
            "gpu_power_w",
            "gpu_energy_j",
            "gpu_mj_per_row",
        ]
    nvml.lacks.clear()
    assert probe.sample(20, 20)["gpu_energy_j"] == 0.0, "from now on it is told"


def test_a_hidden_process_has_no_memory_figure(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 424242)
    for shown in ([], [SimpleNamespace(pid=424242, usedGpuMemory=None)]):
        monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", lambda _, s=shown: s)
        assert GpuProbe("cuda:0").sample(0, 0)["gpu_memory"] is None


def test_a_client_of_nvidias_service_has_its_memory_figure(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = nvml.nvmlDeviceGetComputeRunningProcesses(0)
    server = [SimpleNamespace(pid=1, usedGpuMemory=30 << 20)]
    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", lambda _: server)
    monkeypatch.setattr(nvml, "nvmlDeviceGetMPSComputeRunningProcesses", lambda _: mine)
    assert GpuProbe("cuda:0").sample(0, 0)["gpu_memory"] == 512 << 20


@pytest.mark.parametrize(
    ("visible", "uuid", "asked"),
    [
        (None, "", 1),
        ("3,2", "", 2),
        ("GPU-a,GPU-b", "", "GPU-b"),
        ("3,2", "GPU-c", "GPU-c"),
        ("5", "", 1),
    ],
)
def test_the_right_card_is_asked(
    nvml: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    uuid: str,
    asked: int | str,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    GpuProbe("cuda:1", uuid)
    assert nvml.asked[-1] == asked


@pytest.mark.parametrize("visible", [None, "1,0"])
def test_of_cards_that_differ_a_number_names_one_only_by_their_bus(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    """CUDA counts the fastest first, NVML by bus."""
    nvml.cards = ["T4", "H200"]
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert GpuProbe("cuda:0").sample(0, 0) == {}
    assert GpuProbe("cuda:0", "GPU-c").sample(0, 0) != {}, "its name is its own"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert GpuProbe("cuda:0").sample(0, 0) != {}
    assert nvml.asked[-1] == (0 if visible is None else 1)


def test_an_instance_of_a_divided_gpu_is_found_by_its_own_name(nvml: FakeNvml) -> None:
    nvml.lacks = {"GPU-c"}
    assert GpuProbe("cuda:0", "GPU-c").sample(0, 0)["gpu_util_percent"] == 87
    assert nvml.asked == ["GPU-c", "MIG-c"]
    nvml.lacks = {"GPU-c", "MIG-c"}
    assert GpuProbe("cuda:0", "GPU-c").sample(0, 0) == {}


def test_without_nvml_there_are_no_figures(nvml: FakeNvml) -> None:
    nvml.lacks = {"init"}
    assert GpuProbe("cuda:0").sample(0, 0) == {}
    assert GpuProbe("cpu").sample(0, 0) == {}


def test_the_sampler_puts_them_into_the_record(nvml: FakeNvml) -> None:
    sampler = ProcessSampler("cuda:0", "GPU-x")
    sampler.sample(0, rows=0)
    nvml.energy_mj += 1_000
    kpi = sampler.sample(SECOND, rows=4, copies={"h2d_copies": 3, "h2d_bytes": 12})
    assert (kpi.gpu_power_w, kpi.gpu_mj_per_row) == (300.0, 250.0)
    assert (kpi.h2d_copies, kpi.h2d_bytes, kpi.d2h_copies) == (3, 12, 0)
    assert kpi.to_dict()["gpu_energy_j"] == 1.0


def test_energy_is_the_integral_of_power() -> None:
    meter = EnergyMeter()
    for second, watts in enumerate((100.0, 200.0, 200.0, 0.0)):
        meter.add(second * SECOND, None, watts, rows=second * 10)
    assert meter.joules == 150 + 200 + 100
    assert meter.mj_per_row == pytest.approx(450e3 / 30)


def test_energy_per_row_looks_back_over_the_window_only() -> None:
    meter = EnergyMeter()
    assert meter.mj_per_row is None
    meter.add(0, 0.0, None, rows=0)
    assert meter.mj_per_row is None
    for second in range(1, 21):
        meter.add(second * SECOND, second * 10.0, None, rows=100 if second < 15 else second * 100)
    # Over the last five seconds: 50 J, and rows from 1500 to 2000.
    assert meter.joules == 200.0
    assert meter.mj_per_row == pytest.approx(50e3 / 500)


def test_what_was_used_since_the_windows_beginning_counts_wholly() -> None:
    meter = EnergyMeter()
    for second, joules in enumerate((0.0, 60.0, 60.0, 60.0, 60.0, 60.0)):
        meter.add(second * SECOND, joules, None, rows=second)
    assert meter.mj_per_row == pytest.approx(60e3 / 5)
    meter.add(6 * SECOND, 60.0, None, rows=6)
    assert meter.mj_per_row == 0.0


def test_a_counter_that_cannot_be_read_for_a_while_is_not_counted_twice() -> None:
    meter = EnergyMeter()
    for second, counter in enumerate((0.0, 100.0, None, None, None, 500.0)):
        meter.add(second * SECOND, counter, 100.0, 0)
    assert meter.joules == 500.0


def test_a_counter_that_was_reset_adds_nothing() -> None:
    meter = EnergyMeter()
    for counter in (50.0, 60.0, 3.0, 4.0):
        meter.add(0, counter, None, 0)
    assert meter.joules == 11.0

"""GPU figures by NVML, of a real device: each one there, believable, and cheap enough for 4 Hz."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from blockflow.client.sync import Client
from blockflow.control.system import System
from blockflow.launch.gpu_kpi import GpuProbe
from blockflow.tensormq.memory import open_device
from tests.gpu import test_paths_on_gpu as suite
from tests.gpu.rig import REAL
from tests.gpu.test_paths_on_gpu import WAIT_S, X, block

pytestmark = pytest.mark.skipif(not REAL, reason="the double has no NVML")

layer, system = suite.layer, suite.system
PERIOD_S = 0.25
"""The monitor's, by default."""


@pytest.fixture
def probe() -> Iterator[GpuProbe]:
    pytest.importorskip("pynvml")
    api = open_device("cuda:0")
    made = GpuProbe("cuda:0", api.facts().uuid)
    yield made
    made.close()
    api.close()


def busy(seconds: float) -> None:
    """Keep the device at work for so long."""
    a = torch.randn(2048, 2048, device="cuda:0")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        a = (a @ a).tanh()
        torch.cuda.synchronize()


def test_every_figure_is_there_and_believable(probe: GpuProbe) -> None:
    probe.sample(time.monotonic_ns(), 0)
    busy(1.0)
    figures: dict[str, Any] = probe.sample(time.monotonic_ns(), 100)
    assert 0 < figures["gpu_util_percent"] <= 100
    assert 100 < figures["gpu_clock_mhz"] < 5000
    assert 100 < figures["gpu_memory_clock_mhz"] < 30_000
    assert 10 < figures["gpu_temperature_c"] < 110
    assert 10 < figures["gpu_power_w"] < 2000
    # A second at more than 10 W, and the two figures of it agree.
    assert figures["gpu_energy_j"] > 5
    assert figures["gpu_mj_per_row"] == pytest.approx(figures["gpu_energy_j"] * 1e3 / 100)
    used = figures["gpu_memory"]
    assert used is None or used > 100 << 20, "a context alone takes more; None in a container"


def test_a_sample_takes_a_small_part_of_the_monitors_period(probe: GpuProbe) -> None:
    took = []
    for _ in range(40):
        start = time.monotonic()
        probe.sample(time.monotonic_ns(), 0)
        took.append(time.monotonic() - start)
    assert statistics.median(took) < PERIOD_S / 10


def test_a_worker_reports_them_four_times_a_second(system: System) -> None:
    pytest.importorskip("pynvml")
    system.apply({"blocks": [block("g", "cuda:0")], "tasks": {"t": ["g"]}})
    energies: dict[float, float] = {}
    start = time.monotonic()
    with Client(system.client_endpoint) as client:
        while len(energies) < 9:
            assert time.monotonic() < start + WAIT_S
            client.infer("t", X)
            (worker,) = (w for w in system.status()["workers"] if "g" in w["blocks"])
            if worker["process"]:
                taken = round(time.monotonic() - worker["kpi_age_s"] - start, 2)
                if all(abs(taken - t) > PERIOD_S / 2 for t in energies):
                    energies[taken] = worker["process"]["gpu_energy_j"]
    first, last = min(energies), max(energies)
    assert (last - first) / (len(energies) - 1) < 1.5 * PERIOD_S
    assert energies[last] > energies[first], "energy only grows"
    assert worker["process"]["gpu_power_w"] > 0 and worker["process"]["gpu_mj_per_row"] > 0

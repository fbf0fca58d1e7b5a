"""The thesis's experiments under load run from end to end, in their smallest form, on echo blocks.

All share one running system: what is tested is that each measures something of every kind and
concludes, not what it measures.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blockflow.bench.contenders import CONTENDERS, Contender, Model
from blockflow.bench.results import PARTIAL
from blockflow.bench.thesis import (
    clients,
    clients_figures,
    devices,
    devices_figures,
    energy,
    energy_figures,
    experiment,
    growth,
    growth_blocks,
    growth_figures,
    rates,
    rates_figures,
    served,
    util,
    util_figures,
)
from blockflow.bench.thesis.devices_model import CORES, Places
from blockflow.bench.thesis.energy_source import EnergySource
from blockflow.bench.thesis.experiment import Context, Experiment, Findings, Settings, Workshop
from blockflow.bench.thesis.outcome import broken_off
from blockflow.bench.thesis.served import ARMS, WAYS, replicas
from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.launch.base import Launcher
from blockflow.launch.cgroup import available_cores
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from tests.system_rig import idle_system

SETTINGS = Settings(quick=True, model="resnet18", engine="echo")
BLOCKS = {f"block{n}" for n in range(1, 5)}
COMPUTE_MS = 5.0
"""Of a block: as long as that, and a visit is few requests."""


@contextmanager
def quiet(what: str, parts: int | None) -> Iterator[experiment.Advance]:
    yield lambda: None


class Shared(Context):
    """Its systems are all the same one: starting one is tested elsewhere, and takes seconds. What
    one experiment has deployed stays for the next, which asks for the same blocks."""

    def __init__(self, workshop: Workshop, scratch: Path, system: System) -> None:
        super().__init__(SETTINGS, workshop, scratch, quiet)
        self._system = system

    @contextmanager
    def system(self, topology: Mapping[str, Any]) -> Iterator[System]:
        self._system.apply(topology)
        yield self._system

    def empty(self) -> None:
        """For experiments that look at what workers had when they were new."""
        self._system.apply({"blocks": [], "tasks": {}})


def store_echoes(model: Model, contender: Contender, root: Path) -> None:
    for name in model.chain(contender, root).blocks:
        spec = TensorSpec("float32", ("rows", 64))
        save_echo(BlockRepository(root), name, spec, settings={"delay_ms": COMPUTE_MS})


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[Shared]:
    root = tmp_path_factory.mktemp("thesis")
    workshop = Workshop(root / "blocks")
    (root / "scratch").mkdir()
    repository = workshop.repository(SETTINGS.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONTENDERS, "echo", Contender("echo", "auto"))
        patch.setattr(experiment, "prepare_apart", store_echoes)
        # Enough for a visit that is to have some; these blocks are slow on a busy machine.
        patch.setattr(served, "MIN_ARRIVALS", 12)
        with idle_system(repository, root / "state", launcher) as system:
            yield Shared(workshop, root / "scratch", system)


def run(made: Experiment, context: Shared) -> Findings:
    context.kept = []
    found = made.run(context)
    assert found.skipped is None
    assert not found.failed
    assert found.says
    assert found.plots
    assert found.tables
    for data in found.data:
        assert data.rows
        assert {len(row) for row in data.rows} == {len(data.heads)}
    return found


def names_of(found: Findings) -> set[str]:
    return {f.name for f in found.figures}


def test_utilisation(context: Shared) -> None:
    found = run(util.EXPERIMENT, context)
    shown = {f.labels.get("block") for f in found.figures if f.mode == WAYS[0]}
    assert shown >= {*BLOCKS, util_figures.DISPATCHER}
    assert names_of(found) >= {util_figures.MEAN, util_figures.MACHINE, util_figures.RATE_RATIO}
    assert any("GPU utilisation: skipped" in note for note in found.notes)


def test_clients(context: Shared) -> None:
    found = run(clients.EXPERIMENT, context)
    counted = {f.labels["clients"] for f in found.figures if f.name == clients_figures.LATENCY}
    assert counted == {1, 2, 4}
    assert context.kept  # what had been found would have been left by a failure


def test_throughput(context: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    # The blocks in one process: tests/process/test_bench_in_process.py.
    alone = dict.fromkeys(BLOCKS, COMPUTE_MS)
    monkeypatch.setattr(rates, "service_ms", lambda _chain, _runs: alone)
    monkeypatch.setattr(rates, "patience_s", lambda _callers, _rate: 0.3)
    found = run(rates.EXPERIMENT, context)
    assert names_of(found) >= {rates_figures.SATURATED, rates_figures.LIMIT, rates_figures.CARRIED}


def test_memory_by_rate(context: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    context.empty()
    monkeypatch.setattr(growth, "patience_s", lambda _callers, _rate: 0.3)
    found = run(growth.EXPERIMENT, context)
    by = {(f.name, f.mode): f for f in found.figures}
    for way in WAYS:
        assert by[growth_figures.PAST_RATIO, way].value > 0
        assert by[growth_figures.PSS, way].value > 1
        assert (growth_figures.FIRST, way) in by


def test_memory_by_block(context: Shared) -> None:
    context.empty()
    found = run(growth_blocks.EXPERIMENT, context)
    whole = {f.mode: f.value for f in found.figures if f.name == growth_blocks.PROCESS}
    assert set(whole) == BLOCKS
    assert min(whole.values()) > 1


def test_devices(context: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    # One core stands for all, so that this runs anywhere; what differs is the topology.
    core = str(available_cores()[0])
    monkeypatch.setattr(devices, "find_places", lambda _settings: Places(CORES, [core, core]))
    found = run(devices.EXPERIMENT, context)
    shares = {f.labels["pdi"] for f in found.figures if f.name == devices_figures.LESS}
    assert shares == {25.0, 50.0}
    assert any("PDI 100: skipped" in note for note in found.notes)


class Steady(EnergySource):
    """Ten more millijoules at each look."""

    part = "a stand-in"

    def __init__(self) -> None:
        self.looks = 0
        self.closed = False

    def joules(self) -> float:
        self.looks += 1
        return 0.01 * self.looks

    def close(self) -> None:
        self.closed = True


def test_energy(context: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Steady()
    monkeypatch.setattr(energy, "find_source", lambda _device: source)
    found = run(energy.EXPERIMENT, context)
    spent = {(f.mode, f.batch): f.value for f in found.figures if f.name == energy_figures.ENERGY}
    assert {batch for _, batch in spent} == {1, 2}
    assert min(spent.values()) > 0
    assert source.closed


def test_energy_that_nothing_counts_is_skipped(
    context: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "find_source", lambda _device: "no counters")
    found = energy.EXPERIMENT.run(context)
    assert found.skipped == "no counters"
    assert energy.missing(SETTINGS) == "no counters"


def test_a_visit_lasts_until_there_are_two_answers(context: Shared) -> None:
    from blockflow.bench.thesis.served import ask_in_turn, input_of, served, task_of

    chain = context.chain()
    with (
        context.system(served(chain, "cpu", WAYS[:1])) as system,
        Client(system.client_endpoint) as client,
    ):
        asked = ask_in_turn([client], [task_of(WAYS[0])], input_of(chain), 1e-6)
    assert len(asked.records) >= 2
    assert asked.seconds > 1e-6
    assert asked.rate > 0


def test_a_worker_that_is_killed_in_mid_visit_leaves_what_was_found(
    context: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[float] = []

    @contextmanager
    def deadly(_what: str, _parts: int | None) -> Iterator[experiment.Advance]:
        """After two rounds the third one's first visit is under way for a while."""

        def advance() -> None:
            rounds.append(0.0)
            if len(rounds) == 2:
                pids.extend(w["pid"] for arm in ARMS for w in replicas(running[0], arm))
                timer.start()

        yield advance

    def kill() -> None:
        for pid in pids:  # all at once: whichever is visited, its workers die in mid-visit
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(0.1, kill)
    pids: list[int] = []
    running: list[System] = []
    begun = context.system

    @contextmanager
    def seen(topology: Mapping[str, Any]) -> Iterator[System]:
        with begun(topology) as system:
            running.append(system)
            yield system

    monkeypatch.setattr(context, "system", seen)
    monkeypatch.setattr(context, "step", deadly)
    monkeypatch.setattr(context, "pick", lambda _full, _quick: (4, 0.4))
    context.kept = []
    with pytest.raises(BlockFlowError) as caught:
        util.EXPERIMENT.run(context)
    assert len(rounds) == 2
    outcome = broken_off(util.EXPERIMENT, caught.value, context.kept, 1.0)
    assert {f.n for f in outcome.findings.figures} == {2}
    assert all(f.labels[PARTIAL] for f in outcome.findings.figures)

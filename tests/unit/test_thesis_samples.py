"""What counts as a sample in the thesis's experiments: what is repeated, and nothing else."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from thesis_doubles import Double, Doubled, Life, run_until, save_blocks
from thesis_rig import CHAIN, HANDLES, TENSORS, record

from blockflow.bench.thesis import (
    batches,
    clients,
    components,
    devices,
    energy,
    growth,
    growth_blocks,
    pipeline_time,
    rates,
    served,
    transports,
    util,
)
from blockflow.bench.thesis.clients_figures import KNEE, Clients
from blockflow.bench.thesis.clients_figures import Visit as ClientVisit
from blockflow.bench.thesis.energy_figures import ENERGY, IDLE, Energy
from blockflow.bench.thesis.energy_figures import Visit as EnergyVisit
from blockflow.bench.thesis.experiment import Experiment, Settings
from blockflow.bench.thesis.growth_blocks import COST, Start, figures_of
from blockflow.bench.thesis.growth_figures import ARENA, Look
from blockflow.bench.thesis.served import ARMS, TWICE, WAYS, Asked, ask_in_turn


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_blocks(tmp_path_factory.mktemp("blocks"))


# --- the way that is measured twice --------------------------------------------------------------


class Watched(Doubled):
    """Remembers what was deployed; quick, for the same is in a full run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Settings(quick=True))
        self.deployed: list[Mapping[str, Any]] = []

    @contextmanager
    def system(self, topology: Mapping[str, Any]) -> Iterator[Any]:
        self.deployed.append(topology)
        with super().system(topology) as system:
            yield system


TWO_STARTS = (pipeline_time, components, batches, util, energy, clients, rates, devices)


@pytest.mark.parametrize("experiment", [m.EXPERIMENT for m in TWO_STARTS], ids=lambda e: e.name)
def test_the_way_that_is_measured_twice_has_processes_of_its_own(
    experiment: Experiment, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts of the same thing differ; the same processes, asked twice, would not tell that."""
    context = Watched(repository)
    warmed: set[str] = set()

    def warm(_client: object, tasks: Sequence[str], *_: object) -> None:
        warmed.update(tasks)

    module = sys.modules[experiment.run.__module__]
    if hasattr(module, "warm"):
        monkeypatch.setattr(module, "warm", warm)
    run_until(experiment, context, Life(), monkeypatch)
    (topology,) = context.deployed
    names = [b["name"] for b in topology["blocks"]]
    assert len(set(names)) == len(names)
    paths = {tuple(task["path"]) for task in topology["tasks"].values()}
    again = {p for p in paths if p[0].startswith("tensormq-again")}
    first = {p for p in paths if p[0].startswith("tensormq")} - again
    assert len(again) == len(first) > 0
    assert not {b for p in again for b in p} & {b for p in paths - again for b in p}
    assert not [b for b in topology["blocks"] if "again" in b["name"] and "mode" in b]
    if hasattr(module, "warm"):  # nothing is visited cold
        begun = {tuple(topology["tasks"][task]["path"]) for task in warmed}
        assert begun == paths


def test_the_message_that_is_sent_twice_goes_to_another_process(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Double, "string", lambda self: asked.append(id(self)))
    run_until(transports.EXPERIMENT, Doubled(repository), Life(), monkeypatch)
    counts = Counter(asked)
    assert len(counts) == 2
    assert len(set(counts.values())) == 1


def test_the_arms_are_served_side_by_side() -> None:
    made = served.served(CHAIN, "cpu", ARMS)
    assert len({b["name"] for b in made["blocks"]}) == 12
    assert set(made["tasks"]) == {served.task_of(arm) for arm in ARMS}
    assert len(made["tasks"]) == 3


# --- repeats that are none -----------------------------------------------------------------------


def test_what_comes_in_a_burst_is_no_sample_of_its_own() -> None:
    """Six rounds of 25 round trips each: the rounds differ, a burst's trips do not."""
    found = {
        f"{kind}, {way}": [[ms] * 25 for ms in (2.0, 1.0, 3.5, 1.5, 3.0, 2.5)]
        for kind in ("string", "tensor")
        for way in (*transports.WAYS, "ZeroMQ, again")
    }
    made = transports.findings(found, 4, "digits")
    trip = next(f for f in made.figures if (f.name, f.mode) == ("string", "ZeroMQ"))
    assert (trip.value, trip.n) == (2.25, 6)
    assert trip.low is not None and trip.low <= 1.5  # 150 trips apart from each other had 2.0
    assert trip.high is not None and trip.high >= 3.0
    assert (trip.p10_ms, trip.p90_ms) == (1.0, 3.5)  # of all trips


def test_the_price_of_a_process_has_a_sample_per_start() -> None:
    """On a GPU every block's process tells its own."""
    cost = {"block1": 370.0, "block2": 370.0, "block3": 390.0}
    starts = [
        Start(dict.fromkeys(cost, 400.0), {b: mib + more for b, mib in cost.items()})
        for more in (0.0, 2.0)
    ]
    found = next(f for f in figures_of(starts, dict.fromkeys(cost, 1.0), {}) if f.name == COST)
    assert (found.value, found.n) == (371.0, 2)


def test_power_when_idle_is_measured_once_per_round() -> None:
    watts = (10.0, 11.0, 12.0, 13.0, 14.0)
    visits = {
        (arm, rows): [EnergyVisit(10, 1.0, 50.0, w) for w in watts]
        for arm in ARMS
        for rows in (1, 8)
    }
    idle = next(f for f in Energy(visits, {}).figures() if f.name == IDLE)
    assert (idle.value, idle.low, idle.high, idle.n) == (12.0, 10.0, 14.0, 5)


def test_the_knee_s_interval_holds_what_both_of_its_factors_vary_by() -> None:
    alone = [90.0, 95.0, 100.0, 105.0, 110.0]
    highest = [16.0, 24.0, 20.0, 18.0, 22.0]
    visits = {
        (arm, n): [
            ClientVisit(n * ms, 10.0 if n == 1 else rate)
            for ms, rate in zip(alone, highest, strict=True)
        ]
        for arm in (*WAYS, TWICE)
        for n in (1, 2, 4)
    }
    made = Clients(visits, {})
    knee = next(f for f in made.figures() if (f.name, f.mode) == (KNEE, TENSORS))
    found = (knee.value, knee.low, knee.high, knee.n)
    assert found == (pytest.approx(2.0), pytest.approx(1.44), pytest.approx(2.42), 5)
    assert "2.0 clients (95% 1.44-2.42, n = 5)" in made.says()
    few = Clients({arm: found[:4] for arm, found in visits.items()}, {})
    assert "n = 4: too few rounds to conclude)" in few.says().partition(", from where")[0]


# --- what belongs to a visit ---------------------------------------------------------------------


class Slow:
    """A generator whose requests take two seconds each."""

    def __init__(self, _client: object, task: str, _inputs: object, **options: Any) -> None:
        self._task, self._seconds = task, options["duration_s"]
        self.collector = self

    def run(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def records(self) -> Any:
        return [record(2e3 * n, 2e3, task=self._task) for n in range(int(self._seconds // 2) or 1)]


def test_answers_of_a_visit_that_was_too_short_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meter beside it has counted them as well."""
    monkeypatch.setattr(served, "TaskGenerator", Slow)
    client: Any = None
    found = ask_in_turn([client], ["t"], None, 1.0)
    assert (found.seconds, len(found.latency_ms)) == (4.0, 2)
    assert found.answers == 4  # in one, in two and in four seconds
    assert ask_in_turn([client], ["t"], None, 8.0).answers == 4
    # Two of them: as many answers for each, lest all be those of the begin.
    assert ask_in_turn([client] * 2, ["a", "b"], None, 2.0).seconds == 4.0


def test_energy_is_shared_by_all_that_was_answered(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = itertools.count()

    class Meter:
        part = "a meter"

        def joules(self) -> float:
            return float(next(counter))

    asked = Asked([record(0, 1), record(1, 1)], 1.0, earlier=8)
    context = Doubled(repository)
    monkeypatch.setattr(context, "pick", lambda _full, _quick: ((1,), 5, 0.0))
    monkeypatch.setattr(energy, "_LOOK_S", 60.0)  # looks at the begin and at the end alone
    monkeypatch.setattr(energy, "ask_in_turn", lambda *_: asked)
    monkeypatch.setattr(energy, "warm", lambda *_: None)
    monkeypatch.setattr(energy, "Client", lambda *_: nullcontext())
    meter: Any = Meter()
    found = energy.measure(context, replace(CHAIN, repository=repository), meter)
    whole = next(f for f in found.figures if (f.name, f.mode) == (ENERGY, HANDLES))
    assert whole.value == pytest.approx(100.0)  # a joule for ten rows


def test_the_first_answers_of_clients_that_begin_together_are_no_steady_state() -> None:
    """One of two finds everything idle: it never does again."""
    records = [
        record(0, 50, task="a"),
        record(50, 100, task="a"),
        record(150, 100, task="a"),
        record(0, 100, task="b"),
        record(100, 100, task="b"),
        record(200, 1, "OVERLOADED", task="b"),
    ]
    asked = Asked(records, 1.0)
    assert asked.latency_ms == [50, 100, 100, 100, 100]
    assert asked.steady_ms == [100, 100, 100]


class Looks:
    """Of a visit whose requests are sent for three seconds and a half, from when the first look has
    been taken, which on a busy machine may last as long; then slots become free."""

    def __init__(self, _look: object, _interval_s: float) -> None:
        full, free = Look(1.0, 100.0, 50.0), Look(1.0, 100.0, 0.0)
        self.samples = [(4.0 + t, full if t <= 3 else free) for t in range(12)]

    def __enter__(self) -> Looks:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Sent:
    """That visit's requests."""

    def __init__(self, *_: Any) -> None:
        pass

    def ask(self, *_: Any) -> Asked:
        return Asked([], 3.5)


def test_memory_by_rate_is_that_of_the_time_of_sending(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is seen when nobody sends any more is not what the rate takes."""
    monkeypatch.setattr(growth, "Sampler", Looks)
    monkeypatch.setattr(growth, "Flood", Sent)
    monkeypatch.setattr(growth, "callers_rate", lambda *_: 10.0)
    found = run_until(growth.EXPERIMENT, Doubled(repository), Life(), monkeypatch)
    assert {f.value for f in found.figures if f.name == ARENA} == {50.0}
    assert max(row[3] for row in found.data[0].rows if row[0] == "long") == 7.0


def test_memory_per_block_is_that_of_a_pipeline_at_work(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at while callers are answered, not only when they have gone."""
    busy, seen = threading.Event(), threading.Event()

    def on_cpu(*_: object) -> Start:
        at_work = busy.is_set()
        if at_work:
            seen.set()
        return Start(dict.fromkeys(BLOCKS, 50.0 if at_work else 20.0), dict.fromkeys(BLOCKS, 10.0))

    def callers(*_: object) -> float:
        busy.set()
        assert seen.wait(30)
        return 1.0

    monkeypatch.setattr(growth_blocks, "on_cpu", on_cpu)
    monkeypatch.setattr(growth_blocks, "callers_rate", callers)
    monkeypatch.setattr(growth_blocks, "_LOOK_S", 0.001)
    found = run_until(growth_blocks.EXPERIMENT, Doubled(repository), Life(), monkeypatch)
    assert {f.value for f in found.figures if f.name == growth_blocks.PROCESS} == {50.0}


BLOCKS = [f"block{n}" for n in range(1, 5)]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_limit_is_predicted_from_blocks_alone_on_every_device(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What workers have counted since their start holds the overloads of the rounds before."""
    monkeypatch.setattr(rates, "service_ms", lambda chain, _runs: {chain.blocks[0]: 2.0})
    found = rates.capacity_of(Doubled(Path(), Settings(device=device)), CHAIN)
    assert found.service_ms == {CHAIN.blocks[0]: 2.0}
    assert (found.seats is None) == (device != "cpu")

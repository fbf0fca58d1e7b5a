"""The batching benchmark's traffic, and whole experiments on a system that answers at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batching_rig import SPEC, cell, profile
from rich.progress import Progress

from blockflow.bench.batching import cost, diversity, grids, shared
from blockflow.bench.batching import figures as f
from blockflow.bench.batching.ladder import Ladder, within
from blockflow.bench.batching.plan import (
    COST,
    DELAYBATCH,
    DELAYS,
    DVABATCH,
    DVABATCH_LOADS,
    ENCODER,
    INPUT,
    LOAD,
    TINY,
    ZEROBATCH,
    Diversity,
)
from blockflow.bench.batching.predict import mean_ms
from blockflow.bench.batching.rig import TASK, Rig
from blockflow.bench.batching.traffic import Cell, Inputs, inputs_for, poisson, replay, saturate
from blockflow.bench.decisions import SPECS
from blockflow.bench.simulation.arrivals import Arrival, Mix, parse_arrivals
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.workload import Workload
from blockflow.client.collector import Record
from blockflow.core.errors import RequestError, TopologyError
from blockflow.core.model import BlockInfo, Contract

ONE = Mix([(TASK, 1.0)], parse_sizes("1", ""))


# --- traffic --------------------------------------------------------------------------------------


class FakeClient:
    """Answers at once, or as it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.sent: list[tuple[str, Any]] = []

    def infer(self, task: str, x: Any, **_: Any) -> Any:
        return self.submit(task, x).result()

    def submit(self, task: str, x: Any, **_: Any) -> Future[Any]:
        self.sent.append((task, x))
        future: Future[Any] = Future()
        if self.error is None:
            future.set_result(x)
        else:
            future.set_exception(self.error)
        return future


def test_queries_are_those_that_a_simulated_run_has() -> None:
    queries = poisson(ONE, 50.0, 2.0, seed=3, multiple=10)
    simulated = list(Workload(parse_arrivals("poisson"), ONE, 50.0, 2.0, 3).queries())
    assert len(queries) % 10 == 0
    assert queries == simulated[: len(queries)]
    assert len(simulated) - len(queries) < 10


def test_there_is_at_least_one_batch_of_queries() -> None:
    assert len(poisson(ONE, 0.5, 0.1, seed=1, multiple=10)) >= 10


def test_inputs_fit_the_contract() -> None:
    make = inputs_for(ENCODER.input, 4096)
    x = make(Arrival(0, TASK, 2, 17))
    assert (x.shape, x.dtype) == ((2, 17), np.int64)
    assert x.min() >= 1  # 0 is padding
    assert make(Arrival(5, TASK, 2, 17)) is x
    assert inputs_for(SPEC, 2)(Arrival(0, TASK, 3, None)).shape == (3, 4)


def queries_and_inputs(count: int) -> tuple[list[Arrival], Inputs]:
    return [Arrival(i * 1000, TASK, 1 + i % 2, None) for i in range(count)], inputs_for(SPEC, 2)


def test_every_query_is_sent_once_and_recorded() -> None:
    queries, inputs = queries_and_inputs(7)
    client: Any = FakeClient()
    records = replay(client, queries, inputs)
    assert [len(x) for _, x in client.sent] == [q.rows for q in queries]
    assert [(r.rows, r.outcome) for r in records] == [(q.rows, "OK") for q in queries]
    assert all(r.latency_ms >= 0 for r in records)


def test_failures_are_outcomes_of_a_visit_and_end_a_saturation() -> None:
    queries, inputs = queries_and_inputs(3)
    client: Any = FakeClient(RequestError("OVERLOADED", "full"))
    assert {r.outcome for r in replay(client, queries, inputs)} == {"OVERLOADED"}
    with pytest.raises(RequestError, match="full"):
        saturate(client, queries, inputs, 2, 0.01)


def test_saturation_goes_through_the_queries_again_and_again() -> None:
    queries, inputs = queries_and_inputs(2)
    client: Any = FakeClient()
    assert saturate(client, queries, inputs, 3, 0.01) > 0
    assert len(client.sent) >= 5


def test_a_visit_in_figures() -> None:
    records = [
        Record(TASK, 1, 0.0, 0.0, 10.0, "OK"),
        Record(TASK, 2, 100.0, 103.0, 150.0, "OK"),
        Record(TASK, 1, 200.0, 200.0, 201.0, "DEADLINE_EXCEEDED"),
    ]
    found = Cell.of(records, bound_ms=20.0)
    assert found.times_ms == (10.0, 50.0)
    assert found.mean_ms == 30.0
    assert found.over == pytest.approx(2 / 3)
    assert found.rows_per_s == pytest.approx(3 / 0.201)
    assert found.lag_ms == 3.0
    assert found.failed == ("DEADLINE_EXCEEDED",)
    assert not within(found, 100.0)  # not all were answered
    assert within(cell(10.0, 50.0), 50.0)
    assert not within(cell(10.0, 50.0), 49.0)


def test_the_simulator_meets_the_same_queries() -> None:
    profiles = [profile("a"), profile("b", 20.0)]
    apart = [Arrival(i * 100_000_000, TASK, 1, None) for i in range(10)]
    assert mean_ms(profiles, {"policy": "none"}, apart, 32, 1) == pytest.approx(30.0)
    at_once = [Arrival(0, TASK, 1, None)] * 10
    static = {"policy": "window", "max_rows": 10, "max_delay_ms": 60_000}
    assert mean_ms(profiles, static, at_once, 32, 1) == pytest.approx(30 * 5.5)
    # What a queue gathers is waited for, not turned away.
    crowd = [Arrival(0, TASK, 1, None)] * 300
    assert mean_ms(profiles, {"policy": "none"}, crowd, 32, 1) == pytest.approx(30 * 150.5)
    # A static batch waits for its last query.
    assert mean_ms(profiles, static, apart, 32, 1) == pytest.approx(450 + 30 * 5.5)


# --- whole experiments, on a system that answers at once ------------------------------------------


class FakeSystem:
    """Takes every topology, but classes only if its blocks pad."""

    def __init__(self, *, pads: bool = True) -> None:
        self.pads = pads
        self.applied: list[Mapping[str, Any]] = []

    def apply(self, topology: Mapping[str, Any]) -> None:
        if not self.pads and any("classes" in b["batching"] for b in topology["blocks"]):
            raise TopologyError("INVALID_TOPOLOGY", "no padding")
        self.applied.append(topology)

    def status(self) -> dict[str, Any]:
        workers = {b["worker"] for b in self.applied[-1]["blocks"]}
        return {"workers": [{"worker": w, "pid": os.getpid()} for w in sorted(workers)]}


BRIEF = replace(TINY, seconds=0.02, probes=2)


def rig_of(system: FakeSystem) -> Rig:
    anything: Any = system
    client: Any = FakeClient()
    return Rig(Path("blocks"), anything, client, Progress(disable=True))


def ladder_of(system: FakeSystem, name: str, one: Diversity) -> Ladder:
    profiles = [profile(b, lengths=one.recipe.lengths) for b in one.recipe.blocks]
    return Ladder(rig_of(system), BRIEF, name, one.recipe, profiles, one.bs_max, 32, one.lengths)


def policies_of(system: FakeSystem) -> list[Mapping[str, Any]]:
    """In the order in which they were applied; each topology has one."""
    return [t["blocks"][0]["batching"] for t in system.applied]


@pytest.mark.parametrize("pads", [True, False])
def test_dvabatch_meets_its_rivals_at_every_load(pads: bool) -> None:
    system = FakeSystem(pads=pads)
    one = BRIEF.diversities[INPUT]
    found = diversity.measure(ladder_of(system, INPUT, one), one)
    arms = {(g.labels["load"], g.mode) for g in found if g.name == f.TIME}
    assert arms == {(x, a) for x in DVABATCH_LOADS for a in (ZEROBATCH, DELAYBATCH, DVABATCH)}
    ratios = {(g.labels["load"], g.labels["base"]) for g in found if g.name == f.TIME_RATIO}
    assert ratios == {(x, a) for x in DVABATCH_LOADS for a in (ZEROBATCH, DELAYBATCH)}
    assert {g.mode for g in found if g.name == f.PEAK} <= {ZEROBATCH, DELAYBATCH, DVABATCH}
    notes = [g.mode for g in found if g.name == f.NOTE]
    assert any("do not promise padding" in n for n in notes) is not pads
    assert any("classes" in p for p in policies_of(system)) is pads
    # Of delays that answer all in time, the shortest; all four were tried.
    delays = {p["max_delay_ms"] for p in policies_of(system) if "max_delay_ms" in p}
    assert len(delays) == len(DELAYS)


def test_each_policy_takes_its_turn_alone() -> None:
    system = FakeSystem()
    found = cost.measure(ladder_of(system, COST, BRIEF.diversities[LOAD]), 20)
    alone = {g.mode for g in found if g.name == f.ALONE_RATIO}
    assert len(alone) == len({str(p) for p in policies_of(system)}) - 1  # beside none
    spent = [g for g in found if g.name == f.DECISION]
    assert len(spent) == len(SPECS)
    assert all(g.labels["verdict"] in ("met", "missed") for g in spent)


class FakeBound:
    """Computes at a fixed rate."""

    width = 2

    def __init__(self, *_: Any) -> None:
        pass

    def rate(self) -> float:
        return 1000.0

    def alone_ms(self) -> float:
        return 20.0


class FakeRepository:
    """Weights: a head has 60 MiB, a whole model 100, the rest 20."""

    def __init__(self, _root: Path) -> None:
        pass

    def info(self, name: str) -> BlockInfo:
        size = {BRIEF.trunk.blocks[-1]: 60, BRIEF.whole.blocks[0]: 100}.get(name, 20)
        return BlockInfo(name, "1", "0" * 64, "pt2", Contract(SPEC, SPEC), 0, size * 2**20)


def test_the_shared_trunk_is_weighed_against_full_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_Bound", FakeBound)
    monkeypatch.setattr(shared, "BlockRepository", FakeRepository)
    found = shared.measure(BRIEF, rig_of(FakeSystem()))
    rates = {g.mode: g for g in found if g.name == f.SATURATED}
    assert set(rates) == {shared.BATCHED, shared.UNBATCHED, shared.FULL_MODELS, shared.IN_PROCESS}
    share = {g.mode: g for g in found if g.name == f.OF_BOUND}
    assert share[shared.BATCHED].value == pytest.approx(rates[shared.BATCHED].value / 1000)
    assert share[shared.BATCHED].labels["goal"] == 0.9
    assert "verdict" not in share[shared.UNBATCHED].labels
    sizes = {(g.mode, g.labels["kind"]): g.value for g in found if g.name == f.MEMORY}
    trunk = 20 * (len(BRIEF.trunk.blocks) - 1)
    assert sizes[shared.SHARED_HOME, "weights"] == trunk + 60 * BRIEF.tasks
    assert sizes[shared.FULL_HOME, "weights"] == 100 * BRIEF.tasks
    (ratio,) = [g for g in found if g.name == f.MEMORY_RATIO]
    assert ratio.labels["goal"] == 0.25
    assert grids.shared_grid(found).rows

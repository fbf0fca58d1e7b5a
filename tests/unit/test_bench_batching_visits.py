"""The batching benchmark's traffic, and whole experiments on a system that answers at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batching_rig import SPEC, cell, profile, profiles
from rich.progress import Progress

from blockflow.bench import decisions
from blockflow.bench.batching import cost, diversity, grids, lbci, shared
from blockflow.bench.batching import figures as f
from blockflow.bench.batching.ladder import Ladder
from blockflow.bench.batching.plan import (
    COST,
    DELAY_CLASSES,
    DELAYBATCH,
    DELAYS,
    DVABATCH,
    DVABATCH_LOADS,
    ENCODER,
    INPUT,
    LBCI,
    LBCI_ARM,
    LBCI_LOADS,
    LOAD,
    NONE,
    SERIAL,
    TINY,
    ZERO_CLASSES,
    ZEROBATCH,
    Diversity,
    rotated,
)
from blockflow.bench.batching.predict import simulated, stretched
from blockflow.bench.batching.rig import TASK, Policy, Rig
from blockflow.bench.batching.steady import Steady
from blockflow.bench.batching.traffic import (
    Cell,
    Inputs,
    growth,
    inputs_for,
    poisson,
    replay,
    saturate,
)
from blockflow.bench.decisions import DECISION, SPECS, TURN
from blockflow.bench.simulation.arrivals import Arrival, Mix, parse_arrivals
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.workload import Workload
from blockflow.client.collector import Record
from blockflow.core.errors import RequestError, TopologyError
from blockflow.core.model import BlockInfo, Contract
from blockflow.core.profile import StageProfile

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
    assert found.later_ms == (50.0,)  # due in the later half, and answered
    assert found.due_per_s == pytest.approx(4 / 0.2)


def backlog(rate: float, served: float, count: int = 200) -> list[Record]:
    """Queries that come at an even rate and are answered one by one."""
    free, found = 0.0, []
    for i in range(count):
        due = 1e3 * i / rate
        free = max(free, due) + 1e3 / served
        found.append(Record(TASK, 1, due, due, free, "OK"))
    return found


def test_a_backlog_that_grows_is_seen_though_every_answer_is_in_time() -> None:
    assert growth(backlog(100.0, 110.0)) == pytest.approx(0.0, abs=0.01)
    assert growth(backlog(100.0, 80.0)) == pytest.approx(0.2, abs=0.02)
    assert growth(backlog(100.0, 80.0, count=4)) == 0.0  # too few to say
    late = Cell.of(backlog(100.0, 80.0), bound_ms=1e6)
    assert late.over == 0.0
    assert late.growth > 0.15


def mean_ms(profiles: Sequence[StageProfile], policy: Policy, queries: Sequence[Arrival]) -> float:
    return simulated(profiles, policy, queries, 32, 1).times.mean_ms


def test_the_simulator_meets_the_same_queries() -> None:
    profiles = [profile("a"), profile("b", 20.0)]
    apart = [Arrival(i * 100_000_000, TASK, 1, None) for i in range(10)]
    assert mean_ms(profiles, {"policy": "none"}, apart) == pytest.approx(30.0)
    at_once = [Arrival(0, TASK, 1, None)] * 10
    static = {"policy": "window", "max_rows": 10, "max_delay_ms": 60_000}
    assert mean_ms(profiles, static, at_once) == pytest.approx(30 * 5.5)
    # What a queue gathers is waited for, not turned away.
    crowd = [Arrival(0, TASK, 1, None)] * 300
    assert mean_ms(profiles, {"policy": "none"}, crowd) == pytest.approx(30 * 150.5)
    # A static batch waits for its last query.
    assert mean_ms(profiles, static, apart) == pytest.approx(450 + 30 * 5.5)
    # Times as they are served: by a factor for each size.
    slower = stretched(profiles, lambda rows: 1.5 if rows == 1 else 1.0)
    assert mean_ms(slower, {"policy": "none"}, apart) == pytest.approx(45.0)
    assert simulated(slower, {"policy": "none"}, apart, 32, 1, 40.0).over == 1.0
    assert mean_ms(slower, static, at_once) == pytest.approx(30 * 5.5)


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


BRIEF = replace(TINY, seconds=0.02, probes=2, probe_bounds=0.0)


def rig_of(system: FakeSystem) -> Rig:
    anything: Any = system
    client: Any = FakeClient()
    steady = Steady(0, work=lambda: 1.0)
    return Rig(Path("blocks"), anything, client, Progress(disable=True), steady)


def ladder_of(system: FakeSystem, name: str, one: Diversity) -> Ladder:
    measured = profiles(one.recipe.blocks, one.recipe.lengths, slower=1.2)
    return Ladder(rig_of(system), BRIEF, name, one.recipe, measured, one.bs_max, 32, one.lengths)


def policies_of(system: FakeSystem) -> list[Mapping[str, Any]]:
    """In the order in which they were applied; each topology has one."""
    return [t["blocks"][0]["batching"] for t in system.applied]


@pytest.mark.parametrize("pads", [True, False])
def test_dvabatch_meets_its_rivals_at_every_load(pads: bool) -> None:
    system = FakeSystem(pads=pads)
    one = BRIEF.diversities[INPUT]
    found = diversity.measure(ladder_of(system, INPUT, one), one)
    arms = {(g.labels["load"], g.mode) for g in found if g.name == f.TIME}
    classes = (NONE, ZERO_CLASSES, DELAY_CLASSES) if pads else ()
    bases = {ZEROBATCH, DELAYBATCH, *classes}
    assert arms == {(x, a) for x in DVABATCH_LOADS for a in (*bases, DVABATCH)}
    ratios = {(g.labels["load"], g.labels["base"]) for g in found if g.name == f.TIME_RATIO}
    assert ratios == {(x, a) for x in DVABATCH_LOADS for a in bases}
    assert {g.mode for g in found if g.name == f.PEAK} <= {*bases, DVABATCH}
    aims = [row[0] for row in grids.aim_grid(found).rows]
    assert any("windows with its classes" in aim for aim in aims) is pads
    notes = [g.mode for g in found if g.name == f.NOTE]
    assert any("do not promise padding" in n for n in notes) is not pads
    assert any("classes" in p for p in policies_of(system)) is pads
    # All delays were tried for each window, none among them, and what they came to is kept.
    tried = [g for g in found if g.name == f.CANDIDATE]
    assert len(tried) == len(DELAYS) * (2 if pads else 1)
    for arm in (DELAYBATCH, DELAY_CLASSES) if pads else (DELAYBATCH,):
        mine = [g.labels for g in tried if g.mode == arm]
        assert min(labels["delay_ms"] for labels in mine) == 0
        assert sum(labels["chosen"] for labels in mine) == 1
    assert grids.delay_grid(found).rows


@pytest.mark.parametrize(
    ("cells", "best"),
    [
        ({"0": [cell(30.0)], "1": [cell(20.0)], "2": [cell(25.0)]}, "1"),
        ({"0": [cell(30.0)], "1": [cell(20.0, over=0.3)]}, "0"),
        ({"0": [cell(30.0, over=0.003)], "1": [cell(31.0)]}, "0"),  # a third of a per cent is none
    ],
)
def test_the_delay_with_fewest_late_answers_is_chosen_then_the_fastest(
    cells: dict[str, list[Cell]], best: str
) -> None:
    assert diversity.chosen(cells) == best


def test_lbci_s_throughput_is_judged_where_it_can_differ() -> None:
    """In a closed loop; and what is over the bound is simulated with times as they are served."""
    recipe = BRIEF.lbci
    measured = profiles(recipe.blocks, slower=1.2)
    ladder = Ladder(rig_of(FakeSystem()), BRIEF, LBCI, recipe, measured, 32, 64)
    found = lbci.measure(ladder)
    ratios = {g.labels["base"]: g.labels for g in found if g.name == f.CLOSED_RATIO}
    assert {base: labels["goal"] for base, labels in ratios.items()} == {
        base: 1 + gain for base, gain in f.LBCI_PAPER_CLOSED.items()
    }
    assert all(labels["at_least"] for labels in ratios.values())
    stretch = [g for g in found if g.mode == lbci.STRETCHED]
    assert {g.labels["load"] for g in stretch} == set(LBCI_LOADS)
    assert grids.closed_grid(found).rows
    assert {g.mode for g in found if g.name == f.SIMULATED_OVER} >= {LBCI_ARM, SERIAL}


def test_a_row_s_time_is_laid_beside_both_profiles() -> None:
    ladder = ladder_of(FakeSystem(), LOAD, BRIEF.diversities[LOAD])
    ladder.serial = 1e3 / (2 * ladder.alone_ms)
    ladder.batched = 1e3 * ladder.batch / sum(p.ms(ladder.batch) for p in ladder.profiles)
    assert ladder.stretch(1) == pytest.approx(2.0)
    assert ladder.stretch(ladder.batch) == pytest.approx(1.0)
    assert 1.0 < ladder.stretch(2) < 2.0
    ways = {g.mode: g.value for g in ladder.served()}
    assert ways["served, to the blocks in turn"] == pytest.approx(2.0)
    assert ways["the blocks in turn, to each by itself"] == pytest.approx(1.2)
    assert ways["served, to each block by itself"] == pytest.approx(2.4)
    ladder.serial = BRIEF.rate_limit  # then the sender is what was measured
    assert ladder.served() == []


def test_each_policy_takes_its_turn_alone() -> None:
    system = FakeSystem()
    found = cost.measure(ladder_of(system, COST, BRIEF.diversities[LOAD]), 20)
    alone = {g.mode: g.labels for g in found if g.name == f.ALONE_RATIO}
    assert set(alone) == set(cost.arms()) - {"none"}
    assert "verdict" not in alone[cost.AGAIN]
    assert all("verdict" in labels for arm, labels in alone.items() if arm != cost.AGAIN)
    for name in (DECISION, TURN):
        spent = [g for g in found if g.name == name]
        assert len(spent) == len(SPECS)
        assert all(g.labels["verdict"] in ("met", "missed") for g in spent)


def test_none_is_never_beside_itself_in_turn() -> None:
    """A policy that is in force already is not changed: its visit would begin otherwise."""
    arms = list(cost.arms())
    order = [cost.arms()[arm]["policy"] for turn in range(9) for arm in rotated(arms, turn)]
    assert ["none", "none"] not in [list(pair) for pair in pairwise(order)]


@pytest.mark.parametrize(("apart", "verdict"), [(0.001, "met"), (0.05, "within noise")])
def test_equal_arms_that_lie_apart_decide_nothing(apart: float, verdict: str) -> None:
    found = {
        "none": [10.0] * 9,
        cost.AGAIN: [10.0 * (1 + apart)] * 9,
        "window": [10.05] * 9,
    }
    (one,) = [g for g in cost.ratios(found) if g.mode == "window"]
    assert one.labels["verdict"] == verdict


def test_a_turn_takes_longer_than_its_decision() -> None:
    for spec in SPECS:
        decision, turn = decisions.measure(spec, 16, 2, 200)
        assert (decision.name, turn.name) == (DECISION, TURN)
        assert turn.value > decision.value > 0
        assert turn.n == decision.n == 200


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
    assert set(rates) == {*shared.HOMES, shared.IN_PROCESS}
    share = {g.mode: g for g in found if g.name == f.OF_BOUND}
    assert share[shared.BATCHED].value == pytest.approx(rates[shared.BATCHED].value / 1000)
    assert share[shared.BATCHED].labels["goal"] == 0.9
    assert "verdict" not in share[shared.UNBATCHED].labels
    (gain,) = [g for g in found if g.name == f.SATURATED_RATIO]
    assert gain.labels["base"] == shared.WITHIN
    sizes = {(g.mode, g.labels["kind"]): g.value for g in found if g.name == f.MEMORY}
    trunk = 20 * (len(BRIEF.trunk.blocks) - 1)
    assert sizes[shared.SHARED_HOME, "weights"] == trunk + 60 * BRIEF.tasks
    assert sizes[shared.FULL_HOME, "weights"] == 100 * BRIEF.tasks
    (ratio,) = [g for g in found if g.name == f.MEMORY_RATIO]
    assert ratio.labels["goal"] == 0.25
    assert grids.shared_grid(found).rows

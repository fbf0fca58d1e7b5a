"""The batching benchmark's whole experiments, on a system that answers at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from batching_rig import FakeClient, cell, profiles
from policy_rig import looks
from rich.progress import Progress

from blockflow.bench import decisions
from blockflow.bench.batching import cost, diversity, grids, lbci
from blockflow.bench.batching import figures as f
from blockflow.bench.batching import ladder as ladder_module
from blockflow.bench.batching.ladder import Ladder, Rivalry
from blockflow.bench.batching.plan import (
    COST,
    DELAYED,
    DELAYS,
    DVABATCH,
    DVABATCH_LOADS,
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
)
from blockflow.bench.batching.rig import Policy, Rig
from blockflow.bench.batching.steady import Steady
from blockflow.bench.batching.traffic import Cell
from blockflow.bench.decisions import DECISION, SPECS, TURN
from blockflow.bench.turns import rotated
from blockflow.core.errors import RequestError, TopologyError

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
        """Of blocks that have computed nothing."""
        workers: dict[str, list[dict[str, Any]]] = {}
        for block in self.applied[-1]["blocks"]:
            none = {
                "rows": 0,
                "batches": 0,
                "compute": {"sum_ms": 0.0},
                "overhead": {"sum_ms": 0.0},
            }
            workers.setdefault(block["worker"], []).append({"block": block["name"], "kpi": none})
        mine = {"pid": os.getpid()}
        told = [{"worker": w, **mine, "stages": stages} for w, stages in sorted(workers.items())]
        return {"workers": told, "dispatcher": mine}


BRIEF = replace(TINY, seconds=0.002, probes=2, probe_bounds=0.0, rate_limit=1000.0)


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
@pytest.mark.parametrize("delay", ["0", "1"])
def test_dvabatch_meets_its_rivals_at_every_load(
    pads: bool, delay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diversity, "chosen", lambda _: delay)
    system = FakeSystem(pads=pads)
    one = BRIEF.diversities[INPUT]
    found = diversity.measure(ladder_of(system, INPUT, one), one)
    arms = {(g.labels["load"], g.mode) for g in found if g.name == f.TIME}
    windows = {ZEROBATCH, ZERO_CLASSES} if pads else {ZEROBATCH}
    delayed = {DELAYED[name] for name in windows}
    # Without a delay a delayed window is the same thing once more: nobody measures it twice.
    rivals = windows | (delayed if delay == "1" else set())
    shown = {NONE} if pads else set()
    assert arms == {(x, a) for x in DVABATCH_LOADS for a in (*rivals, *shown, DVABATCH)}
    ratios = {(g.labels["load"], g.labels["base"]): g for g in found if g.name == f.TIME_RATIO}
    assert set(ratios) == {(x, a) for x in DVABATCH_LOADS for a in rivals | shown}
    tails = {(g.labels["load"], g.labels["base"]): g for g in found if g.name == f.TAIL_RATIO}
    for by in (ratios, tails):  # both have an aim beside every rival, none beside ``none``
        assert {base for (_, base), g in by.items() if "verdict" in g.labels} == rivals
    assert {g.mode for g in found if g.name == f.PEAK} <= {*rivals, *shown, DVABATCH}
    aims = [row[0] for row in grids.aim_grid(found).rows]
    for how in ("no slower", "p99 no longer"):
        assert any(how in aim and "windows with its classes" in aim for aim in aims) is pads
        assert any(how in aim and aim.endswith("the windows") for aim in aims)
    notes = [g.mode for g in found if g.name == f.NOTE]
    assert any("do not promise padding" in n for n in notes) is not pads
    assert sum("no delay helps" in n for n in notes) == (len(windows) if delay == "0" else 0)
    assert any("classes" in p for p in policies_of(system)) is pads
    # All delays were tried for each window, none among them, and what they came to is kept.
    tried = [g for g in found if g.name == f.CANDIDATE]
    assert len(tried) == len(DELAYS) * len(windows)
    for arm in delayed:
        mine = [g.labels for g in tried if g.mode == arm]
        assert min(labels["delay_ms"] for labels in mine) == 0
        assert sum(labels["chosen"] for labels in mine) == 1
    assert grids.delay_grid(found).rows


@pytest.mark.parametrize(
    ("cells", "best"),
    [
        ({"0": [cell(30.0)], "1": [cell(20.0)], "2": [cell(25.0)]}, "1"),
        ({"0": [cell(30.0)], "1": [cell(20.0, over=0.3)]}, "0"),
        ({"0": [cell(30.0, over=0.006)], "1": [cell(31.0)]}, "0"),  # less than a per cent is none
        ({"0": [cell(30.9)], "1": [cell(30.0)], "2": [cell(29.5)]}, "0"),  # nor are five of a mean
        ({"0": [cell(failed=("INTERNAL",))], "1": [cell(30.0)]}, "1"),
    ],
)
def test_the_delay_with_fewest_late_answers_is_chosen_then_the_fastest_then_the_shortest(
    cells: dict[str, list[Cell]], best: str
) -> None:
    assert diversity.chosen(cells) == best


def test_a_capacity_is_the_median_of_visits_that_were_not_disturbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All loads of an experiment are shares of it: one unlucky moment would shift all of them."""
    ladder = ladder_of(FakeSystem(), LOAD, BRIEF.diversities[LOAD])
    ladder.plan = replace(BRIEF, repeats=5)
    #        warm-up | serial and batched in turn, the order of which rotates
    rates = [1.0, 1.0, 30.0, 80.0, 20.0, 31.0, 32.0, 82.0]
    left = iter(rates)
    monkeypatch.setattr(ladder_module, "saturate", lambda *_: next(left))
    found = ladder.measure_capacity({"policy": "none"}, {"policy": "window"})
    assert next(left, None) is None
    assert (ladder.serial, ladder.batched) == (31.0, 80.0)
    capacity = {g.mode: g for g in found if g.name == f.CAPACITY}
    assert (capacity["serial"].n, capacity["batched"].low) == (3, 20.0)
    assert ladder.rig.steady.take().visits == 6


class Losing(FakeClient):
    """Loses its third query."""

    def submit(self, task: str, x: Any, **_: Any) -> Future[Any]:
        future = super().submit(task, x)
        if len(self.sent) != 3:
            return future
        lost: Future[Any] = Future()
        lost.set_exception(RequestError("OVERLOADED", "full"))
        return lost


def test_a_search_sends_no_more_than_it_needs() -> None:
    """Where the first answer says that a rate fails, nothing else is asked."""
    ladder = ladder_of(FakeSystem(), LOAD, BRIEF.diversities[LOAD])
    failing: Any = FakeClient(RequestError("OVERLOADED", "full"))
    ladder.rig.client = failing
    ladder.batched = 1e4
    searches = ladder.search("x", {ZEROBATCH: {"policy": "window"}}, 100.0, {}, 1)
    assert len(failing.sent) == searches[ZEROBATCH].made == 3


def test_queries_that_are_lost_are_told() -> None:
    ladder = ladder_of(FakeSystem(), LOAD, BRIEF.diversities[LOAD])
    losing: Any = Losing()
    ladder.rig.client = losing
    ladder.serial = ladder.batched = 1000.0
    arms: dict[str, Policy] = {ZEROBATCH: {"policy": "window"}, DVABATCH: {"policy": "dvabatch"}}
    rivalry = Rivalry(DVABATCH, (ZEROBATCH,), {}, {})
    found = ladder.climb(arms, {"low": 0.3}, 100.0, 4, rivalry)
    notes = [g.mode for g in found if g.name == f.NOTE]
    assert any(n.startswith("at load low 1 of ZeroBatch's 4 queries failed: OVER") for n in notes)


def test_lbci_s_throughput_is_judged_where_it_can_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a closed loop; and what is over the bound is simulated with times as they are served."""
    monkeypatch.setattr(lbci, "GAP_ROWS", 0.01)  # what comes at once is answered at once
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
    judged = [g for g in found if g.name == f.OVER and "verdict" in g.labels]
    assert [(g.mode, g.labels["load"], g.labels["goal"]) for g in judged] == [
        (LBCI_ARM, *f.LBCI_PAPER_OVER)
    ]
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
    assert not [g for g in ladder.served() if g.name == f.NOTE]
    ladder.serial = 1e3 / (0.5 * ladder.alone_ms)  # nobody is twice as fast as computing
    (why,) = [g.mode for g in ladder.served() if g.name == f.NOTE]
    assert "0.50 times its profile's time" in why
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
        chain = [decisions.policy_name(spec) for spec in SPECS]
        tree = [f"{name}, {cost.TASKS} heads" for name in chain]
        tight = [f"{mode}, due in 600 ms" for mode in tree]
        assert [g.mode for g in spent] == [*chain, "window, 2 lanes", *tree, *tight]
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


@pytest.mark.parametrize(("lanes", "heads"), [(1, 1), (3, 2)])
def test_a_turn_takes_longer_than_its_decision(lanes: int, heads: int) -> None:
    for spec in SPECS:
        decision, turn = decisions.measure(spec, 16, 2, 200, lanes, heads)
        assert (decision.name, turn.name) == (DECISION, TURN)
        assert turn.value > decision.value > 0
        assert turn.n == decision.n == 200


def test_in_a_tree_policies_ask_who_would_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each new batch, and nobody is; in a chain nobody is near his deadline."""
    asked = looks(monkeypatch)
    for heads, times in ((1, 0), (8, 2)):
        decisions.measure({"policy": "window"}, 64, 8, 12, heads=heads)
        assert asked == [True] * times

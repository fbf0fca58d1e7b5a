"""The batching benchmark's plans: models, arms, topologies, and the command line that picks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from batching_rig import SPEC, profile

from blockflow.batching.facts import StageFacts
from blockflow.batching.registry import policy_problems
from blockflow.bench.batching import diversity, homes, lbci
from blockflow.bench.batching.blocks import folder_of, recipes_of
from blockflow.bench.batching.plan import (
    ALEXNET,
    DELAY_CLASSES,
    DELAYBATCH,
    DVABATCH,
    ENCODER,
    EXPERIMENTS,
    FULL,
    INPUT,
    LENGTHS,
    LOAD,
    NONE,
    QUICK,
    TINY,
    TRUNK,
    ZERO_CLASSES,
    ZEROBATCH,
    Plan,
    Recipe,
)
from blockflow.bench.batching.rig import chain_topology
from blockflow.bench.batching.run import PLANS, parse_args
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.core.model import BlockInfo, Contract
from blockflow.core.topology import parse_topology

# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_names_the_models_of_its_experiments(plan: Plan) -> None:
    for name in EXPERIMENTS:
        needed = plan.recipes([name])
        assert needed
        for recipe in needed:
            assert len(recipe.blocks) == len(recipe.cuts) + 1
            assert recipe.input.dims[0] == "rows"
    everything = plan.recipes(EXPERIMENTS)
    assert len({r.name for r in everything}) == len(everything)


def test_plans_share_names_only_where_they_mean_the_same() -> None:
    """The child that exports knows recipes by name."""
    known = recipes_of(FULL, TINY)
    for plan in (FULL, QUICK, TINY):
        for recipe in plan.recipes(EXPERIMENTS):
            assert known[recipe.name] == recipe


def test_other_blocks_lie_in_another_folder(tmp_path: Path) -> None:
    assert ALEXNET.digest(b"zoo") == ALEXNET.digest(b"zoo")
    assert ALEXNET.digest(b"zoo") != ALEXNET.digest(b"another zoo")
    assert Recipe("a", "alexnet", size=160).digest(b"") != Recipe("a", "alexnet").digest(b"")
    assert folder_of(tmp_path, [ALEXNET, TRUNK]) == folder_of(tmp_path, [TRUNK, ALEXNET])
    assert folder_of(tmp_path, [ALEXNET]) != folder_of(tmp_path, [TRUNK])


def test_the_input_is_the_zoos_unless_a_recipe_says_otherwise() -> None:
    assert ALEXNET.input.dims == ("rows", 3, 224, 224)
    assert TRUNK.input.dims == ("rows", 3, 160, 160)
    assert ENCODER.input.ranges == {"length": (1, 256)}
    assert parse_sizes(LENGTHS, "").largest <= 256


# --- arms -----------------------------------------------------------------------------------------


def infos(names: Sequence[str]) -> Mapping[str, BlockInfo]:
    return {n: BlockInfo(n, "1", "0" * 64, "pt2", Contract(SPEC, SPEC), 0, 0) for n in names}


def test_the_arms_are_valid_policies() -> None:
    facts = [StageFacts(b, max_rows=64, profile=profile(b)) for b in ("a", "b")]
    arms = {**lbci.policies(320.0)}
    for name in (LOAD, "operator"):
        found = diversity.policies(FULL.diversities[name], {ZEROBATCH: 5.0}, padded=False)
        assert set(found) == {ZEROBATCH, DELAYBATCH, DVABATCH}
        arms |= {f"{name} {arm}": policy for arm, policy in found.items()}
    for arm, policy in arms.items():
        assert policy_problems(policy, arm, facts) == []


def test_only_padded_blocks_get_classes() -> None:
    one = FULL.diversities[INPUT]
    assert all("classes" not in p for p in diversity.policies(one, {}, padded=False).values())
    arms = diversity.policies(one, {ZEROBATCH: 1.0, ZERO_CLASSES: 2.0}, padded=True)
    assert arms[ZEROBATCH]["classes"] == [256]
    assert arms[DELAYBATCH] == {**arms[ZEROBATCH], "max_delay_ms": 1.0}
    assert len(arms[DVABATCH]["classes"]) > 1


def test_a_window_with_dvabatch_s_classes_differs_from_it_by_the_policy_alone() -> None:
    """Else the gain of the classes would be taken for the policy's."""
    one = FULL.diversities[INPUT]
    arms = diversity.policies(one, {ZERO_CLASSES: 2.0}, padded=True)
    assert arms[ZERO_CLASSES]["classes"] == arms[DVABATCH]["classes"]
    assert arms[ZERO_CLASSES]["max_rows"] == arms[DVABATCH]["bs_max"]
    assert arms[DELAY_CLASSES] == {**arms[ZERO_CLASSES], "max_delay_ms": 2.0}
    assert arms[NONE] == {"policy": "none"}


def test_a_chain_is_one_worker_of_one_thread() -> None:
    names = ALEXNET.blocks
    body = chain_topology(names, {"policy": "window"}, 64)
    found = parse_topology(body, infos(names).__getitem__)
    assert {s.worker for s in found.blocks.values()} == {"chain"}
    assert {s.threads for s in found.blocks.values()} == {1}
    assert found.max_rows == 64


def test_there_are_no_more_workers_of_a_shared_trunk_than_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two, three, head = TRUNK.blocks
    for cores, wanted in ((1, [1, 1, 1, 1]), (2, [1, 1, 2, 2]), (16, [1, 2, 3, 4])):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        found = homes.parts(FULL)
        assert [found[b] for b in (one, two, three, head)] == [f"part{n}" for n in wanted]


@pytest.mark.parametrize(("cores", "lanes"), [(2, 2), (64, 11)])
def test_tasks_share_the_trunk_and_no_full_model(
    monkeypatch: pytest.MonkeyPatch, cores: int, lanes: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    names = (*TRUNK.blocks, *FULL.whole.blocks)
    body = homes.topology(FULL, {"policy": "none"}, homes.KINDS)
    found = parse_topology(body, infos(names).__getitem__)
    assert len(found.tasks) == 40
    paths = {
        home: [[found.blocks[b] for b in found.tasks[f"{kind}{i}"].path] for i in range(8)]
        for home, kind in homes.KINDS.items()
    }
    workers = {home: {b.worker for way in ways for b in way} for home, ways in paths.items()}
    assert {home: len(those) for home, those in workers.items()} == {
        homes.SHARED_HOME: 1,
        homes.REPLICAS_HOME: 1,
        homes.PARTS_HOME: min(cores, 4),
        homes.OWN_HOME: 1,
        homes.FULL_HOME: 8,
    }
    assert len(set().union(*workers.values())) == sum(map(len, workers.values()))
    for home, ways in paths.items():
        whole = home == homes.FULL_HOME
        of_model = list(FULL.whole.blocks if whole else TRUNK.blocks)
        assert all([b.artifact for b in way] == of_model for way in ways)
        # A name is a queue: the trunk has one for all tasks, or one for each of them.
        together = home in (homes.SHARED_HOME, homes.REPLICAS_HOME, homes.PARTS_HOME)
        assert len({tuple(b.name for b in way[:3]) for way in ways}) == (1 if together else 8)
        assert len({way[-1].name for way in ways}) == 8
        wide = home in (homes.SHARED_HOME, homes.OWN_HOME)
        assert {b.lanes for way in ways for b in way} == {lanes if wide else 1}
        replicas = cores if home == homes.REPLICAS_HOME else 1
        assert {b.replicas for way in ways for b in way} == {replicas}
    # What the arms differ by is the shared blocks' policy alone.
    windows = homes.topology(FULL, homes.window(FULL), homes.KINDS)
    other = parse_topology(windows, infos(names).__getitem__)
    changed = [b for b in found.blocks if found.blocks[b].batching != other.blocks[b].batching]
    assert len(changed) == 3 * 11


def test_all_lanes_have_the_rows_of_one_batch_where_memory_is_mostly_that_of_activations() -> None:
    late, none = FULL.parted_late(), {"policy": "none"}
    assert homes.parted(FULL, homes.window(FULL), 2) == homes.window(FULL)
    assert homes.parted(late, homes.window(late), 2)["max_rows"] == late.trunk_rows // 2
    assert homes.parted(late, none, 2) == none


def test_a_probe_outlasts_what_a_short_one_would_not_see() -> None:
    """A queue that grows by a twentieth of what comes outgrows the bound within twenty bounds."""
    assert FULL.probe_seconds(1116.0) == pytest.approx(22.32)
    assert FULL.probe_seconds(10.0) == 6.0


def test_the_command_line() -> None:
    args = parse_args(["--quick", "--only", "lbci,cost"])
    assert (args.extent, args.experiments) == ("quick", ["lbci", "cost"])
    assert parse_args([]).experiments == list(EXPERIMENTS)
    assert (parse_args([]).spare, parse_args(["--spare", "60"]).spare) == (None, 60.0)
    for wrong in (["--only", "lbc"], ["--quick", "--tiny"]):
        with pytest.raises(SystemExit):
            parse_args(wrong)

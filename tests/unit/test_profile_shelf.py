"""What workers, plans and people are told of the profiles that hold."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from control_rig import echo_repository

from blockflow.batching.registry import policy_problems
from blockflow.control.events import Launch
from blockflow.control.fleet import StagePlan
from blockflow.control.profiles import ProfileShelf
from blockflow.core.errors import RepositoryError
from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo
from blockflow.core.profile import Point, StageProfile
from blockflow.core.scarcity import is_away
from blockflow.core.specs import BlockSpec
from blockflow.core.topology import parse_topology
from blockflow.repository.repository import BlockRepository
from blockflow.wire.control import SetPolicy

THREADS = {"a": (1, 2), "b": (2,)}
"""With how many each block was measured; the others were not."""


class Shelf(ProfileShelf):
    def _find(self, info: BlockInfo, *asked: Any) -> Any:
        if info.name not in THREADS:
            raise RepositoryError("NO_PROFILE", "not measured", details={"command": "do so"})
        points = tuple(Point(n, 1, None, 9, *[5.0 * n] * 6, 0.0, 0) for n in THREADS[info.name])
        profile = StageProfile(info.name, info.digest, "echo", "fp32", "here", points)
        return SimpleNamespace(profile=profile, when="then")


@pytest.fixture
def repository(tmp_path: Path) -> BlockRepository:
    return echo_repository(tmp_path)


@pytest.fixture
def shelf(repository: BlockRepository) -> Shelf:
    return Shelf(repository.root)


def threads(profile: dict[str, Any] | None) -> list[int]:
    return [p["threads"] for p in (profile or {}).get("points", ())]


def test_a_launch_has_of_each_block_the_points_for_its_threads(
    shelf: Shelf, repository: BlockRepository
) -> None:
    stages = [
        StageSpec(n, repository.info(name), threads=own).to_dict()
        for n, (name, own) in enumerate((("a", 0), ("a", 2), ("b", 0), ("c", 0)), 1)
    ]
    spec = {"device": "cpu", "threads": 1, "stages": stages}
    attached = shelf.attach(Launch(7, "worker", "w#0", "a:run", spec))
    found = attached.spec["stages"]
    assert [threads(s["profile"]) for s in found] == [[1], [2], [], []]
    assert [s["block"]["name"] for s in found] == ["a", "a", "b", "c"]
    shutil.rmtree(repository.root)  # only who needs a profile and has none is kept by that
    for stage, policy, waits in ((3, "none", False), (0, "lbci", False), (3, "lbci", True)):
        asked = replace(
            attached, spec=spec | {"stages": [stages[stage] | {"policy": {"policy": policy}}]}
        )
        if waits:
            with pytest.raises(RepositoryError) as e:
                shelf.attach(asked)
            assert is_away(e.value)
        else:
            assert shelf.attach(asked).spec["stages"][0]["policy"] == {"policy": policy}
    assert replace(attached, spec=spec) == Launch(7, "worker", "w#0", "a:run", spec)


def test_a_change_of_policy_has_the_points_for_its_threads(
    shelf: Shelf, repository: BlockRepository
) -> None:
    for name, count, told in (("a", 2, [2]), ("a", 3, []), ("c", 1, [1])):
        spec = BlockSpec(name=name)
        plan = cast(StagePlan, SimpleNamespace(spec=spec, info=repository.info(name)))
        known = {"points": [{"threads": 1}]}
        message = SetPolicy(4, {"policy": "lbci"}, count, known if name == "c" else {})
        sent = shelf.with_points(message, plan)
        assert threads(sent.profile) == told and bool(sent.profile) == bool(told)
        assert replace(sent, profile={}) == replace(message, profile={})


def test_plans_count_what_was_measured_with_one_thread(
    shelf: Shelf, repository: BlockRepository
) -> None:
    body = {"blocks": ["a", "b", "c"], "tasks": {"t": ["a", "b", "c"]}}
    assert shelf.with_costs(parse_topology(body, repository.info, policy_problems)).costs == {
        "a": 5.0
    }


def test_a_plan_for_policies_is_not_made_without_a_cost_that_cannot_be_read_just_now(
    shelf: Shelf, repository: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RepositoryError("UNKNOWN_BLOCK", "does not answer", details={"away": True})

    monkeypatch.setattr(shelf, "_find", fails)
    body: dict[str, Any] = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}
    topology = parse_topology(body, repository.info, policy_problems)
    assert shelf.with_costs(topology).costs == {}, "nobody goes without a policy for it"
    body["blocks"][1] = {"name": "b", "batching": {"policy": "window"}}
    with pytest.raises(RepositoryError, match="does not answer"):
        shelf.with_costs(parse_topology(body, repository.info, policy_problems))


def test_people_are_told_whether_it_holds_and_what_makes_one(
    shelf: Shelf, repository: BlockRepository
) -> None:
    told = {n: shelf.state(BlockSpec(name=n), repository.info(n)) for n in "ac"}
    assert told["c"] == {"fresh": False, "reason": "not measured", "command": "do so"}
    what = {"fresh": True, "engine": "echo", "precision": "fp32", "when": "then"}
    assert told["a"] == what | {"threads": [1, 2], "points": 2}


def test_there_are_none_of_a_gpu(repository: BlockRepository) -> None:
    state = ProfileShelf(repository.root).state(
        BlockSpec(name="a", device="cuda:0"), repository.info("a")
    )
    assert (state["fresh"], state["reason"]) == (False, "profiles are of the CPU")

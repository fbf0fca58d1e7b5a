"""Placement and plans: what starts, what stays, what stops."""

from __future__ import annotations

from typing import Any

import pytest

from blockflow.core.errors import TopologyError
from blockflow.core.placement import MIB, WorkerSpec, desired_workers
from blockflow.core.plan import Plan, Running, diff
from blockflow.core.topology import parse_topology
from tests.unit.test_topology import THESIS, lookup

CORES = (0, 1)


def workers(data: dict[str, Any]) -> tuple[WorkerSpec, ...]:
    return desired_workers(parse_topology(data, lookup), CORES)


def running(plan: Plan, first: int = 1) -> list[Running]:
    """What runs after ``plan`` was carried out."""
    new = [
        Running(s.spec.name, s.replica, first + i, s.spec.identity(), s.spec.policies())
        for i, s in enumerate(plan.start)
    ]
    return [*plan.keep, *new]


def test_first_update_starts_all() -> None:
    plan = diff(workers(THESIS), [])
    assert [s.replica for s in plan.start] == [f"{b}#0" for b in THESIS["blocks"]]
    assert not plan.stop


def test_same_update_changes_nothing() -> None:
    live = running(diff(workers(THESIS), []))
    plan = diff(workers(THESIS), live)
    assert plan.empty
    assert len(plan.keep) == 4


def test_shared_blocks_run_on_untouched() -> None:
    live = running(diff(workers(THESIS), []))
    shared = ["block1", "block2", "block3"]
    plan = diff(workers({"blocks": [*shared, "other_head"], "tasks": {}}), live)
    assert [s.replica for s in plan.start] == ["other_head#0"]
    assert [r.replica for r in plan.stop] == ["block4_class#0"]
    assert {r.incarnation for r in plan.keep} == {1, 2, 3}


def test_changed_block_is_replaced_side_by_side() -> None:
    live = running(diff(workers(THESIS), []))
    changed = {**THESIS, "blocks": [{"name": "block1", "threads": 2}, *THESIS["blocks"][1:]]}
    plan = diff(workers(changed), live)
    assert [s.replica for s in plan.start] == ["block1#1"]
    assert [r.replica for r in plan.stop] == ["block1#0"]


def test_replicas_grow_and_shrink() -> None:
    one = {"blocks": ["block1"], "tasks": {}}
    three = {"blocks": [{"name": "block1", "replicas": 3}], "tasks": {}}
    live = running(diff(workers(one), []))
    grown = diff(workers(three), live)
    assert [s.replica for s in grown.start] == ["block1#1", "block1#2"]
    shrunk = diff(workers(one), running(grown, first=2))
    assert [r.replica for r in shrunk.stop] == ["block1#1", "block1#2"]
    assert not shrunk.start


def test_policy_changes_without_a_restart() -> None:
    live = running(diff(workers(THESIS), []))
    batching = {"policy": "window", "max_rows": 8}
    first = {"name": "block1", "batching": batching}
    changed = {**THESIS, "blocks": [first, *THESIS["blocks"][1:]]}
    plan = diff(workers(changed), live)
    assert not plan.start
    assert not plan.stop
    (change,) = plan.policies
    assert (change.block, change.policy["policy"]) == ("block1", "window")


def test_blocks_of_one_worker() -> None:
    data = {
        "blocks": [
            {"name": "block1", "worker": "w"},
            {"name": "block2", "worker": "w"},
            "block3",
        ],
        "tasks": {},
    }
    spec = workers(data)
    assert {w.name: w.blocks for w in spec} == {"w": ("block1", "block2"), "block3": ("block3",)}
    assert spec[0].slots == 32


def test_threads_and_cores_are_explicit_and_checked() -> None:
    assert all(w.threads == 1 and w.cores == CORES for w in workers(THESIS))
    for option in ({"threads": 3}, {"cores": [7]}):
        with pytest.raises(TopologyError) as caught:
            workers({"blocks": [{"name": "block1", **option}], "tasks": {}})
        (problem,) = caught.value.problems
        assert problem.path == f"$.blocks[0].{next(iter(option))}"


def test_arena_holds_two_full_batches() -> None:
    (spec,) = workers({"blocks": [{"name": "block1", "max_rows": 4096}], "tasks": {}})
    assert spec.arena_bytes >= 2 * 4096 * 4 * 4 * 4 * 4
    (small,) = workers({"blocks": ["block4_class"], "tasks": {}})
    assert MIB <= small.arena_bytes < 2 * MIB
    (asked,) = workers({"blocks": [{"name": "block1", "arena_mib": 3}], "tasks": {}})
    assert 3 * MIB <= asked.arena_bytes < 4 * MIB


def test_identity_ignores_what_can_change_in_place() -> None:
    def identity(option: dict[str, Any]) -> str:
        return workers({"blocks": [{"name": "block1", **option}], "tasks": {}})[0].identity()

    base = identity({})
    assert identity({"replicas": 2}) == base
    assert identity({"batching": "window"}) == base
    assert identity({"threads": 2}) != base
    assert identity({"mode": "zeromq"}) != base

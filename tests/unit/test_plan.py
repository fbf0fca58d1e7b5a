"""Placement and plans: what starts, what stays, what stops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blockflow.core import limits
from blockflow.core.cores import Cores
from blockflow.core.errors import TopologyError
from blockflow.core.fitting import MIB
from blockflow.core.model import ROWS, BlockInfo, Contract, TensorSpec
from blockflow.core.placement import (
    SOFT_ARENA_BYTES,
    WorkerSpec,
    desired_workers,
    oversubscription,
    plan_workers,
)
from blockflow.core.plan import Plan, Running, diff
from blockflow.core.topology import parse_topology
from tests.unit.test_topology import THESIS, lookup

CORES = (0, 1)


def workers(data: dict[str, Any]) -> tuple[WorkerSpec, ...]:
    return desired_workers(parse_topology(data, lookup, cores=CORES), CORES)


def running(plan: Plan, first: int = 1) -> list[Running]:
    """What runs after ``plan`` was carried out."""
    new = [
        Running(s.replica, first + i, s.spec.identity(), s.spec.policies())
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
    for part in ("start", "stop", "policies"):
        assert not replace(plan, **{part: ("one",)}).empty


def test_shared_blocks_run_on_untouched() -> None:
    live = running(diff(workers(THESIS), []))
    shared = ["block1", "block2", "block3"]
    plan = diff(workers({"blocks": [*shared, "other_head"], "tasks": {}}), live)
    assert [s.replica for s in plan.start] == ["other_head#0"]
    assert [r.replica for r in plan.stop] == ["block4_class#0"]
    assert {r.incarnation for r in plan.keep} == {1, 2, 3}


def test_changed_block_is_replaced_side_by_side() -> None:
    live = running(diff(workers(THESIS), []))
    changed = {**THESIS, "blocks": [{"name": "block1", "slots": 4}, *THESIS["blocks"][1:]]}
    plan = diff(workers(changed), live)
    assert [s.replica for s in plan.start] == ["block1#1"]
    assert [r.replica for r in plan.stop] == ["block1#0"]


def test_replicas_grow_and_shrink() -> None:
    one = {"blocks": ["block1"], "tasks": {}}
    three = {"blocks": [{"name": "block1", "replicas": 3}], "tasks": {}}
    live = running(diff(workers(one), []))
    grown = diff(workers(three), live)
    assert [s.replica for s in grown.start] == ["block1#1", "block1#2"]
    all_three = running(grown, first=2)
    for live in (all_three, all_three[::-1]):
        shrunk = diff(workers(one), live)
        assert [r.replica for r in shrunk.keep] == ["block1#0"], "the last ones go, as they stand"
        assert len(shrunk.stop) == 2 and not shrunk.start
    down = [replace(all_three[0], down=True), *all_three[1:]]
    assert [r.replica for r in diff(workers(one), down).keep] == ["block1#1"]


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
    assert not plan.empty


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


def test_threads_and_cores_are_checked() -> None:
    assert all(w.threads is None and w.cores == CORES for w in workers(THESIS))
    for option in ({"threads": 3}, {"cores": [7]}):
        with pytest.raises(TopologyError) as caught:
            workers({"blocks": [{"name": "block1", **option}], "tasks": {}})
        (problem,) = caught.value.problems
        assert problem.path == f"$.blocks[0].{next(iter(option))}"


def crowded(*blocks: Any, **more: Any) -> tuple[str, str]:
    """(JSON path, message) of the one problem."""
    with pytest.raises(TopologyError) as caught:
        workers({"blocks": list(blocks), "tasks": {}, **more})
    (problem,) = caught.value.problems
    return problem.path, problem.message


def test_threads_that_find_no_core_are_a_problem() -> None:
    two = {"name": "block2", "threads": 2}
    path, message = crowded("block1", two)
    assert path == "$.blocks[1].threads"
    assert "2 threads x 1 of 'block2': 3 threads may compute at once on 2 cores" in message
    assert crowded({"name": "block1", "threads": 2, "replicas": 2})[0] == "$.blocks[0].threads"
    # One thread each is never a problem, and alone two are none.
    workers({"blocks": [{"name": b, "threads": 1} for b in THESIS["blocks"]], "tasks": {}})
    workers({"blocks": [two], "tasks": {}})


def test_of_many_who_lack_cores_a_few_are_named() -> None:
    """Each of them has a finding of its own, and the text is in every one."""
    two = [{"name": b, "threads": 2, "replicas": 2} for b in THESIS["blocks"]]
    found = workers({"blocks": two, "tasks": {}, "oversubscribe": True})
    many = [replace(found[0], name=f"w{n}") for n in range(1000)]
    text = oversubscription(many, plan_workers(many, CORES), CORES)
    assert text.endswith("asked for by w0, w1, w2, w3, w4, w5, w6, w7, and 992 more")


def test_oversubscription_is_taken_when_it_is_meant() -> None:
    body = {"blocks": ["block1", {"name": "block2", "threads": 2}], "oversubscribe": True}
    found = workers({**body, "tasks": {}})
    plan = plan_workers(found, CORES)
    assert plan.threads == (1, 2)
    text = oversubscription(found, plan, CORES)
    assert text == "3 threads may compute at once on 2 cores; asked for by block2"
    assert oversubscription(found[:1], plan_workers(found[:1], CORES), CORES) == ""
    body["blocks"] = ["block1", {"name": "block2", "threads": 2, "replicas": 2}]
    found = workers({**body, "tasks": {}})
    text = oversubscription(found, plan_workers(found, CORES), CORES)
    assert text.startswith("5 threads may compute")
    # More than a worker has cores is no use to anybody.
    three = {"name": "block1", "threads": 3}
    assert crowded(three, oversubscribe=True)[0] == "$.blocks[0].threads"


def test_threads_are_planned_over_all_workers() -> None:
    assert plan_workers(workers({"blocks": ["block1"], "tasks": {}}), CORES).threads == (2,)
    assert plan_workers(workers(THESIS), CORES).threads == (1, 1, 1, 1)
    fused = [{"name": b, "worker": "w"} for b in THESIS["blocks"]]
    assert plan_workers(workers({"blocks": fused, "tasks": {}}), CORES).threads == (2,)
    on_gpu = {"name": "block1", "device": "cuda:0"}
    assert plan_workers(workers({"blocks": [on_gpu], "tasks": {}}), CORES).threads == (1,)


def test_no_more_threads_are_planned_than_a_control_group_gives_time_for() -> None:
    """Whatever cores there are to run on, all of which every worker may use."""
    body = {"blocks": ["block1", "block2"], "tasks": {}}
    topology = parse_topology(body, lookup)
    cores = Cores(range(64), quota=5.5)
    found = desired_workers(topology, cores)
    assert plan_workers(found, cores).threads == (3, 2)
    assert all(w.cores == tuple(range(64)) for w in found)
    assert plan_workers(found, Cores(range(64), quota=0.5)).threads == (1, 1)
    assert plan_workers(found, Cores(range(64))).threads == (32, 32)

    body = {"blocks": ["block1", {"name": "block2", "threads": 5}], "tasks": {}}
    with pytest.raises(TopologyError) as e:
        desired_workers(parse_topology(body, lookup), cores)
    (problem,) = e.value.problems
    assert problem.path == "$.blocks[1].threads"
    assert "6 threads may compute at once on 5 cores (of 64, the control group's" in problem.message
    meant = parse_topology({**body, "oversubscribe": True}, lookup)
    assert plan_workers(desired_workers(meant, cores), cores).oversubscribed


def test_measured_costs_steer_the_plan_and_nothing_else() -> None:
    topology = parse_topology({"blocks": ["block1", "block2"], "tasks": {}}, lookup)
    known = replace(topology, costs={"block1": 1.0, "block2": 9.0})
    found = desired_workers(known, range(4))
    assert plan_workers(found, range(4)).threads == (1, 3)
    bare = desired_workers(topology, range(4))
    assert plan_workers(bare, range(4)).threads == (2, 2)
    assert [w.identity() for w in found] == [w.identity() for w in bare]
    fused = [{"name": b, "worker": "w"} for b in ("block1", "block2")]
    both = parse_topology({"blocks": fused, "tasks": {}}, lookup)
    assert desired_workers(replace(both, costs=known.costs), CORES)[0].cost_ms == 10.0
    assert desired_workers(replace(both, costs={"block1": 1.0}), CORES)[0].cost_ms is None


def test_arena_holds_two_full_batches() -> None:
    (spec,) = workers({"blocks": [{"name": "block1", "max_rows": 4096}], "tasks": {}})
    assert spec.arena_bytes >= 2 * 4096 * 4 * 4 * 4 * 4
    (small,) = workers({"blocks": ["block4_class"], "tasks": {}})
    assert MIB <= small.arena_bytes < 2 * MIB
    (asked,) = workers({"blocks": [{"name": "block1", "arena_mib": 3}], "tasks": {}})
    assert 3 * MIB <= asked.arena_bytes < 4 * MIB
    shared = [{"name": f"block{n}", "worker": "w", "arena_mib": 2 * n + 1} for n in (1, 2)]
    (most,) = workers({"blocks": shared, "tasks": {}})
    assert 5 * MIB <= most.arena_bytes < 6 * MIB
    assert (most.demand().replicas, most.demand(3).replicas) == (1, 3)


def test_a_device_takes_its_arena_whole_and_nobody_takes_more_than_is_usual() -> None:
    block = {"name": "block1", "max_rows": 4096}  # an output is 1 MiB
    (host,), (device,), (many,) = (
        workers({"blocks": [{**block, **more}], "tasks": {}})
        for more in ({}, {"device": "cuda:0"}, {"slots": 1024})
    )
    assert 31 * MIB <= host.arena_bytes < 32 * MIB  # 16 slots, and the gaps between them
    assert 16 * MIB <= device.arena_bytes < 17 * MIB
    assert SOFT_ARENA_BYTES <= many.arena_bytes < SOFT_ARENA_BYTES + 9 * MIB


def test_what_a_worker_asks_of_the_cores() -> None:
    pair = [{"name": b, "worker": "w", "cores": [1], "lanes": 2} for b in ("block1", "block2")]
    (spec,) = found = workers({"blocks": pair, "tasks": {}, "oversubscribe": True})
    assert (spec.cores, spec.demand().cores) == ((1,), (1,))
    assert plan_workers(found, CORES).lanes == (2,)
    for device, overlap in (("cpu", 2), ("cuda:0", 1)):
        blocks = [{"name": b, "worker": "w", "device": device} for b in ("block1", "block2")]
        topology = parse_topology({"blocks": blocks, "tasks": {}}, lookup)
        for first, second, most in ((2, 2, 2), (9, 2, 2), (2, 1, 1), (1, 1, 1)):
            wishes = replace(topology, overlap={"block1": first, "block2": second})
            asked = [s.demand().overlap for s in desired_workers(wishes, CORES)]
            assert asked == [min(most, overlap)]  # no more than blocks that want some
        assert [s.demand().overlap for s in desired_workers(topology, CORES)] == [1]


def test_identity_ignores_what_can_change_in_place() -> None:
    def identity(option: dict[str, Any]) -> str:
        return workers({"blocks": [{"name": "block1", **option}], "tasks": {}})[0].identity()

    base = identity({})
    assert identity({"replicas": 2}) == base
    assert identity({"batching": "window"}) == base
    assert identity({"threads": 2}) == base
    assert identity({"slots": 2}) != base
    assert identity({"mode": "zeromq"}) != base


def test_an_arena_for_outputs_that_nothing_bounds_is_as_large_as_may_be() -> None:
    def worker(*ranges: dict[str, tuple[int, int]]) -> WorkerSpec:
        given = [TensorSpec("float32", ("rows", "length"), r) for r in ranges]
        stored = [replace(lookup("block1"), contract=Contract(g, g)) for g in given]
        blocks = [{"name": f"b{n}", "worker": "w"} for n in range(len(ranges))]
        body = {"blocks": blocks, "tasks": {}}
        (spec,) = desired_workers(parse_topology(body, lambda n: stored[int(n[1:])]), CORES)
        return spec

    assert worker({}).arena_bytes >= SOFT_ARENA_BYTES
    assert worker({"length": (1, 16)}).arena_bytes < 2 * MIB
    assert worker({"length": (1, 16)}, {}).arena_bytes >= SOFT_ARENA_BYTES  # one is enough


@pytest.mark.parametrize("side", ["input", "output"])
def test_rows_that_no_message_may_bring_are_a_problem(side: str) -> None:
    """They passed every check, and the launch ended with an OverflowError."""
    vast = TensorSpec("float32", ("rows", 2**31 - 1, 2**31 - 1))
    sides = {"input": lookup("block1").contract.input, "output": TensorSpec("float32", ("rows", 4))}
    stored = replace(lookup("block1"), contract=Contract(**{**sides, side: vast}))
    body = {"blocks": ["block1", "b"], "tasks": {}}

    def known(artifact: str) -> BlockInfo:
        return stored if artifact == "b" else lookup(artifact)

    with pytest.raises(TopologyError) as caught:
        parse_topology(body, known, cores=CORES)
    (problem,) = caught.value.problems
    assert problem.path == "$.blocks[1]" and problem.message.startswith(f"one row of the {side}")
    parse_topology(body, known)  # what was accepted before is not judged again


def test_a_range_that_allows_for_more_than_a_message_may_bring() -> None:
    """Its smaller rows do; the arena is for those."""
    wide = TensorSpec("float32", ("rows", "length"), {"length": (1, 2**31 - 1)})
    stored = replace(lookup("block1"), contract=Contract(wide, wide))
    topology = parse_topology({"blocks": ["b"], "tasks": {}}, lambda _: stored, cores=CORES)
    (spec,) = desired_workers(topology, CORES)
    assert 3 * limits.MAX_MESSAGE_BYTES <= spec.arena_bytes < 4 * limits.MAX_MESSAGE_BYTES
    edge = TensorSpec("uint8", ("rows", limits.MAX_MESSAGE_BYTES))
    just = replace(lookup("block1"), contract=Contract(edge, edge))
    parse_topology({"blocks": ["b"], "tasks": {}}, lambda _: just, cores=CORES)


def test_an_arena_that_cannot_hold_a_full_output_is_a_problem() -> None:
    wide = {"name": "block1", "max_rows": 4096, "arena_mib": 1}
    with pytest.raises(TopologyError) as caught:
        workers({"blocks": [wide], "tasks": {}})
    (problem,) = caught.value.problems
    assert problem.path == "$.blocks[0].arena_mib" and "give 3 at least" in problem.hint
    workers({"blocks": [{**wide, "arena_mib": 3}], "tasks": {}})


def test_a_task_promises_no_more_rows_than_its_blocks_take() -> None:
    def problem_of(blocks: list[Any], **more: Any) -> tuple[str, str]:
        body = {"blocks": blocks, "tasks": {"a.b": {"path": ["block1", "block2"], **more}}}
        with pytest.raises(TopologyError) as caught:
            workers({**body, "limits": {"max_rows": 32}})
        (problem,) = caught.value.problems
        return problem.path, problem.message

    wide = [{"name": b, "max_rows": 64} for b in ("block1", "block2")]
    for other in (wide[0], {"name": "block1", "max_rows": 48}):  # the narrowest is named
        path, message = problem_of([other, "block2"], max_rows=64)
        assert path == "$.tasks['a.b'].max_rows"
        assert message == "64 rows, but block 'block2' takes 32"
    canary = {"path": ["block3"], "share": 0.5}
    body = {"blocks": [*wide, "block3"], "tasks": {"t": {"path": ["block1"], "max_rows": 64}}}
    workers(body)
    with pytest.raises(TopologyError, match="block 'block3' takes 32"):
        workers({**body, "tasks": {"t": {**body["tasks"]["t"], "canary": canary}}})


def test_a_block_has_no_more_rows_than_it_was_exported_for() -> None:
    def few(name: str) -> BlockInfo:
        info = lookup(name)
        rows = {ROWS: (1, 25)} if name == "block2" else {}
        return replace(info, contract=replace(
            info.contract, input=replace(info.contract.input, ranges=rows)))  # fmt: skip

    wide = {"blocks": ["block1", "block2"], "limits": {"max_rows": 64}}
    topology = parse_topology({**wide, "tasks": {"t": ["block1", "block2"]}}, few, cores=CORES)
    assert [topology.rows_of(b) for b in topology.blocks] == [64, 25]
    assert topology.task_rows("t") == 25
    task = {"path": ["block1", "block2"], "max_rows": 26}
    blocks = ["block1", {"name": "block2", "max_rows": 26}]
    with pytest.raises(TopologyError) as caught:
        parse_topology({**wide, "blocks": blocks, "tasks": {"t": task}}, few, cores=CORES)
    asked, promised = caught.value.problems
    assert (asked.path, promised.path) == ("$.blocks[1].max_rows", "$.tasks.t.max_rows")
    assert "exported for 25 at most" in asked.message and "takes 25" in promised.message


def test_cores_and_threads_are_told_with_all_else() -> None:
    body = {"blocks": [{"name": "nowhere", "cores": [7]}, {"name": "block1", "threads": 3}, 7],
            "tasks": {"t": ["x"]}}  # fmt: skip
    with pytest.raises(TopologyError) as caught:
        parse_topology(body, lookup, cores=CORES)
    assert [p.path for p in caught.value.problems] == [
        "$.blocks[2]", "$.blocks[0].cores", "$.blocks[1].threads", "$.blocks[0]", "$.tasks.t[0]",
    ]  # fmt: skip


def test_slots_that_a_worker_has_for_sure() -> None:
    def full_slots(**options: Any) -> int:
        (spec,) = workers({"blocks": [{"name": "block1", **options}], "tasks": {}})
        return spec.full_slots

    assert full_slots() == 16
    assert full_slots(slots=1) == 2, "one of them for what goes back on opposed paths"
    # A row is 256 bytes, an output of 4096 rows 1 MiB. Each that is out may have a gap beside it.
    assert full_slots(max_rows=4096, arena_mib=3) == 2
    assert full_slots(max_rows=2048, arena_mib=3) == 3
    assert full_slots(max_rows=4096) == 16, "memory of the host is taken as it is needed"


def test_a_workers_blocks_stand_in_the_order_of_the_paths() -> None:
    listed = [{"name": b, "worker": "w"} for b in ("block3", "block1", "block2")]
    (spec,) = workers({"blocks": listed, "tasks": {"t": ["block1", "block2", "block3"]}})
    assert spec.blocks == ("block1", "block2", "block3")
    (spec,) = workers({"blocks": listed, "tasks": {}})
    assert spec.blocks == ("block3", "block1", "block2")

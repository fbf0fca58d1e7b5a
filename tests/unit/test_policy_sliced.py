"""Several blocks as one stage: what the policy decides at the boundaries, and never within."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_rig import MS, TinyWorker, Walk, facts_for, profile, query

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import Policy, Query, Run
from blockflow.batching.registry import create_policy, policy_problems
from blockflow.batching.sliced import SlicedPolicy, merged, slicing_problems
from blockflow.core.errors import TopologyError
from blockflow.core.profile import Point, StageProfile

PATH = "$.blocks[0].batching"
OPTIONS: Sequence[Mapping[str, Any]] = (
    {"policy": "lbci", "t_opt_ms": 90},
    {"policy": "dvabatch", "join": "always"},
    {"policy": "dvabatch", "policies": ["load", "input", "operator"], "classes": [4, 8, 64]},
    {"policy": "dvabatch", "buffer_pairs": 1, "policies": ["operator"]},
)
IDS = ["lbci", "load", "all", "operator"]


def make(spec: Mapping[str, Any], sizes: Sequence[int]) -> Policy:
    stages = range(1, sum(sizes) + 1)
    policy = create_policy({**spec, "stages": list(sizes)}, stages, facts_for(stages))
    assert isinstance(policy, SlicedPolicy)
    return policy


def test_newcomers_wait_for_the_end_of_a_stage() -> None:
    """Blocks 1, 2 | 3: who comes while block 1 runs may not join before block 2, but before 3."""
    worker = TinyWorker(make({"policy": "dvabatch", "join": "always"}, [2, 1]), {})
    worker.enter(1, Walk((1, 2, 3)), 1, 4, 0, 10**12, 0)
    assert worker.decide(0) == Run(1, (1,))
    worker.enter(2, Walk((1, 2, 3)), 1, 4, 0, 10**12, MS)
    worker.finish(0, 2 * MS, fail=False)
    assert worker.decide(2 * MS) == Run(2, (1,))
    worker.finish(0, 4 * MS, fail=False)
    for run in (Run(1, (2,)), Run(2, (2,)), Run(3, (1, 2))):  # catches up, then all together
        assert worker.decide(4 * MS) == run
        worker.finish(0, 4 * MS, fail=False)
    assert worker.left == {1, 2}


def test_a_batch_is_split_at_the_end_of_a_stage_only() -> None:
    """Halves are as fast behind block 1 already; they part behind block 2."""
    linear = {b: 2.0 * b for b in (1, 2, 4, 8)}
    facts = facts_for((1, 2, 3), linear)
    facts[1] = replace(facts[1], profile=profile({1: 9.0, 2: 9.0, 4: 9.0, 8: 9.0}))
    spec = {"policy": "dvabatch", "policies": ["operator"], "stages": [2, 1]}
    worker = TinyWorker(create_policy(spec, (1, 2, 3), facts), {})
    for key in range(4):
        worker.enter(key, Walk((1, 2, 3)), 1, 4, 0, 10**12, 0)
    ran = []
    while isinstance(run := worker.decide(0), Run):
        ran.append(run)
        worker.finish(0, 0, fail=False)
    assert [(r.stage, len(r.keys)) for r in ran] == [(1, 4), (2, 4), (3, 1), (3, 1), (3, 1), (3, 1)]


def test_a_stage_runs_one_batch_at_a_time_in_all_of_its_blocks() -> None:
    """Two lanes: the next batch begins when the one before is through with all of the stage."""
    worker = TinyWorker(make({"policy": "dvabatch", "policies": ["input"]}, [2, 1]), {}, lanes=2)
    worker.enter(1, Walk((1, 2, 3)), 1, 4, 0, 10**12, 0)
    assert worker.decide(0) == Run(1, (1,))
    worker.finish(0, MS, fail=False)
    worker.enter(2, Walk((1, 2, 3)), 1, 4, 0, 10**12, MS)
    assert worker.decide(MS) == Run(2, (1,))
    assert worker.decide(MS) is None  # block 1 is free, its stage is not
    worker.finish(0, 2 * MS, fail=False)
    assert {worker.decide(2 * MS), worker.decide(2 * MS)} == {Run(1, (2,)), Run(3, (1,))}


def test_what_waits_within_a_stage_and_came_with_no_batch_goes_on_alone() -> None:
    policy = make({"policy": "dvabatch"}, [3, 1])
    for key in (1, 2):  # handed over from another policy, both before block 2
        policy.arrive(Query(key, 2, 1, 0, 0, 10**12, (4,), first=False), 0)
    policy.arrive(query(3, 0), 0)
    worker = TinyWorker(policy, {k: Walk((1, 2, 3, 4)) for k in (1, 2, 3)})
    assert [q.key for q in policy.waiting()] == [1, 2, 3]
    assert worker.decide(0) == Run(2, (1,))
    worker.finish(0, 0, fail=False)
    assert worker.decide(0) == Run(3, (1,))
    worker.run_out(0)
    assert worker.left == {1, 2, 3}


def test_who_skips_the_end_of_a_stage_stays_with_its_batch() -> None:
    policy = make({"policy": "dvabatch"}, [2, 1])
    assert isinstance(policy, SlicedPolicy)
    worker = TinyWorker(policy, {})
    for key, walk in ((1, Walk((1, 2, 3))), (2, Walk((1, 3)))):
        worker.enter(key, walk, 1, 4, 0, 10**12, 0)
    for run in (Run(1, (1, 2)), Run(2, (1,)), Run(3, (1, 2))):
        decided = worker.decide(0)
        assert isinstance(decided, Run)
        assert (decided.stage, set(decided.keys)) == (run.stage, set(run.keys))
        worker.finish(0, 0, fail=False)
    assert worker.left == {1, 2}
    worker.decide(0)
    assert not policy._trip_of and not policy._trips


def test_the_policy_knows_the_lanes() -> None:
    policy = make({"policy": "dvabatch"}, [2, 1])
    assert isinstance(policy, SlicedPolicy)
    policy.lanes = 3
    policy.decide(0)
    assert policy._policy.lanes == 3


def test_a_stage_pads_if_all_of_it_does_and_scatters_like_the_worst_of_it() -> None:
    one, two = facts_for((1, 2)).values()
    for pads in ((True, True), (True, False), (False, True)):
        both = merged([replace(f, pads=p) for f, p in zip((one, two), pads, strict=True)])
        assert both.pads == all(pads)
    restless = replace(two, profile=profile({1: 2.0, 8: 9.0}, spread=0.25))
    for members in ([one, restless], [restless, one]):
        found = merged(members).profile
        assert found is not None and found.r_max(1) == 0.25


def test_the_policy_sees_the_sum_of_a_stage() -> None:
    one, two = facts_for((1, 2)).values()
    both = merged([replace(one, max_rows=4), replace(two, exported_rows=63)])
    assert both.exported_rows == 63
    assert both.profile is not None and both.max_rows == 4
    assert [both.profile.ms(b) for b in (1, 3, 8)] == [4.0, 8.0, 18.0]
    assert merged([one]) is one
    assert merged([one, replace(two, profile=None)]).profile is None


def test_stages_of_variable_length_have_a_sum_for_each_length() -> None:
    def long(scale: float) -> StageProfile:
        cells = [
            Point(1, b, n, 9, t, t, t, t, t, t, 0.1, 0)
            for n in (8, 16)
            for b in (1, 4)
            for t in [scale * b * n]
        ]
        return StageProfile("b", "0" * 64, "echo", "fp32", "here", tuple(cells))

    facts = [StageFacts("a", 4, 1, long(1.0), (0,), (1, 16), True)]
    facts += [StageFacts("b", 4, 1, long(0.5), (0,), (1, 16), True)]
    facts += [StageFacts("c", 4, 1, profile({1: 1.0, 4: 4.0}))]  # of fixed dims
    whole = merged(facts)
    assert whole.profile is not None
    assert whole.profile.ms(4, 1, 8) == 1.5 * 32 + 4.0
    assert whole.profile.ms(2, 1, 12) == pytest.approx(1.5 * 24 + 2.0)
    assert whole.profile.r_max() == 0.1


# --- what is refused ------------------------------------------------------------------------------

CHAIN = {"t": [["a", "b", "c", "out"]], "early": [["in", "a", "b"]], "other": [["out"]]}


def test_a_slicing_that_fits() -> None:
    for stages in ([3], [1, 2], [1, 1, 1], "auto"):
        spec = {"policy": "dvabatch", "stages": stages}
        assert policy_problems(spec, PATH) == []
        assert slicing_problems(spec, ["a", "b", "c"], CHAIN, PATH) == []
    assert slicing_problems({"policy": "dvabatch"}, ["c", "a"], CHAIN, PATH) == []


@pytest.mark.parametrize("stages", [[], [2, 0], [-1], "even", [1.5], 3, [True], {"auto": [1]}])
def test_a_slicing_that_is_none(stages: Any) -> None:
    (problem,) = policy_problems({"policy": "lbci", "t_opt_ms": 9, "stages": stages}, PATH)
    assert problem.path == f"{PATH}.stages" and "a list of integers" in problem.message


@pytest.mark.parametrize("policy", ["none", "window"])
def test_a_policy_that_looks_at_one_block_has_no_stages(policy: str) -> None:
    (problem,) = policy_problems({"policy": policy, "stages": [1]}, PATH)
    assert problem.path == f"{PATH}.stages" and "has no option 'stages'" in problem.message


def test_a_list_that_does_not_add_up() -> None:
    (problem,) = slicing_problems({"stages": [2, 2]}, ["a", "b", "c"], CHAIN, PATH)
    assert problem.path == f"{PATH}.stages"
    assert "slices 4 blocks, the worker has 3" in problem.message


@pytest.mark.parametrize(
    "way",
    [["b", "c"], ["a", "c"], ["a", "x", "b"], ["b", "a"]],
    ids=["begins later", "leaves one out", "leaves the worker", "another order"],
)
def test_blocks_that_are_no_chain(way: list[str]) -> None:
    tasks = {**CHAIN, "bad": [["a", "b"], way]}
    for stages in ("auto", [2, 1]):
        (problem,) = slicing_problems({"stages": stages}, ["a", "b", "c"], tasks, PATH)
        assert problem.path == f"{PATH}.stages" and "'bad'" in problem.message
        assert "need a chain" in problem.message


def test_a_tree_is_no_chain() -> None:
    tasks = {"one": [["trunk", "left"]], "two": [["trunk", "right"]]}
    (problem,) = slicing_problems({"stages": "auto"}, ["trunk", "left", "right"], tasks, PATH)
    assert "task 'two' runs trunk, right" in problem.message


def test_auto_has_to_be_replaced_before_it_runs() -> None:
    with pytest.raises(TopologyError, match="not yet replaced by numbers"):
        create_policy({"policy": "dvabatch", "stages": "auto"}, (1, 2), facts_for((1, 2)))


def test_a_slicing_of_more_blocks_is_put_aside_while_a_policy_arrives_block_by_block() -> None:
    spec = {"policy": "dvabatch", "stages": [2, 1]}
    assert not isinstance(create_policy(spec, (1, 2), facts_for((1, 2))), SlicedPolicy)


# --- any course of events ------------------------------------------------------------------------

WALKS = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (1, 2), (1, 2, 3, 4)]
ODD_WALKS = [*WALKS, (2, 3, 4), (1, 3, 5), (1, 4), (1, 2, (3, 4)), (1, (2, 5))]
EVENT = st.one_of(
    st.tuples(st.just("arrive"), st.tuples(st.integers(1, 4), st.integers(0, 8))),
    st.tuples(st.just("arrive"), st.tuples(st.integers(1, 4), st.integers(0, 8))),
    st.tuples(st.sampled_from(["decide", "decide", "done"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["fail", "drop", "change"]), st.integers(0, 30)),
)
SIZES = st.sampled_from([[5], [2, 3], [1, 4], [2, 2, 1], [3, 1, 1], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("spec", OPTIONS, ids=IDS)
@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(st.tuples(EVENT, st.integers(0, 9)), max_size=60),
    lanes=st.integers(1, 3),
    sizes=SIZES,
    odd=st.booleans(),
)
def test_any_course_of_events(
    spec: Mapping[str, Any],
    events: list[tuple[tuple[str, Any], int]],
    lanes: int,
    sizes: list[int],
    odd: bool,
) -> None:
    """Early exits, failures, drops, slicings changed in flight; and, when ``odd``, ways that are no
    chain, as those of requests under way when an update changes the tasks: every query leaves
    exactly once, and nothing is left lying."""
    worker = TinyWorker(make(spec, sizes), {}, lanes=lanes)
    walks = ODD_WALKS if odd else WALKS
    now = 0
    for key, ((what, arg), dt) in enumerate(events):
        now += dt * MS
        if what == "arrive":
            rows, way = arg
            end = now + (15 if way == 3 else 1000) * MS
            worker.enter(key, Walk(walks[way % len(walks)]), rows, 4 + 2 * (way % 2), 0, end, now)
        elif what == "decide":
            worker.decide(now)
        elif what in ("done", "fail"):
            worker.finish(arg, now, fail=what == "fail")
        elif what == "drop":
            worker.drop(arg, now)
        else:
            worker.change(make(OPTIONS[arg % len(OPTIONS)], [arg % 4 + 1, 4 - arg % 4]), now)
        worker.check()
    worker.run_out(now)
    assert not worker.waiting and not worker.running
    assert list(worker.policy.waiting()) == []


@pytest.mark.parametrize("spec", OPTIONS, ids=IDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_nothing_changes_within_a_stage(spec: Mapping[str, Any], data: st.DataObject) -> None:
    """What ran the first block of a stage runs the others, unless it has left or failed."""
    sizes = data.draw(SIZES)
    policy = make(spec, sizes)
    worker = TinyWorker(policy, {}, lanes=data.draw(st.integers(1, 2)))
    now = 0
    for key in range(data.draw(st.integers(1, 15))):
        now += data.draw(st.integers(0, 5)) * MS
        way = Walk(data.draw(st.sampled_from(WALKS)))
        worker.enter(key, way, data.draw(st.integers(1, 3)), 4, 0, now + 10**12, now)
        if data.draw(st.booleans()):
            worker.decide(now)
        if data.draw(st.booleans()):
            worker.finish(0, now, fail=False)
    worker.run_out(now)
    assert worker.left == set(worker.walks)
    assert isinstance(policy, SlicedPolicy)
    for members in policy.slices:
        mine = [run for _, run in worker.runs if run.stage in members]
        for before, run in pairwise(mine):
            if run.stage != members[0]:
                assert run.stage == before.stage + 1 and set(run.keys) <= set(before.keys)
                stayed = set(before.keys) - set(run.keys)
                assert all(before.stage == worker.walks[k].stages[-1] for k in stayed)

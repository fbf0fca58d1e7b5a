"""The registry's own errors, checks against profiles, and what `none` promises beyond the
contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from policy_rig import facts_for, profile

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import ELSEWHERE, Query, Run
from blockflow.batching.registry import (
    POLICIES,
    batch_rows,
    create_policy,
    largest_batch,
    policy_problems,
)
from blockflow.batching.shares import TaskShare
from blockflow.batching.ways import Ways
from blockflow.core.errors import TopologyError
from blockflow.core.measuring import Subject
from blockflow.core.specs import BlockSpec
from blockflow.core.topology import Topology

PATH = "$.blocks[0].batching"


@pytest.mark.parametrize("name", ["nope", "", None, 3, ["none"]])
def test_unknown_policy(name: object) -> None:
    (problem,) = policy_problems({"policy": name}, "$.b")
    assert problem.path == "$.b.policy" and "none" in problem.hint
    with pytest.raises(TopologyError) as err:
        create_policy({"policy": name}, (1,))
    assert err.value.code == "INVALID_TOPOLOGY" and err.value.problems


@pytest.mark.parametrize(
    ("spec", "option", "says"),
    [
        ({"policy": "window", "max_rows": 0}, "max_rows", "0 is not an integer from 1"),
        ({"policy": "window", "max_rows": True}, "max_rows", "True is not"),
        ({"policy": "window", "max_delay_ms": -1}, "max_delay_ms", "-1 is not a number from 0"),
        ({"policy": "window", "max_delay_ms": float("nan")}, "max_delay_ms", "nan is not"),
        ({"policy": "window", "max_delay_ms": float("inf")}, "max_delay_ms", "inf is not"),
        ({"policy": "window", "max_delay_ms": 10**400}, "max_delay_ms", "is not a number"),
        ({"policy": "window", "max_delay_ms": "5"}, "max_delay_ms", "'5' is not a number"),
        ({"policy": "window", "classes": [8, 8]}, "classes", "growing integers"),
        ({"policy": "window", "classes": []}, "classes", "growing integers"),
        ({"policy": "window", "classes": [0, 4]}, "classes", "growing integers"),
        ({"policy": "window", "max_row": 3}, "max_row", "no option 'max_row'"),
        ({"policy": "none", "max_rows": 3}, "max_rows", "no option 'max_rows'"),
        ({"policy": "lbci"}, "t_opt_ms", "needs 't_opt_ms'"),
        ({"policy": "lbci", "t_opt_ms": 0}, "t_opt_ms", "0 is not a number above 0"),
        ({"policy": "lbci", "t_opt_ms": 9, "join": "never"}, "join", "one of 'always', 'gain'"),
        ({"policy": "dvabatch", "policies": []}, "policies", "a list of"),
        ({"policy": "dvabatch", "policies": ["load", "load"]}, "policies", "a list of"),
        ({"policy": "dvabatch", "policies": "load"}, "policies", "a list of"),
        ({"policy": "dvabatch", "buffer_pairs": 0}, "buffer_pairs", "0 is not an integer"),
        ({"policy": "dvabatch", "window_ms": "stage2"}, "window_ms", "or one of 'stage1'"),
    ],
)
def test_wrong_options(spec: Mapping[str, Any], option: str, says: str) -> None:
    (problem,) = policy_problems(spec, PATH)
    assert problem.path == f"{PATH}.{option}" and says in problem.message


def test_all_findings_at_once_with_the_near_name() -> None:
    found = policy_problems({"policy": "window", "max_rowz": 3, "max_delay_ms": "x"}, PATH)
    assert [p.path for p in found] == [f"{PATH}.max_rowz", f"{PATH}.max_delay_ms"]
    assert "max_rows" in found[0].hint


@pytest.mark.parametrize(
    "spec",
    [
        {"policy": "lbci", "t_opt_ms": 50},
        {"policy": "dvabatch", "policies": ["operator"]},
        {"policy": "dvabatch", "window_ms": "stage1"},
        {"policy": "dvabatch", "join": "gain"},
    ],
    ids=str,
)
def test_a_missing_profile_names_the_command(spec: Mapping[str, Any]) -> None:
    assert policy_problems(spec, PATH) == [], "the options themselves are right"
    stages = [
        StageFacts("trunk1", 8),
        StageFacts("trunk2", 8, 2, profile({1: 5.0}, threads=1)),  # measured for other threads
        StageFacts("trunk3", 8, 1, profile({1: 5.0})),
    ]
    (problem,) = policy_problems(spec, PATH, stages)
    assert problem.path == PATH and "trunk1, trunk2" in problem.message
    assert problem.hint == "run: blockflow profile trunk1 trunk2"
    with pytest.raises(TopologyError, match="blockflow profile"):
        create_policy(spec, (1, 2))
    other = [StageFacts("trunk1", 8, 3, subject=Subject(("trunk1",), "onnx"))]
    (problem,) = policy_problems(spec, PATH, other)
    assert problem.hint == "run: blockflow profile trunk1 --engines onnx --threads 3"


def test_an_impossible_bound_is_named() -> None:
    stages = [StageFacts(f"b{i}", 8, 1, profile({1: 20.0, 2: 30.0}, spread=0.1)) for i in (1, 2)]
    (problem,) = policy_problems({"policy": "lbci", "t_opt_ms": 43}, PATH, stages)
    assert problem.path == f"{PATH}.t_opt_ms"
    assert "43 ms" in problem.message and "40 ms" in problem.message and "44" in problem.hint
    assert policy_problems({"policy": "lbci", "t_opt_ms": 45}, PATH, stages) == []


@pytest.mark.parametrize("ms", [0.0123449, 1.2349, 10.04, 99.94, 1004.0, 12344.0])
def test_the_bound_that_is_named_is_enough(ms: float) -> None:
    stages = [StageFacts("b", 8, 1, profile({1: ms, 2: 2 * ms}, spread=0.01))]
    (problem,) = policy_problems({"policy": "lbci", "t_opt_ms": 0.001}, PATH, stages)
    bound = float(problem.hint.removeprefix("at least "))
    assert bound < 1.03 * ms
    assert policy_problems({"policy": "lbci", "t_opt_ms": bound}, PATH, stages) == []


def test_a_bound_is_held_against_the_dearest_way_through_a_tree() -> None:
    """A trunk of 40 ms and eight heads of 10: each task takes 50, all blocks together 120."""
    heads = [f"head{i}" for i in range(8)]
    times = {"trunk": 40.0, **dict.fromkeys(heads, 10.0)}
    stages = [StageFacts(b, 8, 1, profile({1: ms, 8: ms})) for b, ms in times.items()]
    tasks = {h: [["trunk", h]] for h in heads}
    ways = Ways(tasks).through(list(times))
    assert ways == [(0, i) for i in range(1, 9)]
    assert policy_problems({"policy": "lbci", "t_opt_ms": 60}, PATH, stages, ways) == []
    (problem,) = policy_problems({"policy": "lbci", "t_opt_ms": 49}, PATH, stages, ways)
    assert "one sample takes 50 ms through trunk, head0" in problem.message
    assert problem.hint == "at least 50"
    spec = {"policy": "lbci", "t_opt_ms": 60}
    create_policy(spec, range(9), dict(enumerate(stages)))  # who makes it knows no ways
    with pytest.raises(TopologyError):
        create_policy({**spec, "t_opt_ms": 39}, range(9), dict(enumerate(stages)))


@pytest.mark.parametrize(
    ("spec", "option"),
    [
        ({"policy": "window", "max_rows": 13}, "max_rows"),
        ({"policy": "lbci", "t_opt_ms": 60, "n_max": 13}, "n_max"),
        ({"policy": "dvabatch", "bs_max": 13}, "bs_max"),
    ],
)
def test_more_rows_than_the_worker_is_laid_out_for(spec: Mapping[str, Any], option: str) -> None:
    spec = dict(spec)
    (problem,) = policy_problems(spec, PATH, list(facts_for((1,)).values()))
    assert problem.path == f"{PATH}.{option}" and "12 that" in problem.message
    assert problem.hint == "at most 12, or raise the block's max_rows"
    bound = [replace(facts, exported_rows=12) for facts in facts_for((1,)).values()]
    (problem,) = policy_problems(spec, PATH, bound)  # which no topology raises
    assert problem.message.startswith("13 rows are over the 12 that block")
    assert problem.hint == "at most 12, or export the block with --range rows=1..13"
    # Nothing is known of the stage: the policy's own bound stands.
    assert policy_problems(spec, PATH) == []
    narrow = [replace(facts, max_rows=1) for facts in facts_for((1,)).values()]
    del spec[option]
    assert policy_problems(spec, PATH, narrow) == [], "without the option there is no other bound"


def test_classes_need_a_variable_dim_that_may_be_padded() -> None:
    spec = {"policy": "window", "classes": [8, 32]}
    (stage,) = facts_for((1,)).values()
    for facts, says in (
        (replace(stage, length_dims=()), "no block here has a variable dim"),
        (replace(stage, pads=False), "does not promise"),
        (replace(stage, lengths=(33, 64)), "takes lengths from 33"),
    ):
        (problem,) = policy_problems(spec, PATH, [facts])
        assert problem.path == f"{PATH}.classes" and says in problem.message
    for classes in ([8, 64], [8, 32]):  # longer inputs than the last class are refused at the door
        assert policy_problems({"policy": "window", "classes": classes}, PATH, [stage]) == []
    assert policy_problems(spec, PATH, [replace(stage, lengths=(32, 64))]) == []
    fixed = replace(stage, length_dims=(), pads=False)  # beside it classes mean nothing
    assert policy_problems(spec, PATH, [fixed, stage]) == []
    (problem,) = policy_problems(spec, PATH, [fixed, replace(stage, pads=False)])
    assert "does not promise" in problem.message


def test_none_lets_what_is_under_way_leave_before_newcomers_start() -> None:
    policy = create_policy({}, (1, 2, 3))  # none is the default
    policy.arrive(Query(5, 1, 1, 50, 50, 10**12), 50)
    policy.arrive(Query(4, 1, 9, 40, 60, 10**12 + 1), 60)
    for key, stage, arrival in ((3, 2, 45), (2, 2, 30), (6, 3, 35), (7, 3, 20)):
        policy.arrive(Query(key, stage, 1, arrival, 60, 10**12, first=False), 60)
    assert [policy.decide(70) for _ in range(7)] == [
        Run(3, (7,)),
        Run(2, (2,)),
        Run(3, (6,)),
        Run(2, (3,)),
        Run(1, (5,)),
        Run(1, (4,)),
        None,
    ]


def test_none_gives_those_from_another_policys_block_their_turns() -> None:
    """They queue here whenever that policy has had the lane, so that age would be all that counts:
    no priority, and no weight."""
    shares = [TaskShare(), TaskShare(weight=3.0), TaskShare(priority=1)]
    policy = create_policy({}, (2, 3), shares=shares)
    for key in range(9):
        task = 2 if key == 8 else key // 4
        query = Query(key, 2, 1, key, 50, 10**12, first=False, task=task, origin=ELSEWHERE)
        policy.arrive(query, 50)
    assert policy.decide(60) == Run(2, (8,))
    policy.done(2, (8,), 70)
    policy.arrive(Query(8, 3, 1, 8, 70, 10**12, first=False, task=2), 70)
    assert policy.decide(70) == Run(3, (8,)), "what has begun here goes first"
    ran = [run.keys[0] // 4 for _ in range(4) if isinstance(run := policy.decide(80), Run)]
    assert sorted(ran) == [0, 1, 1, 1]


def test_none_keeps_who_has_gone_on_waiting_for_the_stage_where_he_is() -> None:
    policy = create_policy({}, (1, 2, 3))
    for stage in (1, 2):
        policy.arrive(Query(1, stage, 1, 0, stage, 10**12, first=stage == 1), stage)
        assert policy.decide(stage) == Run(stage, (1,))
    policy.arrive(Query(1, 3, 1, 0, 3, 10**12, first=False), 3)
    assert policy.decide(3, {3}) is None
    assert policy.decide(3) == Run(3, (1,))


def test_none_forgets_what_it_has_run() -> None:
    policy = create_policy({}, (1, 2))
    policy.arrive(Query(1, 1, 1, 0, 0, 10**12), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.arrive(Query(1, 2, 1, 0, 5, 10**12), 5)  # the same key again
    policy.drop(1, 6)
    assert policy.decide(7) is None
    policy.arrive(Query(1, 2, 1, 0, 8, 10**12), 8)
    assert policy.decide(9) == Run(2, (1,))
    assert policy.decide(9) is None


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        ({"policy": "none"}, 1),
        ({"policy": "window"}, 32),
        ({"policy": "window", "max_rows": 10}, 10),
        ({"policy": "dvabatch", "bs_max": 64}, 32),
        ({"policy": "lbci", "t_opt_ms": 10, "n_max": 4}, 4),
    ],
)
def test_the_largest_batch_of_a_policy(spec: dict[str, Any], rows: int) -> None:
    assert largest_batch(spec, 32) == rows


def test_the_largest_batch_of_a_task_is_that_of_any_block_on_its_ways() -> None:
    policies = {"a": "none", "b": {"policy": "window", "max_rows": 6}, "c": "window", "d": "window"}
    blocks = {n: BlockSpec.model_validate({"name": n, "batching": b}) for n, b in policies.items()}
    tasks = {"t": SimpleNamespace(paths=[["b", "a"], ["a", "c"]])}
    tasks["u"] = SimpleNamespace(paths=[["a"]])
    rows_of = {"a": 32, "b": 32, "c": 4, "d": 16}.__getitem__
    topology = SimpleNamespace(tasks=tasks, blocks=blocks, rows_of=rows_of)
    found = [batch_rows(cast(Topology, topology), task) for task in tasks]
    assert found == [6, 1]


@pytest.mark.parametrize(
    ("name", "options", "does"),
    [
        ("none", {}, set()),
        ("window", {}, set()),
        ("lbci", {"t_opt_ms": 9}, {"join"}),
        ("dvabatch", {}, {"join"}),
        ("dvabatch", {"buffer_pairs": 1}, set()),
        ("dvabatch", {"policies": ["input"]}, set()),
        ("dvabatch", {"policies": ["operator", "load"]}, {"join", "split"}),
        ("dvabatch", {"policies": ["operator"], "buffer_pairs": 1}, {"split"}),
    ],
)
def test_what_a_policy_may_do_between_two_stages(
    name: str, options: dict[str, Any], does: set[str]
) -> None:
    assert POLICIES[name].boundaries(options) == does
    assert policy_problems({"policy": name, **options}, PATH) == []

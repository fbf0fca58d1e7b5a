"""What policies share that let queries wait: their limits, and what their predictions say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from policy_rig import MS, facts_for, query

from blockflow.batching import costs, queueing
from blockflow.batching.lbci import LbciPolicy
from blockflow.batching.policy import ELSEWHERE, Run
from blockflow.batching.queueing import QueueingPolicy
from blockflow.batching.registry import create_policy
from blockflow.batching.shares import TaskShare
from blockflow.batching.window import WindowPolicy
from blockflow.core import limits
from blockflow.core.profile import Point, StageProfile

SPECS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"policy": "window"}, "max_rows"),
    ({"policy": "dvabatch"}, "bs_max"),
)
QUICK = {1: 10.0, 12: 10.0}


@pytest.mark.parametrize(("spec", "option"), SPECS)
def test_of_a_block_of_which_nothing_is_known_the_policys_own_bound_counts(
    spec: Mapping[str, Any], option: str
) -> None:
    most = limits.DEFAULT_MAX_ROWS + 8
    policy = create_policy({**spec, option: most}, (1,))
    for key in range(most + 1):
        policy.arrive(query(key, 0), 0)
    assert policy.decide(0) == Run(1, tuple(range(most)))


@pytest.mark.parametrize("spec", [spec for spec, _ in SPECS])
def test_a_narrow_block_is_no_bound_on_what_is_predicted_for_a_wide_one(
    spec: Mapping[str, Any],
) -> None:
    """Twelve rows take as long as one, and all of them leave after the wide block."""
    facts = facts_for((1, 2), QUICK)
    facts[2] = replace(facts[2], max_rows=1)
    policy = create_policy(spec, (1, 2), facts)
    for key in range(12):
        policy.arrive(query(key, 0, deadline_ms=15, ahead=()), 0)
    assert policy.decide(0) == Run(1, tuple(range(12)))


@pytest.mark.parametrize("spec", [spec for spec, _ in SPECS])
def test_lengths_count_where_another_block_has_fixed_dims(spec: Mapping[str, Any]) -> None:
    """A row of 8 takes 1 ms there, one of 64 eight times as long."""
    points = tuple(
        Point(1, rows, n, 5, *[rows * n / 8] * 6, 0.0, 0) for n in (8, 64) for rows in (1, 12)
    )
    facts = facts_for((1, 2), {1: 0.001, 12: 0.001})
    lengthy = StageProfile("enc", "0" * 64, "echo", "fp32", "here", points)
    facts[1] = replace(facts[1], profile=lengthy)
    facts[2] = replace(facts[2], length_dims=(), pads=False)
    policy = create_policy(spec, (1, 2), facts)
    for key in range(6):
        policy.arrive(query(key, 0, shape=(8,), deadline_ms=4 + 100 * key), 0)
    assert policy.decide(0) == Run(1, (0, 1, 2)), "four take 4 ms, and then the other block"


def test_who_was_under_way_when_the_policy_changed_has_not_arrived_again() -> None:
    policy = create_policy({"policy": "dvabatch"}, (1, 2), facts_for((1, 2)))
    assert isinstance(policy, QueueingPolicy)
    policy.arrive(query(1, 0), 5 * MS)
    for key, ms in ((2, 1), (3, 2)):
        policy.arrive(query(key, ms * MS, stage=2, first=False), 5 * MS)
    assert policy._arrivals.rate(5 * MS) == 0
    policy.arrive(query(4, 3 * MS, rows=2)._replace(first=False, origin=ELSEWHERE), 5 * MS)
    assert policy._arrivals.rate(4 * MS) == 2 / (4 * MS), "who comes from another policy has"


LANES = (*(spec for spec, _ in SPECS), {"policy": "lbci", "t_opt_ms": 900})


@pytest.mark.parametrize("spec", [{"policy": "none"}, *LANES], ids=str)
@pytest.mark.parametrize(("lanes", "first"), [(1, 1), (2, 3)])
def test_in_one_lane_who_is_under_way_goes_before_newcomers_of_any_priority(
    spec: Mapping[str, Any], lanes: int, first: int
) -> None:
    shares = [TaskShare(), TaskShare(priority=1)]
    policy = create_policy(spec, (1, 2), facts_for((1, 2)), shares)
    policy.lanes = lanes
    policy.arrive(query(1, 0), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.done(1, (1,), MS)
    policy.arrive(query(1, 0, stage=2, first=False), MS)
    policy.arrive(query(3, MS, stage=2, task=1), MS)
    for key in (first, 4 - first):
        assert policy.decide(MS) == Run(2, (key,))
        policy.done(2, (key,), MS)
    assert policy.decide(MS) is None


@pytest.mark.parametrize("spec", [{"policy": "none"}, *LANES], ids=str)
def test_nobody_begins_before_the_first_of_those_who_come_to_a_block(
    spec: Mapping[str, Any],
) -> None:
    """Though he would before the last of them."""
    policy = create_policy(spec, (1, 2), facts_for((1, 2)))
    policy.lanes = 2
    for key, shape in ((1, 4), (2, 5)):
        policy.arrive(query(key, 0, shape=(shape,), deadline_ms=100 * key), 0)
        assert policy.decide(0, {2}) == Run(1, (key,))
        policy.done(1, (key,), MS)
        ready = query(key, 0, stage=2, shape=(shape,), deadline_ms=100 * key, first=False)
        policy.arrive(ready, MS)
    policy.arrive(query(3, 0, stage=2, deadline_ms=150), MS)
    assert policy.decide(MS) == Run(2, (1,))


def test_who_comes_through_a_block_is_told_by_his_way() -> None:
    stages = (1, 2, 3, 4)
    policy = create_policy({"policy": "window"}, stages, facts_for(stages), [TaskShare()] * 2)
    assert isinstance(policy, QueueingPolicy)
    ways = [(1, (2, 3)), (1, (2,)), (3, (4,)), (1, ()), (2, (4,))]
    for key, (stage, ahead) in enumerate(ways):
        policy.arrive(query(key, 0, stage=stage, shape=(key,), ahead=ahead), 0)
    policy.arrive(query(9, 0, shape=(3,), task=1, ahead=(2, 3, 4)), 0)  # beside the one that leaves
    groups = list(policy._room.groups)

    def others(*stages: int) -> list[int]:
        return [shape for _, (shape,) in policy._not_through(stages, groups)]

    assert others(3) == [1, 2]
    assert others(3, 2) == [2]
    assert others(4) == [0, 1]
    assert others() == [0, 1, 2, 3, 4]


def test_nothing_is_padded_of_what_a_block_does_not_say_that_it_may_be() -> None:
    facts = {s: replace(f, pads=False) for s, f in facts_for((1,)).items()}
    policy = WindowPolicy((1,), {"classes": [64]}, facts)
    for key in (1, 2):
        policy.arrive(query(key, 0, shape=(key,)), 0)
    assert policy.decide(0) == Run(1, (1,))


@pytest.mark.parametrize("spec", LANES, ids=str)
def test_what_is_remembered_of_shapes_lengths_and_ways_has_a_bound(
    spec: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, bound in ((queueing, "_SHAPES_KEPT"), (costs, "_KEPT"), (limits, "MAX_BLOCKS")):
        monkeypatch.setattr(module, bound, 9)
    stages = tuple(range(1, 7))
    policy = create_policy(spec, stages, facts_for(stages))
    assert isinstance(policy, QueueingPolicy)
    made = policy._costs
    kept = [policy._known_groups, policy._known_routes, made._lines, made._parts, made._bounds]
    if isinstance(policy, LbciPolicy):
        kept.append(policy._known_n_opt)
    most = [0] * len(kept)
    for key in range(50):
        way = tuple(s for s in stages[1:] if key >> s & 1)
        policy.arrive(query(key, 0, shape=(1 + key,), ahead=way, deadline_ms=1 + key), 0)
        assert policy.decide(0) == Run(1, (key,))
        policy.done(1, (key,), 0)
        most = list(map(max, most, map(len, kept)))
    assert all(0 < known <= 9 for known in most)

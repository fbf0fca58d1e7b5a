"""What policies share that let queries wait: their limits, and what their predictions say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from policy_rig import MS, facts_for, query

from blockflow.batching.policy import ELSEWHERE, Run
from blockflow.batching.queueing import QueueingPolicy
from blockflow.batching.registry import create_policy
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

"""What has run one stage together need not fit the next one together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from policy_rig import MS, TIMES, TinyWorker, Walk, profile

from blockflow.batching.costs import FittedCosts
from blockflow.batching.facts import StageFacts
from blockflow.batching.lbci import n_opt
from blockflow.batching.policy import Query, Run
from blockflow.batching.registry import create_policy
from blockflow.batching.shares import TaskShare

WALK = Walk((1, 2))
LATE = 10**12
SPECS: tuple[Mapping[str, Any], ...] = (
    {"policy": "window"},
    {"policy": "lbci", "t_opt_ms": 100},
    {"policy": "dvabatch"},
)
BY_NAME = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["policy"])


def ran(w: TinyWorker) -> list[tuple[int, int]]:
    """Stage and size of each batch."""
    return [(run.stage, len(run.keys)) for _, run in w.runs]


@BY_NAME
def test_no_batch_is_larger_than_its_stage_takes(spec: Mapping[str, Any]) -> None:
    facts = {n: StageFacts(f"b{n}", most, 1, profile(TIMES)) for n, most in ((1, 8), (2, 2))}
    w = TinyWorker(create_policy(spec, (1, 2), facts), {})
    for key in range(4):
        w.enter(key, WALK, 1, 4, 0, LATE, 0)
    w.run_out(0)
    assert all(size <= (8, 2)[stage - 1] for stage, size in ran(w))
    assert w.left == {0, 1, 2, 3}


def test_who_joins_stays_within_the_strict_bound() -> None:
    """The times scatter by as much as they are: a batch may be predicted at half the bound."""
    times = {1: 10.0, 2: 11.0, 4: 13.0, 8: 17.0}
    facts = {n: StageFacts(f"b{n}", 8, 1, profile(times, spread=1.0)) for n in (1, 2)}
    most = n_opt(FittedCosts(facts, 8), (1, 2), None, 60 * MS, 8)
    assert 1 < most < 8
    w = TinyWorker(create_policy({"policy": "lbci", "t_opt_ms": 60}, (1, 2), facts), {})
    w.enter(0, WALK, 1, 4, 0, LATE, 0)
    w.decide(0)
    w.finish(0, 10 * MS, fail=False)
    for key in range(1, 8):
        w.enter(key, WALK, 1, 4, 0, LATE, 10 * MS)
    w.run_out(10 * MS)
    assert ran(w)[:3] == [(1, 1), (1, most - 1), (2, most)]


@BY_NAME
def test_two_branches_of_a_request_that_meet_again_keep_to_their_tasks_limit(
    spec: Mapping[str, Any],
) -> None:
    facts = {n: StageFacts(f"b{n}", 8, 1, profile(TIMES)) for n in (1, 2, 3)}
    policy = create_policy(spec, (1, 2, 3), facts, [TaskShare(max_batch_rows=1)])
    whole = Query(1, 1, 1, 0, 0, LATE, ahead=(2, 3))
    policy.arrive(whole, 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.done(1, (1,), MS)
    by_two = whole._replace(stage=2, ready_ns=MS, first=False, ahead=(3,))
    policy.arrive(by_two, MS)
    policy.arrive(by_two._replace(key=2, stage=3, ahead=(), origin=1), MS)
    waiting: dict[int, Query | None] = {1: by_two, 2: None}
    now = MS
    while waiting:
        run = policy.decide(now)
        assert isinstance(run, Run) and len(run.keys) == 1
        now += MS
        query = waiting.pop(run.keys[0])
        policy.done(run.stage, run.keys, now)
        if query is not None:
            policy.arrive(query._replace(stage=3, ready_ns=now, ahead=()), now)
            waiting[1] = None


@BY_NAME
def test_lengths_that_a_stage_takes_into_two_classes_part(spec: Mapping[str, Any]) -> None:
    """A block with a stride comes before it."""
    stages = [
        StageFacts(f"b{n}", 8, 1, profile(TIMES), length_dims=(0,), lengths=(1, 64), pads=True)
        for n in (1, 2)
    ]
    facts = dict(enumerate(stages, start=1))
    policy = create_policy({**spec, "classes": [8, 64]}, (1, 2), facts)
    both = [Query(key, 1, 1, 0, 0, LATE, (shape,)) for key, shape in ((1, 40), (2, 64), (3, 41))]
    for query in both:
        policy.arrive(query, 0)
    assert policy.decide(0) == Run(1, (1, 2, 3), (64,))
    policy.done(1, (1, 2, 3), MS)
    for query, shape in zip(both, (5, 9, 6), strict=True):
        policy.arrive(query._replace(stage=2, shape=(shape,), ready_ns=MS, first=False), MS)
    assert policy.decide(MS) == Run(2, (1, 3), (6,))
    policy.done(2, (1, 3), MS)
    assert policy.decide(MS) == Run(2, (2,))

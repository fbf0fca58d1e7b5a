"""`lbci`: newcomers on their way to the batch that they join."""

from __future__ import annotations

from policy_rig import MS, profile, query

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import Policy, Run
from blockflow.batching.registry import create_policy

# Each stage takes 5 ms and 5 ms per row.
TIMES = {b: 5.0 + 5.0 * b for b in (1, 2, 4, 8, 16)}


def make(t_opt_ms: float = 300, stages: int = 3) -> Policy:
    facts = {s: StageFacts(f"b{s}", 16, 1, profile(TIMES)) for s in range(1, stages + 1)}
    return create_policy({"policy": "lbci", "t_opt_ms": t_opt_ms}, tuple(facts), facts)


def goes_on(policy: Policy, stage: int, now: int, *keys: int) -> None:
    policy.done(stage, keys, now)
    for key in keys:
        policy.arrive(query(key, now, stage=stage + 1, first=False), now)


def two_stages_done(policy: Policy) -> None:
    """Of the first request; another has come, and catches up at stage 1."""
    policy.arrive(query(1, 0), 0)
    for stage, now in ((1, 0), (2, 10)):
        assert policy.decide(now * MS) == Run(stage, (1,))
        goes_on(policy, stage, (now + 10) * MS, 1)
    policy.arrive(query(2, 20 * MS), 20 * MS)
    assert policy.decide(20 * MS) == Run(1, (2,))


def test_newcomers_wait_for_a_stage_that_is_busy() -> None:
    policy = make()
    two_stages_done(policy)
    goes_on(policy, 1, 30 * MS, 2)
    assert policy.decide(30 * MS, {2}) is None
    assert policy.decide(30 * MS) == Run(2, (2,))
    goes_on(policy, 2, 40 * MS, 2)
    assert policy.decide(40 * MS) == Run(3, (1, 2))


def test_newcomers_go_on_though_nobody_is_left_whom_they_would_catch_up_with() -> None:
    policy = make()
    two_stages_done(policy)
    policy.drop(1, 25 * MS)
    assert policy.decide(25 * MS, {1}) is None
    goes_on(policy, 1, 30 * MS, 2)
    for stage in (2, 3):
        assert policy.decide(40 * MS) == Run(stage, (2,))
        goes_on(policy, stage, 40 * MS, 2)


def test_what_is_done_of_a_batch_counts_from_when_it_began() -> None:
    policy = make(t_opt_ms=59.9, stages=2)
    for key in (1, 2):
        policy.arrive(query(key, 100 * MS), 100 * MS)
    assert policy.decide(100 * MS) == Run(1, (1, 2))
    for key in (3, 4):
        policy.arrive(query(key, 110 * MS), 110 * MS)
    goes_on(policy, 1, 115 * MS, 1, 2)
    assert policy.decide(115 * MS) == Run(1, (3,)), "5 + 15 + 10 + 20; for two 60"


def test_who_joins_always_does_so_beside_an_idle_lane() -> None:
    policy = make()
    policy.lanes = 2
    policy.arrive(query(1, 0), 0)
    assert policy.decide(0) == Run(1, (1,))
    goes_on(policy, 1, 10 * MS, 1)
    policy.arrive(query(2, 10 * MS), 10 * MS)
    assert policy.decide(10 * MS) == Run(1, (2,))
    assert policy.decide(10 * MS, {1}) is None, "the first one rests for him"

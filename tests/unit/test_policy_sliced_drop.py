"""A stage of several blocks: who is withdrawn never runs, and whose batch it is that is done."""

from __future__ import annotations

from policy_rig import query

from blockflow.batching.policy import Policy, Run
from blockflow.batching.registry import create_policy
from blockflow.batching.sliced import SlicedPolicy


def make() -> Policy:
    return create_policy({"policy": "dvabatch", "stages": [2, 1]}, (1, 2, 3))


def begin(policy: Policy, *keys: int) -> None:
    """They run the first block, as one batch."""
    for key in keys:
        policy.arrive(query(key, 0), 0)
    assert policy.decide(0) == Run(1, keys)


def goes_on(policy: Policy, stage: int, *ways: tuple[int, int]) -> None:
    """A batch has left ``stage``: keys, and where they go on."""
    policy.done(stage, [key for key, _ in ways], 0)
    for key, to in ways:
        policy.arrive(query(key, 0, stage=to, first=False), 0)


def test_who_waits_before_a_stage_or_within_it_alone_is_taken_away() -> None:
    policy = make()
    policy.arrive(query(1, 0), 0)
    policy.arrive(query(2, 0, stage=2, first=False), 0)
    assert [q.key for q in policy.waiting()] == [1, 2]
    for key in (2, 1, 1, 9):
        policy.drop(key, 0)
    assert list(policy.waiting()) == [] and policy.decide(0) is None


def test_who_waits_for_the_next_block_with_his_batch_is_taken_away() -> None:
    policy = make()
    begin(policy, 1, 2)
    policy.drop(2, 0)  # it runs: nobody withdraws it
    goes_on(policy, 1, (1, 2), (2, 2))
    policy.drop(1, 0)
    assert [q.key for q in policy.waiting()] == [2]
    assert policy.decide(0) == Run(2, (2,))
    goes_on(policy, 2, (2, 3))
    assert policy.decide(0) == Run(3, (2,))
    assert isinstance(policy, SlicedPolicy) and not policy._trip_of


def test_who_waits_elsewhere_for_the_end_of_his_batchs_stage_is_taken_away() -> None:
    policy = make()
    begin(policy, 1, 2)
    goes_on(policy, 1, (1, 2), (2, 3))
    policy.drop(2, 0)
    assert policy.decide(0) == Run(2, (1,))
    goes_on(policy, 2, (1, 3))
    assert policy.decide(0) == Run(3, (1,))
    assert isinstance(policy, SlicedPolicy) and not policy._trip_of


def test_batches_that_others_have_started_are_not_taken_for_its_own() -> None:
    policy = make()
    policy.done(9, [5], 0)
    policy.done(1, [5], 0)
    begin(policy, 1, 2)
    policy.done(2, [5], 0)
    assert policy.decide(0, {1}) is None, "its batch runs the first block"
    goes_on(policy, 1, (1, 2), (2, 2))
    policy.done(1, [5], 0)
    assert policy.decide(0) == Run(2, (1, 2))


def test_a_stage_whose_batch_runs_keeps_no_other_from_going_on() -> None:
    policy = create_policy({"policy": "dvabatch", "stages": [2, 2]}, (1, 2, 3, 4))
    begin(policy, 1)
    for stage in (1, 2):
        goes_on(policy, stage, (1, stage + 1))
        assert policy.decide(0) == Run(stage + 1, (1,))
    policy.arrive(query(2, 0), 0)
    assert policy.decide(0, {3}) == Run(1, (2,))
    goes_on(policy, 1, (2, 2))
    assert policy.decide(0, {3}) == Run(2, (2,))

"""Several blocks as one stage: while any of them is busy, or a batch is between them, none of them
starts another batch; whoever has asked for what runs there."""

from __future__ import annotations

import pytest
from policy_rig import MS, TinyWorker, Walk, facts_for, query

from blockflow.batching.policy import Policy, Run
from blockflow.batching.registry import create_policy
from blockflow.batching.sliced import SlicedPolicy

WALK = Walk((1, 2, 3))
LATE = 10**12


def make(**options: object) -> Policy:
    spec = {"policy": "dvabatch", "stages": [2, 1], **options}
    return create_policy(spec, (1, 2, 3), facts_for((1, 2, 3)))


@pytest.mark.parametrize("busy", [1, 2])
def test_what_another_policy_has_started_keeps_the_whole_stage(busy: int) -> None:
    policy = make()
    policy.arrive(query(1, 0), 0)
    assert policy.decide(0, {busy}) is None
    assert policy.decide(0, {3}) == Run(1, (1,))


def test_a_policy_knows_how_many_lanes_are_in_use() -> None:
    """A stage that another policy runs may have several batches under way."""
    policy = make()
    assert isinstance(policy, SlicedPolicy)
    policy.arrive(query(1, 0), 0)
    assert policy.decide(0, [9, 9]) == Run(1, (1,))
    seen: list[list[int]] = []
    policy._policy.decide = lambda now, busy=(): seen.append([*busy])  # type: ignore[method-assign, func-returns-value]
    assert policy.decide(0, [9, 1, 9]) is None and seen == [[9, 1, 9]]
    policy.done(1, (1,), MS)
    policy.arrive(query(1, MS, stage=2, first=False), MS)
    assert policy.decide(MS, [9, 2, 9]) is None and seen[1:] == [[9, 1, 9]]


def test_a_batch_between_two_blocks_keeps_the_stage() -> None:
    """The block that it goes on to is busy with what another policy has started."""
    worker = TinyWorker(make(policies=["input"]), {})
    worker.enter(1, WALK, 1, 4, 0, LATE, 0)
    assert worker.decide(0) == Run(1, (1,))
    worker.finish(0, MS, fail=False)
    worker.enter(2, WALK, 1, 9, 0, LATE, MS)
    assert worker.policy.decide(MS, {2}) is None
    assert worker.decide(2 * MS) == Run(2, (1,))
    worker.finish(0, 3 * MS, fail=False)
    worker.run_out(3 * MS)
    assert worker.left == {1, 2}


def test_who_waits_within_a_stage_lets_its_batch_pass() -> None:
    """It has been handed over between two blocks: it goes on alone, when nothing is under way."""
    policy = make()
    policy.arrive(query(7, 0, stage=2, first=False), 0)
    assert policy.decide(0, {1}) is None
    assert policy.decide(0, {2}) is None
    worker = TinyWorker(policy, {7: WALK})
    worker.enter(1, WALK, 1, 4, 0, LATE, 0)
    assert worker.decide(0) == Run(2, (7,))
    worker.lanes = 2
    assert worker.decide(0) is None, "the stage is one"
    worker.run_out(MS)
    assert worker.left == {1, 7}


def test_a_stray_waits_for_a_batch_between_the_blocks() -> None:
    worker = TinyWorker(make(), {7: WALK})
    worker.enter(1, WALK, 1, 4, 0, LATE, 0)
    assert worker.decide(0) == Run(1, (1,))
    stray = query(7, 0, stage=2, first=False)
    worker.waiting[7] = stray
    worker.policy.arrive(stray, 0)
    worker.lanes = 2
    assert worker.decide(0) is None
    worker.run_out(MS)
    assert worker.left == {1, 7}


def test_a_padded_batch_is_padded_at_every_block_of_a_stage() -> None:
    worker = TinyWorker(make(policies=["input"], classes=[8]), {})
    for key, length in ((1, 5), (2, 7), (3, 6)):
        worker.enter(key, WALK, 1, length, 0, LATE, 0)
    for stage in (1, 2, 3):
        assert worker.decide(0) == Run(stage, (1, 2, 3), (7,))
        worker.finish(0, 0, fail=False)
    assert worker.left == {1, 2, 3}

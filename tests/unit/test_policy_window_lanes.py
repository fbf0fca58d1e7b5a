"""`window` in several lanes: who waits for one stage has his turn, whatever his batch."""

from __future__ import annotations

from collections.abc import Sequence

from policy_rig import MS, query

from blockflow.batching.policy import Policy, Run
from blockflow.batching.registry import create_policy
from blockflow.batching.shares import TaskShare

ALIKE = [TaskShare(), TaskShare()]


def meet(
    batches: Sequence[tuple[int, ...]],
    tasks: Sequence[int],
    to: Sequence[int] = (2, 2, 2, 2),
    *,
    shares: Sequence[TaskShare] = ALIKE,
    most: int = 2,
) -> Policy:
    """Two lanes. These batches have run stage 1, and all in them wait at their next stages; tasks
    and stages are by key."""
    policy = create_policy({"policy": "window", "max_rows": most}, (1, 2, 3), None, shares)
    policy.lanes = 2
    for keys in batches:
        for key in keys:
            policy.arrive(query(key, key, task=tasks[key], ahead=(to[key],)), key)
        assert policy.decide(9, {2, 3}) == Run(1, keys)
        policy.done(1, keys, MS)
        for key in keys:
            there = query(key, key, task=tasks[key], stage=to[key], first=False, ahead=())
            policy.arrive(there, MS)
    return policy


def test_of_two_batches_at_a_stage_those_go_together_whose_turn_it_is() -> None:
    """Whoever waits elsewhere, of whatever priority; and together they are as old as the oldest."""
    shares = [*ALIKE, TaskShare(priority=1)]
    batches = [(0, 1), (2, 3), (4,)]
    policy = meet(batches, [0, 0, 1, 1, 2], (2, 2, 2, 2, 3), shares=shares)
    assert policy.decide(MS, {3}) == Run(2, (0, 2))
    assert policy.decide(MS, {2}) == Run(3, (4,))
    policy.done(2, (0, 2), MS)
    for key in (0, 2):
        policy.arrive(query(key, key, task=key // 2, stage=3, first=False, ahead=()), MS)
    assert policy.decide(MS) == Run(3, (0, 2)), "which goes on before those who wait at stage 2"
    assert policy.decide(MS, {3}) == Run(2, (1, 3))


def test_of_each_task_the_oldest_comes_first_though_its_batch_is_younger() -> None:
    """It has begun later because its deadline was later, say."""
    policy = meet([(2, 3), (0, 1)], [0, 0, 0, 0])
    assert policy.decide(MS) == Run(2, (0, 1))
    assert policy.decide(MS) == Run(2, (2, 3))


def test_of_those_whose_turn_it_is_somewhere_the_oldest_batch_goes_on() -> None:
    """At stage 2 it is the turn of the youngest, who has a higher priority."""
    shares = [TaskShare(), TaskShare(priority=1)]
    policy = meet([(0,), (1,), (2,)], [0, 0, 1], (2, 3, 2), shares=shares, most=1)
    assert policy.decide(MS) == Run(3, (1,))
    assert policy.decide(MS, {3}) == Run(2, (2,))
    assert policy.decide(MS, {2, 3}) is None
    policy.done(2, (2,), MS)
    assert policy.decide(MS, {3}) == Run(2, (0,))


def test_who_comes_to_a_batch_that_waits_runs_with_it_once() -> None:
    policy = meet([(0,), (1,)], [0, 1], (2, 3))
    assert policy.decide(MS) == Run(2, (0,))
    policy.done(2, (0,), MS)
    policy.arrive(query(0, 0, stage=3, first=False, ahead=()), MS)
    assert policy.decide(MS) == Run(3, (0, 1))


def test_who_can_share_no_batch_with_others_of_its_task_has_its_turn_where_they_meet() -> None:
    """To stage 2 comes one of task 1 again and again, and with it three of task 0. The oldest of
    task 0 there has another shape."""
    policy = create_policy({"policy": "window", "max_rows": 4}, (1, 2), None, ALIKE)
    policy.lanes = 2

    def come(tasks: Sequence[int], begin: int, shape: tuple[int, ...] = (4,)) -> None:
        keys = tuple(range(begin, begin + len(tasks)))
        for key, task in zip(keys, tasks, strict=True):
            policy.arrive(query(key, key, task=task, shape=shape, ahead=(2,)), key)
        assert policy.decide(MS, {2}) == Run(1, keys)
        policy.done(1, keys, MS)
        for key, task in zip(keys, tasks, strict=True):
            there = query(key, key, task=task, shape=shape, stage=2, first=False, ahead=())
            policy.arrive(there, MS)

    def goes() -> tuple[int, ...]:
        run = policy.decide(MS, {1})
        assert isinstance(run, Run)
        policy.done(2, run.keys, MS)
        return run.keys

    for begin in range(0, 40, 4):
        come((1, 0, 0, 0), begin)
        assert len(goes()) == 4
    come((0,), 50, shape=(8,))
    came = []
    for begin in range(60, 80, 4):
        come((1, 0, 0, 0), begin)
        came.append(goes())
    assert came[:2] == [(60, 61, 62, 63), (50,)]

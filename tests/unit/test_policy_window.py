"""`window`: ZeroBatch, DelayBatch, and what deadlines do to them."""

from __future__ import annotations

import pytest
from policy_rig import MS, TinyWorker, Walk, facts_for, query

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import Policy, Query, Run, WaitUntil
from blockflow.batching.registry import create_policy
from blockflow.batching.shares import TaskShare
from blockflow.batching.window import WindowPolicy


def make(stages: tuple[int, ...] = (1,), *, profiled: bool = False, **options: object) -> Policy:
    facts = facts_for(stages) if profiled else None
    return create_policy({"policy": "window", **options}, stages, facts)


def test_zero_batch_takes_what_is_there() -> None:
    policy = make(max_rows=3)
    for key in range(5):
        policy.arrive(query(key, 0), 0)
    assert policy.decide(0) == Run(1, (0, 1, 2))
    assert policy.decide(0) == Run(1, (3, 4))


def test_delay_batch_waits_for_the_oldest() -> None:
    policy = make(max_rows=3, max_delay_ms=10)
    policy.arrive(query(1, 2 * MS), 2 * MS)
    assert policy.decide(3 * MS) == WaitUntil(12 * MS)
    policy.arrive(query(2, 8 * MS), 8 * MS)
    assert policy.decide(9 * MS) == WaitUntil(12 * MS)
    policy.drop(1, 10 * MS)
    assert policy.decide(10 * MS) == WaitUntil(18 * MS)
    assert policy.decide(18 * MS) == Run(1, (2,))


def test_the_window_that_ends_first_is_waited_for() -> None:
    """Of two groups the older one's, unless the other one has a deadline before: a quarter of its
    time is kept."""
    for deadline_ms, until_ms in ((1000, 50), (20, 5 + 15)):
        policy = make(max_delay_ms=50, profiled=True)
        policy.arrive(query(1, 0, shape=(4,)), 0)
        policy.arrive(query(2, 5 * MS, shape=(6,), deadline_ms=deadline_ms), 5 * MS)
        assert policy.decide(5 * MS) == WaitUntil(until_ms * MS)


def test_a_full_batch_does_not_wait() -> None:
    policy = make(max_rows=3, max_delay_ms=10)
    policy.arrive(query(1, 0, rows=2), 0)
    assert isinstance(policy.decide(0), WaitUntil)
    policy.arrive(query(2, MS, rows=2), MS)
    assert policy.decide(MS) == Run(1, (1,))  # the next one does not fit any more
    assert policy.decide(MS) == WaitUntil(11 * MS)
    policy.arrive(query(3, MS), MS)
    assert policy.decide(MS) == Run(1, (2, 3)), "as many as fit"


def test_a_batch_is_full_where_no_task_may_have_more_in_it() -> None:
    window = {"policy": "window", "max_rows": 8, "max_delay_ms": 500}
    dvabatch = {"policy": "dvabatch", "bs_max": 8, "window_ms": 500, "policies": ["load"]}
    for spec in (window, dvabatch):
        shares = [TaskShare(max_batch_rows=2), TaskShare(max_batch_rows=3), TaskShare()]
        policy = create_policy(spec, (1,), facts_for((1,)), shares)
        policy.arrive(query(1, 0, deadline_ms=60_000), 0)
        assert isinstance(policy.decide(0), WaitUntil)
        for key in (2, 3, 4):
            policy.arrive(query(key, 0, deadline_ms=60_000), 0)
        for keys in ((1, 2), (3, 4)):  # nobody else has ever come
            assert policy.decide(0) == Run(1, keys)
            policy.done(1, keys, 0)
        policy.arrive(query(5, 0, rows=2, task=1, deadline_ms=60_000), 0)
        policy.arrive(query(6, 0, rows=2, deadline_ms=60_000), 0)
        assert isinstance(policy.decide(0), WaitUntil), "one more row of task 1 would fit"
        policy.arrive(query(7, 0, task=1, deadline_ms=60_000), 0)
        decision = policy.decide(0)
        assert isinstance(decision, Run) and sorted(decision.keys) == [5, 6, 7]
        policy.done(1, decision.keys, 0)
        policy.arrive(query(8, 0, task=2, deadline_ms=60_000), 0)  # it has no limit
        policy.arrive(query(9, 0, rows=3, task=1, deadline_ms=60_000), 0)
        policy.arrive(query(10, 0, rows=2, deadline_ms=60_000), 0)
        assert isinstance(policy.decide(0), WaitUntil)


def test_nobody_is_held_back_beyond_the_deadline() -> None:
    policy = make(max_delay_ms=100, profiled=True)
    policy.arrive(query(1, 0, deadline_ms=8), 0)
    # One row takes 2 ms by the profile; a quarter more is left to the deadline.
    assert policy.decide(0) == WaitUntil(round((8 - 2.5) * MS))
    assert policy.decide(6 * MS) == Run(1, (1,))


def test_a_quarter_of_the_time_is_kept_however_short_the_work() -> None:
    policy = make(max_delay_ms=1000, profiled=True)
    policy.arrive(query(1, 0, deadline_ms=800), 0)
    assert policy.decide(0) == WaitUntil(600 * MS)
    assert policy.decide(600 * MS) == Run(1, (1,))


def test_without_a_profile_the_last_batches_tell_how_long_one_takes() -> None:
    policy = make(max_delay_ms=100)
    policy.arrive(query(1, 0, deadline_ms=50), 0)
    assert policy.decide(0) == WaitUntil(25 * MS)  # nothing known yet
    later = make(max_delay_ms=100)
    later.arrive(query(1, 40 * MS, deadline_ms=50), 40 * MS)
    assert later.decide(40 * MS) == WaitUntil(65 * MS)
    policy.arrive(query(2, 0, rows=40), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.done(1, [1], 8 * MS)
    assert policy.decide(8 * MS) == Run(1, (2,))
    policy.done(1, [2], 28 * MS)
    policy.arrive(query(3, 30 * MS, deadline_ms=50), 30 * MS)
    assert policy.decide(30 * MS) == WaitUntil(80 * MS - 25 * MS)
    assert policy.decide(55 * MS) == Run(1, (3,))
    policy.done(1, [3], 57 * MS)  # quick, but the slow one is not forgotten at once
    policy.arrive(query(4, 60 * MS, deadline_ms=50), 60 * MS)
    assert policy.decide(60 * MS) == WaitUntil(110 * MS - 22_500_000)


def test_who_is_in_time_in_a_smaller_batch_only_gets_the_smaller_batch() -> None:
    policy = make(profiled=True)
    policy.arrive(query(1, 0, deadline_ms=5), 0)
    for key in range(2, 9):
        policy.arrive(query(key, 0), 0)
    # 4 rows take 5 ms, 5 rows take 6.
    assert policy.decide(0) == Run(1, (1, 2, 3, 4))
    late = make(profiled=True)
    late.arrive(query(1, 0, deadline_ms=1), 0)  # too late in any batch: holds nobody back
    for key in range(2, 9):
        late.arrive(query(key, 0), 0)
    assert late.decide(0) == Run(1, (1, 2, 3, 4, 5, 6, 7, 8))


def test_a_batch_goes_to_its_end_before_the_next_one_starts() -> None:
    policy = make((1, 2, 3), max_rows=2)
    worker = TinyWorker(policy, {})
    for key in range(3):
        worker.enter(key, Walk((1, 2, 3)), 1, 4, 0, 10**9, 0)
    worker.run_out(0)
    assert [(r.stage, r.keys) for _, r in worker.runs] == [
        (1, (0, 1)),
        (2, (0, 1)),
        (3, (0, 1)),
        (1, (2,)),
        (2, (2,)),
        (3, (2,)),
    ]


def test_forks_are_run_one_after_the_other() -> None:
    policy = make((1, 2, 3))
    worker = TinyWorker(policy, {})
    worker.enter(0, Walk((1, (2, 3))), 1, 4, 0, 10**9, 0)
    worker.enter(1, Walk((1, 3)), 1, 4, 0, 10**9, 0)
    worker.run_out(0)
    assert [(r.stage, len(r.keys)) for _, r in worker.runs] == [(1, 2), (2, 1), (3, 2)]


def test_a_part_of_a_batch_does_not_overtake_an_older_batch() -> None:
    policy = make((1, 2, 3, 4))

    def goes_on(key: int, stage: int, to: int, *ahead: int) -> None:
        policy.done(stage, (key,), 0)
        policy.arrive(query(key, 0, stage=to, first=False, ahead=ahead), 0)

    policy.arrive(query(1, 0, ahead=(2, 4)), 0)
    assert policy.decide(0) == Run(1, (1,))
    goes_on(1, 1, 2, 4)
    assert policy.decide(0) == Run(2, (1,))
    for key, ahead in ((2, (3, 4)), (3, (2,))):
        policy.arrive(query(key, 0, ahead=ahead), 0)
    assert policy.decide(0, {2}) == Run(1, (2, 3))
    policy.done(1, (2, 3), 0)
    for key, stage, rest in ((2, 3, (4,)), (3, 2, ())):
        policy.arrive(query(key, 0, stage=stage, first=False, ahead=rest), 0)
    assert policy.decide(0, {2}) == Run(3, (2,))
    goes_on(1, 2, 4)
    goes_on(2, 3, 4)
    assert policy.decide(0) == Run(4, (1, 2))  # the older first, and they go on together


def lands(policy: Policy, stage: int, keys: tuple[int, ...], to: int, ms: int = 1000) -> None:
    """A batch has left ``stage``; all of it goes on at ``to``."""
    policy.done(stage, keys, 0)
    for key in keys:
        policy.arrive(query(key, 0, stage=to, first=False, task=key % 2, deadline_ms=ms), 0)


def beside(policy: Policy, ms: int = 1000) -> None:
    """Two batches of two, side by side in stage 1; the younger is done first, and 2 is busy.
    The older has ``ms`` left."""
    for keys in ((1, 2), (3, 4)):
        for key in keys:
            policy.arrive(query(key, 0, task=key % 2), 0)
        assert policy.decide(0) == Run(1, keys)
    lands(policy, 1, (3, 4), 2)
    assert policy.decide(0, {2}) is None
    lands(policy, 1, (1, 2), 2, ms)


def test_batches_that_wait_for_the_same_stage_run_together() -> None:
    policy = make((1, 2, 3), max_rows=4)
    beside(policy)
    assert policy.decide(0) == Run(2, (1, 2, 3, 4))
    lands(policy, 2, (1, 2, 3, 4), 3)
    assert policy.decide(0) == Run(3, (1, 2, 3, 4))


@pytest.mark.parametrize(
    ("shapes", "runs"), [((4, 4, 4), [(1, 2), (3,)]), ((4, 5, 4), [(1, 3), (2,)])]
)
def test_of_batches_that_wait_for_the_same_stage_the_oldest_run_together(
    shapes: tuple[int, ...], runs: list[tuple[int, ...]]
) -> None:
    """Those of one shape, whoever has come there first."""
    policy = make((1, 2), max_rows=2)
    for key in (1, 2, 3):
        policy.arrive(query(key, 0), 0)
        assert policy.decide(0, {2}) == Run(1, (key,))
    for key in (3, 2, 1):
        policy.done(1, (key,), MS)
        policy.arrive(query(key, 0, stage=2, first=False, shape=(shapes[key - 1],)), MS)
        assert policy.decide(MS, {1, 2}) is None
    assert [policy.decide(MS) for _ in runs] == [Run(2, keys) for keys in runs]


@pytest.mark.parametrize(
    ("options", "shares", "runs"),
    [
        ({"max_rows": 3}, (), (1, 2, 3)),
        ({}, (TaskShare(max_batch_rows=1), TaskShare()), (1, 2, 3)),
    ],
)
def test_together_they_are_no_more_than_one_batch_may_be(
    options: dict[str, int], shares: tuple[TaskShare, ...], runs: tuple[int, ...]
) -> None:
    policy = create_policy({"policy": "window", **options}, (1, 2), None, shares)
    beside(policy)
    assert policy.decide(0) == Run(2, runs)
    assert policy.decide(0) == Run(2, (4,))


def test_nobody_is_late_for_the_sake_of_a_younger_batch() -> None:
    policy = make((1, 2), profiled=True)
    beside(policy, ms=4)  # which three rows take, and four do not
    assert policy.decide(0) == Run(2, (1, 2, 3))
    assert policy.decide(0) == Run(2, (4,))


def test_parts_of_a_batch_that_meet_again_keep_their_order() -> None:
    facts = {stage: StageFacts(max_rows=rows) for stage, rows in ((1, 8), (2, 4), (3, 4))}
    policy = create_policy({"policy": "window"}, (1, 2, 3), facts)

    def arrive(key: int, stage: int, now: int) -> None:
        policy.arrive(query(key, now, stage=stage, rows=4, first=stage == 1), now)

    for key in (1, 2):
        arrive(key, 1, 0)
    assert policy.decide(0) == Run(1, (1, 2))
    policy.done(1, (1, 2), 1)
    for key in (1, 2):
        arrive(key, 2, 1)
    for now, key in ((1, 1), (2, 2)):
        assert policy.decide(now, {3}) == Run(2, (key,))
        policy.done(2, (key,), now + 1)
        arrive(key, 3, now + 1)
    assert policy.decide(3) == Run(3, (1,)), "not the one that has just run"
    assert policy.decide(3) == Run(3, (2,))


def test_who_is_late_anyhow_keeps_nobody_out_of_his_batch() -> None:
    policy = make((1, 2), profiled=True)
    beside(policy, ms=2)  # which one row takes, and the older batch's two do not
    assert policy.decide(0) == Run(2, (1, 2, 3, 4))


def test_who_goes_on_within_the_worker_has_not_arrived_again() -> None:
    policy = make((1, 2))
    assert isinstance(policy, WindowPolicy)
    policy.arrive(query(1, 0), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.done(1, (1,), MS)
    policy.arrive(query(1, MS, stage=2, first=False), MS)
    assert policy._arrivals.rate(2 * MS) == 0


def test_lengths_of_one_class_are_padded_to_the_longest() -> None:
    policy = make(profiled=True, classes=[8, 16, 64])
    for key, length in ((1, 3), (2, 8), (3, 9), (4, 5)):
        policy.arrive(query(key, key, shape=(length, 7)), 4)
    policy.arrive(query(5, 5, shape=(3, 9)), 5)  # it differs where nothing may be padded
    assert policy.decide(5) == Run(1, (1, 2, 4), (8, 7))
    assert policy.decide(5) == Run(1, (3,))
    assert policy.decide(5) == Run(1, (5,))


def test_without_classes_lengths_stay_apart() -> None:
    policy = make(profiled=True)
    for key, length in ((1, 3), (2, 8), (3, 3)):
        policy.arrive(query(key, key, shape=(length,)), 4)
    assert policy.decide(5) == Run(1, (1, 3))
    assert policy.decide(5) == Run(1, (2,))


def test_what_comes_from_another_policy_does_not_wait() -> None:
    policy = make(max_delay_ms=50)
    policy.arrive(Query(1, 1, 1, 0, 0, 10**9, (4,), first=False), 0)
    assert policy.decide(0) == Run(1, (1,))

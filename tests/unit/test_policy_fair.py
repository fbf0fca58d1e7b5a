"""Tasks of a worker: equal ones fare alike, and a slow one does not take it all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from policy_rig import MS, TinyWorker, Walk, facts_for, query
from scheduler_rig import ticket

from blockflow.batching.meetings import Meetings
from blockflow.batching.policy import Run
from blockflow.batching.registry import create_policy
from blockflow.batching.row_costs import RowCosts
from blockflow.batching.shares import TaskShare
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.ticket import Batch

ALONE: list[dict[str, Any]] = [
    {"policy": "none"},
    {"policy": "window", "max_rows": 1},
    {"policy": "dvabatch", "bs_max": 1},
]


@pytest.mark.parametrize("spec", ALONE)
def test_between_tasks_with_equal_service_the_earlier_deadline_goes_first(
    spec: dict[str, Any],
) -> None:
    policy = create_policy(spec, [1], None, [TaskShare()] * 3)
    policy.arrive(query(1, 0, task=2, deadline_ms=20), 0)
    policy.arrive(query(2, 5 * MS, task=1, deadline_ms=10_000), 5 * MS)
    assert policy.decide(5 * MS) == Run(1, (1,))


@pytest.mark.parametrize(
    "spec", [{"policy": "window"}, {"policy": "dvabatch"}, {"policy": "lbci", "t_opt_ms": 100}]
)
def test_a_deadline_is_kept_where_two_rows_take_longer_than_four(spec: dict[str, Any]) -> None:
    policy = create_policy(spec, [1], facts_for([1], {1: 10.0, 2: 30.0, 4: 12.0, 16: 40.0}))
    policy.arrive(query(1, 0, deadline_ms=15), 0)
    policy.arrive(query(2, 0, deadline_ms=10_000), 0)
    assert policy.decide(0) == Run(1, (1,))


def test_rows_count_alike_up_to_a_few_times_their_time() -> None:
    costs = RowCosts([1, 2, 3])
    here = [query(n, 0, stage=n, ahead=()) for n in (1, 2, 3)]
    assert [costs.of(q) for q in here] == [1.0] * 3  # nothing is known
    for stage, ns in ((1, 1000), (2, 4000), (3, 100_000)):
        costs.measured(stage, 1, ns)
    assert [costs.of(q) for q in here] == [1.0, 1.0, 25.0]
    assert costs.of(query(9, 0, stage=1)) == pytest.approx(105_000 / 4000)  # all later stages
    assert costs.of(query(9, 0, stage=1, ahead=(2,))) == pytest.approx(5000 / 4000)


def test_costs_follow_what_is_measured() -> None:
    costs = RowCosts([1, 2])
    costs.measured(1, 4, 4000)
    costs.measured(2, 1, 40_000)
    slow = query(2, 0, stage=2)
    assert costs.of(slow) == 10.0
    costs.measured(1, 1, 11_000)  # a tenth of the way from 1000
    assert costs.of(slow) == 5.0
    costs.measured(1, 1, 0)  # no time at all says nothing
    assert costs.of(slow) == 5.0
    for _ in range(200):
        costs.measured(1, 1, 20_000)  # the cheapest is so no more
    assert costs.of(slow) == 1.0
    for _ in range(200):
        costs.measured(1, 1, 400_000)  # nor even cheap
    assert costs.of(slow) == 1.0
    assert costs.of(query(1, 0, ahead=())) == pytest.approx(2.5)


def test_at_one_block_a_row_is_a_row() -> None:
    costs = RowCosts([1])
    costs.measured(1, 1, 5000)
    assert costs.of(query(1, 0)) == 1.0


def served(policies: dict[int, dict[str, Any]], rounds: int) -> list[tuple[int, int]]:
    """(stage, time) of batches in one lane: stage 1 takes 100 ms, stage 2 takes one. Many wait at
    stage 1; at stage 2 one comes every 20 ms."""
    shares = [TaskShare(), TaskShare(), TaskShare()]
    scheduler = Scheduler(policies, None, shares)
    now, key, due = MS, 0, MS
    out = []

    def come(stage: int) -> None:
        nonlocal key
        key += 1
        one = ticket(key, [[stage]], deadline=10**12, now=now)
        one.task = stage
        scheduler.arrive(one, now)

    for _ in range(200):
        come(1)
    for _ in range(rounds):
        while due <= now:
            come(2)
            due += 20 * MS
        batch = scheduler.decide(now)
        assert isinstance(batch, Batch)
        batch.started_ns = now
        now += (100 if batch.stage == 1 else 1) * MS
        scheduler.done(batch, now)
        out.append((batch.stage, now))
    return out


@pytest.mark.parametrize("second", [{"policy": "none"}, {"policy": "window", "max_rows": 1}])
def test_a_slow_task_leaves_a_quick_one_what_it_needs(second: dict[str, Any]) -> None:
    found = served({1: {"policy": "none"}, 2: second}, 300)
    end = found[-1][1]
    quick = sum(stage == 2 for stage, _ in found)
    # As many as have come but for the last few; by turns there would be a fifth of them.
    assert quick >= 0.9 * end / (20 * MS)


@pytest.mark.parametrize("stages", [{}, {"stages": [1, 1]}, {"stages": [2]}])
def test_who_ends_early_is_as_well_off_where_blocks_are_sliced(stages: dict[str, Any]) -> None:
    """As many wait for block 1, of 1 ms, as for both; block 2 takes 100 ms."""
    policy = {"policy": "dvabatch", "bs_max": 1, **stages}
    scheduler = Scheduler({1: policy, 2: policy}, None, [TaskShare()] * 3)
    now, quick = MS, 0

    def come(key: int, hop: int) -> None:
        task = 1 + key % 2
        one = ticket(key, [[1, 2][:task]], hop=hop, deadline=10**12, now=now)
        one.task, one.arrival_ns = task, MS
        scheduler.arrive(one, now)

    for key in range(100):
        come(key, 0)
    while now < 1000 * MS:
        batch = scheduler.decide(now)
        assert isinstance(batch, Batch)
        batch.started_ns = now
        now += (100 if batch.stage == 2 else 1) * MS
        scheduler.done(batch, now)
        (one,) = batch.tickets
        if one.task == 2 and batch.stage == 1:
            come(one.key, 1)
        quick += one.task == 1
    assert quick == 50


def test_a_policy_that_was_away_has_saved_nothing_up() -> None:
    scheduler = Scheduler({1: {"policy": "none"}, 2: {"policy": "window", "max_rows": 1}})
    now = MS

    def run() -> int:
        nonlocal now
        batch = scheduler.decide(now)
        assert isinstance(batch, Batch)
        batch.started_ns = now
        now += MS
        scheduler.done(batch, now)
        return batch.stage

    for key in range(1, 41):
        scheduler.arrive(ticket(key, [[1]]), now)
    assert [run() for _ in range(20)] == [1] * 20
    for key in range(41, 61):
        scheduler.arrive(ticket(key, [[2]]), now)
    assert sum(run() for _ in range(20)) == 30  # ten of each, and not twenty of the second


@pytest.mark.parametrize("priority", [0, 1])
@pytest.mark.parametrize("spec", [*ALONE, {"policy": "lbci", "t_opt_ms": 100, "n_max": 1}])
def test_with_several_lanes_who_begins_at_a_later_block_has_his_turn(
    spec: dict[str, Any], priority: int
) -> None:
    """Somebody is always under way and waits there."""
    shares = [TaskShare(), TaskShare(priority=priority)]
    worker = TinyWorker(create_policy(spec, [1, 2], facts_for([1, 2]), shares), {}, lanes=2)
    for key in range(30):
        worker.enter(key, Walk((1, 2)), 1, 4, 0, 10_000 * MS, 0)
    for now in range(MS, 9 * MS, MS):
        if now == 3 * MS:
            worker.enter(99, Walk((2,)), 1, 4, 1, 10_000 * MS, now)
        while isinstance(worker.decide(now), Run):
            pass
        while worker.running:
            worker.finish(0, now, fail=False)
    assert 99 in worker.left
    worker.run_out(9 * MS)
    assert worker.left == {*range(30), 99}


@pytest.mark.parametrize("spec", [*ALONE, {"policy": "lbci", "t_opt_ms": 100, "n_max": 1}])
def test_with_several_lanes_a_blocks_newcomers_and_who_comes_to_it_share_it_by_weight(
    spec: dict[str, Any],
) -> None:
    """However many of those who come have begun."""
    shares = [TaskShare(weight=2.0), TaskShare()]
    worker = TinyWorker(create_policy(spec, [1, 2], facts_for([1, 2]), shares), {}, lanes=2)
    for key in range(60):
        way = Walk((2,) if key % 2 else (1, 2))
        worker.enter(key, way, 1, 4, key % 2, 10_000 * MS, 0)
    for now in range(MS, 30 * MS, MS):
        while isinstance(worker.decide(now), Run):
            pass
        while worker.running:
            worker.finish(0, now, fail=False)
    by_task = [sum(key % 2 == task for key in worker.left) for task in (0, 1)]
    assert by_task[0] == pytest.approx(2 * by_task[1], abs=4)


@pytest.mark.parametrize("ways", [((1, 3), (2, 3)), ((1, 3), (1, 3))], ids=str)
@pytest.mark.parametrize("share", [TaskShare(weight=4.0), TaskShare(priority=1)], ids=str)
@pytest.mark.parametrize("spec", [*ALONE, {"policy": "lbci", "t_opt_ms": 100, "n_max": 1}], ids=str)
def test_with_several_lanes_those_under_way_have_their_turns_at_a_slow_block(
    spec: dict[str, Any], share: TaskShare, ways: tuple[tuple[int, ...], ...]
) -> None:
    """The blocks before it are quick, so that all of the queue is under way when they come."""
    policy = create_policy(spec, [1, 2, 3], facts_for([1, 2, 3]), [share, TaskShare()])
    worker = TinyWorker(policy, {}, lanes=2)
    served = 0
    for now in range(0, 81 * MS, MS):
        if now in (0, 30 * MS):
            task, served = int(now == 0), len(worker.left)
            for key in range(20 * task, 20 * task + 20):
                worker.enter(key, Walk(ways[task]), 1, 4, task, 10_000 * MS, now)
        while isinstance(worker.decide(now), Run):
            pass
        for i in reversed(range(len(worker.running))):
            if worker.running[i][0].stage != 3 or now % (3 * MS) == 0:
                worker.finish(i, now, fail=False)
    since = len(worker.left) - served
    assert since >= 15
    least = 0.8 if share.weight > 1 else 1.0
    assert sum(key < 20 for key in worker.left) >= least * since - 5


@pytest.mark.parametrize("ways", [((2, 3), (1, 2, 3)), ((2, 3), (1, 3), (1, 2, 3))], ids=str)
@pytest.mark.parametrize("rows", [1, 4])
def test_who_begins_at_a_later_block_finds_a_place_between_the_buffers(
    rows: int, ways: tuple[tuple[int, ...], ...]
) -> None:
    """The last block is slow: who comes from the first has each place as soon as it is free."""
    spec = {"policy": "dvabatch", "bs_max": rows}
    shares = [TaskShare()] * len(ways)
    worker = TinyWorker(create_policy(spec, [1, 2, 3], facts_for([1, 2, 3]), shares), {}, lanes=3)
    for key in range(300):
        task = key % len(ways)
        worker.enter(key, Walk(ways[task]), 1, 4, task, 10_000 * MS, 0)
    for now in range(0, 100 * MS, MS):
        while isinstance(worker.decide(now), Run):
            pass
        for i in reversed(range(len(worker.running))):
            if now % ((1, 2, 5)[worker.running[i][0].stage - 1] * MS) == 0:
                worker.finish(i, now, fail=False)
    had = [sum(key % len(ways) == task for key in worker.left) for task in range(len(ways))]
    assert min(had) >= 0.25 * sum(had)


def test_what_a_more_urgent_task_has_had_at_a_block_is_no_debt_of_the_others() -> None:
    meetings = Meetings([TaskShare(weight=4.0), TaskShare(), TaskShare(priority=1)])
    had = [0, 0]
    for key in range(50):
        two = [query(10 * key + task, 0, task=task, first=False) for task in (0, 1)]
        first = next(meetings.in_turn(two))
        had[first.task] += 1
        meetings.served([first])
        meetings.served([query(10 * key + 2, 0, task=2, rows=9, first=False)])
    assert had == [40, 10]


def test_turns_are_taken_as_if_each_ran_alone() -> None:
    meetings = Meetings([TaskShare(weight=2.0), TaskShare()])
    waiting = [query(key, 0, task=key // 4, first=False) for key in range(8)]
    assert [q.task for q in meetings.in_turn(waiting)] == [0, 1, 0, 0, 1, 0, 1, 1]
    alone = []
    while waiting:
        first = next(meetings.in_turn(waiting))
        alone.append(first.task)
        meetings.served([first])
        waiting.remove(first)
    assert alone == [0, 1, 0, 0, 1, 0, 1, 1]


def test_a_batch_of_lbci_has_the_turn_of_the_most_urgent_in_it() -> None:
    """Two lanes; the urgent one has joined the younger of two batches that wait for a block."""
    shares = [TaskShare(), TaskShare(priority=1), TaskShare(priority=2)]
    spec = {"policy": "lbci", "t_opt_ms": 900}
    worker = TinyWorker(create_policy(spec, [1, 2, 3], facts_for([1, 2, 3]), shares), {}, lanes=2)

    def enter(key: int, task: int, rows: int = 1) -> None:
        worker.enter(key, Walk((1, 2, 3)), rows, 4, task, 10_000 * MS, 0)
        assert worker.decide(0) == Run(1, (key,))
        worker.finish(-1, 0, fail=False)

    enter(1, 0)
    assert worker.decide(0) == Run(2, (1,))
    enter(2, 1, rows=12)  # as many as it takes: nobody joins
    enter(3, 0)
    enter(4, 2)  # catches up with that one
    worker.finish(0, 0, fail=False)
    assert worker.decide(0) == Run(3, (1,))
    assert worker.decide(0) == Run(2, (3, 4))


def test_a_batch_of_lbci_keeps_its_turn_while_others_of_its_task_ride_with_urgent_ones() -> None:
    """Two lanes. Task 1 has eight times the weight, and in each of its batches comes one of task 0:
    what that has had at the slow block is more and more."""
    spec = {"policy": "lbci", "t_opt_ms": 900}
    shares = [TaskShare(), TaskShare(weight=8.0)]
    worker = TinyWorker(create_policy(spec, [1, 2], facts_for([1, 2]), shares), {}, lanes=2)

    def through_the_first_block(keys: range, tasks: Sequence[int]) -> None:
        for key, task in zip(keys, tasks, strict=True):
            worker.enter(key, Walk((1, 2)), 12 // len(keys), 4, task, 10_000 * MS, 0)
        decision = worker.decide(0)
        assert isinstance(decision, Run) and decision.stage == 1
        worker.finish(-1, 0, fail=False)

    through_the_first_block(range(2), [0, 1])
    assert worker.decide(0) == Run(2, (0, 1))
    through_the_first_block(range(2, 3), [0])
    for n in range(10, 50, 2):
        through_the_first_block(range(n, n + 2), [0, 1])
        worker.finish(0, 0, fail=False)
        assert isinstance(worker.decide(0), Run)
    assert 2 not in worker.waiting


JOINERS = [{"policy": "dvabatch", "join": "always"}, {"policy": "lbci", "t_opt_ms": 900}]


@pytest.mark.parametrize("spec", JOINERS)
@pytest.mark.parametrize(
    ("task", "second"), [(1, (2, (0,))), (0, (1, (1,)))], ids=["urgent", "alike"]
)
def test_nobody_joins_while_a_more_urgent_one_of_another_length_waits(
    spec: dict[str, Any], task: int, second: tuple[int, tuple[int, ...]]
) -> None:
    """The batch would end later for each newcomer, and he would begin later."""
    shares = [TaskShare(), TaskShare(priority=1)]
    w = TinyWorker(create_policy(spec, (1, 2), facts_for((1, 2)), shares), {})
    walk = Walk((1, 2))
    w.enter(0, walk, 1, 4, 0, 10**12, 0)
    w.decide(0)
    w.enter(1, walk, 1, 4, 0, 10**12, MS)
    w.enter(2, walk, 1, 9, task, 10**12, MS)
    w.finish(0, 2 * MS, fail=False)
    w.run_out(2 * MS)
    ran = [(run.stage, run.keys) for _, run in w.runs]
    assert ran[1] == second
    assert ran[2] == ((1, (2,)) if task else (2, (0, 1)))


@pytest.mark.parametrize("spec", JOINERS)
@pytest.mark.parametrize(("task", "joining"), [(2, (1,)), (1, (1, 2))], ids=["urgent", "alike"])
def test_nor_beside_one_who_is_more_urgent_still(
    spec: dict[str, Any], task: int, joining: tuple[int, ...]
) -> None:
    """Who joins has to be as urgent as any who waits elsewhere: each by himself."""
    shares = [TaskShare(), TaskShare(priority=1), TaskShare(priority=2), TaskShare(priority=3)]
    w = TinyWorker(create_policy(spec, (1, 2), facts_for((1, 2)), shares), {})
    walk = Walk((1, 2))
    w.enter(0, walk, 1, 4, 0, 10**12, 0)
    w.decide(0)
    w.enter(1, walk, 1, 4, 3, 10**12, MS)
    w.enter(2, walk, 1, 4, 1, 10**12, MS)
    w.enter(3, walk, 1, 9, task, 10**12, MS)
    w.finish(0, 2 * MS, fail=False)
    assert w.decide(2 * MS) == Run(1, joining)

"""Batches of one block side by side: in as many lanes as its engine has twins."""

from __future__ import annotations

import pytest
from lanes_rig import Bench

from blockflow.batching.queueing import QueueingPolicy
from blockflow.batching.shares import TaskShare
from blockflow.core.errors import BlockError


def alone(bench: Bench, key: int) -> None:
    """A query waits at stage 1 that is to run unbatched."""
    bench.arrive(key, 1)
    bench.scheduler._tickets[key].apart = True
    bench.scheduler._alone[key] = 1
    bench.scheduler._policies[0].drop(key, 0)


@pytest.mark.parametrize("policy", ["none", "window"])
def test_a_stage_with_twins_runs_a_batch_per_lane(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    bench = Bench(monkeypatch, policy=policy, twins=True)
    batches = []
    for key in (1, 2):
        bench.arrive(key, 1)
        batches.append(bench.expect(1))
    bench.arrive(3, 1)
    assert bench.start() is None, "two lanes"
    assert bench.scheduler.busy == {1}
    for batch in reversed(batches):
        bench.compute(batch)
    bench.compute(bench.expect(1))
    assert bench.sink.sent == [[2], [1], [3]] and bench.executor.idle
    assert bench.scheduler.busy == set()


def test_a_batch_that_fails_as_a_whole_is_not_taken_for_the_one_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is under way goes before newcomers; that place would be lost."""
    bench = Bench(monkeypatch, policy="window", twins=True)
    batches = []
    for key in (1, 2):
        bench.arrive(key, 1, 2)
        batches.append(bench.expect(1))
    older, younger = batches
    bench.clock.now += 5
    younger.errors[2] = BlockError("BLOCK_FAILED", "no")
    bench.compute(younger)
    bench.arrive(3, 2)
    bench.compute(older)
    goes_on = bench.expect(2)
    assert [t.key for t in goes_on.tickets] == [1]
    bench.compute(goes_on)
    bench.compute(bench.expect(2))
    assert bench.sink.failed == {2: "BLOCK_FAILED"} and bench.sink.sent == [[1], [3]]
    (policy,) = bench.scheduler._policies
    assert isinstance(policy, QueueingPolicy) and policy._convoys._running == []


def test_whoever_runs_alone_has_the_stage_for_himself(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, twins=True)
    bench.arrive(1, 1)
    one = bench.expect(1)
    alone(bench, 2)
    assert bench.start() is None
    bench.compute(one)
    assert bench.expect(1).alone


def test_whoever_runs_alone_has_his_turn_though_a_batch_is_always_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, twins=True)
    batches = []
    for key in (1, 2):
        bench.arrive(key, 1)
        batches.append(bench.expect(1))
    alone(bench, 3)
    bench.arrive(4, 1)
    bench.compute(batches[0])
    assert bench.start() is None, "the other lane runs its stage, which is kept for him"
    bench.compute(batches[1])
    lone = bench.expect(1)
    assert lone.alone and bench.scheduler.busy == {1}
    assert bench.start() is None, "nobody beside him"
    bench.compute(lone)
    assert [t.key for t in bench.expect(1).tickets] == [4] and bench.scheduler.busy == set()


def test_a_policy_that_is_not_made_for_it_runs_one_batch_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, policy="dvabatch", twins=True)
    for key in (1, 2):
        bench.arrive(key, 1)
        if key == 1:
            one = bench.expect(1)
    assert bench.scheduler.busy == {1} and bench.start() is None
    bench.compute(one)
    # Its successor may, while that one runs.
    bench.expect(1)
    bench.scheduler.set_policy(1, {"policy": "window"}, 0)
    bench.arrive(3, 1)
    bench.expect(1)


def test_another_policy_is_told_of_all_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It predicts by the lanes that are left."""
    bench = Bench(monkeypatch, twins=True, lanes=3)
    bench.scheduler.set_policy(2, {"policy": "dvabatch"}, 0)
    told: list[set[int]] = []
    policy = bench.scheduler._by_stage[2]
    monkeypatch.setattr(policy, "decide", lambda _now, busy: told.append(set(busy)))
    bench.arrive(1, 1)
    bench.expect(1)
    assert bench.start() is None
    assert told[-1] == {1} and bench.scheduler.busy == set()


def test_with_fewer_lanes_there_is_no_second_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, twins=True)
    assert [bench.scheduler.width(1), bench.stages[1].width] == [1, 2]  # before its first step
    bench.arrive(1, 1)
    bench.expect(1)
    assert bench.scheduler.width(1) == 2
    bench.executor.lanes = 1
    bench.arrive(2, 1)
    assert bench.start() is None


def test_a_block_of_one_task_leaves_lanes_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trunk is everybody's; each head is one task's."""
    bench = Bench(monkeypatch, twins=True)
    for key, path in ((1, (1, 2)), (2, (1, 3))):
        bench.arrive(key, *path)
        bench.expect(1)
    assert [bench.scheduler.width(n) for n in (1, 2, 3)] == [2, 1, 1]
    # One request for both is on no way that leaves the trunk out.
    bench.arrive(3, 1, 2, 3)
    assert [bench.scheduler.width(n) for n in (1, 2, 3)] == [2, 1, 1]
    bench.arrive(4, 3)
    assert [bench.scheduler.width(n) for n in (1, 2, 3)] == [1, 1, 1]
    # With other tasks it is found out anew.
    bench.scheduler.set_shares([TaskShare(), TaskShare(2.0)], 0)
    bench.arrive(5, 3)
    assert [bench.scheduler.width(n) for n in (1, 2, 3)] == [1, 1, 2]
    # Others may claim the same.
    bench.scheduler.set_shares([TaskShare(), TaskShare(2.0)], 0)
    bench.arrive(6, 1, 2)
    assert [bench.scheduler.width(n) for n in (1, 2, 3)] == [2, 2, 1]


def test_who_comes_on_from_another_stage_here_is_no_newcomer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, twins=True)
    bench.arrive(1, 1, 2)
    one = bench.expect(1)
    bench.clock.now += 5
    bench.compute(one)
    assert [bench.scheduler.width(n) for n in (1, 2)] == [2, 2]

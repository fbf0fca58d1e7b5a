"""The executor with several lanes: batches of different stages at once, by a fake clock."""

from __future__ import annotations

from typing import Any

import pytest
from lanes_rig import LATE, MS, Bench

from blockflow.core.errors import RequestError


def test_batches_of_different_stages_run_at_once_and_end_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    for key, stage in ((1, 1), (2, 2), (3, 3)):
        bench.arrive(key, stage)
    one, two = bench.expect(1), bench.expect(2)
    assert bench.start() is None, "two lanes"
    assert bench.executor.busy and not bench.executor.idle
    bench.compute(two)
    three = bench.expect(3)
    for batch in (three, one):
        bench.compute(batch)
    assert bench.sink.sent == [[2], [3], [1]]
    assert bench.executor.idle and not bench.executor.busy


def test_a_stage_runs_one_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    for key in (1, 2):
        bench.arrive(key, 1, 2)
    first = bench.expect(1)
    assert bench.start() is None
    bench.compute(first)
    # The older goes on with stage 2, and the younger follows it.
    ahead, behind = bench.expect(2), bench.expect(1)
    assert [t.key for t in (*ahead.tickets, *behind.tickets)] == [1, 2]
    bench.compute(behind)
    assert bench.start() is None, "stage 2 is busy"
    bench.compute(ahead)
    bench.compute(bench.expect(2))
    assert bench.sink.sent == [[1], [2]]


def test_one_lane_is_one_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, lanes=1)
    bench.arrive(1, 1)
    bench.arrive(2, 2)
    bench.expect(1)
    assert bench.start() is None


def test_lanes_change_while_batches_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    for key in (1, 2, 3):
        bench.arrive(key, key)
    one, two = bench.expect(1), bench.expect(2)
    bench.executor.lanes = 1
    bench.compute(one)
    assert bench.start() is None, "one still runs"
    bench.executor.lanes = 3
    three = bench.expect(3)
    assert bench.scheduler.lanes == 3
    bench.compute(two)
    bench.compute(three)
    assert bench.executor.idle


def test_only_the_late_forward_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, timeout_ms=(50, 20, 0))
    for key in (1, 2):
        bench.arrive(key, key)
    one, two = bench.expect(1), bench.expect(2)
    assert bench.executor.next_wake_ns() == 20 * MS
    assert not bench.executor.give_up_overdue(20 * MS - 1)
    assert bench.executor.give_up_overdue(20 * MS)
    assert bench.sink.failed == {2: "BLOCK_FAILED"}
    assert bench.executor.busy, "the other one may still be done"
    assert bench.executor.next_wake_ns() == 50 * MS
    bench.compute(two)  # too late: it was answered for
    bench.compute(one)
    assert bench.sink.sent == [[1]] and not bench.executor.busy


def test_it_wakes_for_what_a_free_lane_waits_for_and_not_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    for stage in bench.stages:
        bench.scheduler.set_policy(stage, {"policy": "window", "max_delay_ms": 10}, 0)
    bench.arrive(1, 1)
    assert bench.start() is None
    assert bench.executor.next_wake_ns() == 10 * MS
    bench.clock.now = 10 * MS
    bench.expect(1)
    bench.arrive(2, 2)
    assert bench.start() is None
    assert bench.executor.next_wake_ns() == 20 * MS, "one lane is free"
    bench.arrive(3, 3)
    bench.clock.now = 20 * MS
    bench.expect(2)
    assert bench.start() is None
    assert bench.executor.next_wake_ns() == LATE, "only the deadline of what waits"


def test_what_waits_expires_while_all_lanes_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    for key in (1, 2):
        bench.arrive(key, key)
    bench.expect(1)
    bench.expect(2)
    bench.arrive(3, 3, deadline=5)
    assert bench.executor.next_wake_ns() == 5
    bench.clock.now = 5
    assert bench.start() is None
    assert bench.sink.failed == {3: "DEADLINE_EXCEEDED"}


def test_without_a_slot_the_other_lane_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, slots=1)
    for key in (1, 2):
        bench.arrive(key, key)
    one = bench.expect(1)
    assert bench.start() is None, "no slot is left"
    assert not bench.executor.idle
    assert bench.executor.next_wake_ns() == bench.clock.now + MS
    bench.compute(one)
    bench.compute(bench.expect(2))
    assert bench.sink.sent == [[1], [2]] and bench.executor.idle


def test_a_slot_that_is_being_read_is_not_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stalled batch makes those who wait give up their slots, but not the other lane."""
    bench = Bench(monkeypatch, slots=2)
    bench.arrive(1, 1, 2)
    bench.compute(bench.expect(1))
    reads = bench.expect(2)  # its input lies in the first slot, its output in the second
    held = reads.tickets[0].source.tensor()
    bench.arrive(2, 1)
    assert bench.start() is None
    assert reads.tickets[0].source.tensor() is held
    assert bench.stages[1].meter.copies_out == 0
    bench.compute(reads)
    bench.compute(bench.expect(1))
    assert bench.sink.sent == [[1], [2]]
    assert bench.slots is not None and bench.slots.free == 2

    # Nobody reads it: it gives up its slot to whoever cannot start without.
    bench.executor.lanes = 1
    bench.slots.free = 1
    bench.arrive(3, 1, 2)
    bench.compute(bench.expect(1))
    waits = next(iter(bench.scheduler._tickets.values())).source
    held = waits.tensor()
    assert bench.start() is None
    assert waits.tensor() is not held and bench.slots.free == 1
    assert [s.meter.copies_out for s in bench.stages.values()] == [1, 0, 0]
    bench.compute(bench.expect(2))
    assert bench.sink.sent[-1] == [3]


def test_without_a_slot_nor_memory_to_free_one_the_batch_fails_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, slots=1, lanes=1)
    bench.arrive(1, 1, 2)
    bench.compute(bench.expect(1))  # its output holds the slot, and waits for stage 2
    source = next(iter(bench.scheduler._tickets.values())).source

    class Full:
        def clone(self) -> Any:
            raise RuntimeError("can't allocate memory")

    source._tensor = Full()
    assert bench.start() is None
    assert bench.sink.failed == {1: "NO_SPACE"}
    assert bench.slots is not None and bench.slots.free == 1, "the slot is back"
    assert bench.executor.idle
    bench.arrive(2, 1)
    bench.compute(bench.expect(1))
    assert bench.sink.sent == [[2]]


def test_termination_refuses_what_waits_and_leaves_what_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    for key in (1, 2, 3):
        bench.arrive(key, key)
    one, two = bench.expect(1), bench.expect(2)
    bench.executor.refuse_all(RequestError("BLOCK_UNAVAILABLE", "the worker is being stopped"))
    assert bench.sink.failed == {3: "BLOCK_UNAVAILABLE"}
    bench.compute(two)
    bench.compute(one)
    assert bench.sink.sent == [[2], [1]] and bench.executor.idle


def test_what_is_abandoned_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    for key in (1, 2):
        bench.arrive(key, key)
    one, two = bench.expect(1), bench.expect(2)
    bench.compute(two)
    bench.executor.abandon()
    bench.compute(one)
    assert bench.sink.sent == [[2]] and not bench.executor.busy


@pytest.mark.parametrize("code", ["TOO_LARGE", "NO_SPACE"])
def test_who_is_too_large_together_runs_alone(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    bench = Bench(monkeypatch, slots=2, policy="window")
    assert bench.slots is not None
    bench.slots.max_rows, bench.slots.beyond = 2, code
    for key in (1, 2, 3):
        bench.arrive(key, 1)
    for key in (1, 2, 3):
        batch = bench.expect(1)
        assert [t.key for t in batch.tickets] == [key]
        bench.compute(batch)
    assert bench.sink.sent == [[1], [2], [3]] and bench.executor.idle
    bench.arrive(4, 1)
    bench.arrive(5, 1)
    together = bench.expect(1)
    assert [t.key for t in together.tickets] == [4, 5], "the policy goes on as before"
    bench.compute(together)
    assert not bench.sink.failed


@pytest.mark.parametrize("code", ["TOO_LARGE", "NO_SPACE"])
def test_who_is_too_large_alone_fails(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    bench = Bench(monkeypatch, slots=2, policy="window")
    assert bench.slots is not None
    bench.slots.max_rows, bench.slots.beyond = 0, code
    bench.arrive(1, 1)
    bench.arrive(2, 1)
    assert bench.start() is None
    assert bench.sink.failed == {1: code, 2: code} and bench.executor.idle


def test_clients_are_not_told_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, slots=2)
    assert bench.slots is not None
    bench.slots.max_rows, bench.slots.beyond = 0, "NO_SPACE"
    bench.arrive(1, 1)
    assert bench.start() is None
    (error,) = bench.sink.errors
    assert (error.where, error.message) == ("b1", "no memory for an output of 8 bytes")
    assert error.hint and error.retryable

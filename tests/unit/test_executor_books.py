"""The executor answers for all that it has taken, once, and gives its memory back, once."""

from __future__ import annotations

import gc
import os
import weakref
from typing import cast

import pytest
import torch
from lanes_rig import LATE, MS, Bench

from blockflow.core.errors import BlockError, RequestError
from blockflow.core.routing import merge_paths
from blockflow.tensormq.channel import InBuffer
from blockflow.wire.data import Item, Withdraw, encode_withdraw
from blockflow.worker.ticket import Batch, Source, Ticket


def waiting(bench: Bench) -> list[Ticket]:
    """What waits in its queue, oldest first."""
    return list(bench.scheduler._tickets.values())


def withdraw(bench: Bench, *tickets: Ticket) -> None:
    """The Dispatcher says that nobody waits for these any more."""
    gone = tuple((t.item.request_id, t.item.attempt) for t in tickets)
    bench.executor.receive(encode_withdraw(Withdraw(1, gone)), None, bench.clock.now)


def mates(bench: Bench, *keys: int) -> Source:
    """Tickets whose rows have come in one message."""
    source = Source("float32", (2,), len(keys), tensor=torch.zeros(len(keys), 2))
    tree, _ = merge_paths([[1]])
    for row, key in enumerate(keys):
        item = Item(os.urandom(16), 1, 1, tree, 0, 1, 1000)
        bench.sink.keys[item.request_id] = key
        bench.executor._queue(Ticket(key, item, 1, source, row, 0, 0, 0, LATE, 0))
    return source


def stalled(monkeypatch: pytest.MonkeyPatch, deadline: int = LATE) -> tuple[Bench, Batch, Ticket]:
    """Stage 1 computes, and the batch of stage 2 has no slot for its output."""
    bench = Bench(monkeypatch, slots=1)
    bench.arrive(1, 1)
    running = bench.expect(1)
    bench.arrive(2, 2, deadline=deadline)
    (ticket,) = waiting(bench)
    assert bench.start() is None and not waiting(bench)
    return bench, running, ticket


def serves_stage_two(bench: Bench, running: Batch) -> bool:
    """Once the slot is free again."""
    bench.compute(running)
    bench.arrive(9, 2)
    bench.compute(bench.expect(2))
    return bench.sink.sent[-1] == [9] and bench.executor.idle


def test_a_landing_does_not_give_back_what_mates_have_still_to_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, stages=1, lanes=1, slots=4)
    source = mates(bench, 1, 2)
    batch = bench.expect(1)
    batch.result = source.tensor()[:1]
    bench.executor.ordered(batch)
    bench.executor.computed(batch)
    assert bench.sink.sent == [[1]]
    assert source.tensor() is not None, "the second ticket's row lies in it"
    bench.compute(bench.expect(1))
    assert source.tensor() is None


def test_who_fails_in_a_batch_is_answered_for_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, policy="window")
    mates(bench, 1, 2, 3)
    batch = bench.expect(1)
    batch.errors[2] = BlockError("BLOCK_FAILED", "no")
    bench.compute(batch)
    assert bench.sink.failed == {2: "BLOCK_FAILED"}
    assert bench.sink.sent == [[1], [3]], "rows apart are messages apart"
    assert bench.executor.idle


def test_who_is_late_for_a_slot_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, running, ticket = stalled(monkeypatch, deadline=5 * MS)
    bench.clock.now = 5 * MS
    bench.compute(running)
    assert not bench.executor.idle, "somebody waits for a slot"
    assert bench.start() is None
    assert bench.sink.failed == {2: "DEADLINE_EXCEEDED"}
    assert ticket.source.tensor() is None
    assert bench.stages[2].meter.expired == 1
    bench.arrive(9, 2)
    bench.compute(bench.expect(2))
    assert bench.sink.sent == [[1], [9]] and bench.executor.idle


def test_what_waits_for_a_slot_can_be_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, running, ticket = stalled(monkeypatch)
    withdraw(bench, ticket)
    assert ticket.source.tensor() is None
    assert bench.executor.withdrawn == 1 and bench.sink.failed == {}
    assert serves_stage_two(bench, running)
    assert bench.slots is not None and bench.slots.free == 1


def test_one_of_a_batch_that_waits_for_a_slot_can_be_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, slots=0, policy="window", lanes=1)
    source = mates(bench, 1, 2)
    first, _ = waiting(bench)
    assert bench.start() is None
    withdraw(bench, first)
    assert bench.slots is not None
    bench.slots.free = 1
    bench.compute(bench.expect(1))
    assert bench.sink.sent == [[2]]
    assert source.tensor() is None


def test_what_is_withdrawn_in_the_queue_or_before_it_comes_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.arrive(1, 1)
    (ticket,) = waiting(bench)
    withdraw(bench, ticket)
    assert ticket.source.tensor() is None and bench.executor.idle
    late = Source("float32", (2,), 1, tensor=torch.zeros(1, 2))
    bench.executor._queue(Ticket(2, ticket.item, 1, late, 0, 0, 0, 0, LATE, 0))
    assert late.tensor() is None and bench.start() is None
    assert bench.executor.withdrawn == 2 and bench.sink.failed == {}


def test_termination_refuses_what_waits_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _, ticket = stalled(monkeypatch)
    bench.executor.refuse_all(RequestError("WORKER_LOST", "the worker has ended"))
    assert bench.sink.failed == {2: "WORKER_LOST"}
    assert ticket.source.tensor() is None


def test_what_waits_for_a_slot_is_neither_idle_nor_overtaken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, running, _ = stalled(monkeypatch)
    bench.arrive(3, 3)
    assert bench.start() is None
    assert bench.executor.next_wake_ns() == bench.clock.now + MS  # is a slot free by then?
    bench.compute(running)
    assert not bench.executor.idle
    for stage in (2, 3):
        bench.compute(bench.expect(stage))
    assert bench.sink.sent == [[1], [2], [3]] and bench.executor.idle


def test_branches_here_share_an_output_until_the_last_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, slots=3)
    tree, _ = merge_paths([[1, 2], [1, 3]])
    item = Item(os.urandom(16), 1, 1, tree, 0, 1, 1000)
    bench.sink.keys[item.request_id] = 1
    source = Source("float32", (2,), 1, tensor=torch.full((1, 2), 7.0))
    bench.executor._queue(Ticket(50, item, 1, source, 0, 0, 0, 0, LATE, 0))
    bench.compute(bench.expect(1))
    one, other = waiting(bench)
    assert one.key == 50 and other.key != 50 and other.origin == 50
    bench.compute(bench.expect(other.stage))  # its key is smaller
    assert torch.equal(one.source.tensor(), torch.full((1, 2), 7.0))
    bench.compute(bench.expect(one.stage))
    assert one.source.tensor() is None
    assert bench.slots is not None and bench.slots.free == 3
    assert bench.executor.backlog._own == {}


def test_an_output_that_nobody_reads_any_more_is_not_left_to_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole tensor's memory counts as out for as long as anything refers to it."""
    bench = Bench(monkeypatch, stages=2, lanes=1, slots=2)
    gc.disable()
    try:
        bench.arrive(1, 1, 2)
        batch = bench.expect(1)
        out = weakref.ref(batch.out)
        bench.compute(batch)
        del batch
        assert out() is not None
        bench.compute(bench.expect(2))
        assert out() is None
    finally:
        gc.enable()


def test_what_goes_on_here_from_a_padded_batch_keeps_its_own_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, lanes=1)
    bench.arrive(1, 1, 2)
    batch = bench.expect(1)
    batch.cuts = {1: (1,)}
    bench.compute(batch)
    (follower,) = waiting(bench)
    assert (follower.stage, follower.shape, follower.source.shape) == (2, (1,), (2,))


def test_what_lies_in_a_slot_is_copied_before_the_slot_is_let_go_of() -> None:
    done: list[str] = []
    x = torch.ones(1, 2)
    source = Source("float32", (2,), 1, tensor=x, on_release=lambda: done.append("let go"))

    def full(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    with pytest.raises(RuntimeError):
        source.detach(full)
    assert done == [] and source.tensor() is x

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        done.append("copied")
        return tensor.clone()

    assert source.detach(copied) and not source.detach(copied)
    source.release()
    assert done == ["copied", "let go"]


def test_only_who_has_taken_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, stages=3, lanes=3, timeout_ms=(20, 40, 0))
    for key in (1, 2, 3):
        bench.arrive(key, key)
        bench.expect(key)
    assert bench.executor.next_overdue_ns() == bench.clock.now + 20 * MS
    assert bench.executor.give_up_overdue(bench.clock.now + 20 * MS)
    assert bench.sink.failed == {1: "BLOCK_FAILED"}


def test_it_wakes_for_what_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, stages=1, timeout_ms=(20,))
    executor, now = bench.executor, bench.clock.now
    assert executor.next_wake_ns() is None and executor.idle
    bench.arrive(1, 1)
    running = bench.expect(1)
    assert executor.busy and executor.next_wake_ns() == now + 20 * MS
    for deadline, wakes in ((30, 20), (10, 10)):
        bench.arrive(deadline, 1, deadline=now + deadline * MS)
        assert executor.next_wake_ns() == now + wakes * MS
    bench.compute(running)
    assert not executor.busy


def test_it_wakes_for_what_a_policy_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, stages=1)
    now = bench.clock.now
    bench.scheduler.set_policy(1, {"policy": "window", "max_rows": 8, "max_delay_ms": 10}, now)
    bench.arrive(1, 1)
    assert bench.start() is None and bench.executor.next_wake_ns() == now + 10 * MS


def test_a_forwards_time_begins_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, stages=1, timeout_ms=(20,))
    bench.clock.now = 100 * MS
    bench.arrive(1, 1)
    bench.expect(1)
    assert not bench.executor.give_up_overdue(120 * MS - 1)
    assert bench.executor.give_up_overdue(120 * MS)


def test_who_is_to_run_alone_waits_for_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.arrive(1, 1)
    running = bench.expect(1)
    bench.arrive(2, 1)
    (suspect,) = waiting(bench)
    assert bench.scheduler.withdraw([suspect.item], 0) == [suspect]
    suspect.apart = True
    bench.executor._queue(suspect)
    assert bench.start() is None
    bench.compute(running)
    bench.compute(bench.expect(1))
    assert bench.sink.sent == [[1], [2]]


class Received:
    """A buffer in somebody's slot."""

    def __init__(self) -> None:
        self.released = 0

    def tensor(self) -> torch.Tensor:
        return torch.zeros(2, 2)

    def release(self) -> None:
        self.released += 1


def test_a_slot_goes_back_with_the_last_of_its_rows() -> None:
    buffer = Received()
    source = Source("float32", (2,), 2, buffer=cast(InBuffer, buffer))
    source.release()
    assert buffer.released == 0 and source.tensor().shape == (2, 2)
    source.release()
    assert buffer.released == 1


def test_an_output_is_waited_for_until_the_last_deadline_of_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, policy="window")
    for key, deadline in ((1, 5 * MS), (2, 9 * MS), (3, 7 * MS)):
        bench.arrive(key, 1, deadline=deadline)
    tickets = tuple(waiting(bench))
    batch = Batch(1, tickets)
    assert (batch.rows, batch.until_ns) == (3, 9 * MS)
    batch.keep(tickets[::2])
    assert (batch.rows, batch.until_ns) == (2, 7 * MS)

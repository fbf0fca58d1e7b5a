"""What a scheduler's policies know of what waits, also when they change; who runs by himself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from blockflow.batching.policy import Query, WaitUntil
from blockflow.batching.queueing import QueueingPolicy
from blockflow.batching.shares import TaskShare
from blockflow.core.routing import merge_paths
from blockflow.wire.data import REQUEST_ID_BYTES, Item
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.ticket import Batch, Source, Ticket

MS = 1_000_000
NONE = {"policy": "none"}
WINDOW = {"policy": "window", "max_rows": 8, "max_delay_ms": 10}


def ticket(key: int, path: list[int], now: int = 0, deadline: int = 1000 * MS) -> Ticket:
    tree, _ = merge_paths([path])
    item = Item(bytes(REQUEST_ID_BYTES), 1, 1, tree, 0, 1, 1000)
    return Ticket(key, item, path[0], Source("float32", (4,), 1), 0, now, now, now, deadline, 5)


def test_what_runs_apart_is_in_no_batch() -> None:
    """No output could hold its batch's: it would come back for ever."""
    s = Scheduler({1: {**WINDOW, "max_delay_ms": 0}})
    for key in range(4):
        t = ticket(key, [1])
        t.apart = key in (1, 2)
        s.arrive(t, 0)
    batches = []
    while isinstance(batch := s.decide(0), Batch):
        batches.append([t.key for t in batch.tickets])
        s.done(batch, 0)
    assert batches == [[1], [2], [0, 3]]


def test_a_new_policy_counts_from_the_arrival_of_the_oldest() -> None:
    s = Scheduler({1: NONE})
    s.arrive(ticket(1, [1], now=4 * MS, deadline=900 * MS), 4 * MS)
    s.arrive(ticket(0, [1], now=3 * MS, deadline=901 * MS), 5 * MS)  # by another way, later
    s.set_policy(1, WINDOW, 6 * MS)
    assert s.decide(6 * MS) == WaitUntil(13 * MS)


def test_other_shares_are_another_policy_and_the_same_are_not() -> None:
    s = Scheduler({1: NONE}, shares=[TaskShare(), TaskShare()])
    for key, task in ((0, 0), (1, 1), (2, 1)):
        waiting = ticket(key, [1])
        waiting.task = task
        s.arrive(waiting, 0)
    before = s._policies
    s.set_shares([TaskShare(), TaskShare()], 0)
    assert s._policies is before
    s.set_shares([TaskShare(), TaskShare(priority=1)], 0)
    order = []
    while isinstance(batch := s.decide(0), Batch):
        order += [t.key for t in batch.tickets]
        s.done(batch, 0)
    assert order == [1, 2, 0]


def test_a_key_that_has_waited_at_two_stages_expires_once() -> None:
    s = Scheduler({1: NONE, 2: NONE})
    s.arrive(ticket(7, [1, 2], deadline=5 * MS), 0)
    batch = s.decide(0)
    assert isinstance(batch, Batch)
    s.done(batch, 0)
    s.arrive(ticket(7, [2], deadline=5 * MS), 0)
    assert s.expire(5 * MS - 1) == []
    assert [t.key for t in s.expire(5 * MS)] == [7]
    assert s.expire(5 * MS) == [] and s.next_deadline() is None


def test_a_policy_that_gets_another_stage_knows_who_goes_on_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Sequence[int]] = []
    real = QueueingPolicy.arrive

    def arrive(self: QueueingPolicy, query: Query, now: int) -> None:
        seen.append(self._route(query))
        real(self, query, now)

    monkeypatch.setattr(QueueingPolicy, "arrive", arrive)
    s = Scheduler({1: WINDOW, 2: NONE})
    s.arrive(ticket(1, [1, 2]), 0)
    s.set_policy(2, WINDOW, 0)
    s.set_policy(2, NONE, 0)
    assert seen == [(1,), (1, 2), (1,)]

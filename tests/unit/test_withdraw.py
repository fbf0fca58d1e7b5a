"""Withdrawn requests: remembered within bounds, dropped in the queue, said to those concerned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from blockflow.core import limits
from blockflow.core.errors import RequestError
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import PathNode, PathTree, RouteTable, StageRoute, TaskRoute
from blockflow.dispatcher.entry import Answer, Entry
from blockflow.dispatcher.plan import Planner
from blockflow.dispatcher.withdraw import Withdrawals
from blockflow.wire.data import Item, Withdraw, decode_data_plane
from blockflow.worker import withdrawn
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.ticket import Batch, Source, Ticket
from blockflow.worker.withdrawn import MOST, WithdrawnRequests

MINUTE = limits.MAX_DEADLINE_MS * 1_000_000
ANY = TensorSpec("float32", ("rows", 4))
TREE = PathTree((PathNode(1, -1, True),))


def item(number: int, attempt: int = 1, alone: bool = False) -> Item:
    return Item(number.to_bytes(16, "big"), attempt, 1, TREE, 0, 1, 1000, alone=alone)


def test_an_attempt_is_withdrawn_with_those_before_it() -> None:
    known = WithdrawnRequests()
    assert not known
    known.add([(item(1).request_id, 2)], 0)
    assert item(1, 1) in known
    assert item(1, 2) in known
    assert item(1, 3) not in known  # a re-run that somebody waits for
    assert item(2) not in known
    known.add([(item(1).request_id, 1)], 5)  # overtaken on its way
    assert item(1, 2) in known


def test_memory_is_bounded_in_number_and_time() -> None:
    known = WithdrawnRequests()
    for n in range(3 * MOST):
        known.add([(item(n).request_id, 1)], n)
    assert len(known) == MOST
    assert item(0) not in known
    assert item(3 * MOST - 1) in known
    known.add([(item(7).request_id, 1)], 3 * MOST + MINUTE)
    assert len(known) == 1


def test_who_is_withdrawn_again_is_remembered_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(withdrawn, "MOST", 2)
    known = WithdrawnRequests()
    for now, n in enumerate((1, 2, 1, 3)):
        known.add([(item(n).request_id, 1)], now)
    assert [item(n) in known for n in (1, 2, 3)] == [True, False, True]


def ticket(key: int, it: Item) -> Ticket:
    return Ticket(key, it, 1, Source("float32", (4,), 1), 0, 0, 0, 0, MINUTE, 0)


def test_the_scheduler_gives_back_what_is_withdrawn_and_runs_the_rest() -> None:
    scheduler = Scheduler({1: {"policy": "none"}})
    for n in range(6):
        scheduler.arrive(ticket(n, item(n, alone=n == 4)), 0)
    known = WithdrawnRequests()
    known.add([(item(n).request_id, 1) for n in (0, 3, 4, 99)], 0)
    assert [t.key for t in scheduler.withdraw(known, 0)] == [0, 3, 4]
    assert scheduler.withdraw(known, 0) == []
    assert scheduler.all_rows == 3
    ran = []
    while isinstance(batch := scheduler.decide(1), Batch):
        ran += [t.key for t in batch.tickets]
        scheduler.done(batch, 1)
    assert sorted(ran) == [1, 2, 5]


# --- the Dispatcher's side ------------------------------------------------------------------------


class Push:
    """Takes messages for any endpoint."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Withdraw]] = []
        self.takes = True

    def send(self, endpoint: str, frames: Sequence[Any]) -> bool:
        message = decode_data_plane(frames[0])
        assert isinstance(message, Withdraw)
        if self.takes:
            self.sent.append((endpoint, message))
        return self.takes


def routes(version: int, incarnations: Sequence[int]) -> RouteTable:
    stages = {0: StageRoute(0, "", "dispatcher", 1, "ipc://me", "tensormq")}
    for n, (block, inc) in enumerate(zip("abc", incarnations, strict=True), 1):
        stages[n] = StageRoute(n, block, f"{block}#0", inc, f"ipc://{inc}", "tensormq")
    tasks = {
        "ab": TaskRoute("ab", ("a", "b"), Contract(ANY, ANY)),
        "ac": TaskRoute("ac", ("a", "c"), Contract(ANY, ANY)),
    }
    return RouteTable(1, version, stages, tasks)


class Desk:
    """Withdrawals with their planner and what they have sent."""

    def __init__(self) -> None:
        self.push = Push()
        self.withdrawals = Withdrawals(1, self.push)  # type: ignore[arg-type]
        self.planner = Planner()
        self.publish(1, (11, 12, 13))
        self._count = 0

    def publish(self, version: int, incarnations: Sequence[int]) -> None:
        self.planner.replace(routes(version, incarnations))
        self.withdrawals.publish(routes(version, incarnations))

    def entry(self, *tasks: str) -> Entry:
        self._count += 1
        plan = self.planner.plan([self.planner.task(t) for t in tasks])
        ticket = self._count.to_bytes(16, "big")
        return Entry(b"c", b"r" * 16, ticket, tasks, plan, 1, 10, 0, None, 0)

    def told(self, *entries: Entry) -> dict[str, list[tuple[bytes, int]]]:
        for entry in entries:
            self.withdrawals.ended(entry)
        self.withdrawals.send()
        sent, self.push.sent = self.push.sent, []
        out: dict[str, list[tuple[bytes, int]]] = {}
        for endpoint, message in sent:
            out.setdefault(endpoint, []).extend(message.requests)
        return out


CANCELLED = RequestError("CANCELLED", "by the client")
LOST = RequestError("WORKER_LOST", "too many requests are being run again")
LATE = RequestError("DEADLINE_EXCEEDED", "late")
DONE = Answer("result", (), 0)


def test_a_gone_client_is_told_to_all_workers_on_the_way() -> None:
    desk = Desk()
    entry = desk.entry("ab")
    assert desk.told(entry) == {
        "ipc://11": [(entry.ticket, 1)],
        "ipc://12": [(entry.ticket, 1)],
    }


def test_only_what_may_be_under_way_yet_is_withdrawn() -> None:
    desk = Desk()
    for outcome in (DONE, LATE):  # nothing is left of it, or it falls out by its deadline
        entry = desk.entry("ab")
        entry.outcomes[entry.plan.ends[0]] = outcome
        assert desk.told(entry) == {}
    for outcome in (CANCELLED, LOST):
        entry = desk.entry("ab", "ac")
        entry.outcomes = dict(zip(entry.plan.ends, (DONE, outcome), strict=True))
        assert set(desk.told(entry)) == {"ipc://11", "ipc://13"}
    entry = desk.entry("ab")
    entry.waits_for = "b"  # between two attempts it is nowhere
    assert desk.told(entry) == {}


def test_many_go_in_few_messages_and_old_routes_are_known() -> None:
    desk = Desk()
    entries = [desk.entry("ab") for _ in range(limits.MAX_WITHDRAWN_PER_MESSAGE + 1)]
    desk.publish(2, (21, 12, 13))
    desk.publish(3, (31, 12, 13))  # the first ones drain yet
    for entry in entries:
        desk.withdrawals.ended(entry)
    desk.withdrawals.send()
    assert sorted(e for e, _ in desk.push.sent) == ["ipc://11"] * 2 + ["ipc://12"] * 2
    assert desk.withdrawals.sent == 2 * len(entries)
    desk.push.sent.clear()
    desk.withdrawals.peer_gone(11)
    assert set(desk.told(entries[0])) == {"ipc://12"}
    desk.push.takes = False
    before = desk.withdrawals.sent
    assert desk.told(entries[0]) == {}
    assert desk.withdrawals.sent == before


def test_who_is_in_no_route_is_forgotten_when_nothing_can_be_there() -> None:
    desk = Desk()
    entry = desk.entry("ab")
    desk.publish(2, (21, 12, 13))
    desk.withdrawals.forget_retired()
    assert set(desk.told(entry)) == {"ipc://12"}
    desk.withdrawals.peer_gone(12)
    desk.withdrawals.forget_retired()
    assert desk.told(entry) == {}

"""Whatever happens in whatever order: each admitted request gets one reply, and nothing remains."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blockflow.core.errors import BlockError, RequestError
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import RouteTable, StageRoute, TaskRoute
from blockflow.dispatcher.inflight import Answer, Entry, InFlightTable, ReleaseInput, Reply
from blockflow.dispatcher.plan import Planner

CONTRACT = Contract(TensorSpec("float32", ("rows", 4)), TensorSpec("float32", ("rows", 4)))
STAGES = {1: ("trunk", 101), 2: ("mid", 102), 3: ("head", 103), 4: ("side", 102)}
TASKS = {
    "long": ("trunk", "mid", "head"),
    "short": ("trunk",),
    "side": ("trunk", "mid", "side"),
    "twin": ("trunk", "mid", "head"),
}
CLIENTS = (b"one", b"two")


class InFlight(RuleBasedStateMachine):
    """Keeps its own ledger and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.table = InFlightTable(1)
        self.planner = Planner()
        self.now = 0
        self.version = 0
        self.open: dict[bytes, Entry] = {}
        self.ended: list[Entry] = []
        self.replies: dict[bytes, int] = {}
        self.released: dict[bytes, int] = {}
        self.taken = 0
        self.publish()

    # --- the ledger

    def carry_out(self, instructions: list[Any]) -> None:
        for what in instructions:
            if isinstance(what, Reply):
                ticket = what.entry.ticket
                self.replies[ticket] = self.replies.get(ticket, 0) + 1
                assert len(what.entry.results()) == len(what.entry.tasks)
            elif isinstance(what, ReleaseInput):
                ticket = what.entry.ticket
                self.released[ticket] = self.released.get(ticket, 0) + 1
                self.planner.give_back(what.entry.plan)
                self.ended.append(self.open.pop(ticket))

    def pick(self, data: st.DataObject) -> Entry:
        return data.draw(st.sampled_from(list(self.open.values())))

    # --- events

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.planner.replace(
            RouteTable(
                self.version,
                self.version,
                {
                    s: StageRoute(s, b, f"{b}#0", inc, f"ipc://{inc}", "tensormq")
                    for s, (b, inc) in STAGES.items()
                },
                {n: TaskRoute(n, p, CONTRACT) for n, p in TASKS.items()},
            )
        )

    @rule(
        tasks=st.lists(st.sampled_from(sorted(TASKS)), min_size=1, max_size=3, unique=True),
        client=st.sampled_from(CLIENTS),
        rid=st.integers(0, 3),
        budget=st.integers(1, 20),
    )
    def admit(self, tasks: list[str], client: bytes, rid: int, budget: int) -> None:
        plan = self.planner.plan([self.planner.task(t) for t in tasks])
        key = rid.to_bytes(16, "big")
        in_use = any((e.client, e.request_id) == (client, key) for e in self.open.values())
        given: dict[str, Any] = {
            "rows": 1,
            "deadline_ns": self.now + budget,
            "received_ns": self.now,
            "retained": None,
            "charged": 8,
        }
        if in_use:
            with pytest.raises(RequestError, match="in flight"):
                self.table.admit(client, key, tuple(tasks), plan, **given)
            return
        entry = self.table.admit(client, key, tuple(tasks), plan, **given)
        self.planner.take(plan)
        self.open[entry.ticket] = entry

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def result(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        hop = data.draw(st.sampled_from(entry.plan.ends))
        sender = entry.plan.incarnations[hop]
        self.carry_out(self.table.outcome(entry.ticket, 1, hop, sender, Answer("x", (), 0)))

    @precondition(lambda self: self.open or self.ended)
    @rule(
        data=st.data(),
        attempt=st.integers(1, 2),
        hop=st.integers(0, 6),
        sender=st.sampled_from([101, 102, 103, 999]),
    )
    def forged_or_late_result(
        self, data: st.DataObject, attempt: int, hop: int, sender: int
    ) -> None:
        entry = data.draw(st.sampled_from([*self.open.values(), *self.ended[-5:]]))
        before = dict(entry.outcomes)
        out = self.table.outcome(entry.ticket, attempt, hop, sender, Answer("y", (), 0))
        for node, outcome in before.items():
            assert entry.outcomes[node] is outcome
        self.carry_out(out)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def failure(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        hop = data.draw(st.integers(0, len(entry.plan.blocks) - 1))
        sender = entry.plan.incarnations[hop]
        error = BlockError("BLOCK_FAILED", "broken")
        self.carry_out(self.table.failure(entry.ticket, 1, hop, sender, error))

    @rule(step=st.integers(0, 8))
    def time_passes(self, step: int) -> None:
        self.now += step
        self.carry_out(self.table.tick(self.now))
        assert all(e.deadline_ns > self.now for e in self.open.values())

    @rule(client=st.sampled_from(CLIENTS), rid=st.integers(0, 3))
    def cancel(self, client: bytes, rid: int) -> None:
        self.carry_out(self.table.cancel(client, rid.to_bytes(16, "big")))

    @rule(incarnation=st.sampled_from([101, 102, 103, 999]))
    def worker_dies(self, incarnation: int) -> None:
        self.carry_out(self.table.peer_gone(incarnation))
        for entry in self.open.values():
            lost = entry.plan.lost_with.get(incarnation, frozenset())
            assert lost.issubset(entry.outcomes)

    @rule(client=st.sampled_from(CLIENTS))
    def client_leaves(self, client: bytes) -> None:
        gone = [t for t, e in self.open.items() if e.client == client]
        self.carry_out(self.table.client_gone(client))
        for ticket in gone:
            self.replies[ticket] = self.replies.get(ticket, 0) + 1  # nobody is left to tell

    # --- what holds at any time

    @invariant()
    def each_ended_request_was_answered_once(self) -> None:
        for entry in self.ended:
            assert self.replies[entry.ticket] == 1
            assert self.released[entry.ticket] == 1

    @invariant()
    def the_books_agree(self) -> None:
        open_entries = list(self.open.values())
        assert len(self.table) == len(open_entries)
        assert self.table.charged == 8 * len(open_entries)
        for client in CLIENTS:
            assert self.table.of_client(client) == sum(e.client == client for e in open_entries)
        versions = [e.plan.version for e in open_entries]
        assert self.table.oldest_version() == (min(versions) if versions else None)
        due = [e.deadline_ns for e in open_entries]
        assert self.table.next_deadline() == (min(due) if due else None)
        for stage in STAGES:
            visits = sum(n.stage == stage for e in open_entries for n in e.plan.tree.nodes)
            assert self.planner.outstanding(stage) == visits

    def teardown(self) -> None:
        self.carry_out(self.table.abort_all(RequestError("BLOCK_UNAVAILABLE", "over")))
        assert not self.open
        self.each_ended_request_was_answered_once()
        self.the_books_agree()


InFlight.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestInFlight = InFlight.TestCase

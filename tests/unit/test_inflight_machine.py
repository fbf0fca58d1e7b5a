"""Whatever happens in whatever order: each admitted request gets one reply, and nothing remains."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blockflow.core.errors import BlockError, RequestError
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import CanaryRoute, RouteTable, StageRoute, TaskRoute
from blockflow.dispatcher.entry import (
    EDGE,
    QUARANTINE,
    Answer,
    Entry,
    ReleaseInput,
    Reply,
    SendAgain,
    Supersede,
)
from blockflow.dispatcher.inflight import InFlightTable
from blockflow.dispatcher.plan import Planner
from blockflow.dispatcher.recovery import DEADLY, Death
from blockflow.dispatcher.retry import MAX_ATTEMPTS, RetryBudget

CONTRACT = Contract(TensorSpec("float32", ("rows", 4)), TensorSpec("float32", ("rows", 4)))
BLOCKS = ("trunk", "mid", "head", "side")
ONCE = "side"
TASKS = {
    "long": ("trunk", "mid", "head"),
    "short": ("trunk",),
    "side": ("trunk", "mid", "side"),
    "twin": ("trunk", "mid", "head"),
    "back": ("head", "mid"),
}
CANARIES = {"twin": CanaryRoute(("trunk", "head"), 0.5)}
SLOTS = 3
CLIENTS = (b"one", b"two")
SECOND = 1_000_000_000


class InFlight(RuleBasedStateMachine):
    """Keeps its own ledger and compares.

    A worker hosts one block; "mid" and "side" share workers. Each life has a number of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.planner = Planner()
        self.table = InFlightTable(1, self.planner, RetryBudget(6))
        self.now = 0
        self.version = 0
        self.epoch = 1
        self.next_life = 100
        self.alive: dict[int, tuple[str, ...]] = {}
        self.open: dict[bytes, Entry] = {}
        self.ended: list[Entry] = []
        self.replies: dict[bytes, int] = {}
        self.released: dict[bytes, int] = {}
        self.sent: dict[bytes, int] = {}
        self.left: set[tuple[bytes, int]] = set()
        for blocks in (("trunk",), ("mid", "side"), ("head",)):
            self.start(blocks)
        self.publish(new_epoch=False, down=[])

    # --- the ledger

    def carry_out(self, instructions: list[Any]) -> None:
        for what in instructions:
            if isinstance(what, SendAgain):
                ticket = what.entry.ticket
                self.sent[ticket] += 1
                assert self.sent[ticket] <= MAX_ATTEMPTS
                assert what.entry.attempt <= MAX_ATTEMPTS
                assert self.sent[ticket] == what.entry.attempt
                assert what.entry.attempt == 1 or (ticket, what.entry.attempt - 1) in self.left
                assert not what.entry.waits_for
                assert set(what.entry.plan.incarnations) <= self.alive.keys()
            elif isinstance(what, Supersede):
                assert (what.ticket, what.attempt) not in self.left
                assert what.attempt == self.sent[what.ticket]
                assert what.ends and set(what.ends) <= set(what.plan.ends)
                self.left.add((what.ticket, what.attempt))
            elif isinstance(what, Reply):
                ticket = what.entry.ticket
                self.replies[ticket] = self.replies.get(ticket, 0) + 1
                results = what.entry.results()
                assert [e.task for e in results] == list(what.entry.tasks)
                answered = {e.plan.epoch for e in results if isinstance(e.outcome, Answer)}
                assert len(answered) <= 1
            elif isinstance(what, ReleaseInput):
                ticket = what.entry.ticket
                self.released[ticket] = self.released.get(ticket, 0) + 1
                self.ended.append(self.open.pop(ticket))

    def pick(self, data: st.DataObject, under_way: bool = False) -> Entry | None:
        entries = [e for e in self.open.values() if not (under_way and e.waits_for)]
        return data.draw(st.sampled_from(entries)) if entries else None

    def start(self, blocks: tuple[str, ...]) -> None:
        self.next_life += 1
        self.alive[self.next_life] = blocks

    # --- events

    @rule(blocks=st.sampled_from([("trunk",), ("mid", "side"), ("head",)]))
    def worker_starts(self, blocks: tuple[str, ...]) -> None:
        if len(self.alive) < 8:
            self.start(blocks)

    @rule(new_epoch=st.booleans(), down=st.sampled_from([[], [], ["head"]]))
    def publish(self, new_epoch: bool, down: list[str]) -> None:
        self.version += 1
        self.epoch += new_epoch
        stages = {}
        for life, blocks in self.alive.items():
            for block in blocks:
                stage = life * 10 + BLOCKS.index(block)
                stages[stage] = StageRoute(
                    stage,
                    block,
                    f"{block}#{life}",
                    life,
                    f"ipc://{life}",
                    "tensormq",
                    replayable=block != ONCE,
                    slots=SLOTS,
                )
        tasks = {n: TaskRoute(n, p, CONTRACT, canary=CANARIES.get(n)) for n, p in TASKS.items()}
        reasons = dict.fromkeys(down, "given up")
        self.planner.replace(RouteTable(self.epoch, self.version, stages, tasks, (), reasons))
        self.carry_out(self.table.published())

    @rule(
        tasks=st.lists(st.sampled_from(sorted(TASKS)), min_size=1, max_size=3, unique=True),
        client=st.sampled_from(CLIENTS),
        rids=st.lists(st.integers(0, 9), min_size=1, max_size=4),
        seconds=st.integers(1, 20),
        again=st.booleans(),
    )
    def admit(
        self, tasks: list[str], client: bytes, rids: list[int], seconds: int, again: bool
    ) -> None:
        for rid in rids:
            self.admit_one(tasks, client, rid, seconds, again)

    def admit_one(
        self, tasks: list[str], client: bytes, rid: int, seconds: int, again: bool
    ) -> None:
        try:
            plan = self.planner.way([self.planner.task(t) for t in tasks])
        except RequestError as exc:
            # The tasks do not go together, or nothing will bring a block back.
            if exc.code == "INVALID_REQUEST" or self.planner.down(exc.where):
                return
            raise
        if self.planner.edges.full(plan.guards):
            return
        key = rid.to_bytes(16, "big")
        in_use = any((e.client, e.request_id) == (client, key) for e in self.open.values())
        given: dict[str, Any] = {
            "rows": 1,
            "deadline_ns": self.now + seconds * SECOND,
            "received_ns": self.now,
            "retained": None,
            "charged": 8,
            "digest": b"same" if again else b"",
        }
        if in_use:
            with pytest.raises(RequestError, match="in flight"):
                self.table.admit(client, key, tuple(tasks), plan, **given)
            return
        entry = self.table.admit(client, key, tuple(tasks), plan, **given)
        self.open[entry.ticket] = entry
        self.sent[entry.ticket] = int(not entry.waits_for)
        assert bool(entry.waits_for) == bool(plan.absent)

    @rule(data=st.data(), client=st.sampled_from(CLIENTS))
    def comes_again(self, data: st.DataObject, client: bytes) -> None:
        known = self.pick(data)
        if known is None or not known.digest:
            return
        entry = self.table.find(known.request_id, b"same")
        assert self.table.find(known.request_id, b"other") is None
        if entry is None:  # the last one with this id has ended
            return
        if any((e.client, e.request_id) == (client, entry.request_id) for e in self.open.values()):
            with pytest.raises(RequestError, match="in flight"):
                self.table.attach(client, entry)
        else:
            self.table.attach(client, entry)
            assert entry.client == client

    @rule(data=st.data())
    def result(self, data: st.DataObject) -> None:
        entry = self.pick(data, under_way=True)
        if entry is None:
            return
        hop = data.draw(st.sampled_from(entry.plan.ends))
        sender = entry.plan.incarnations[hop]
        answer = Answer("x", (), 0)
        self.carry_out(self.table.outcome(entry.ticket, entry.attempt, hop, sender, answer))

    @precondition(lambda self: self.open or self.ended)
    @rule(
        data=st.data(),
        attempt=st.integers(1, 3),
        hop=st.integers(0, 6),
        sender=st.integers(100, 112),
    )
    def forged_or_late_result(
        self, data: st.DataObject, attempt: int, hop: int, sender: int
    ) -> None:
        entry = data.draw(st.sampled_from([*self.open.values(), *self.ended[-5:]]))
        before = entry.ended()
        out = self.table.outcome(entry.ticket, attempt, hop, sender, Answer("y", (), 0))
        for task, end in entry.ended().items():
            assert task not in before or before[task].outcome is end.outcome
        self.carry_out(out)

    @rule(data=st.data(), code=st.sampled_from(["BLOCK_FAILED", "WORKER_LOST"]))
    def failure(self, data: st.DataObject, code: str) -> None:
        entry = self.pick(data, under_way=True)
        if entry is None:
            return
        hop = data.draw(st.integers(0, len(entry.plan.blocks) - 1))
        sender = entry.plan.incarnations[hop]
        error = BlockError(code, "broken")
        self.carry_out(
            self.table.failure(entry.ticket, entry.attempt, hop, sender, error, self.now)
        )

    @rule(step=st.sampled_from([1, SECOND // 2, SECOND // 2, 3 * SECOND]))
    def time_passes(self, step: int) -> None:
        self.now += step
        self.carry_out(self.table.tick(self.now))
        assert all(e.deadline_ns > self.now for e in self.open.values())
        due = self.table.next_deadline()
        assert due is None or due > self.now

    @rule(data=st.data(), client=st.sampled_from(CLIENTS))
    def cancel(self, data: st.DataObject, client: bytes) -> None:
        entry = self.pick(data)
        if entry is not None:
            self.carry_out(self.table.cancel(client, entry.request_id))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), replaced=st.sampled_from([True, True, True, False]))
    def worker_dies(self, data: st.DataObject, replaced: bool) -> None:
        life = data.draw(st.sampled_from(sorted(self.alive)))
        blocks = self.alive.pop(life)
        self.check_death(data, life)
        if replaced:
            self.start(blocks)
            self.publish(new_epoch=False, down=[])

    def check_death(self, data: st.DataObject, life: int) -> None:
        there = [e for e in self.open.values() if not e.waits_for and life in e.plan.lost_with]
        records, deaths = [], {e.ticket: e.deaths for e in self.open.values()}
        for entry in there:
            if len(there) == 1 or data.draw(st.booleans()):
                nodes = [i for i, inc in enumerate(entry.plan.incarnations) if inc == life]
                node = data.draw(st.sampled_from(nodes))
                records.append(entry.ticket + bytes([entry.attempt, node]))
        ended = len(self.ended)
        self.carry_out(self.table.peer_gone(Death.of(life, records), self.now))
        at_work = {r[:-2] for r in records}
        for entry in [*self.open.values(), *self.ended[ended:]]:
            blamed = entry.ticket in at_work
            assert entry.deaths == deaths[entry.ticket] + blamed
            poison = [
                e.task
                for e in entry.ended().values()
                if isinstance(e.outcome, RequestError) and e.outcome.code == "POISON"
            ]
            if poison and entry in self.ended[ended:]:
                assert entry.deaths >= DEADLY
                assert at_work == {entry.ticket}
        for entry in self.open.values():
            if not entry.waits_for:
                lost = entry.plan.lost_with.get(life, frozenset())
                assert lost <= entry.outcomes.keys() | entry.lost

    @rule(client=st.sampled_from(CLIENTS))
    def client_leaves(self, client: bytes) -> None:
        gone = [t for t, e in self.open.items() if e.client == client and not e.digest]
        self.carry_out(self.table.client_gone(client))
        assert not any(e.client == client for e in self.open.values())
        for ticket in gone:
            self.replies[ticket] = self.replies.get(ticket, 0) + 1  # nobody is left to tell

    # --- what holds at any time

    @invariant()
    def each_ended_request_was_answered_once(self) -> None:
        for entry in self.ended:
            assert self.replies[entry.ticket] == 1
            assert self.released[entry.ticket] == 1

    @invariant()
    def each_attempt_was_sent_once(self) -> None:
        for entry in self.open.values():
            assert self.sent[entry.ticket] == entry.attempt - bool(entry.waits_for)

    @invariant()
    def no_two_suspects_meet(self) -> None:
        met: set[int] = set()
        for entry in self.open.values():
            if entry.item(self.now).alone and entry.attempt > 1 and not entry.waits_for:
                if not self.suspected_before_its_attempt(entry):
                    continue
                assert met.isdisjoint(entry.plan.lost_with)
                met.update(entry.plan.lost_with)

    def suspected_before_its_attempt(self, entry: Entry) -> bool:
        """Not one whose earlier attempt killed a worker while this attempt was under way."""
        return entry.ticket in self.table._room._suspects

    @invariant()
    def quarantine_has_a_reason(self) -> None:
        waits = [e for e in self.open.values() if e.waits_for == QUARANTINE]
        assert not waits or self.table.gauges()["suspects"]

    @invariant()
    def nobody_waits_for_a_worker_that_is_there_or_will_not_come(self) -> None:
        for entry in self.open.values():
            if entry.waits_for and entry.waits_for not in (QUARANTINE, EDGE):
                (block,) = [b for b in BLOCKS if repr(b) in entry.waits_for]
                assert not self.planner._replicas.get(block)
                assert not self.planner.down(block)

    @invariant()
    def slots_on_opposed_paths_are_not_overdrawn(self) -> None:
        under_way = [e.plan.guards for e in self.open.values() if not e.waits_for]
        held = Counter(incarnation for guards in under_way for incarnation in guards)
        assert self.planner.edges._held == held
        for incarnation, count in held.items():
            assert count <= max(SLOTS - 1, *(g.count(incarnation) for g in under_way))
        if any(e.waits_for == EDGE for e in self.open.values()):
            assert held

    @invariant()
    def the_books_agree(self) -> None:
        open_entries = list(self.open.values())
        under_way = [e for e in open_entries if not e.waits_for]
        assert len(self.table) == len(open_entries)
        assert self.table.waiting == len(open_entries) - len(under_way)
        assert self.table.charged == 8 * len(open_entries)
        for client in CLIENTS:
            assert self.table.of_client(client) == sum(e.client == client for e in open_entries)
        versions = [e.plan.version for e in under_way]
        assert self.table.oldest_version() == (min(versions) if versions else None)
        due = [e.deadline_ns for e in open_entries]
        assert self.table.soonest_deadline() == (min(due) if due else None)
        for stage in {n.stage for e in under_way for n in e.plan.tree.nodes}:
            visits = sum(n.stage == stage for e in under_way for n in e.plan.tree.nodes)
            assert self.planner.outstanding(stage) == visits
        assert len(self.planner._load) == len(
            {n.stage for e in under_way for n in e.plan.tree.nodes}
        )

    def teardown(self) -> None:
        self.carry_out(self.table.abort_all(RequestError("BLOCK_UNAVAILABLE", "over")))
        assert not self.open
        self.each_ended_request_was_answered_once()
        self.the_books_agree()


InFlight.TestCase.settings = settings(max_examples=45, stateful_step_count=40, deadline=None)
TestInFlight = InFlight.TestCase

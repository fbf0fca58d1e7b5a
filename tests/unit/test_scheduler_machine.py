"""The worker's Scheduler as a state machine, with every policy: whatever comes in which order, each
ticket leaves exactly once, and nothing waits for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import WaitUntil
from blockflow.batching.registry import POLICIES
from blockflow.batching.shares import TaskShare
from blockflow.bench.simulation.example import made_up
from blockflow.core.routing import merge_paths
from blockflow.wire.data import REQUEST_ID_BYTES, Item
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.ticket import Batch, Source, Ticket
from blockflow.worker.withdrawn import WithdrawnRequests

MS = 1_000_000
STAGES = (1, 2, 3)
MAX_ROWS = 8
FACTS = {
    s: StageFacts(f"b{s}", MAX_ROWS, 1, made_up(f"b{s}", lambda rows: 4.0 + rows)) for s in STAGES
}
SPECS: tuple[dict[str, Any], ...] = (
    {"policy": "none"},
    {"policy": "window", "max_rows": 4, "max_delay_ms": 5},
    {"policy": "lbci", "t_opt_ms": 60},
    {"policy": "lbci", "t_opt_ms": 60, "n_max": 4, "join": "gain"},
    {"policy": "dvabatch", "bs_max": 4},
    {
        "policy": "dvabatch",
        "policies": ["load", "input", "operator"],
        "window_ms": "stage1",
        "t_comp_wait_ms": 20,
    },
    {"policy": "dvabatch", "stages": [1, 2]},
    {"policy": "lbci", "t_opt_ms": 60, "stages": [2, 1]},
)
PATHS = ([[1, 2, 3]], [[1, 3]], [[2]], [[3]], [[1, 2], [1, 3]])
SHARES = (
    (),
    (TaskShare(), TaskShare(weight=4.0)),
    (TaskShare(), TaskShare(priority=2), TaskShare(max_batch_rows=2)),
)
specs = st.sampled_from(SPECS)


def test_no_policy_is_left_out() -> None:
    assert {s["policy"] for s in SPECS} == set(POLICIES)


class Worker(RuleBasedStateMachine):
    """What an Executor with a lane per stage may do with its Scheduler."""

    @initialize(spec=specs)
    def begin(self, spec: dict[str, Any]) -> None:
        self.scheduler = Scheduler(dict.fromkeys(STAGES, spec), FACTS)
        self.now = 1000 * MS
        self.keys = 0
        self.waiting: dict[int, Ticket] = {}
        self.running: dict[int, Batch] = {}
        self.gone: set[tuple[int, int]] = set()  # (key, node): a key goes from node to node

    # --- what comes

    @rule(
        count=st.integers(1, 3),
        path=st.sampled_from(PATHS),
        rows=st.integers(1, 4),
        left_ms=st.sampled_from((1, 30, 1000)),
        width=st.sampled_from((2, 2, 2, 3)),
        task=st.integers(0, 3),
        alone=st.sampled_from((False, False, False, True)),
    )
    def arrive(
        self,
        count: int,
        path: list[list[int]],
        rows: int,
        left_ms: int,
        width: int,
        task: int,
        alone: bool,
    ) -> None:
        tree, _ = merge_paths(path)
        stage, now = tree.nodes[0].stage, self.now
        for _ in range(count):
            self.keys += 1
            request = self.keys.to_bytes(REQUEST_ID_BYTES, "big")
            item = Item(request, 1, 1, tree, 0, rows, left_ms, task=task, alone=alone)
            source = Source("float32", (width,), 1)
            deadline = now + left_ms * MS
            self.queue(Ticket(self.keys, item, stage, source, 0, now, now, now, deadline, 0, task))

    def queue(self, ticket: Ticket) -> None:
        assert ticket.key not in self.waiting
        self.waiting[ticket.key] = ticket
        self.scheduler.arrive(ticket, self.now)

    @rule(ms=st.sampled_from((0.1, 3.0, 40.0)))
    def time_passes(self, ms: float) -> None:
        self.now += round(ms * MS)

    # --- what is done

    @rule()
    def expire(self) -> None:
        due = {k for k, t in self.waiting.items() if t.deadline_ns <= self.now}
        assert {self.leave(t) for t in self.scheduler.expire(self.now)} == due

    @rule(steps=st.integers(1, 8), lanes=st.integers(1, len(STAGES)))
    def work(self, steps: int, lanes: int) -> None:
        """Decide and finish by turns, in order: what is deep in a policy needs many of both."""
        for _ in range(steps):
            before = len(self.running)
            if before < lanes:
                self.decide()
            if self.running and len(self.running) == before:
                self.now += MS
                self.end(self.running.pop(next(iter(self.running))))

    @rule()
    def decide(self) -> None:
        self.expire()
        decision = self.scheduler.decide(self.now)
        if isinstance(decision, Batch):
            self.start(decision)
        elif isinstance(decision, WaitUntil):
            assert decision.at_ns > self.now, "it would be asked again at once, without end"
        else:
            assert self.running or not self.waiting, "nothing will ever wake it"

    def start(self, batch: Batch) -> None:
        assert batch.stage not in self.running
        assert batch.tickets and all(t.stage == batch.stage for t in batch.tickets)
        assert len({t.shape for t in batch.tickets}) == 1 or batch.pad_to
        assert batch.rows <= MAX_ROWS
        if any(t.item.alone for t in batch.tickets):
            assert len(batch.tickets) == 1 and batch.alone
        for ticket in batch.tickets:
            assert ticket.deadline_ns > self.now
            self.leave(ticket)
        self.running[batch.stage] = batch

    def leave(self, ticket: Ticket) -> int:
        assert self.waiting.pop(ticket.key) is ticket
        step = ticket.key, ticket.item.hop
        assert step not in self.gone
        self.gone.add(step)
        return ticket.key

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.sampled_from((False, False, False, True)))
    def done(self, data: st.DataObject, fails: bool) -> None:
        """A batch ends; what goes on in this worker arrives again at once."""
        batch = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        if fails:
            batch.errors[batch.tickets[0].key] = RuntimeError()  # type: ignore[assignment]
        self.end(batch)

    def end(self, batch: Batch) -> None:
        self.scheduler.done(batch, self.now)
        for ticket in batch.tickets:
            if ticket.key in batch.errors:
                continue
            key, path = ticket.key, ticket.item.path
            for node in path.children(ticket.item.hop):
                item = replace(ticket.item, hop=node)
                self.queue(
                    replace(
                        ticket,
                        key=key,
                        item=item,
                        stage=path.nodes[node].stage,
                        received_ns=self.now,
                        ready_ns=self.now,
                        origin=None if key == ticket.key else ticket.key,
                    )
                )
                self.keys += 1
                key = self.keys  # a further branch is a query of its own

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """With all its branches."""
        request = self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))].item.request_id
        withdrawn = WithdrawnRequests()
        withdrawn.add([(request, 1)], self.now)
        due = {k for k, t in self.waiting.items() if t.item.request_id == request}
        gone = self.scheduler.withdraw(withdrawn, self.now)
        assert {self.leave(t) for t in gone} == due

    @rule(stages=st.sampled_from(((1,), (2, 3), STAGES)), spec=specs)
    def set_policy(self, stages: tuple[int, ...], spec: dict[str, Any]) -> None:
        for stage in stages:
            self.scheduler.set_policy(stage, spec, self.now)

    @rule(shares=st.sampled_from(SHARES))
    def set_shares(self, shares: tuple[TaskShare, ...]) -> None:
        self.scheduler.set_shares(shares, self.now)

    @precondition(lambda self: self.waiting)
    @rule()
    def stop(self) -> None:
        """As at the worker's end; here it lives on."""
        due = set(self.waiting)
        assert {self.leave(t) for t in self.scheduler.take_all()} == due

    # --- what holds

    @invariant()
    def the_books_agree(self) -> None:
        queue = self.scheduler
        assert len(queue) == len(self.waiting)
        assert set(queue.busy) == set(self.running)
        for stage in STAGES:
            here = [t for t in self.waiting.values() if t.stage == stage]
            assert queue.queued(stage) == len(here)
            assert queue.queued_rows(stage) == sum(t.rows for t in here)
        assert queue.all_rows == sum(t.rows for t in self.waiting.values())
        assert queue.next_deadline() == min(
            (t.deadline_ns for t in self.waiting.values()), default=None
        )

    def teardown(self) -> None:
        """Without deadlines, too, everything would be served."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20 * (len(self.waiting) + len(self.running)) + 20):
            if not self.waiting and not self.running:
                return
            decision = self.scheduler.decide(self.now)
            if isinstance(decision, Batch):
                for ticket in decision.tickets:
                    self.leave(ticket)
                self.running[decision.stage] = decision
            elif self.running:
                self.now += MS
                self.end(self.running.pop(min(self.running)))
            elif decision is not None:
                assert decision.at_ns > self.now
                self.now = decision.at_ns
            else:
                raise AssertionError("nothing will ever wake it")
        raise AssertionError(f"{len(self.waiting)} tickets still wait")


TestScheduler = Worker.TestCase
TestScheduler.settings = settings(max_examples=35, stateful_step_count=40, deadline=None)

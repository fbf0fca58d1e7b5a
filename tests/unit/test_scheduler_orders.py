"""Every order of a few events in a worker of two stages, with the policies that keep most in their
books: each ticket leaves a stage exactly once, none waits for ever, and the books are empty then.

The worker asks for a batch after every event as long as a lane is free, as an Executor does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from scheduler_rig import MS, ticket

from blockflow.batching.dvabatch import DvabatchPolicy
from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import WaitUntil
from blockflow.bench.simulation.example import made_up
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.ticket import Batch, Ticket
from blockflow.worker.withdrawn import WithdrawnRequests

STAGES = (1, 2)
MOST_ROWS = 2
FACTS = {
    s: StageFacts(f"b{s}", MOST_ROWS, 1, made_up(f"b{s}", lambda rows: 4.0 + rows)) for s in STAGES
}
PATHS = ([[1, 2]], [[1, 2]], [[2]])
EVENTS = 6
"""So many in a row are tried in every order; then all that there is runs to its end."""


class Worker:
    def __init__(self, spec: dict[str, Any], lanes: int) -> None:
        self.lanes = lanes
        self.scheduler = Scheduler(dict.fromkeys(STAGES, spec), FACTS, lanes=lanes)
        self.now = 1000 * MS
        self.wakes: int | None = None
        self.waiting: dict[int, Ticket] = {}
        self.running: list[Batch] = []
        self.left: set[tuple[int, int]] = set()
        self.came = self.withdrawn = 0

    def events(self) -> Iterator[tuple[str, int]]:
        if self.came < len(PATHS):
            yield "comes", 0
        yield from (("done", i) for i in range(len(self.running)))
        yield from (("fails", i) for i in range(len(self.running)) if not self.withdrawn)
        yield from (("withdrawn", key) for key in self.waiting if not self.withdrawn)
        if self.waiting:
            yield "time", 0

    def happens(self, event: str, which: int) -> None:
        if event == "comes":
            path = PATHS[self.came]
            self.came += 1
            deadline = self.now + 10_000 * MS
            self.arrives(ticket(self.came, path, now=self.now, deadline=deadline))
        elif event in ("done", "fails"):
            self.withdrawn += event == "fails"
            self.ends(self.running.pop(which), fails=event == "fails")
        elif event == "withdrawn":
            self.withdrawn += 1
            requests = WithdrawnRequests()
            requests.add([(self.waiting[which].item.request_id, 1)], self.now)
            for gone in self.scheduler.withdraw(requests, self.now):
                self.leaves(gone)
            assert which not in self.waiting
        else:
            self.now += 5 * MS
        self.decide()

    def arrives(self, new: Ticket) -> None:
        self.waiting[new.key] = new
        self.scheduler.arrive(new, self.now)

    def leaves(self, gone: Ticket) -> None:
        assert self.waiting.pop(gone.key) is gone
        assert (gone.key, gone.stage) not in self.left
        self.left.add((gone.key, gone.stage))

    def ends(self, batch: Batch, *, fails: bool = False) -> None:
        self.scheduler.done(batch, self.now)
        for t in batch.tickets[fails:]:
            for node in t.item.path.children(t.item.hop):
                item, stage = replace(t.item, hop=node), t.item.path.nodes[node].stage
                at = {"received_ns": self.now, "ready_ns": self.now}
                self.arrives(replace(t, item=item, stage=stage, **at))

    def decide(self) -> None:
        self.wakes = None
        while len(self.running) < self.lanes:
            decision = self.scheduler.decide(self.now)
            if not isinstance(decision, Batch):
                break
            assert decision.rows <= MOST_ROWS
            assert decision.stage not in [b.stage for b in self.running]
            for t in decision.tickets:
                self.leaves(t)
            self.running.append(decision)
        else:
            return
        if isinstance(decision, WaitUntil):
            assert decision.at_ns > self.now
            self.wakes = decision.at_ns
        assert self.running or self.wakes or not self.waiting, "nothing will ever wake it"

    def finish(self) -> None:
        for _ in range(30):
            if self.running:
                self.now += MS
                self.happens("done", 0)
            elif self.wakes is not None:
                self.now = self.wakes
                self.decide()
        assert not self.waiting and not self.running, "they wait for ever"
        for policy in self.scheduler._policies:
            convoys: Any = getattr(policy, "_convoys", None)
            assert not [*policy.waiting(), *convoys._of, *convoys._running]
            assert not getattr(policy, "_groups", None)
            if isinstance(policy, DvabatchPolicy):
                assert policy._pipeline.at_rest


def after(spec: dict[str, Any], lanes: int, events: Iterable[tuple[str, int]]) -> Worker:
    worker = Worker(spec, lanes)
    for event in events:
        worker.happens(*event)
    return worker


@pytest.mark.parametrize(
    ("spec", "lanes"),
    [
        ({"policy": "lbci", "t_opt_ms": 60}, 1),
        ({"policy": "dvabatch", "bs_max": 2, "join": "always"}, 2),
        ({"policy": "dvabatch", "policies": ["load", "operator"], "window_ms": 3}, 1),
    ],
)
def test_no_order_of_events_loses_a_ticket_or_lets_one_wait_for_ever(
    spec: dict[str, Any], lanes: int
) -> None:
    stories: list[tuple[tuple[str, int], ...]] = [()]
    for _ in range(EVENTS):
        found = []
        for past in stories:
            for event in after(spec, lanes, past).events():
                after(spec, lanes, (*past, event)).finish()
                found.append((*past, event))
        stories = found
    assert len(stories) > 100

"""Every order of a few events in the life of one request for two tasks: it gets one reply, each
result in it is of the attempt that it is said to be of, a block that must not run twice does not,
and in the end nothing of it is left in any book.

What the workers have of the request is modelled: withdrawals are lost, so that what an attempt has
left behind runs on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

from recovery_rig import PATHS, World

from blockflow.core.errors import BlockError
from blockflow.dispatcher.entry import Answer, ReleaseInput, Reply, SendAgain
from blockflow.dispatcher.plan import Plan

ONCE = "head_b"
BLOCKS = ("trunk", "head_a", ONCE)
EVENTS = 4
"""So many in a row are tried in every order; then all that there is runs to its end."""


class Visit(NamedTuple):
    """The request at a node of an attempt, in its worker's queue."""

    attempt: int
    plan: Plan
    node: int

    @property
    def life(self) -> int:
        return self.plan.incarnations[self.node]


class Story:
    """A request, three workers of one block each, and an update that leads task "a" through the
    block that must not run twice."""

    def __init__(self) -> None:
        self.lives = dict(zip(BLOCKS, (1, 2, 3), strict=True))
        self.world = World(once=[ONCE], **{b: [life] for b, life in self.lives.items()})
        self.entry = self.world.admit("a", "b")
        self.visits = [Visit(1, self.entry.plan, 0)]
        self.plans = {1: self.entry.plan}
        self.begun: Counter[str] = Counter()
        self.told: Counter[type] = Counter()
        self.epoch = 1
        self.latest = 3

    def events(self) -> Iterator[tuple[Any, ...]]:
        for i in range(len(self.visits)):
            yield "runs", i
            yield "fails", i
        for block, life in self.lives.items():
            here = [i for i, v in enumerate(self.visits) if v.life == life]
            for count in range(len(here) + 1):
                for at_work in combinations(here, count):
                    yield "dies", block, at_work
        yield from (("starts", b) for b in BLOCKS if b not in self.lives)
        if self.epoch == 1:
            yield ("update",)

    def happens(self, event: tuple[Any, ...]) -> None:
        kind, *which = event
        if kind == "dies":
            self.dies(*which)
        elif kind == "starts":
            self.latest += 1
            self.lives[which[0]] = self.latest
            self.published()
        elif kind == "update":
            self.epoch += 1
            self.published()
        else:
            self.leaves(self.visits.pop(which[0]), fails=kind == "fails")
        assert self.told[Reply] == self.told[ReleaseInput] == 1 - len(self.world.table)

    def published(self) -> None:
        paths = PATHS if self.epoch == 1 else {**PATHS, "a": PATHS["b"]}
        workers = {b: [life] for b, life in self.lives.items()}
        self.carry_out(self.world.publish(epoch=self.epoch, paths=paths, **workers))

    def leaves(self, visit: Visit, *, fails: bool) -> None:
        attempt, plan, node = visit
        self.begins(visit)
        place = self.entry.ticket, attempt, node, visit.life
        if fails:
            error = BlockError("BLOCK_FAILED", "no")
            self.carry_out(self.world.table.failure(*place, error, 0))
            return
        if plan.tree.nodes[node].terminal:
            answer = Answer((attempt, node), (), 0)
            self.carry_out(self.world.table.outcome(*place, answer))
        self.visits += [Visit(attempt, plan, n) for n in plan.tree.children(node)]
        alive = set(self.lives.values())
        self.visits = [v for v in self.visits if v.life in alive]

    def begins(self, visit: Visit) -> None:
        block = visit.plan.blocks[visit.node]
        self.begun[block] += 1
        assert block != ONCE or self.begun[block] == 1, "it ran twice"

    def dies(self, block: str, at_work: Iterable[int]) -> None:
        life, records = self.lives.pop(block), []
        for visit in [self.visits[i] for i in at_work]:
            self.begins(visit)
            records.append(self.entry.ticket + bytes([visit.attempt, visit.node]))
        self.visits = [v for v in self.visits if v.life != life]
        self.carry_out(self.world.gone(life, records))

    def carry_out(self, instructions: Iterable[Any]) -> None:
        for what in instructions:
            self.told[type(what)] += 1
            if isinstance(what, SendAgain):
                plan, attempt = self.entry.plan, self.entry.attempt
                assert self.plans.setdefault(attempt, plan) is plan
                self.visits.append(Visit(attempt, plan, 0))
            elif isinstance(what, Reply):
                for end in self.entry.results():
                    if isinstance(end.outcome, Answer):
                        attempt, node = end.outcome.payload
                        assert end.plan is self.plans[attempt]
                        assert end.node == node
                        assert end.task in [t.name for t in end.plan.tasks]

    def ends(self) -> None:
        """Workers are there again, and all that waits in them runs."""
        while self.visits or len(self.lives) < len(BLOCKS):
            missing = [b for b in BLOCKS if b not in self.lives]
            self.happens(("starts", missing[0]) if missing else ("runs", 0))
        planner = self.world.planner
        assert self.told[Reply] == 1, "it waits for its deadline"
        assert self.world.left() == (0, 0, 0)
        assert [planner._load, planner.edges._held, self.world.table._room._suspects] == [{}] * 3

    def state(self) -> object:
        """All that the future depends on, but for numbers of lives."""
        entry = self.entry
        ages = {life: i for i, life in enumerate(sorted({*self.lives.values()}))}
        known = [(v.attempt, v.node, v.plan.blocks, ages.get(v.life)) for v in self.visits]
        ended = sorted((t, str(e.outcome), e.node) for t, e in entry.ended().items())
        here = (entry.attempt, entry.open, entry.deaths, entry.waits_for, sorted(entry.lost))
        way = [ages.get(i) for i in entry.plan.incarnations], entry.plan.blocks, entry.plan.epoch
        lives = sorted((b, ages[life]) for b, life in self.lives.items())
        return repr((known, ended, here, way, lives, self.epoch, self.begun[ONCE], self.told))


def after(events: Iterable[tuple[Any, ...]]) -> Story:
    story = Story()
    for event in events:
        story.happens(event)
    return story


def test_no_order_of_events_runs_a_block_twice_or_leaves_a_request_behind() -> None:
    seen: set[object] = set()
    latest: list[tuple[tuple[Any, ...], ...]] = [()]
    for _ in range(EVENTS):
        found = []
        for past in latest:
            for event in after(past).events():
                story = after((*past, event))
                if story.state() not in seen:
                    seen.add(story.state())
                    story.ends()
                    found.append((*past, event))
        latest = found
    assert len(seen) > 200

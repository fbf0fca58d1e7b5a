"""Every order of a few events in the life of one slot: it is never written while somebody reads it,
nobody reads what was not sent to him, and it is free again once everybody has done or has died.

The steps of owner and consumers that memory can see one by one are taken one by one, as ShmProducer
and ArenaReader take them; the book is the real one. It begins where the generations wrap.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

from blockflow.tensormq.leases import (
    MAX_GENERATION,
    REVOKE_NS,
    LeaseTable,
    SlotState,
    opened_mark,
)

ONE, TWO = 1, 2
LANES = 2
EVENTS = 8
"""So many in a row are tried in every order."""


@dataclass
class Reader:
    """A consumer at a message: the next of its steps, and what the slot held when it was sent."""

    consumer: int
    lane: int
    generation: int
    content: int
    step: str = "look"


@dataclass
class Owner:
    """One slot between its owner and two consumers.

    Attributes:
        word: of the slot's generation, and ``marks``: all that consumers see of the book.
        pending: generation words that the owner is just about to write.
        messages: on their way. A dead consumer's are lost with it.
        told: of whose death the owner knows.
    """

    table: LeaseTable = field(default_factory=lambda: LeaseTable(4096, 1, LANES))
    now: int = REVOKE_NS
    content: int = 0
    word: int = 0
    marks: list[int] = field(default_factory=lambda: [0] * LANES)
    pending: list[int] = field(default_factory=list)
    messages: list[Reader] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    passed: int = 0

    def events(self) -> Iterator[tuple[str, int]]:
        yield from (("reader", i) for i in range(len(self.readers)))
        if self.pending:
            yield "write", 0
            return
        lease = self.table[0]
        if lease.state is SlotState.FREE:
            yield "reserve", 0
        elif lease.state is SlotState.RESERVED or lease.holds:
            yield from (("publish", c) for c in (ONE, TWO) if self._lanes_left())
        if lease.state is not SlotState.FREE:
            yield "sweep", 0
        if lease.holds:
            yield "unhold", 0
        elif lease.state is SlotState.RESERVED:  # who holds a slot does so before anybody has it
            yield "hold", 0
        yield from (("open", i) for i in range(len(self.messages)))
        yield from (("lose", i) for i in range(len(self.messages)))
        yield from (("die", c) for c in (ONE,) if c not in self.dead)
        yield from (("gone", c) for c in self.dead if c not in self.told)
        # Who is about to open something does not take a second for it.
        if self.passed < 2 and all(r.step == "release" for r in self.readers):
            yield "time", 0

    def _lanes_left(self) -> bool:
        lease = self.table[0]
        return not lease.lanes or lease.used_lanes < LANES

    def happens(self, event: str, which: int) -> None:
        table = self.table
        if event == "reserve":
            table.reserve(10)
            self.content += 1
        elif event == "publish":
            lanes = table.publish(0, [which], self.now - REVOKE_NS)  # it is late already
            generation = table[0].generation
            self.marks[lanes[0]] = 0
            self.word = generation
            if which not in self.dead:
                self.messages.append(Reader(which, lanes[0], generation, self.content))
        elif event == "hold":
            table.hold(0)
        elif event == "unhold":
            self.pending += [0] * table.unhold(0)
        elif event == "sweep":
            self.pending += [0] * len(table.sweep(self.marks))
            revoked, freed = table.reclaim(self.marks, self.now)
            self.pending += [0] * len(revoked + freed)
        elif event == "write":
            self.word = self.pending.pop(0)
        elif event == "open":
            self.readers.append(self.messages.pop(which))
            self.reads(self.readers[-1])
        elif event == "lose":
            self.messages.pop(which)
        elif event == "die":
            self.dead.append(which)
            self.readers = [r for r in self.readers if r.consumer != which]
            self.messages = [m for m in self.messages if m.consumer != which]
        elif event == "gone":
            self.told.append(which)
            self.pending += [0] * len(table.peer_gone(which)[1])
        elif event == "time":
            self.now += REVOKE_NS
            self.passed += 1
        else:
            self.reads(self.readers[which])
        read = [r for r in self.readers if r.step == "release"]
        assert not read or table[0].state is SlotState.PUBLISHED, "free while it is read"
        assert not table[0].holds or table[0].state is not SlotState.FREE, "free while it is held"
        assert all(r.content == self.content for r in read), "another one's tensor"

    def reads(self, reader: Reader) -> None:
        lane, generation = reader.lane, reader.generation
        if reader.step == "look" and self.word == generation and self.marks[lane] != generation:
            reader.step = "mark"
        elif reader.step == "mark":
            self.marks[lane] = opened_mark(generation)
            reader.step = "look again"
        elif reader.step == "look again" and self.word == generation:
            reader.step = "release"
        else:
            if reader.step != "look":
                self.marks[lane] = generation
            self.readers.remove(reader)

    def ends(self) -> None:
        """All do what they are at, and time passes."""
        lease = self.table[0]
        while self.readers:
            self.happens("reader", 0)
        self.messages.clear()
        for consumer in (c for c in self.dead if c not in self.told):
            self.happens("gone", consumer)
        while lease.holds:
            self.happens("unhold", 0)
        if lease.state is SlotState.RESERVED:
            self.table.discard(0)
        for _ in range(4):
            self.happens("time", 0)
            self.happens("sweep", 0)
        assert self.table.outstanding == 0, "kept for ever"

    def state(self) -> tuple[object, ...]:
        """All that the future depends on."""
        lease, now = self.table[0], self.now
        book = (lease.state, lease.generation, sorted(lease.lanes.items()), lease.used_lanes)
        when = (min(3, now - lease.until_ns), lease.revoked_ns and now - lease.revoked_ns)
        seen = (lease.holds, self.word, self.marks, self.pending, self.passed)
        known = [
            sorted((r.consumer, r.lane, r.generation, self.content - r.content, r.step) for r in rs)
            for rs in (self.messages, self.readers)
        ]
        return (repr((book, when, seen, known, self.dead, self.told)),)


def test_no_order_of_events_frees_a_slot_that_is_read_or_keeps_one_that_is_not() -> None:
    first = Owner()
    first.table[0].generation = MAX_GENERATION - 1
    first.happens("reserve", 0)
    seen: set[tuple[object, ...]] = set()
    latest = [first]
    for _ in range(EVENTS):
        found: list[Owner] = []
        for owner in latest:
            for event in owner.events():
                after = copy.deepcopy(owner)
                after.happens(*event)
                if after.state() not in seen:
                    seen.add(after.state())
                    copy.deepcopy(after).ends()
                    found.append(after)
        latest = found
    assert len(seen) > 1000

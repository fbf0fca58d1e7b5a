"""The book of granted memory: nothing is granted twice, over a limit, or to the wrong client."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.grants import (
    HEADER_BYTES,
    MIN_SLOT_BYTES,
    Grant,
    GrantBook,
    geometry,
    segment_bytes,
)
from blockflow.wire.client import Place
from blockflow.wire.grants import Direction

UP, DOWN = Direction.UPLOAD, Direction.RESULT
MIB = 1 << 20


def granted(book: GrantBook, client: bytes, direction: Direction, nbytes: int) -> Grant:
    grant = book.ask(client, direction, nbytes)
    assert isinstance(grant, Grant), grant
    return grant


def code(book: GrantBook, client: bytes, number: int, slot: int, nbytes: int) -> str:
    with pytest.raises(BlockFlowError) as info:
        book.check_upload(client, number, slot, nbytes)
    return info.value.code


@given(st.integers(1, limits.MAX_MESSAGE_BYTES))
@example(MIB + 1)
def test_a_segment_holds_what_was_asked_for(nbytes: int) -> None:
    slot_bytes, slots = geometry(nbytes)
    assert max(nbytes, MIN_SLOT_BYTES) <= slot_bytes < 2 * max(nbytes, MIN_SLOT_BYTES)
    assert 2 <= slots <= limits.MAX_GRANT_SLOTS
    assert segment_bytes(slot_bytes, slots) <= 2 * limits.MAX_MESSAGE_BYTES + HEADER_BYTES
    assert geometry(slot_bytes) == (slot_bytes, slots)


def test_clients_have_nothing_of_each_other() -> None:
    book = GrantBook()
    assert book.attach(b"a")
    assert book.attach(b"b")
    mine = granted(book, b"a", UP, MIB)
    results = granted(book, b"a", DOWN, MIB)
    for slot in (0, mine.slots - 1):
        book.check_upload(b"a", mine.number, slot, MIB)
    assert code(book, b"b", mine.number, 0, 1) == "INVALID_REQUEST"
    assert code(book, b"c", mine.number, 0, 1) == "CONNECTION_LOST"
    assert code(book, b"a", mine.number, mine.slots, 1) == "INVALID_REQUEST"
    assert code(book, b"a", mine.number, -1, 1) == "INVALID_REQUEST"
    assert code(book, b"a", mine.number, 0, MIB + 1) == "INVALID_REQUEST"
    assert code(book, b"a", results.number, 0, 1) == "INVALID_REQUEST"
    assert code(book, b"a", 77, 0, 1) == "INVALID_REQUEST"
    assert book.reserve(b"b", MIB, lambda n: [0] * 16) is None
    book.detach(b"a")
    assert code(book, b"a", mine.number, 0, 1) == "CONNECTION_LOST"


def test_the_smallest_free_slot_is_taken() -> None:
    book = GrantBook()
    book.attach(b"a")
    large, small = granted(book, b"a", DOWN, 64 * MIB), granted(book, b"a", DOWN, MIB)
    marks = {g.number: [0] * g.slots for g in (large, small)}
    places = [book.reserve(b"a", MIB, marks.__getitem__) for _ in range(18)]
    assert [(p.grant, p.slot) for p in places if p] == [
        *((small.number, i) for i in range(16)),
        *((large.number, i) for i in range(2)),
    ]
    assert book.reserve(b"a", MIB, marks.__getitem__) is None
    marks[small.number][5] = 7  # not the generation of what lies there
    assert book.reserve(b"a", MIB, marks.__getitem__) is None
    marks[small.number][5] = 1
    assert book.reserve(b"a", MIB + 1, marks.__getitem__) is None  # it would not fit in there
    again = book.reserve(b"a", MIB, marks.__getitem__)
    assert again is not None
    assert (again.slot, again.generation) == (5, 2)
    assert book.reserve(b"a", 128 * MIB, marks.__getitem__) is None


def test_what_its_client_is_never_told_of_is_free_at_once() -> None:
    book = GrantBook()
    book.attach(b"a")
    granted(book, b"a", DOWN, 64 * MIB)
    places = [book.reserve(b"a", MIB, lambda n: [0] * 16) for _ in range(2)]
    first, second = (p for p in places if p)
    book.take_back(b"a", replace(second, generation=9))  # of a former result
    book.take_back(b"a", replace(second, grant=9))
    book.take_back(b"b", second)
    assert book.reserve(b"a", MIB, lambda n: [0] * 16) is None
    book.take_back(b"a", second)
    assert book.reserve(b"a", MIB, lambda n: [0] * 16) == replace(second, generation=2)
    assert book.reserve(b"a", MIB, lambda n: [0] * 16) is None and first.slot == 0


def test_a_generation_is_never_the_mark_of_an_unused_slot() -> None:
    book = GrantBook()
    book.attach(b"a")
    grant = granted(book, b"a", DOWN, 1)
    grant.generations[0] = 2**32 - 1
    place = book.reserve(b"a", 1, lambda n: [0] * 16)
    assert place is not None
    assert place.generation == 1


def test_limits() -> None:
    small = GrantBook(max_bytes=2 * MIB)
    small.attach(b"a")
    assert granted(small, b"a", UP, MIB).slots == 1  # its header needs room as well
    book = GrantBook(max_bytes=100 * MIB, max_client_bytes=70 * MIB, max_clients=2)
    assert book.attach(b"a")
    assert not book.attach(b"a")
    assert book.attach(b"b")
    assert not book.attach(b"c")
    assert "2 clients" in book.full()
    first = granted(book, b"a", UP, MIB)
    assert (first.slots, first.number) == (16, 1)
    assert "granted already" in str(book.ask(b"a", UP, MIB - 5))
    # A client's own bound first cuts the number of slots, then refuses.
    assert granted(book, b"a", DOWN, 32 * MIB).slots == 1
    assert "no room" in str(book.ask(b"a", DOWN, 64 * MIB))
    # So does the bound of all.
    assert granted(book, b"b", UP, 32 * MIB).slots == 1
    assert "no room" in str(book.ask(b"b", UP, 64 * MIB))
    book.detach(b"a")
    assert granted(book, b"b", DOWN, 32 * MIB).slots == 1
    book.detach(b"b")
    assert book.nbytes == 0
    assert book.detach(b"b") == []


def test_a_grant_that_could_not_be_made_does_not_count() -> None:
    book = GrantBook()
    book.attach(b"a")
    grant = granted(book, b"a", UP, MIB)
    book.revoke(b"a", grant.number)
    assert book.nbytes == 0
    assert granted(book, b"a", UP, MIB).number != grant.number


class Machine(RuleBasedStateMachine):
    """Clients that ask, receive, release, lie and leave, in any order."""

    CLIENTS = (b"a", b"b", b"c")
    MAX = 200 * MIB

    def __init__(self) -> None:
        super().__init__()
        self.book = GrantBook(max_bytes=self.MAX, max_client_bytes=120 * MIB, max_clients=2)
        self.mine: dict[bytes, dict[int, Grant]] = {}
        self.marks: dict[int, list[int]] = {}
        self.held: set[tuple[int, int, int]] = set()
        self.seen: set[int] = set()

    @rule(client=st.sampled_from(CLIENTS))
    def attach(self, client: bytes) -> None:
        took = self.book.attach(client)
        assert took == (client not in self.mine and len(self.mine) < 2)
        if took:
            self.mine[client] = {}

    @rule(client=st.sampled_from(CLIENTS))
    def detach(self, client: bytes) -> None:
        ended = {g.number for g in self.book.detach(client)}
        assert ended == self.mine.pop(client, {}).keys()
        self.held = {h for h in self.held if h[0] not in ended}

    @precondition(lambda self: self.mine)
    @rule(
        data=st.data(),
        direction=st.sampled_from(Direction),
        nbytes=st.integers(0, 27).map(lambda n: 1 << n),
    )
    def ask(self, data: st.DataObject, direction: Direction, nbytes: int) -> None:
        client = data.draw(st.sampled_from(sorted(self.mine)))
        grant = self.book.ask(client, direction, nbytes)
        if isinstance(grant, Grant):
            assert grant.number not in self.seen
            assert grant.slot_bytes >= nbytes
            self.seen.add(grant.number)
            self.mine[client][grant.number] = grant
            self.marks[grant.number] = [0] * grant.slots

    @precondition(lambda self: self.mine)
    @rule(data=st.data(), nbytes=st.integers(1, 1 << 27))
    def result(self, data: st.DataObject, nbytes: int) -> None:
        client = data.draw(st.sampled_from(sorted(self.mine)))
        place = self.book.reserve(client, nbytes, self.marks.__getitem__)
        if place is not None:
            grant = self.mine[client][place.grant]
            assert grant.direction is DOWN
            assert grant.slot_bytes >= nbytes
            where = place.grant, place.slot
            assert where not in {h[:2] for h in self.held}, "a slot that its client still holds"
            self.held.add((*where, place.generation))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number, slot, generation = data.draw(st.sampled_from(sorted(self.held)))
        self.held.remove((number, slot, generation))
        self.marks[number][slot] = generation

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        number, slot, generation = data.draw(st.sampled_from(sorted(self.held)))
        self.held.remove((number, slot, generation))
        client = next(c for c, mine in self.mine.items() if number in mine)
        self.book.take_back(client, Place(number, slot, generation))
        assert slot not in self.mine[client][number].out

    @precondition(lambda self: self.held)
    @rule(data=st.data(), wrong=st.integers(0, 2**32 - 1))
    def scribble(self, data: st.DataObject, wrong: int) -> None:
        number, slot, generation = data.draw(st.sampled_from(sorted(self.held)))
        if wrong != generation:
            self.marks[number][slot] = wrong

    @rule(
        client=st.sampled_from(CLIENTS),
        number=st.integers(0, 40),
        slot=st.integers(-1, 17),
        nbytes=st.integers(1, 1 << 28),
    )
    def upload(self, client: bytes, number: int, slot: int, nbytes: int) -> None:
        grant = self.mine.get(client, {}).get(number)
        lawful = (
            grant is not None
            and grant.direction is UP
            and 0 <= slot < grant.slots
            and nbytes <= grant.slot_bytes
        )
        try:
            self.book.check_upload(client, number, slot, nbytes)
        except BlockFlowError:
            assert not lawful
        else:
            assert lawful

    @invariant()
    def the_sums_are_right(self) -> None:
        all_of_them = [g for mine in self.mine.values() for g in mine.values()]
        assert self.book.nbytes == sum(g.nbytes for g in all_of_them) <= self.MAX
        assert self.book.clients == len(self.mine) <= 2
        for mine in self.mine.values():
            assert sum(g.nbytes for g in mine.values()) <= 120 * MIB
            keys = [(g.direction, g.slot_bytes) for g in mine.values()]
            assert len(set(keys)) == len(keys)


Machine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase

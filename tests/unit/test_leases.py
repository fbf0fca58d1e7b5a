"""The lease table: its moves one by one, then at random against a plain model."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blockflow.tensormq.leases import (
    MAX_GENERATION,
    REVOKE_NS,
    LeaseError,
    LeaseTable,
    SlotState,
    opened_mark,
)

KIB = 1024


def table(capacity: int = 64 * KIB, slots: int = 4, lanes: int = 3) -> LeaseTable:
    return LeaseTable(capacity, slots, lanes)


def reserved(t: LeaseTable, nbytes: int = 100) -> int:
    lease = t.reserve(nbytes)
    assert lease is not None
    return lease.slot


def test_slots_are_taken_by_their_number_or_by_their_bytes() -> None:
    t = table(slots=8)  # of 64 KiB
    assert t.taken == 0
    for n in range(1, 4):
        reserved(t)
        assert t.taken == n
    t = table(slots=8)
    reserved(t, 16 * KIB)
    assert (t.outstanding, t.taken) == (1, 4)  # gaps may leave twice its bytes to nobody
    reserved(t, 24 * KIB)
    assert (t.outstanding, t.taken) == (2, 8)


def test_a_slot_is_free_when_the_last_consumer_has_released_it() -> None:
    t = table()
    slot = reserved(t)
    assert list(t.publish(slot, [7, 8])) == [0, 1]
    generation = t[slot].generation
    assert not t.release(slot, 1, generation)
    assert t.outstanding == 1
    assert t.release(slot, 0, generation)
    assert (t.outstanding, t.used, t[slot].state) == (0, 0, SlotState.FREE)


def test_marks_are_swept_lane_by_lane() -> None:
    t = table(lanes=2)
    slot = reserved(t)
    t.publish(slot, [7, 7])
    marks = [0] * 8
    marks[slot * 2] = t[slot].generation
    assert t.sweep(marks) == []
    assert list(t[slot].lanes) == [1]
    marks[slot * 2 + 1] = t[slot].generation
    assert t.sweep(marks) == [slot]
    assert t.sweep(marks) == []


def test_what_nobody_opens_is_revoked_and_then_free() -> None:
    t = table(lanes=2)
    slot = reserved(t)
    t.publish(slot, [7, 8], until_ns=50)
    assert t.reclaim([0] * 8, 50 + REVOKE_NS - 1) == ([], [])
    now = 50 + REVOKE_NS
    assert t.reclaim([0] * 8, now) == ([slot], [])
    assert t.reclaim([0] * 8, now + REVOKE_NS - 1) == ([], [])
    assert t.outstanding == 1
    assert t.reclaim([0] * 8, now + REVOKE_NS) == ([], [slot])
    assert (t.outstanding, t.lost) == (0, 2)
    assert reserved(t) == slot
    t.publish(slot, [7])  # nothing of that life is left in the next one
    assert t.reclaim([0] * 8, now + 10 * REVOKE_NS) == ([], [])
    t.release(slot, 0, t[slot].generation)
    assert reserved(t) == slot
    t.publish(slot, [7], until_ns=now)  # nor that it was revoked: somebody may just be opening it
    assert t.reclaim([0] * 8, now + 11 * REVOKE_NS) == ([slot], [])


def test_what_is_opened_stays_with_its_consumer() -> None:
    t = table(lanes=2)
    slot = reserved(t)
    t.publish(slot, [7, 8], until_ns=0)
    marks = [0] * 8
    assert t.reclaim(marks, REVOKE_NS) == ([slot], [])
    marks[slot * 2] = opened_mark(t[slot].generation)  # it was about to
    assert t.reclaim(marks, 2 * REVOKE_NS) == ([], [])
    assert (list(t[slot].lanes), t.lost) == ([0], 1)
    assert t.reclaim(marks, 9 * REVOKE_NS) == ([], [])
    marks[slot * 2] = t[slot].generation
    assert t.sweep(marks) == [slot]


def test_what_is_held_or_awaited_longer_is_not_reclaimed() -> None:
    t = table(lanes=3)
    slot = reserved(t)
    t.hold(slot)
    t.publish(slot, [7], until_ns=0)
    assert t.reclaim([0] * 12, 9 * REVOKE_NS) == ([], [])
    t.publish(slot, [8], until_ns=9 * REVOKE_NS)
    t.publish(slot, [9], until_ns=0)
    t.unhold(slot)
    assert t.reclaim([0] * 12, 9 * REVOKE_NS) == ([], [])
    assert t.reclaim([0] * 12, 10 * REVOKE_NS) == ([slot], [])


def test_stale_releases_are_counted_and_change_nothing() -> None:
    t = table()
    slot = reserved(t)
    t.publish(slot, [7])
    old = t[slot].generation
    t.release(slot, 0, old)
    assert reserved(t) == slot
    t.publish(slot, [8])
    assert not t.release(slot, 0, old)
    assert not t.release(slot, 2, old + 1)
    assert not t.release(99, 0, 1)
    assert (t.stale, t.outstanding) == (3, 1)


def test_a_mark_of_an_earlier_generation_does_not_free() -> None:
    t = table(slots=1, lanes=1)
    t.publish(reserved(t), [7])
    marks = [t[0].generation]
    t.sweep(marks)
    t.publish(reserved(t), [8])
    assert t.sweep(marks) == []


def test_the_generation_skips_zero_when_it_wraps() -> None:
    t = table(slots=1)
    slot = reserved(t)
    t[slot].generation = MAX_GENERATION
    t.publish(slot, [7])
    assert t[slot].generation == 1


def test_peer_gone_releases_all_its_lanes_and_no_other() -> None:
    t = table()
    both, mine = reserved(t), reserved(t)
    t.publish(both, [7, 8, 7])
    t.publish(mine, [7])
    assert t.peer_gone(7) == (3, [mine])
    assert t.peer_gone(7) == (0, [])
    assert t.peer_gone(8) == (1, [both])
    assert t.outstanding == 0


def test_a_held_slot_outlives_its_consumers_and_can_be_published_again() -> None:
    t = table()
    slot = reserved(t)
    t.hold(slot)
    t.publish(slot, [7])
    first = t[slot].generation
    assert not t.release(slot, 0, first)
    assert list(t.publish(slot, [8])) == [0]
    assert t[slot].generation == first + 1, "all lanes were back: a new life"
    assert not t.unhold(slot)
    assert t.release(slot, 0, first + 1)


def test_publishing_again_while_a_lane_is_out_takes_further_lanes() -> None:
    t = table(lanes=3)
    slot = reserved(t)
    t.hold(slot)
    t.publish(slot, [7, 8])
    generation = t[slot].generation
    t.release(slot, 0, generation)
    assert list(t.publish(slot, [9])) == [2], "lane 0's mark shows this generation already"
    assert t[slot].generation == generation
    with pytest.raises(LeaseError, match="0 lanes"):
        t.publish(slot, [9])


def test_holds_are_counted() -> None:
    t = table()
    slot = reserved(t)
    t.hold(slot)
    t.hold(slot)
    t.publish(slot, [7])
    t.release(slot, 0, t[slot].generation)
    assert not t.unhold(slot)
    assert t.unhold(slot)


def test_nothing_free_is_none_and_counted() -> None:
    t = table(capacity=8 * KIB, slots=2)
    assert t.reserve(9 * KIB) is None
    assert t.stalls == 0, "it would not fit an empty arena: waiting cannot help"
    assert not t.fits(9 * KIB)
    reserved(t, 4 * KIB)
    assert t.reserve(5 * KIB) is None
    reserved(t)
    assert t.reserve(1) is None
    assert t.stalls == 2
    assert (t.high_slots, t.high_water) == (2, 4 * KIB + 128)


@pytest.mark.parametrize(
    "illegal",
    [
        lambda t, s: t.discard(3),
        lambda t, s: t.publish(3, [7]),
        lambda t, s: t.hold(3),
        lambda t, s: t.unhold(s),
        lambda t, s: t.publish(s, []),
        lambda t, s: t.publish(s, [7] * 4),
        lambda t, s: (t.publish(s, [7]), t.publish(s, [7])),
        lambda t, s: (t.publish(s, [7]), t.discard(s)),
        lambda t, s: (t.hold(s), t.discard(s)),
    ],
)
def test_illegal_moves_raise(illegal: object) -> None:
    t = table()
    slot = reserved(t)
    with pytest.raises(LeaseError):
        illegal(t, slot)  # type: ignore[operator]


@pytest.mark.parametrize(("slots", "lanes"), [(0, 1), (1, 0), (1, 257)])
def test_a_table_without_slots_or_lanes_is_refused(slots: int, lanes: int) -> None:
    with pytest.raises(ValueError):
        LeaseTable(4096, slots, lanes)


class LeaseMachine(RuleBasedStateMachine):
    """Random lives of slots. The model keeps, per slot, its consumers by lane and its holds."""

    SLOTS, LANES, CAPACITY = 5, 4, 32 * KIB

    def __init__(self) -> None:
        super().__init__()
        self.t = LeaseTable(self.CAPACITY, self.SLOTS, self.LANES)
        self.marks = [0] * (self.SLOTS * self.LANES)
        self.bytes: dict[int, int] = {}
        self.lanes: dict[int, dict[int, int]] = {}
        self.holds: dict[int, int] = {}
        self.last_generation: dict[int, int] = {}

    def pick(self, data: st.DataObject, slots: list[int]) -> int:
        return data.draw(st.sampled_from(sorted(slots)))

    @rule(nbytes=st.one_of(st.integers(0, 300), st.integers(1, 40 * KIB)))
    def reserve(self, nbytes: int) -> None:
        stalls = self.t.stalls
        lease = self.t.reserve(nbytes)
        if lease is None:
            assert self.t.stalls == stalls + self.t.fits(nbytes)
            assert len(self.bytes) == self.SLOTS or all(
                size < self.t.extents.size_of(nbytes) + (-start % 4096)
                for start, size in self.t.extents.gaps()
            )
        else:
            assert lease.slot not in self.bytes
            assert lease.size >= nbytes
            self.bytes[lease.slot] = nbytes
            self.holds[lease.slot] = 0

    @precondition(lambda self: self.bytes.keys() - self.lanes.keys())
    @rule(data=st.data(), consumers=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def publish(self, data: st.DataObject, consumers: list[int]) -> None:
        slot = self.pick(data, list(self.bytes.keys() - self.lanes.keys()))
        lanes = self.t.publish(slot, consumers)
        self.lanes[slot] = dict(zip(lanes, consumers, strict=True))
        assert self.t[slot].generation == self.last_generation.get(slot, 0) + 1
        self.last_generation[slot] = self.t[slot].generation

    @precondition(lambda self: self.bytes.keys() - self.lanes.keys())
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        slot = self.pick(data, list(self.bytes.keys() - self.lanes.keys()))
        if self.holds[slot]:
            with pytest.raises(LeaseError):
                self.t.discard(slot)
            return
        self.t.discard(slot)
        del self.bytes[slot], self.holds[slot]

    @precondition(lambda self: self.bytes)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        slot = self.pick(data, list(self.bytes))
        self.t.hold(slot)
        self.holds[slot] += 1

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        slot = self.pick(data, [s for s, n in self.holds.items() if n])
        self.holds[slot] -= 1
        assert self.t.unhold(slot) == self.settle(slot)

    @precondition(lambda self: any(self.lanes.values()))
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        """A consumer writes its mark; nothing happens before the sweep."""
        slot = self.pick(data, [s for s, lanes in self.lanes.items() if lanes])
        lane = data.draw(st.sampled_from(sorted(self.lanes[slot])))
        self.marks[slot * self.LANES + lane] = self.t[slot].generation

    @rule()
    def sweep(self) -> None:
        expected = []
        for slot, lanes in list(self.lanes.items()):
            done = [
                lane
                for lane in lanes
                if self.marks[slot * self.LANES + lane] == self.last_generation[slot]
            ]
            for lane in done:
                del lanes[lane]
            if done and self.settle(slot):
                expected.append(slot)
        assert sorted(self.t.sweep(self.marks)) == sorted(expected)

    @rule(peer=st.integers(1, 3))
    def peer_gone(self, peer: int) -> None:
        count, freed = 0, []
        for slot, lanes in list(self.lanes.items()):
            done = [lane for lane, consumer in lanes.items() if consumer == peer]
            for lane in done:
                del lanes[lane]
            count += len(done)
            if done and self.settle(slot):
                freed.append(slot)
        got_count, got_freed = self.t.peer_gone(peer)
        assert (got_count, sorted(got_freed)) == (count, sorted(freed))

    @rule(slot=st.integers(0, 6), lane=st.integers(0, 5), generation=st.integers(0, 2**32))
    def forged_release(self, slot: int, lane: int, generation: int) -> None:
        if self.last_generation.get(slot) == generation:
            return
        stale = self.t.stale
        assert not self.t.release(slot, lane, generation)
        assert self.t.stale == stale + 1

    def settle(self, slot: int) -> bool:
        """Whether the model says that the slot is free now; forgets it if so."""
        if self.holds[slot] or slot not in self.lanes or self.lanes[slot]:
            return False
        del self.bytes[slot], self.lanes[slot], self.holds[slot]
        return True

    @invariant()
    def extents_never_overlap_and_nothing_leaks(self) -> None:
        used = sorted((self.t[s].offset, self.t[s].size) for s in self.bytes)
        gaps = self.t.extents.gaps()
        everything = sorted(used + gaps)
        at = 0
        for start, size in everything:
            assert start == at, "overlap or leak"
            assert size > 0
            at = start + size
        assert at == self.CAPACITY
        assert all(a + n < b for (a, n), (b, _) in pairwise(gaps)), "coalesced"
        assert self.t.used == sum(size for _, size in used)
        assert self.t.extents.end == max((start + size for start, size in used), default=0)

    @invariant()
    def the_table_agrees_with_the_model(self) -> None:
        assert self.t.outstanding == len(self.bytes)
        for slot in range(self.SLOTS):
            lease = self.t[slot]
            if slot in self.lanes:
                assert lease.state is SlotState.PUBLISHED
                assert lease.lanes == self.lanes[slot]
            else:
                want = SlotState.RESERVED if slot in self.bytes else SlotState.FREE
                assert lease.state is want
        assert self.t._published.keys() == self.lanes.keys()


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=35, stateful_step_count=50, deadline=None)

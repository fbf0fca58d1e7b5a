"""What a client does with granted memory: pure, no sockets."""

from __future__ import annotations

import pytest
from client_core_rig import rid
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from blockflow.client.sharing import RETRY_NS, Sharing, SharingState, Slot
from blockflow.tensormq.grants import MIN_TENSOR_BYTES, geometry
from blockflow.wire.client import Invitation, Invite, decode_to_dispatcher
from blockflow.wire.grants import Ask, Attach, Direction, Granted, Refused

UP, DOWN = Direction.UPLOAD, Direction.RESULT
BIG = MIN_TENSOR_BYTES
TOKEN = b"t" * 16


def attached() -> Sharing:
    """Attached, with one segment of 16 slots for uploads."""
    sharing = Sharing("auto")
    assert sharing.take(BIG, 0) is None
    sharing.on_invitation(Invitation(rid(1), "/x", TOKEN, ""), 0)
    sharing.on_attached()
    sharing.packets.clear()
    sharing.on_packet(Granted(1, UP, geometry(BIG)[0], 16), 0)
    return sharing


def test_the_first_large_tensor_asks_and_the_small_ones_do_not() -> None:
    sharing = Sharing("auto")
    assert sharing.info().reason == ""
    assert sharing.take(BIG - 1, 0) is None
    sharing.want(DOWN, BIG - 1, 0)
    assert not sharing.invites
    assert sharing.take(BIG, 0) is None
    assert sharing.take(BIG, 0) is None
    sharing.want(DOWN, 5 * BIG, 0)
    (invite,) = sharing.invites
    assert isinstance(decode_to_dispatcher(invite), Invite)
    assert sharing.state is SharingState.ASKED
    assert sharing.on_invitation(Invitation(rid(1), "/x", TOKEN, ""), 0)
    assert sharing.way == ("/x", Attach(TOKEN))
    assert sharing.state is SharingState.ATTACHING and not sharing.packets
    sharing.on_attached()
    assert sharing.way is None
    assert list(sharing.packets) == [Ask(UP, BIG), Ask(DOWN, 5 * BIG)]
    assert sharing.info().state is SharingState.ATTACHED


def test_each_size_is_asked_for_once() -> None:
    sharing = attached()
    sharing.want(UP, BIG, 0)
    assert not sharing.packets
    sharing.want(UP, 4 * BIG, 0)
    sharing.want(UP, 4 * BIG - 1, 0)
    assert list(sharing.packets) == [Ask(UP, 4 * BIG)]


def test_a_refused_size_is_asked_for_again_later() -> None:
    sharing = attached()
    sharing.want(UP, 64 * BIG, 0)
    sharing.packets.clear()
    sharing.on_packet(Refused(UP, 64 * BIG, "no room"), 5)
    assert sharing.info().reason == "no room"
    assert sharing.info().state is SharingState.ATTACHED
    sharing.want(UP, 64 * BIG, 5)
    assert not sharing.packets
    sharing.want(UP, 64 * BIG, 5 + RETRY_NS)
    assert list(sharing.packets) == [Ask(UP, 64 * BIG)]


def test_off_is_off() -> None:
    sharing = Sharing("off")
    assert sharing.take(BIG, 0) is None
    sharing.want(DOWN, BIG, 0)
    sharing.lost("x", 0)
    sharing.reset()
    assert not sharing.invites
    assert sharing.info().state is SharingState.OFF


def test_a_refusal_holds_for_a_while() -> None:
    sharing = Sharing("auto")
    sharing.take(BIG, 0)
    sharing.invites.clear()
    assert sharing.on_invitation(Invitation(rid(1), "", b"", "another host"), 7)
    assert sharing.info().reason == "another host"
    assert sharing.state is SharingState.UNAVAILABLE
    sharing.take(BIG, 6 + RETRY_NS)
    assert not sharing.invites
    sharing.take(BIG, 7 + RETRY_NS)
    assert len(sharing.invites) == 1


def test_an_invitation_that_nobody_asked_for_is_nothing() -> None:
    sharing = Sharing("auto")
    assert not sharing.on_invitation(Invitation(rid(1), "/x", TOKEN, ""), 0)
    assert sharing.way is None
    assert sharing.state is SharingState.UNUSED


def test_slots_are_used_from_the_lowest_and_run_out() -> None:
    sharing = attached()
    slots = [sharing.take(BIG, 0) for _ in range(16)]
    assert slots == [Slot(1, i) for i in range(16)]
    assert sharing.take(BIG, 0) is None
    sharing.put_back(Slot(1, 3))
    sharing.put_back(Slot(1, 9))
    assert sharing.take(BIG, 0) == Slot(1, 3)


def test_the_smallest_slot_that_fits_is_taken() -> None:
    sharing = attached()
    sharing.on_packet(Granted(2, UP, 64 * BIG, 2), 0)
    assert sharing.take(BIG, 0) == Slot(1, 0)
    assert sharing.take(64 * BIG, 0) == Slot(2, 0)
    assert sharing.take(BIG - 1, 0) is None  # it rides in the message
    sharing.on_packet(Granted(3, DOWN, 128 * BIG, 2), 0)  # for results
    assert (sharing.info().upload_slots, sharing.info().result_slots) == (18, 2)
    assert sharing.take(128 * BIG, 0) is None


def test_a_reply_frees_what_was_sent_before_it_and_no_more() -> None:
    sharing = attached()
    numbers = {}
    for n in range(1, 6):
        slot = None if n == 3 else sharing.take(BIG, 0)  # the third goes in a message
        numbers[n] = sharing.sent(rid(n), slot)
    free = sharing._uploads[1].free
    assert len(free) == 12
    sharing.on_reply(rid(99), 0)  # it had no slot
    assert len(free) == 12
    sharing.on_reply(rid(3), numbers[3])
    assert len(free) == 14
    sharing.on_reply(rid(1), numbers[1])
    assert len(free) == 14
    sharing.on_reply(rid(4), 0)  # late: its caller has gone
    assert len(free) == 15
    sharing.on_reply(rid(5), numbers[5])
    assert sorted(free) == list(range(16))


@pytest.mark.parametrize("how", ["lost", "reset"])
def test_what_was_granted_is_void_with_its_connection(how: str) -> None:
    sharing = attached()
    slot = sharing.take(BIG, 0)
    assert slot is not None
    assert sharing.holds(slot)
    number = sharing.sent(rid(1), slot)
    if how == "lost":
        sharing.lost("gone", 0)
    else:
        sharing.reset()
    assert not sharing.holds(slot)
    sharing.on_reply(rid(1), number)
    sharing.put_back(slot)
    assert sharing.take(BIG, 0) is None
    assert sharing.info().nbytes == 0


class Reuse(RuleBasedStateMachine):
    """A slot is written again only after the Dispatcher, that reads in order, has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.sharing = attached()
        self.count = 0
        self.unread: list[tuple[bytes, int, Slot | None]] = []
        self.unanswered: list[tuple[bytes, int]] = []

    @rule(by_slot=st.booleans())
    def send(self, by_slot: bool) -> None:
        self.count += 1
        slot = self.sharing.take(BIG, 0) if by_slot else None
        assert slot is None or slot not in [s for _, _, s in self.unread]
        number = self.sharing.sent(rid(self.count), slot)
        self.unread.append((rid(self.count), number, slot))

    @precondition(lambda self: self.unread)
    @rule()
    def dispatcher_reads(self) -> None:
        request_id, number, _ = self.unread.pop(0)
        self.unanswered.append((request_id, number))

    @precondition(lambda self: self.unanswered)
    @rule(data=st.data(), late=st.booleans())
    def reply(self, data: st.DataObject, late: bool) -> None:
        n = data.draw(st.integers(0, len(self.unanswered) - 1))
        request_id, number = self.unanswered.pop(n)
        self.sharing.on_reply(request_id, 0 if late else number)


Reuse.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestReuse = Reuse.TestCase

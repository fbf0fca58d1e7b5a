"""What a server sends that nobody asked for: counted, borne for a while, never the thread's end."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import zmq
from client_core_rig import (
    DESC,
    MS,
    connected_core,
    description,
    only,
    reply,
    rid,
    send_all,
    submit,
)

from blockflow.client.asks import Asks
from blockflow.client.conduct import FORGIVEN_PER_S, MOST_FRAMES, MOST_UNASKED, UNIT_BYTES, Conduct
from blockflow.client.core import ClientCore
from blockflow.client.dealer import FIRST_NS, LONGEST_NS, Redial
from blockflow.client.outcome import Failed, Outcome
from blockflow.client.reception import ROUND_NS, Reception
from blockflow.client.sharing import ANSWER_NS, INVITE_ID, Sharing, SharingState
from blockflow.client.tensors import from_wire
from blockflow.core import limits
from blockflow.core.errors import WireError
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import TaskRoute
from blockflow.tensormq.grants import MIN_TENSOR_BYTES, geometry, segment_bytes
from blockflow.wire.client import (
    KIND_INVITATION,
    Description,
    Invitation,
    Reply,
    TaskResult,
    decode_to_client,
    encode_to_client,
)
from blockflow.wire.codec import encode
from blockflow.wire.grants import Ask, Direction, Granted, Refused
from blockflow.wire.tensor import Handle, TensorDesc

S = 1_000_000_000
UP, DOWN = Direction.UPLOAD, Direction.RESULT
BIG = MIN_TENSOR_BYTES
SPEC = TensorSpec("float32", ("rows", 4))


class FakeDealer:
    """Gives these messages, again and again if there are more of them than can be read."""

    def __init__(self, messages: list[list[bytes]], *, endless: bool = False) -> None:
        self.messages = messages
        self.given = self.tried = 0
        self._endless = endless

    @property
    def waits(self) -> bool:
        return self._endless or self.given < len(self.messages)

    def receive(self) -> list[zmq.Frame] | None:
        self.tried += 1
        if self.given >= (1_000_000 if self._endless else len(self.messages)):
            return None
        frames = self.messages[self.given % len(self.messages)]
        self.given += 1
        return [zmq.Frame(f) for f in frames]


def received(core: ClientCore, dealer: FakeDealer) -> tuple[Reception, list[Outcome], bool]:
    out: list[Outcome] = []
    reception = Reception(core, dealer, out.extend)  # type: ignore[arg-type]
    return reception, out, reception.receive()


# --- conduct


def test_so_much_is_borne_and_time_forgives() -> None:
    conduct = Conduct()
    for n in range(10 * MOST_UNASKED):
        conduct.unasked(100, n * S // FORGIVEN_PER_S)
    assert not conduct.trouble
    now = 10 * MOST_UNASKED * S // FORGIVEN_PER_S
    for _ in range(MOST_UNASKED - 1):
        conduct.unasked(100, now)
    assert not conduct.trouble
    for _ in range(2):
        conduct.unasked(100, now)
    assert "nobody asked for" in conduct.trouble
    conduct.begin()
    conduct.unasked(100, now)
    assert not conduct.trouble


def test_large_messages_count_for_more() -> None:
    conduct = Conduct()
    conduct.unasked(MOST_UNASKED * UNIT_BYTES, 0)
    assert conduct.trouble


def test_what_answers_nothing_is_counted_and_what_was_asked_for_is_not() -> None:
    core = connected_core()
    submit(core, 1)
    submit(core, 2, deadline_ms=10)
    send_all(core)
    core.on_tick(2 * S)  # both are overdue: their replies are late, but were asked for
    core.on_message(reply(1), S)
    core.on_message(reply(2), S)
    assert (core.counters.late_replies, core.counters.unasked) == (2, 0)
    core.on_message(reply(2), S)
    core.on_message([b"\xc1"], S)
    assert core.on_message([encode_to_client(Invitation(rid(7), "/x", b"t" * 16, ""))], S) == []
    core.on_message(description(rid(9)), S)
    assert core.counters.unasked == 4
    core.ask(rid(10), None, 1000, S)
    core.on_message(description(rid(10)), S)
    assert core.counters.unasked == 4


def test_a_connection_that_was_given_up_waits_longest() -> None:
    redial = Redial(lambda: 0.0)
    redial.offended(0)
    assert redial.due_ns == LONGEST_NS > FIRST_NS


# --- reception


def test_what_is_not_there_is_not_tried() -> None:
    """pyzmq makes an exception of such an attempt: it costs as much as to ask three times."""
    core, dealer = connected_core(), FakeDealer([reply(99), reply(98)])
    _, _, all_ = received(core, dealer)
    assert all_ and (dealer.given, dealer.tried) == (2, 2)


def test_a_flood_leaves_room_for_everything_else() -> None:
    core = connected_core()
    asked: list[bytes] = []

    def never_unasked(frames: Any, now_ns: int) -> list[Outcome]:
        asked.append(frames[0])
        return []

    core.on_message = never_unasked  # type: ignore[method-assign]
    begun = time.monotonic_ns()
    _, _, all_ = received(core, FakeDealer([[b"x"]], endless=True))
    assert not all_ and asked
    assert time.monotonic_ns() - begun < 100 * ROUND_NS


@pytest.mark.parametrize("frames", [[b"\xc1"], reply(99)])
def test_who_sends_only_what_nobody_asked_for_is_left(frames: list[bytes]) -> None:
    core, dealer = connected_core(), FakeDealer([frames], endless=True)
    out: list[Outcome] = []
    reception = Reception(core, dealer, out.extend)  # type: ignore[arg-type]
    while not reception.conduct.trouble:
        reception.receive()
    assert MOST_UNASKED <= dealer.given <= 2 * MOST_UNASKED
    assert reception.receive() and dealer.given <= 2 * MOST_UNASKED  # no more is read


def test_a_defect_ends_the_request_and_the_connection_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = connected_core()
    submit(core, 1)
    submit(core, 2)
    send_all(core)

    def defect(*_: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(core, "_on_reply", defect)
    reception, out, _ = received(core, FakeDealer([reply(1)]))
    failed = only(out)
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.error.code) == (rid(1), "MALFORMED_MESSAGE")
    assert reception.conduct.trouble and core.counters.malformed == 1
    assert len(core._pending) == 1
    assert "planted" in caplog.text


def test_a_message_of_more_frames_than_any_has_is_the_last_one() -> None:
    core = connected_core()
    submit(core, 1)
    send_all(core)
    frames = [reply(1)[0], *[b""] * MOST_FRAMES]
    reception, out, _ = received(core, FakeDealer([frames]))
    failed = only(out)
    assert isinstance(failed, Failed) and failed.error.code == "MALFORMED_MESSAGE"
    assert "frames" in reception.conduct.trouble


# --- descriptions and replies


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("deadline_ms", math.inf),
        ("share", math.inf),
        ("deadline_ms", -5),
        ("deadline_ms", 0),
        ("deadline_ms", 2**63),
        ("contract", {"input": None}),
        ("canary", [1]),
        ("path", 3),
    ],
)
def test_a_task_out_of_range_is_malformed(key: str, value: Any) -> None:
    task = TaskRoute("t", ("b",), Contract(SPEC, SPEC)).to_dict() | {key: value}
    with pytest.raises(ValueError):
        TaskRoute.from_dict(task)
    core = connected_core()
    core.ask(rid(5), None, 1000, 0)
    raw = [encode_to_client(Description(rid(5), 1, (task,), {}))]
    failed = only(core.on_message(raw, 1))
    assert isinstance(failed, Failed) and failed.error.code == "MALFORMED_MESSAGE"
    assert core.on_message(raw, 1) == []  # and when nobody asks
    assert core.counters.malformed == 1


@pytest.mark.parametrize(
    "desc",
    [
        TensorDesc("float32", (1, 4), None, (4, 1)),
        TensorDesc("float32", (1, 4), Handle(1, 0, 0, 1, 0)),
    ],
)
def test_a_result_has_neither_strides_nor_a_handle(desc: TensorDesc) -> None:
    header = encode_to_client(Reply(rid(1), 1, (TaskResult("t", desc, None),)))
    with pytest.raises(WireError):
        decode_to_client(header)
    assert decode_to_client(encode_to_client(Reply(rid(1), 1, (TaskResult("t", DESC, None),))))


def test_dims_that_no_array_has_are_malformed() -> None:
    huge = (0, limits.MAX_DIM, limits.MAX_DIM, limits.MAX_DIM)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(WireError) as e:
            from_wire(TensorDesc(dtype, huge), b"", "numpy")
        assert e.value.code == "MALFORMED_MESSAGE"
    assert from_wire(TensorDesc("float32", (0, 4)), b"", "numpy").shape == (0, 4)
    assert np.array_equal(from_wire(TensorDesc("uint8", (1, 2)), b"ab", "numpy"), [[97, 98]])


# --- granted memory


def test_an_ask_has_one_answer() -> None:
    slot_bytes, slots = geometry(BIG)
    asks = Asks()
    with pytest.raises(WireError):
        asks.answered(Granted(1, UP, slot_bytes, slots))
    asks.asked(Ask(UP, BIG))
    with pytest.raises(WireError):
        asks.answered(Granted(1, DOWN, slot_bytes, slots))
    asks.answered(Granted(1, UP, slot_bytes, slots))
    with pytest.raises(WireError):
        asks.answered(Granted(2, UP, slot_bytes, slots))
    asks.asked(Ask(UP, 4 * BIG))
    asks.answered(Refused(UP, 4 * BIG, "no room"))
    with pytest.raises(WireError):
        asks.answered(Refused(UP, 4 * BIG, "no room"))


@pytest.mark.parametrize(
    "wrong",
    [
        Granted(1, DOWN, geometry(BIG)[0], 1),  # the number of another one
        Granted(2, DOWN, geometry(BIG)[0] - 1, 1),
        Granted(2, DOWN, geometry(16 * 2**20)[0], limits.MAX_GRANT_SLOTS),
    ],
)
def test_a_grant_is_of_the_size_that_was_asked_for(wrong: Granted) -> None:
    asks = Asks()
    asks.asked(Ask(UP, BIG))
    asks.answered(Granted(1, UP, *geometry(BIG)))
    asks.asked(Ask(DOWN, wrong.slot_bytes))
    with pytest.raises(WireError):
        asks.answered(wrong)


def test_grants_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = geometry(BIG), geometry(4 * BIG)
    asks = Asks()
    for nbytes in (BIG, 4 * BIG):
        asks.asked(Ask(UP, nbytes))
    monkeypatch.setattr(limits, "MAX_CLIENT_GRANT_BYTES", segment_bytes(*one))
    asks.answered(Granted(1, UP, *one))
    with pytest.raises(WireError):
        asks.answered(Granted(2, UP, two[0], 1))


def test_an_invitation_that_cannot_be_read_is_a_refusal() -> None:
    sharing = Sharing("auto")
    core = connected_core()
    core.sharing = sharing
    sharing.want(UP, BIG, 0)
    raw = [encode([limits.PROTOCOL_VERSION, KIND_INVITATION, INVITE_ID, 3, b"", ""])]
    assert core.on_message(raw, 5 * MS) == []
    assert sharing.info().state is SharingState.UNAVAILABLE
    assert "cannot be read" in sharing.info().reason
    assert (core.counters.malformed, core.counters.unasked) == (1, 0)
    core.on_message(raw, 5 * MS)
    assert core.counters.unasked == 1


def test_an_invitation_that_never_comes_is_asked_for_again() -> None:
    sharing = Sharing("auto")
    sharing.want(UP, BIG, 0)
    sharing.invites.clear()
    sharing.want(UP, BIG, ANSWER_NS - 1)
    assert not sharing.invites
    sharing.want(UP, BIG, ANSWER_NS)
    assert len(sharing.invites) == 1
    assert sharing.state is SharingState.ASKED

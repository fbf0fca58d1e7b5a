"""The client's core where a connection, a caller or a slot goes in the middle of a request."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from client_core_rig import (
    BODY,
    DESC,
    MS,
    SPEC,
    connected_core,
    description,
    only,
    rid,
    send_all,
    submit,
)

from blockflow.client.core import GRACE_NS, ClientCore
from blockflow.client.outcome import Answered, Link
from blockflow.client.request import Upload
from blockflow.client.result import Trip, make_result
from blockflow.client.sharing import INVITE_ID, Sharing
from blockflow.core import limits
from blockflow.core.errors import make_error
from blockflow.core.model import Contract
from blockflow.core.routing import TaskRoute
from blockflow.tensormq.grants import MIN_TENSOR_BYTES, geometry
from blockflow.wire.client import (
    Description,
    Invitation,
    Invite,
    Place,
    Reply,
    TaskResult,
    encode_to_client,
)
from blockflow.wire.codec import encode
from blockflow.wire.grants import Direction, Granted
from blockflow.wire.tensor import TensorDesc

BIG = TensorDesc("uint8", (1, MIN_TENSOR_BYTES))
MS_OF = {"t": 500, "u": 200, "v": 900}


def attach(core: ClientCore, slots: int) -> None:
    """The connection gets memory for uploads."""
    core.sharing.want(Direction.UPLOAD, BIG.nbytes, 0)
    assert send_all(core) == [Invite(INVITE_ID)]
    core.sharing.on_invitation(Invitation(rid(9), "/x", bytes(16), ""), 0)
    core.sharing.on_attached()
    core.sharing.on_packet(Granted(1, Direction.UPLOAD, geometry(BIG.nbytes)[0], slots), 0)


def sharing_core(slots: int = 1) -> ClientCore:
    core = ClientCore(
        "tcp://test:1",
        connect_timeout_ns=1000 * MS,
        max_pending=10,
        now_ns=0,
        sharing=Sharing("auto"),
    )
    core.on_connected()
    attach(core, slots)
    return core


def submit_big(core: ClientCore, n: int, tasks: tuple[str, ...] = ("t",)) -> None:
    core.submit(rid(n), tasks, BIG, memoryview(bytes(BIG.nbytes)), 1000, 0)


def answer(n: int, *results: TaskResult) -> bytes:
    return encode_to_client(Reply(rid(n), 1, results))


def test_what_may_go_again_keeps_its_body() -> None:
    core = connected_core()
    core.submit(rid(1), ("t",), DESC, BODY, 1000, 0, 1)
    bodies: list[Any] = []
    for _ in range(2):
        message = core.next_message(0)
        assert message is not None
        bodies.append(message[1])
        core.sent(message[2])
        core.on_disconnected(MS)
        core.on_connected()
    assert bodies == [BODY, BODY]


def test_what_will_not_go_again_keeps_no_body() -> None:
    """Of a large input that would be memory for as long as its answer takes."""
    core, body = connected_core(), np.zeros(4, np.float32)
    core.submit(rid(1), ("t",), DESC, body, 1000, 0)
    assert len(send_all(core)) == len(core._pending) == 1
    kept = weakref.ref(body)
    del body
    assert kept() is None


def test_an_error_keeps_no_input_alive() -> None:
    core, body = connected_core(), np.zeros(4, np.float32)
    core.submit(rid(1), ("t",), DESC, body, 1000, 0, 1)  # it might have gone again
    send_all(core)
    failed = only(core.on_message([encode([1, 20, rid(1)])], 0))
    assert failed.error.__traceback__ is not None
    kept = weakref.ref(body)
    del body
    assert kept() is None


def test_what_goes_through_a_slot_waits_for_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNANSWERED_BYTES", 1)
    core = sharing_core()
    for n in (1, 3):
        submit(core, n)
        submit_big(core, n + 1)
    assert [m.request_id for m in send_all(core)] == [rid(1), rid(2)]


def test_the_slot_of_what_ends_unsent_is_free() -> None:
    core = sharing_core(slots=1)
    submit_big(core, 1)
    message = core.next_message(0)
    assert message is not None and isinstance(message[1], Upload)
    core.cancel(rid(1))
    submit_big(core, 2)
    assert [m.upload for m in send_all(core)] == [(1, 0)]


def test_a_reply_in_whatever_way_says_that_slots_and_messages_before_it_were_read() -> None:
    core = sharing_core(slots=1)
    for n in (1, 2, 3):  # the second and the third go in messages
        submit_big(core, n)
    assert [m.upload for m in send_all(core) if hasattr(m, "upload")] == [(1, 0), None, None]
    failed = make_error("BLOCK_FAILED", "broken")
    core.on_message([answer(2, TaskResult("t", None, failed))], MS)
    submit_big(core, 4)
    submit_big(core, 5)
    assert [m.upload for m in send_all(core) if hasattr(m, "upload")] == [(1, 0), None]
    assert core._window.nbytes == 2 * BIG.nbytes  # of 3 and 5
    core.on_message([answer(4, TaskResult("t", None, failed))], MS)
    assert core._window.nbytes == BIG.nbytes


def test_a_slot_of_a_former_connection_is_not_written_to() -> None:
    """It was taken, and the connection broke before the header had left."""
    core = sharing_core()
    submit_big(core, 1)
    message = core.next_message(0)
    assert message is not None and isinstance(message[1], Upload)
    again = core.next_message(0)  # the socket was full: it takes no second slot
    assert again is not None and again[1] is message[1]
    core.on_disconnected(MS)
    core.on_connected()
    (sent, *_) = (m for m in send_all(core) if hasattr(m, "upload"))
    assert sent.upload is None


def test_a_slot_stays_taken_while_the_dispatcher_may_still_read_it() -> None:
    """Whatever the caller does: the next input would be read for this one's."""
    core = sharing_core(slots=1)
    submit_big(core, 1)
    (first,) = send_all(core)
    assert first.upload == (1, 0)
    core.cancel(rid(1))
    submit_big(core, 2)
    uploads = [m.upload for m in send_all(core) if hasattr(m, "upload")]
    assert uploads == [None]
    error = make_error("CANCELLED", "by its caller")
    core.on_message([answer(1, TaskResult("t", None, error))], MS)
    submit_big(core, 3)
    assert [m.upload for m in send_all(core) if hasattr(m, "upload")] == [(1, 0)]


def test_a_result_that_nobody_waits_for_gives_its_slot_back() -> None:
    core = connected_core()
    submit(core, 1)
    send_all(core)
    core.cancel(rid(1))
    place = Place(3, 1, 2)
    assert core.on_message([answer(1, TaskResult("t", DESC, None, place=place))], MS) == []
    assert list(core.unclaimed) == [place]


def test_what_has_run_for_one_task_is_not_sent_again_for_another() -> None:
    core = sharing_core()
    submit_big(core, 1, ("t", "u"))
    send_all(core)
    lost = TaskResult("u", None, make_error("CONNECTION_LOST", "a worker's"))
    out = core.on_message([answer(1, TaskResult("t", DESC, None), lost), bytes(16)], MS)
    assert isinstance(only(out), Answered) and send_all(core) == []


def test_another_connection_may_lead_to_other_deadlines() -> None:
    core = connected_core()
    core.ask(rid(7), None, 1000, 0)
    send_all(core)
    core.on_message(description(rid(7), deadline_ms=300), 0)
    core.on_disconnected(MS)
    core.on_connected()
    submit(core, 1, deadline_ms=None)
    assert [m for m in send_all(core, 2 * MS) if hasattr(m, "deadline_ms")] == []  # it asks first
    core.on_message(description(bytes(16), deadline_ms=700), 3 * MS)
    (sent,) = send_all(core, 3 * MS)
    assert sent.deadline_ms == 697


def test_of_several_tasks_the_shortest_deadline_holds() -> None:
    core = connected_core()
    core.ask(rid(7), None, 1000, 0)
    send_all(core)
    routes = [TaskRoute(t, ("b",), Contract(SPEC, SPEC), 32, ms) for t, ms in MS_OF.items()]
    tasks = tuple(r.to_dict() for r in routes)
    core.on_message([encode_to_client(Description(rid(7), 1, tasks, {}))], 0)
    core.submit(rid(1), tuple(MS_OF), DESC, BODY, None, 0)
    (sent,) = send_all(core)
    assert sent.deadline_ms == min(MS_OF.values())
    assert only(core.on_tick(min(MS_OF.values()) * MS + GRACE_NS)).error.code == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("local", [True, False])
def test_the_legs_of_a_request_add_up_where_the_clocks_are_one(local: bool) -> None:
    answered = TaskResult("t", DESC, None, total_ns=30 * MS)
    outcome = Answered(rid(1), 1, (answered,), (BODY,), 100 * MS, 110 * MS)
    trip = Trip(DESC.nbytes, False, local)
    result = make_result(outcome, answered, DESC, BODY, None, trip, 160 * MS)
    assert (result.rtt_ms, result.total_ms) == (60.0, 30.0)
    legs = (result.upload.ms, result.download.ms)
    assert legs == ((10.0, 20.0) if local else (None, None))


def test_who_asks_just_after_the_connection_was_lost_waits_for_the_next() -> None:
    link = Link("tcp://test:1", 1000, 0)
    assert link.gives_up_at(asked_ns=0) == 1000
    link.since_ns = 5000
    assert link.gives_up_at(asked_ns=100) == 6000  # it was sent, and is to be sent again
    assert link.gives_up_at(asked_ns=5500) == 6500

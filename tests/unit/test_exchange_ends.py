"""The request path at the ends that few requests take: each has its answer, and keeps nothing."""

from __future__ import annotations

import numpy as np
import pytest
import zmq

from blockflow.core.errors import RequestError, make_error
from blockflow.tensormq.push import Unsent
from blockflow.wire import client as wire
from blockflow.wire.data import (
    Data,
    Failure,
    Withdraw,
    decode_data_plane,
    encode_data,
    encode_failure,
    encode_withdraw,
)
from blockflow.wire.tensor import TensorDesc
from tests.unit.test_exchange import CLIENT, Scene


def withdrawn(s: Scene) -> list[tuple[str, tuple[tuple[bytes, int], ...]]]:
    """What workers were told of requests that nobody waits for."""
    found = [(m.endpoint, decode_data_plane(memoryview(m.frames[0]))) for m in s.door.sent]
    return [(where, told.requests) for where, told in found if isinstance(told, Withdraw)]


def test_a_defect_in_admission_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Scene()
    monkeypatch.setattr(s.exchange.table, "admit", lambda *_, **__: 1 // 0)
    s.ask(1)
    assert s.ends() == ["INTERNAL"]


def test_where_no_slot_is_free_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Scene()
    monkeypatch.setattr(s.desk, "retain", lambda *_: None)
    s.ask(1)
    assert (s.ends(), s.out(), len(s.exchange.table)) == (["OVERLOADED"], (0, 0, 0), 0)
    assert s.exchange.admission.refused == {"memory": 1}


def test_a_worker_is_told_what_its_client_has_cancelled() -> None:
    s = Scene()
    s.ask(1)
    cancel = wire.encode_to_dispatcher(wire.Cancel(bytes(15) + b"\1"))
    s.exchange.on_client(CLIENT, [zmq.Frame(cancel)])
    assert s.ends() == ["CANCELLED"]
    assert withdrawn(s) == [("to 11", ((s.items()[0].request_id, 1),))]


def test_a_withdrawal_that_never_left_is_nobodys_request() -> None:
    s = Scene()
    s.ask(1)
    s.exchange.on_unsent([Unsent("to 12", [b""], None), *s.door.sent])
    assert (s.ends(), s.out()) == (["BLOCK_UNAVAILABLE"], (0, 0, 0))


@pytest.mark.parametrize("count", [0, 3])
def test_a_message_of_no_or_many_frames_is_counted(count: int) -> None:
    s = Scene()
    s.exchange.on_client(CLIENT, [zmq.Frame(b"x")] * count)
    assert (s.exchange.stats.events["malformed_client"], s.ends()) == (1, [])


def test_the_end_is_told_to_everybody() -> None:
    s = Scene()
    for number in (1, 2):
        s.ask(number)
    s.exchange.abort_all(RequestError("NOT_READY", "over"))
    assert (s.ends(), s.exchange.admission.inflight) == (["NOT_READY"] * 2, 0)


def test_only_what_was_sent_before_may_have_run_before() -> None:
    s = Scene(replayable=False)
    s.publish()
    for tries in (1, 2):
        s.ask(tries, tries=tries)
    s.publish(11)
    assert (len(s.items()), s.ends()) == (1, ["WORKER_LOST"])
    assert s.door.replies[0][0].request_id[-1] == 2


# --- from the workers


def from_worker(s: Scene, *frames: bytes) -> None:
    s.exchange.on_return([zmq.Frame(f) for f in frames])


def test_what_a_worker_says_has_failed_is_answered() -> None:
    s = Scene()
    s.ask(1)
    error = make_error("BLOCK_FAILED", "broken")
    from_worker(s, encode_failure(Failure(11, 0, error, tuple(s.items()))))
    assert (s.ends(), s.exchange.admission.inflight) == (["BLOCK_FAILED"], 0)


@pytest.mark.parametrize("mode", ["tensormq", "zeromq"])
def test_a_result_may_come_in_a_frame(mode: str) -> None:
    s, x = Scene(mode), np.ones(4, np.float32).tobytes()
    s.ask(1)
    from_worker(s, encode_data(Data(11, 0, TensorDesc("float32", (1, 4)), tuple(s.items()))), x)
    assert [frames for _, frames in s.door.replies] == [[x]]


def test_a_result_that_cannot_be_read_is_an_answer_and_counted() -> None:
    s = Scene()
    s.ask(1)
    from_worker(s, encode_data(Data(11, 0, TensorDesc("float32", (1, 4)), tuple(s.items()))))
    assert s.ends() == ["OUTPUT_MISMATCH"]
    assert s.exchange.stats.events["unreadable_data"] == 1


def test_what_no_worker_sends_is_counted_and_answers_nothing() -> None:
    s = Scene()
    s.ask(1)
    right = encode_data(Data(11, 0, TensorDesc("float32", (1, 4)), tuple(s.items())))
    for frames in ([], [right] * 3, [b"\xc1"], [encode_withdraw(Withdraw(11, ()))]):
        from_worker(s, *frames)
    assert (s.exchange.stats.events["malformed_data"], s.ends()) == (4, [])


def test_one_result_of_several_tasks_is_in_no_clients_slot_twice() -> None:
    """A slot is free when one of them has read it."""
    s = Scene(place=wire.Place(1, 0, 7))
    request = wire.Request(bytes(16), ("t", "u"), 1000, TensorDesc("float32", (1, 4)), None, 0)
    x = np.zeros(4, np.float32).tobytes()
    s.exchange.on_client(CLIENT, [zmq.Frame(wire.encode_to_dispatcher(request)), zmq.Frame(x)])
    s.answer(11, s.items(), [1.0])
    ((reply, frames),) = s.door.replies
    assert [r.place for r in reply.results] == [None, None] and len(frames) == 2

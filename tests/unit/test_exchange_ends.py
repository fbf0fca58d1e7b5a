"""The request path at the ends that few requests take: each has its answer, and keeps nothing."""

from __future__ import annotations

import pytest
import zmq

from blockflow.core.errors import RequestError
from blockflow.tensormq.push import Unsent
from blockflow.wire import client as wire
from blockflow.wire.data import Withdraw, decode_data_plane
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

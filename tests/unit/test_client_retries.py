"""A request that is sent again: when its connection broke, or its upload was not found."""

from __future__ import annotations

from client_core_rig import (
    BODY,
    DESC,
    MS,
    connected_core,
    only,
    reply,
    rid,
    send_all,
    submit,
)

from blockflow.client.core import ClientCore
from blockflow.client.outcome import Answered, Failed
from blockflow.client.sharing import Sharing
from blockflow.core.errors import make_error
from blockflow.tensormq.grants import MIN_TENSOR_BYTES, geometry
from blockflow.wire.client import (
    Invitation,
    Reply,
    Request,
    TaskResult,
    encode_to_client,
)
from blockflow.wire.codec import decode, encode
from blockflow.wire.grants import Direction, Granted
from blockflow.wire.tensor import TensorDesc

LARGE = TensorDesc("uint8", (1, MIN_TENSOR_BYTES))


def retrying(core: ClientCore, n: int, retries: int = 2, deadline_ms: int = 1000) -> None:
    core.submit(rid(n), ("t",), DESC, BODY, deadline_ms, 0, retries)


def core_with_a_slot() -> ClientCore:
    """It has been granted one slot for uploads."""
    sharing = Sharing("auto")
    core = ClientCore(
        "tcp://test:1", connect_timeout_ns=1000 * MS, max_pending=10, now_ns=0, sharing=sharing
    )
    core.on_connected()
    sharing.want(Direction.UPLOAD, LARGE.nbytes, 0)
    send_all(core)
    sharing.on_invitation(Invitation(rid(9), "/x", bytes(16), ""), 0)
    sharing.on_attached()
    sharing.on_packet(Granted(1, Direction.UPLOAD, geometry(LARGE.nbytes)[0], 1), 0)
    return core


def test_a_request_goes_again_under_its_id_when_the_connection_broke() -> None:
    core = connected_core()
    retrying(core, 1)
    submit(core, 2)
    sent = send_all(core)
    assert [m.tries for m in sent] == [1, 0]
    lost = only(core.on_disconnected(10 * MS))
    assert (lost.request_id, lost.error.code) == (rid(2), "CONNECTION_LOST")
    assert core.next_message(20 * MS) is None
    core.on_connected()
    (again,) = send_all(core, now=30 * MS)
    assert again == Request(rid(1), ("t",), 970, DESC, None, 2)
    assert core.counters.retries == 1
    assert isinstance(only(core.on_message(reply(1), 40 * MS)), Answered)


def test_retries_run_out() -> None:
    core = connected_core()
    retrying(core, 1, retries=1)
    for tries in (1, 2):
        (sent,) = send_all(core)
        assert sent.tries == tries
        out = core.on_disconnected(0)
        core.on_connected()
    assert only(out).error.code == "CONNECTION_LOST"
    assert len(core._pending) == 0


def test_an_upload_that_was_not_found_is_no_sending() -> None:
    """Nothing has run: it uses up no retry, and a block that must not run twice may run."""
    core = core_with_a_slot()
    core.submit(rid(1), ("t",), LARGE, memoryview(bytes(LARGE.nbytes)), 1000, 0, 1)
    (sent,) = send_all(core)
    assert (sent.upload, sent.tries) == ((1, 0), 1)
    gone = TaskResult("*", None, make_error("CONNECTION_LOST", "no such slot"))
    assert core.on_message([encode_to_client(Reply(rid(1), 1, (gone,)))], MS) == []
    (sent,) = send_all(core)
    assert (sent.upload, sent.tries) == (None, 1)
    assert core.on_disconnected(2 * MS) == []
    core.on_connected()
    (sent,) = send_all(core)
    assert sent.tries == 2
    assert only(core.on_disconnected(3 * MS)).error.code == "CONNECTION_LOST"


def test_also_a_reply_that_makes_no_sense_says_that_a_slot_was_read() -> None:
    core = core_with_a_slot()
    error = TaskResult("t", None, make_error("BLOCK_FAILED", "x"))
    for n in (1, 2):
        core.submit(rid(n), ("t",), LARGE, memoryview(bytes(LARGE.nbytes)), 1000, 0)
        (sent,) = send_all(core)
        assert sent.upload == (1, 0)
        raw = decode(encode_to_client(Reply(rid(n), 1, (error,))), max_bytes=4096, what="reply")
        raw[3] = "no epoch"
        assert only(core.on_message([encode(raw)], MS)).error.code == "MALFORMED_MESSAGE"


def test_no_retry_waits_longer_than_for_a_connection_or_the_deadline() -> None:
    core = connected_core()
    retrying(core, 1, deadline_ms=5000)
    retrying(core, 2, deadline_ms=500)
    send_all(core)
    assert core.on_disconnected(100 * MS) == []
    assert only(core.on_tick(500 * MS)).request_id == rid(2)
    lost = only(core.on_tick(1100 * MS))  # the connect time-out is 1 s
    assert (lost.request_id, lost.error.code) == (rid(1), "CONNECTION_LOST")


def test_breaks_do_not_pile_up_timers() -> None:
    """At the fourth all that had piled up was swept for each request anew."""
    core = connected_core()
    for n in range(1, 8):
        retrying(core, n, retries=200, deadline_ms=1000 + n)
    core.ask(rid(9), ("t",), 60_000, 0)
    for n in range(99):
        send_all(core)
        core.on_disconnected(n)
        assert len(core._timers) == 8
        core.on_connected()
    send_all(core)
    assert [core.next_wakeup(), core._timers[0][1]] == [core._catalog.due(rid(9)), rid(9)]
    ended = [o for o in core.on_tick(2000 * MS) if isinstance(o, Failed)]
    assert [o.request_id for o in ended] == [rid(n) for n in range(1, 8)]

"""The Dispatcher between real sockets: requests that come again, of which it knows nothing."""

from __future__ import annotations

from collections.abc import Callable

import dispatcher_rig
import numpy as np
import pytest
from dispatcher_rig import Rig, X, task, wait_until

from blockflow.dispatcher import exchange, repeats
from blockflow.wire.control import Drain, PeerGone

make = dispatcher_rig.make
MUST_NOT = "block 'f' must not run twice"


@pytest.mark.parametrize("memory", [0, 100, 1 << 20], ids=["no memory", "forgotten", "another's"])
def test_a_block_that_must_not_run_twice_is_not_asked_again(
    make: Callable[..., Rig], memory: int
) -> None:
    """Its reply was forgotten, or it is told to a Dispatcher that has never heard of it."""
    r = make(result_memory_bytes=memory)
    fine, once = r.worker(11, {1: "e"}), r.worker(12, {2: "f"})
    once.replayable = False
    r.publish(task("t", ["e", "f"]), task("te", ["e"]))
    client = r.client()
    rid = None
    if memory < 1 << 20:
        rid = client.ask("t", X, tries=1)
        client.answer()
    ran = len(once.seen)
    (error,) = client.infer("t", X, rid=rid, tries=2)
    assert (error.code, MUST_NOT in error.message) == ("WORKER_LOST", True)
    assert not error.retryable
    (error, other) = client.infer(["t", "te"], X, tries=3)
    assert error.code == other.code == "WORKER_LOST"
    assert len(once.seen) == ran
    # What is sent for the first time runs, and so does what may run twice.
    for tries in (0, 1):
        np.testing.assert_array_equal(client.infer("t", X, tries=tries)[0], X + 2)
    np.testing.assert_array_equal(client.infer("te", X, tries=2)[0], X + 1)
    assert len(once.seen) == ran + 2
    assert len(fine.seen) == ran + 3
    wait_until(r.idle)


@pytest.mark.parametrize("replayable", [True, False])
def test_nor_when_it_had_no_worker_at_first(make: Callable[..., Rig], replayable: bool) -> None:
    """Only its next worker's routes say what may be done with it."""
    r = make()
    r.publish(task("t", ["f"]))
    client = r.client()
    rid = client.ask("t", X, tries=2)
    first = client.ask("t", X, tries=1)
    wait_until(lambda: r.exchange.table.waiting == 2)
    worker = r.worker(12, {2: "f"})
    worker.replayable = replayable
    r.publish(task("t", ["f"]))
    replies = {
        reply.request_id: reply.results[0] for reply, _ in (client.answer(), client.answer())
    }
    assert replies[first].error is None
    if replayable:
        assert replies[rid].error is None
    else:
        assert (replies[rid].error.code, MUST_NOT in replies[rid].error.message) == (
            "WORKER_LOST",
            True,
        )
    assert len(worker.seen) == 1 + replayable
    r.mailbox.put(PeerGone(12))
    wait_until(r.idle)


def test_a_request_that_comes_again_by_its_own_connection_is_answered_once(
    make: Callable[..., Rig],
) -> None:
    """ZeroMQ has connected anew before the client hears of the break: it sends by the new
    connection, is told that the old one broke, and sends again."""
    r = make(result_memory_bytes=1 << 20)
    worker = r.worker(11, {1: "e"})
    r.publish(task("t", ["e"]))
    client = r.client()
    worker.behave["e"] = dispatcher_rig.swallow
    rid = client.ask("t", X, tries=1)
    wait_until(lambda: len(worker.seen) == 1)
    client.ask("t", X, rid=rid, tries=2)
    wait_until(lambda: r.exchange.memory.gauges().get("attached") == 1)
    client.ask("t", X + 1, rid=rid, tries=2)
    assert client.answer()[0].results[0].error.code == "DUPLICATE_REQUEST", "that is another one"
    r.mailbox.put(PeerGone(11))
    again = r.worker(12, {1: "e"})
    r.publish(task("t", ["e"]))
    reply, _ = client.answer()
    assert (reply.request_id, reply.results[0].error) == (rid, None)
    assert len(again.seen) == 1
    wait_until(r.idle)


def test_an_input_is_not_hashed_before_its_request_is_let_in(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes a second for the largest, and everybody waits meanwhile."""
    hashed: list[int] = []
    real = repeats.request_digest

    def digest(request: repeats.Request, elements: memoryview) -> bytes:
        hashed.append(request.tries)
        return real(request, elements)

    monkeypatch.setattr(exchange, "request_digest", digest)
    monkeypatch.setattr(repeats, "request_digest", digest)
    r = make(max_inflight=1)
    worker = r.worker(11, {1: "e"})
    r.publish(task("t", ["e"], max_rows=8))
    client = r.client()
    for tries in (1, 2):
        codes = [
            client.infer("nobody", X, tries=tries)[0].code,
            client.infer("t", np.ones((9, 4), np.float32), tries=tries)[0].code,
            client.infer("t", np.ones((2, 5), np.float32), tries=tries)[0].code,
        ]
        assert codes == ["UNKNOWN_TASK", "TOO_LARGE", "CONTRACT_MISMATCH"]
    worker.behave["e"] = dispatcher_rig.swallow
    client.ask("t", X, deadline_ms=300)
    for tries in (1, 2):
        assert client.infer("t", X, tries=tries)[0].code == "OVERLOADED"
    assert client.answer()[0].results[0].error.code == "DEADLINE_EXCEEDED"
    assert not hashed
    worker.behave.clear()
    rid = client.ask("t", X, tries=1)
    answer = client.answer()
    r.mailbox.put(Drain())
    wait_until(lambda: r.exchange.closed_because)
    for tries in (1, 2):
        assert client.infer("t", X, tries=tries)[0].code == "NOT_READY"
    assert hashed == [1]
    client.ask("t", X, rid=rid, tries=2)  # it is known: what was answered is, whatever holds now
    assert client.answer() == answer
    assert hashed == [1, 2]

"""The Dispatcher between real sockets when workers die, connections break and requests return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import dispatcher_rig
import numpy as np
import pytest
from dispatcher_rig import PATIENCE_S, FakeWorker, Rig, X, swallow, task, wait_until

from blockflow.wire.client import Cancel, encode_to_dispatcher
from blockflow.wire.control import PeerGone

make = dispatcher_rig.make


def array_of(reply: Any, frames: list[bytes]) -> np.ndarray:
    """The one result of a reply; fails with its error."""
    (result,) = reply.results
    assert result.error is None, result.error
    return np.frombuffer(frames[0], result.tensor.dtype).reshape(result.tensor.dims)


def test_a_dead_workers_request_runs_again_elsewhere(make: Callable[..., Rig]) -> None:
    r = make()
    dead = r.worker(11, {1: "e"})
    other = r.worker(12, {2: "e"})
    dead.behave["e"] = other.behave["e"] = swallow
    r.publish(task("t", ["e"]))
    client = r.client()
    rids = {client.ask("t", X), client.ask("t", X)}
    wait_until(lambda: dead.seen and other.seen)  # in turn
    other.behave.clear()
    r.mailbox.put(PeerGone(11))
    reply, frames = client.answer()
    np.testing.assert_array_equal(array_of(reply, frames), X + 1)
    again = other.seen[-1][1]
    assert (again.attempt, again.alone) == (2, False)
    assert len(r.exchange.table) == 1  # what the living worker has swallowed
    r.mailbox.put(PeerGone(12))
    wait_until(lambda: r.exchange.table.waiting == 1)
    r.publish(task("t", ["e"]), workers=[r.worker(13, {3: "e"})])
    second, frames = client.answer()
    np.testing.assert_array_equal(array_of(second, frames), X + 1)
    assert {reply.request_id, second.request_id} == rids
    wait_until(r.idle)


def test_a_rerun_waits_for_a_worker_while_other_tasks_go_on(make: Callable[..., Rig]) -> None:
    r = make()
    dead = r.worker(11, {1: "e"})
    dead.behave["e"] = swallow
    fine = r.worker(12, {2: "f"})
    r.publish(task("te", ["e"]), task("tf", ["f"]))
    client = r.client()
    rid = client.ask("te", X)
    wait_until(lambda: dead.seen)
    r.mailbox.put(PeerGone(11))
    np.testing.assert_array_equal(client.infer("tf", X)[0], X + 1)
    wait_until(lambda: r.exchange.table.waiting == 1)
    r.publish(task("te", ["e"]), task("tf", ["f"]), workers=[fine, r.worker(13, {3: "e"})])
    reply, frames = client.answer()
    assert reply.request_id == rid
    np.testing.assert_array_equal(array_of(reply, frames), X + 1)
    wait_until(r.idle)


@pytest.mark.parametrize("mode", ["tensormq", "zeromq"])
def test_a_new_request_waits_for_a_worker(make: Callable[..., Rig], mode: str) -> None:
    r = make()
    dead = r.worker(11, {1: "e"}, mode=mode)
    r.publish(task("t", ["e"]))
    r.mailbox.put(PeerGone(11))
    wait_until(lambda: 11 in r.exchange.planner._dead)
    client, leaver = r.client(), r.client()
    rid, cancelled = client.ask("t", X), client.ask("t", X)
    leaver.ask("t", X)
    wait_until(lambda: r.exchange.table.waiting == 3)
    client.send(encode_to_dispatcher(Cancel(cancelled)))
    reply, _ = client.answer()
    assert (reply.request_id, reply.results[0].error.code) == (cancelled, "CANCELLED")
    leaver.close()
    wait_until(lambda: r.exchange.table.waiting == 1)
    successor = r.worker(12, {2: "e"}, mode=mode)
    r.publish(task("t", ["e"]), workers=[successor])
    reply, frames = client.answer()
    assert reply.request_id == rid
    np.testing.assert_array_equal(array_of(reply, frames), X + 1)
    assert [i.attempt for _, i in successor.seen] == [1]
    assert not dead.seen
    client.ask("t", X)
    client.answer()
    r.mailbox.put(PeerGone(12))
    wait_until(lambda: 12 in r.exchange.planner._dead)
    client.ask("t", X)
    wait_until(lambda: r.exchange.table.waiting == 1)
    r.publish(task("t", ["e"]), workers=[], down={"e": "it was given up"})
    reply, _ = client.answer()
    assert reply.results[0].error.code == "BLOCK_UNAVAILABLE"
    recovery = r.server._gauges()["recovery"]
    assert (recovery["parked_new"], recovery["waiting"]) == (4, 0)
    wait_until(r.idle)


def test_a_new_request_waits_until_its_deadline_at_most(make: Callable[..., Rig]) -> None:
    r = make()
    r.publish(task("t", ["e"]))
    (error,) = r.client().infer("t", X, deadline_ms=50)
    assert error.code == "DEADLINE_EXCEEDED"
    assert "a worker of block 'e'" in error.message
    wait_until(r.idle)


def test_a_superseded_attempt_is_withdrawn_where_it_still_waits(make: Callable[..., Rig]) -> None:
    r = make()
    living = r.worker(11, {1: "e"})
    dead = r.worker(12, {2: "f"})
    dead.behave["f"] = swallow
    r.publish(task("t", ["e", "f"]))
    client = r.client()
    client.ask("t", X)
    wait_until(lambda: dead.seen)
    ((_, item),) = dead.seen
    r.mailbox.put(PeerGone(12))
    wait_until(lambda: living.withdrawn)
    assert living.withdrawn == [(item.request_id, 1)]
    assert dead.withdrawn == []
    r.publish(task("t", ["e", "f"]), workers=[living, r.worker(13, {3: "f"})])
    np.testing.assert_array_equal(array_of(*client.answer()), X + 2)
    assert [i.attempt for _, i in living.seen] == [1, 2]
    assert living.withdrawn == [(item.request_id, 1)]
    wait_until(r.idle)


@pytest.mark.parametrize(("first", "second"), [("tensormq", "zeromq"), ("zeromq", "tensormq")])
def test_a_rerun_may_begin_at_a_worker_of_another_mode(
    make: Callable[..., Rig], first: str, second: str
) -> None:
    r = make()
    dead = r.worker(11, {1: "e"}, mode=first)
    dead.behave["e"] = swallow
    r.publish(task("t", ["e"]))
    client = r.client()
    client.ask("t", X)
    wait_until(lambda: dead.seen)
    r.mailbox.put(PeerGone(11))
    r.publish(task("t", ["e"]), workers=[r.worker(12, {2: "e"}, mode=second)])
    np.testing.assert_array_equal(array_of(*client.answer()), X + 1)
    wait_until(r.idle)


def test_what_never_left_for_a_dead_worker_is_run_elsewhere(make: Callable[..., Rig]) -> None:
    """Its socket is not there any more; the message waits in the cache when the death is known."""
    r = make()
    worker = r.worker(11, {1: "e"})
    r.publish(task("t", ["e"]))
    worker._stop.set()
    worker._thread.join(PATIENCE_S)
    worker.pull.close(0)
    client = r.client()
    client.ask("t", X)
    wait_until(lambda: len(r.exchange.table) == 1)
    r.mailbox.put(PeerGone(11))
    r.publish(task("t", ["e"]), workers=[r.worker(12, {2: "e"})])
    np.testing.assert_array_equal(array_of(*client.answer()), X + 1)
    wait_until(r.idle)


def test_suspects_are_told_to_run_alone(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """And are named: by ticket, as the crash has them, and by the client's id."""
    r = make()
    dead = r.worker(11, {1: "e"})
    dead.behave["e"] = swallow
    r.publish(task("t", ["e"]))
    client = r.client()
    asked = {client.ask("t", X).hex() for _ in range(2)}
    wait_until(lambda: len(dead.seen) == 2)
    at_work = [i.request_id + bytes([i.attempt, i.hop]) for _, i in dead.seen]
    r.mailbox.put(PeerGone(11, at_work))
    successor = r.worker(12, {2: "e"})
    r.publish(task("t", ["e"]), workers=[successor])
    for _ in range(2):
        np.testing.assert_array_equal(array_of(*client.answer()), X + 1)
    assert [i.alone for _, i in successor.seen] == [True, True]
    told = [m for m in caplog.messages if m.startswith("incarnation 11 died at ticket ")]
    assert {m.partition("request ")[2].split()[0] for m in told} == asked
    assert {m.split("ticket ")[1][:32] for m in told} == {r[:-2].hex() for r in at_work}
    recovery = r.server._gauges()["recovery"]
    assert (recovery["rerun"], recovery["poisoned"], recovery["suspects"]) == (2, 0, 0)
    wait_until(r.idle)


def test_a_request_that_comes_again_is_answered_from_memory(make: Callable[..., Rig]) -> None:
    r = make()
    worker = r.worker(11, {1: "e"})
    r.publish(task("t", ["e"]))
    first, second = r.client(), r.client()
    rid = first.ask("t", X, tries=1)
    reply, frames = first.answer()
    second.ask("t", X, rid=rid, tries=2)
    assert second.answer() == (reply, frames)
    assert len(worker.seen) == 1
    # Another input, or a request that does not say that it came before, is another request.
    second.ask("t", X + 1, rid=rid, tries=2)
    np.testing.assert_array_equal(array_of(*second.answer()), X + 2)
    second.ask("t", X, rid=rid)
    second.answer()
    assert len(worker.seen) == 3
    memory = r.server._gauges()["result_memory"]
    assert (memory["remembered"], memory["answered"], memory["results"]) == (2, 1, 1)


def held_back(r: Rig) -> tuple[FakeWorker, threading.Event]:
    """A worker that computes when it is let go."""
    worker = r.worker(11, {1: "e"})
    go = threading.Event()

    def wait(x: np.ndarray) -> np.ndarray:
        assert go.wait(PATIENCE_S)
        return x + 1

    worker.behave["e"] = wait
    r.publish(task("t", ["e"]))
    return worker, go


def test_a_request_that_comes_again_in_flight_is_answered_there(make: Callable[..., Rig]) -> None:
    r = make()
    worker, go = held_back(r)
    first, second = r.client(), r.client()
    rid = first.ask("t", X, tries=1)
    wait_until(lambda: worker.seen)
    second.ask("t", X, rid=rid, tries=2)
    wait_until(lambda: r.exchange.memory.events["attached"])
    go.set()
    reply, frames = second.answer()
    assert reply.request_id == rid
    np.testing.assert_array_equal(array_of(reply, frames), X + 1)
    assert len(worker.seen) == 1
    np.testing.assert_array_equal(first.infer("t", X)[0], X + 1)  # nothing else came there


def test_what_a_lost_client_may_ask_for_again_is_finished(make: Callable[..., Rig]) -> None:
    r = make()
    worker, go = held_back(r)
    first = r.client()
    rid = first.ask("t", X, tries=1)
    first.ask("t", X)  # the answer to this one is what shows that the client is gone
    wait_until(lambda: worker.seen)
    first.close()
    go.set()
    wait_until(lambda: r.exchange.memory.events["remembered"])
    second = r.client()
    second.ask("t", X, rid=rid, tries=2)
    np.testing.assert_array_equal(array_of(*second.answer()), X + 1)
    wait_until(r.idle)


def test_without_memory_what_comes_again_is_new(make: Callable[..., Rig]) -> None:
    r = make(result_memory_bytes=0)
    worker = r.worker(11, {1: "e"})
    r.publish(task("t", ["e"]))
    client = r.client()
    rid = client.ask("t", X, tries=1)
    client.answer()
    client.ask("t", X, rid=rid, tries=2)
    client.answer()
    assert len(worker.seen) == 2

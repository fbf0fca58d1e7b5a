"""The Dispatcher between real sockets: what the Controller asks of it and is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dispatcher_rig
import numpy as np
import pytest
from dispatcher_rig import Rig, X, swallow, task, wait_until

from blockflow.dispatcher.clients import TRACKED_BYTES, Sent
from blockflow.wire import client as wire
from blockflow.wire.control import Drain, Drained, Monitor, Routes, Stats, Undrain

make = dispatcher_rig.make
up = dispatcher_rig.up


def test_new_routes_take_over_and_the_old_ones_are_reported_drained(
    make: Callable[..., Rig],
) -> None:
    r = make()
    old = r.worker(11, {1: "e"})
    old.behave["e"] = swallow
    r.publish(task("t", ["e"]))
    wait_until(lambda: r.drained(1))
    client = r.client()
    held = client.ask("t", X)
    wait_until(lambda: old.seen)
    new = r.worker(12, {2: "e"})
    r.publish(task("t", ["e"]), workers=[new])
    (out,) = client.infer("t", X)
    np.testing.assert_array_equal(out, X + 1)
    assert not r.drained(2)
    client.send(wire.encode_to_dispatcher(wire.Cancel(held)))
    client.answer()
    wait_until(lambda: r.drained(2))
    assert len(old.seen) == 1
    assert r.told.count(Drained(1, 2)) == 1


def test_each_of_several_routes_is_said_to_have_drained_in_its_time(
    make: Callable[..., Rig],
) -> None:
    """What an update has replaced need not wait for the requests of the next ones."""
    r = make()
    client = r.client()
    held = []
    for version in (1, 2):
        worker = r.worker(10 + version, {version: "e"})
        worker.behave["e"] = swallow
        r.publish(task("t", ["e"]), workers=[worker])
        held.append(client.ask("t", X))
        wait_until(lambda w=worker: w.seen)
    r.publish(task("t", ["e"]), workers=[r.worker(13, {3: "e"})])
    client.send(wire.encode_to_dispatcher(wire.Cancel(held[0])))
    client.answer()
    wait_until(lambda: r.drained(2))
    assert not r.drained(3)
    client.send(wire.encode_to_dispatcher(wire.Cancel(held[1])))
    client.answer()
    wait_until(lambda: r.drained(3))
    assert [m.version for m in r.told if isinstance(m, Drained)] == [1, 2, 3]


def test_a_task_that_went_away_is_unknown(up: Rig) -> None:
    client = up.client()
    client.infer("ta", X)
    up.publish(task("tb", ["trunk", "b"]))
    assert client.infer("ta", X)[0].code == "UNKNOWN_TASK"
    assert list(up.exchange.stats.tasks) == ["tb"]


def test_routes_out_of_order_or_broken_are_not_applied(up: Rig) -> None:
    up.publish(task("ta", ["trunk", "a"]))
    old = replace(up.exchange.planner.table, version=1)
    up.mailbox.put(Routes(old.to_dict()))
    up.mailbox.put(Routes({"epoch": 1}))
    assert np.array_equal(up.client().infer("ta", X)[0], X + 2)
    assert up.exchange.planner.version == 2


def test_draining_admits_nothing_and_says_when_it_is_empty(make: Callable[..., Rig]) -> None:
    r = make()
    worker = r.worker(11, {1: "e"})
    worker.behave["e"] = swallow
    r.publish(task("t", ["e"]))
    wait_until(lambda: r.drained(1))
    client = r.client()
    held = client.ask("t", X)
    wait_until(lambda: worker.seen)
    r.mailbox.put(Drain())
    wait_until(lambda: r.server.state == "draining")
    (error,) = client.infer("t", X)
    assert error.code == "NOT_READY"
    assert r.told.count(Drained(1, 1)) == 1  # that of the routes
    client.send(wire.encode_to_dispatcher(wire.Cancel(held)))
    client.answer()
    wait_until(lambda: Drained(1, 0) in r.told)
    assert r.told.count(Drained(1, 1)) == 1
    r.mailbox.put(Undrain())
    wait_until(lambda: r.server.state == "running")
    worker.behave.clear()
    np.testing.assert_array_equal(client.infer("t", X)[0], X + 1)


def test_stop_answers_what_is_in_flight(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is more than a connection takes at once."""
    r = make()
    worker = r.worker(11, {1: "e"})
    worker.behave["e"] = swallow
    r.publish(task("t", ["e"]))
    client = r.client()
    for _ in range(3):
        client.ask("t", X)
    wait_until(lambda: len(worker.seen) == 3)
    port = r.server._clients
    take, refusals = port._try, iter(range(5))

    def try_later(*given: Any) -> Sent:
        return take(*given) if next(refusals, None) is None else Sent.LATER

    monkeypatch.setattr(port, "_try", try_later)
    r.stop()
    for _ in range(3):
        reply, _ = client.answer()
        assert reply.results[0].error.code == "BLOCK_UNAVAILABLE"
        assert "shutting down" in reply.results[0].error.message


def test_figures_are_pushed_while_the_monitor_is_on(up: Rig) -> None:
    client = up.client()
    for _ in range(3):
        client.infer("ta", X)
    client.infer("nope", X)
    up.mailbox.put(Monitor(50.0))

    def figures() -> Any:
        return next((m for m in up.told if isinstance(m, Stats)), None)

    stats = wait_until(figures)
    up.mailbox.put(Monitor(0.0))
    figure = stats.extra["tasks"]["ta"]
    assert figure["requests"] == figure["ok"] == 3
    assert figure["rows"] == 6
    assert figure["latency"]["count"] == 3
    assert figure["ingress"]["p50_ms"] > 0
    assert stats.extra["rejected"] == {"UNKNOWN_TASK": 1}
    assert stats.extra["inflight"] == 0
    assert stats.process["rss"] > 0
    assert stats.process["slots"] == 64
    assert stats.stages == []


def test_changed_tasks_are_described_once_for_all_clients(
    up: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A description of many tasks takes milliseconds to write, and no request is served then."""
    written: list[list[bytes]] = []
    write = wire.description_body

    def count(*args: Any) -> list[bytes]:
        written.append(write(*args))
        return written[-1]

    clients = [up.client(1) for _ in range(3)]
    for client in clients:
        client.infer("ta", X)
        client.send(wire.encode_to_dispatcher(wire.Describe(client.new_id())))
        assert "ta" in {t["name"] for t in client.answer()[0].tasks}
    monkeypatch.setattr(wire, "description_body", count)
    up.publish(task("t", ["e"], deadline_ms=500))
    for client in clients:
        told, _ = client.answer()
        assert told.request_id == wire.UNASKED and told.tasks[0]["deadline_ms"] == 500
    for client in clients:
        rid = client.new_id()
        client.send(wire.encode_to_dispatcher(wire.Describe(rid)))
        told, _ = client.answer()
        assert told.request_id == rid and told.tasks[0]["deadline_ms"] == 500
    assert len(written) == 1


def test_one_description_at_a_time_is_under_way_to_each_client(up: Rig) -> None:
    """A question is two dozen bytes, and what answers it may be a megabyte."""
    many = [task(f"task-{n}", ["e"]) for n in range(2000)]
    up.publish(*many)
    port, client = up.server._clients, up.client(1, hwm=1)
    asked = [client.new_id() for _ in range(40)]
    for rid in asked:
        client.send(wire.encode_to_dispatcher(wire.Describe(rid)))
    most = 0

    def answered() -> int:
        nonlocal most
        most = max(most, port.backlog_bytes())
        return client.socket.poll(10)

    told = []
    for _ in asked:
        wait_until(answered)
        header = client.socket.recv()
        assert len(header) > TRACKED_BYTES
        assert most <= len(header), "of all forty, one waits to be taken"
        told.append(wire.decode_to_client(header).request_id)
    assert told == asked, "each has its answer"

"""Clients and workers that misbehave: the Dispatcher goes on, and nothing stays behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq
from dispatcher_rig import Rig, rig, swallow, task, wait_until

from blockflow.core.model import Contract, TensorSpec
from blockflow.dispatcher.clients import ClientPort, Sent
from blockflow.dispatcher.debt import SLOW_CLIENT_BYTES
from blockflow.tensormq.janitor import run_root
from blockflow.tensormq.push import PushCache
from blockflow.tensormq.sockets import bind_router, new_context
from blockflow.wire import client as wire
from blockflow.wire.data import Data, encode_data
from blockflow.wire.tensor import TensorDesc

X = np.ones((1, 4), np.float32)
FUZZ_ROUNDS = 4000


@pytest.fixture
def up() -> Iterator[Rig]:
    with rig(run_root()) as r:
        r.worker(11, {1: "e"})
        r.publish(task("t", ["e"]))
        yield r


def mutations(valid: list[bytes], seed: int) -> Iterator[list[bytes]]:
    """Random frames, and valid messages with bytes changed, cut, repeated or frames moved."""
    rng = np.random.default_rng(seed)
    for _ in range(FUZZ_ROUNDS):
        if rng.random() < 0.3:
            yield [rng.bytes(int(rng.integers(0, 120))) for _ in range(int(rng.integers(1, 5)))]
            continue
        frames = [bytearray(f) for f in valid]
        for _ in range(int(rng.integers(1, 4))):
            frame = frames[int(rng.integers(len(frames)))]
            at = int(rng.integers(max(1, len(frame))))
            match int(rng.integers(4)):
                case 0:
                    frame[at : at + 1] = rng.bytes(1)
                case 1:
                    del frame[at:]
                case 2:
                    frame[at:at] = rng.bytes(int(rng.integers(1, 9)))
                case 3:
                    frames.append(frame)
        yield [bytes(f) for f in frames]


def test_rubbish_from_a_client_changes_nothing(up: Rig) -> None:
    fuzzer, witness = up.client(), up.client(1)
    request = wire.Request(b"f" * 16, ("t",), 50, TensorDesc("float32", (1, 4)))
    valid = [wire.encode_to_dispatcher(request), X.tobytes()]
    for n, frames in enumerate(mutations(valid, seed=1)):
        fuzzer.send(*frames)
        while fuzzer.socket.poll(0):
            wire.decode_to_client(fuzzer.socket.recv_multipart()[0])  # answers are well-formed
        if n % 500 == 0:
            np.testing.assert_array_equal(witness.infer("t", X)[0], X + 1)
    np.testing.assert_array_equal(witness.infer("t", X)[0], X + 1)
    wait_until(lambda: (not fuzzer.quiet(1) and False) or len(up.exchange.table) == 0)
    events = up.exchange.stats.events
    assert events["malformed_client"] > 1000
    assert events["defects"] == 0
    assert list(up.exchange.stats.tasks) == ["t"]
    wait_until(up.idle)


def test_rubbish_from_a_worker_changes_nothing(up: Rig) -> None:
    worker = up.workers[0]
    worker.behave["e"] = swallow
    client = up.client()
    client.ask("t", X, deadline_ms=60_000)
    wait_until(lambda: worker.seen)
    item = worker.seen[0][1]
    message = Data(999, time.monotonic_ns(), TensorDesc("float32", (1, 4)), (item,))
    push = PushCache(up.context, zmq.Poller())
    for frames in mutations([encode_data(message), X.tobytes()], seed=2):
        if b"\x0b" in frames[0][:8]:  # a mutation that became the real sender's name is no rubbish
            continue
        while not push.send(up.server.endpoint, frames):
            push.flush()
            time.sleep(0.001)
    wait_until(lambda: push.flush() or not push.pending())
    push.close()
    worker.behave.clear()
    other = up.client()
    np.testing.assert_array_equal(other.infer("t", X)[0], X + 1)
    events = up.exchange.stats.events
    assert events["malformed_data"] > 1000
    assert events["defects"] == 0
    assert client.quiet()  # nothing of it was taken for an answer
    client.send(wire.encode_to_dispatcher(wire.Cancel(item_id(up))))
    client.answer()
    wait_until(up.idle)


def item_id(up: Rig) -> bytes:
    """The client's id of the only request in flight."""
    (entry,) = up.exchange.table._by_ticket.values()
    return entry.request_id


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sender": 12}, "wrong_sender"),
        ({"attempt": 2}, "old_attempt"),
        ({"request_id": b"\0" * 16}, "unknown"),
    ],
)
def test_a_result_of_another_life_is_dropped(up: Rig, change: dict[str, Any], reason: str) -> None:
    worker = up.workers[0]
    worker.behave["e"] = swallow
    client = up.client()
    client.ask("t", X)
    wait_until(lambda: worker.seen)
    sender = change.pop("sender", 11)
    item = replace(worker.seen[0][1], **change)
    push = PushCache(up.context, zmq.Poller())
    header = encode_data(Data(sender, 1, TensorDesc("float32", (1, 4)), (item,)))
    push.send(up.server.endpoint, [header, X.tobytes()])
    wait_until(lambda: push.flush() or not push.pending())
    wait_until(lambda: up.exchange.table.dropped[reason] == 1)
    assert client.quiet()
    push.close()


def test_a_result_with_other_rows_is_the_blocks_fault(up: Rig) -> None:
    up.workers[0].behave["e"] = lambda v: np.concatenate([v, v])
    worker = up.workers[0]
    forward = worker._forward

    def with_wrong_rows(item: Any, *rest: Any) -> None:
        forward(replace(item, rows=2), *rest)

    worker._forward = with_wrong_rows  # type: ignore[method-assign]
    (error,) = up.client().infer("t", X)
    assert error.code == "OUTPUT_MISMATCH"
    wait_until(up.idle)


def test_a_late_result_frees_its_slot(up: Rig) -> None:
    worker = up.workers[0]

    def slow(v: np.ndarray) -> np.ndarray:
        wait_until(lambda: len(up.exchange.table) == 0)  # until the deadline has passed
        return v

    worker.behave["e"] = slow
    client = up.client()
    (error,) = client.infer("t", X, deadline_ms=60)
    assert error.code == "DEADLINE_EXCEEDED"
    wait_until(lambda: up.exchange.table.dropped["unknown"] == 1)
    wait_until(lambda: worker.producer.sweep() or worker.producer.outstanding() == 0)
    assert client.quiet()
    wait_until(up.idle)


def test_unknown_tasks_leave_no_trace(up: Rig) -> None:
    client = up.client()
    for n in range(2000):
        client.ask(f"no-such-task-{n}", X)
        client.answer()
    assert up.exchange.stats.rejected["UNKNOWN_TASK"] == 2000
    assert list(up.exchange.stats.tasks) == ["t"]
    assert len(up.exchange.table) == 0


def test_a_client_that_does_not_read_is_given_up() -> None:
    wide = TensorSpec("float32", ("rows", 32_768))
    with rig(run_root(), arena_bytes=64 << 20) as r:
        r.worker(11, {1: "e"})
        r.publish(task("t", ["e"], contract=Contract(wide, wide)))
        x = np.ones((1, 32_768), np.float32)
        lazy, witness = r.client(hwm=1), r.client()
        lazy.socket.set(zmq.SNDTIMEO, 1000)
        events = r.exchange.stats.events
        for n in range(600):
            if events["slow_client"]:
                break
            # Once it is cut off, ZeroMQ waits for it to read first; so it does for a dispatcher
            # that has other things to do just then, and that is no reason to stop.
            with suppress(zmq.Again):
                lazy.ask("t", x)
            if n % 50 == 0:
                np.testing.assert_array_equal(witness.infer("t", x)[0], x + 1)
        wait_until(lambda: events["slow_client"])
        np.testing.assert_array_equal(witness.infer("t", x)[0], x + 1)
        assert r.server._clients.backlog_bytes() <= 8 << 20


def test_a_backlog_is_sent_in_order_and_bounded() -> None:
    """The port itself, with a peer that reads late."""
    context = new_context()
    socket, (endpoint,) = bind_router(context, ["tcp://127.0.0.1:0"], hwm=1)
    socket.set(zmq.SNDBUF, 4096)
    peer = context.socket(zmq.DEALER)  # without heartbeats: it may stop reading
    peer.set(zmq.RCVHWM, 1)
    peer.connect(endpoint)
    peer.send(b"hello")
    assert socket.poll(5000)
    port = ClientPort(socket, [endpoint])
    received = port.receive(0)
    assert received is not None
    client, _ = received
    body = bytes(300_000)
    sent, states, now = 0, [], 0
    while not states or states[-1] is not Sent.LATER:
        states.append(port.send(client, [str(sent).encode(), body], now))
        sent += 1
        assert sent < 200
    states = [port.send(client, [str(sent + n).encode(), body], now) for n in range(3)]
    assert states == [Sent.LATER] * 3
    assert port.backlog_bytes() > 900_000
    for n in range(sent + 3):
        wait_until(lambda: port.flush(now) or peer.poll(1))
        number, data = peer.recv_multipart()
        assert (number, len(data)) == (str(n).encode(), len(body))
    wait_until(lambda: port.flush(now) or not port.waiting())
    # It stops reading again, and what its kernel takes in yet is no reading.

    def behind() -> list[tuple[bytes, Sent]]:
        outcome = Sent.YES
        while outcome is not Sent.SLOW and port.backlog_bytes() <= SLOW_CLIENT_BYTES:
            outcome = port.send(client, [b"x", body], time.monotonic_ns())
        return [(client, outcome)] if outcome is Sent.SLOW else port.flush(time.monotonic_ns())

    wait_until(lambda: behind() == [(client, Sent.SLOW)])
    assert (port.waiting(), port.backlog_bytes(), port.evicted) == (0, 0, 1)
    # ZeroMQ knows it no more once somebody has read to the end of what it had sent.
    port.send(client, [b"x"], now)
    wait_until(lambda: port.receive(now) or port.flush(now) == [(client, Sent.GONE)])
    assert port.send(b"nobody", [b"x"], now) is Sent.GONE
    peer.close(0)
    port.close()
    context.term()

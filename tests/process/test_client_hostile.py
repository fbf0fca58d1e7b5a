"""Servers that send without end, or what nobody asked for: the client's promises hold."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from dispatcher_rig import wait_until
from fake_dispatcher import FakeDispatcher
from grants_rig import grant, side_pair

from blockflow.client import Client, conduct
from blockflow.client.conduct import MOST_FRAMES, Conduct
from blockflow.client.dealer import Dealer
from blockflow.client.side import SideConnection
from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.grants import MIN_TENSOR_BYTES
from blockflow.wire.client import Reply, TaskResult, encode_to_client
from blockflow.wire.grants import Ask, Direction
from blockflow.wire.tensor import TensorDesc

X = np.ones((1, 4), np.float32)
DEADLINE_S = 0.4
SLACK_S = 1.0
"""For a machine with other work to do; the floods last far longer."""
FLOOD_S = 8.0
LATE = Reply(b"z" * 16, 1, (TaskResult("t", TensorDesc("float32", (1, 4)), None),))
HEAVY = Reply(b"z" * 16, 1, 16 * LATE.results)
FLOODS = {
    "garbage": [b"\xc1" * 10],
    "heavy": [encode_to_client(HEAVY), *16 * [bytes(16)]],  # sent much faster than read
    "unasked": [encode_to_client(LATE), bytes(16)],
}


@contextmanager
def flood(frames: list[bytes]) -> Iterator[str]:
    """A server that answers the first message by these, for as long as the test looks."""
    over = threading.Event()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind("tcp://127.0.0.1:*")

    def run() -> None:
        while not over.is_set() and not router.poll(20):
            pass
        end = time.monotonic() + FLOOD_S
        who = b"" if over.is_set() else router.recv_multipart()[0]
        while not over.is_set() and time.monotonic() < end:
            try:
                router.send_multipart([who, *frames], zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.001)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield router.getsockopt_string(zmq.LAST_ENDPOINT)
    finally:
        over.set()
        thread.join()
        context.destroy(0)


@pytest.mark.parametrize("kind", sorted(FLOODS))
def test_a_flood_is_hung_up_on(kind: str) -> None:
    with flood(FLOODS[kind]) as endpoint, Client(endpoint) as client:
        begun = time.monotonic()
        with pytest.raises(BlockFlowError) as e:
            client.infer("t", X, deadline_s=DEADLINE_S)
        assert time.monotonic() - begun < DEADLINE_S + SLACK_S
        assert e.value.code in ("CONNECTION_LOST", "DEADLINE_EXCEEDED")
        wait_until(lambda: client.counters().hang_ups == 1)
        assert client.counters().unasked > conduct.MOST_UNASKED
        begun = time.monotonic()
        client.close()
        assert time.monotonic() - begun < SLACK_S


def test_under_a_flood_that_is_borne_deadlines_and_close_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Conduct, "unasked", lambda *_: None)
    with flood(FLOODS["heavy"]) as endpoint, Client(endpoint) as client:
        begun = time.monotonic()
        with pytest.raises(BlockFlowError) as e:
            client.infer("t", X, deadline_s=DEADLINE_S)
        assert e.value.code == "DEADLINE_EXCEEDED"
        assert time.monotonic() - begun < DEADLINE_S + SLACK_S
        begun = time.monotonic()
        client.close()
        assert time.monotonic() - begun < SLACK_S


def test_it_comes_back_to_who_behaves_again() -> None:
    with FakeDispatcher() as fake, Client(fake.endpoint) as client:
        client.infer("echo", X)
        fake.send_raw([bytes(conduct.MOST_UNASKED * conduct.UNIT_BYTES)])
        wait_until(lambda: client.counters().hang_ups == 1)
        assert np.array_equal(client.infer("echo", X, deadline_s=10).value, X)


def test_replies_that_came_before_the_end_are_not_lost_with_it() -> None:
    fake = FakeDispatcher()
    with Client(fake.endpoint) as client:
        pending = [client.submit("held", X, deadline_s=30) for _ in range(2000)]
        fake.wait_for(lambda: len(fake.requests) == 2000, 30)
        slow = threading.Event()
        pending[0].add_done_callback(lambda _: slow.wait(1))  # all is there before it is read
        fake.release()
        time.sleep(0.3)  # what was sent has left
        fake.stop()
        slow.set()
        assert all(np.array_equal(p.result(30).value, X) for p in pending)


def test_a_message_of_many_frames_is_read_to_its_end_and_not_kept() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        router = context.socket(zmq.ROUTER)
        router.bind("tcp://127.0.0.1:*")
        dealer = Dealer(context, router.getsockopt_string(zmq.LAST_ENDPOINT))
        dealer.socket.send(b"hello")
        who = router.recv_multipart()[0]
        router.send_multipart([who, b"first", *[b""] * 5000])
        router.send_multipart([who, b"second", b"x"])
        got: list[Any] = []
        rounds = 0
        while len(got) < 2:
            assert dealer.socket.poll(5000)
            frames = dealer.receive()
            rounds += 1
            if frames:
                got.append([f.bytes for f in frames])
        assert rounds > 5
        assert got[0][0] == b"first" and len(got[0]) == MOST_FRAMES + 1
        assert got[1] == [b"second", b"x"]
        dealer.close(0)
    finally:
        context.destroy(0)


@pytest.mark.parametrize("asked", [0, 1])
def test_grants_that_nobody_asked_for_are_not_mapped(tmp_path: Path, asked: int) -> None:
    with side_pair(tmp_path) as (side, theirs):
        if asked:
            side.send(Ask(Direction.RESULT, MIN_TENSOR_BYTES))
            grant(theirs, 1)
            side.receive()
            assert not side.trouble and len(side._segments) == 1
        for number in range(2, 50):
            grant(theirs, number)
        before = len(os.listdir("/proc/self/fd"))
        side.receive()
        assert "not asked for" in side.trouble
        assert not side._segments
        assert len(os.listdir("/proc/self/fd")) < before


def test_a_packet_that_cannot_be_handled_ends_the_side_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: Any) -> Any:
        raise ZeroDivisionError

    with side_pair(tmp_path) as (side, theirs):
        monkeypatch.setattr("blockflow.client.side.decode_from_dispatcher", defect)
        theirs.send(b"x")
        side.receive()
        assert side.trouble and side.fileno() == -1


@pytest.mark.parametrize("path", ["a\ud800", "/" + 5000 * "x"])
def test_a_way_that_is_no_path_is_trouble(path: str) -> None:
    side = SideConnection()
    side.connect(path)
    assert side.trouble
    side.close()

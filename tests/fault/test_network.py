"""A network between clients and the Dispatcher that loses, holds, slices and resets.

Both clients, on tcp, through a proxy. Whatever it does, a request ends once, what is left behind is
cleared away, and the next request is served. That the fault took place is read off the proxy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any

import numpy as np
import pytest
from byte_proxy import ByteProxy, Direction
from client_faces import AsyncFace, SyncFace
from dispatcher_rig import FakeWorker, Rig, rig, task, wait_until

from blockflow.client import connection as client_connection
from blockflow.client import io as client_io
from blockflow.client.core import GRACE_NS
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import Contract, TensorSpec
from blockflow.tensormq import sockets
from blockflow.tensormq.janitor import run_root

X = np.ones((1, 4), np.float32)
LONG_S = 60.0
HEARTBEAT_MS, SILENCE_MS = 100, 3000
LARGE = np.ones((1, 1 << 16), np.float32)
SLOW_S = 4
"""So long a slow link takes for it."""

WAYS: tuple[Direction, ...] = ("up", "down")

Face = SyncFace | AsyncFace


@pytest.fixture(params=[SyncFace, AsyncFace], ids=["sync", "async"])
def face(request: pytest.FixtureRequest) -> type[Face]:
    kind: type[Face] = request.param
    return kind


@pytest.fixture
def up() -> Iterator[Rig]:
    with rig(run_root()) as r:
        r.worker(11, {1: "e"})
        r.publish(task("t", ["e"]))
        yield r


@pytest.fixture
def proxy(up: Rig) -> Iterator[ByteProxy]:
    with ByteProxy(up.server.client_endpoints[1]) as made:
        yield made


@pytest.fixture
def client(face: type[Face], proxy: ByteProxy) -> Iterator[Face]:
    """Connected, and has been answered once."""
    made = face(proxy.endpoint, connect_timeout_s=LONG_S, shared_memory="off")
    try:
        serves(made)
        yield made
    finally:
        made.close()


class Clock:
    """The clients' clock, which a test sets forward instead of waiting for a deadline."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_ns

    def pass_deadline(self, client: Face) -> None:
        self.ahead_ns += int(LONG_S * 1e9) + GRACE_NS
        client._client._connection._io._wakeup.ring()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(client_io, "time", made)
    monkeypatch.setattr(client_connection, "time", made)
    return made


def serves(client: Face) -> None:
    assert np.array_equal(client.infer("t", X, deadline_s=LONG_S).value, X + 1)


def code_of(future: Any) -> str:
    """How the only outcome of a request failed."""
    with pytest.raises(BlockFlowError) as e:
        future.result(LONG_S)
    return e.value.code


def messages(proxy: ByteProxy, way: Direction) -> Callable[[], bool]:
    """True when another message has come to the proxy that way."""
    before = proxy.total(way, "messages")
    return lambda: proxy.total(way, "messages") > before


def runs(up: Rig) -> int:
    """How often a request has reached the worker."""
    worker: FakeWorker = up.workers[0]
    return len(worker.seen)


def ended_well(client: Face, up: Rig) -> None:
    """Served again; nothing is in flight, and every request had one outcome."""
    serves(client)
    wait_until(up.idle)
    counters = client.counters()
    assert counters.submitted == counters.answered + counters.failed
    assert up.exchange.stats.events["defects"] == 0


@pytest.mark.parametrize("size", [1, 3])
def test_bytes_that_come_one_by_one(up: Rig, proxy: ByteProxy, face: type[Face], size: int) -> None:
    proxy.rule(slice_bytes=size)
    client = face(proxy.endpoint, connect_timeout_s=LONG_S)
    try:
        wide = np.arange(128, dtype=np.float32).reshape(32, 4)
        for n in range(3):
            found = client.infer("t", wide + n, deadline_s=LONG_S)
            assert np.array_equal(found.value, wide + n + 1)
        wait_until(lambda: not proxy.findings())
        for way in WAYS:
            assert proxy.total(way, "writes") > 3 * wide.nbytes / size
        assert client.counters().disconnects == 0
        ended_well(client, up)
    finally:
        client.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("retries", [0, 2])
def test_a_message_lost_in_a_reset(
    up: Rig, proxy: ByteProxy, client: Face, retries: int, way: Direction
) -> None:
    """With retries a lost reply comes from the Dispatcher's memory: nothing runs twice."""
    before = runs(up)
    proxy.rule(way, hold=True)
    came = messages(proxy, way)
    future = client.submit("t", X, deadline_s=LONG_S, retries=retries)
    wait_until(came)
    assert proxy.reset() == 1
    proxy.rule()
    if retries:
        assert np.array_equal(future.result(LONG_S).value, X + 1)
    else:
        assert code_of(future) == "CONNECTION_LOST"
    assert runs(up) == before + (way == "down" or bool(retries))
    assert proxy.total(way, "held") > 0
    ended_well(client, up)


@pytest.mark.parametrize("way", WAYS)
def test_a_message_lost_on_a_connection_that_stays(
    up: Rig, proxy: ByteProxy, clock: Clock, client: Face, way: Direction
) -> None:
    """Nobody notices: the client's own deadline ends the request."""
    before = runs(up)
    proxy.rule(way, lose=1)
    future = client.submit("t", X, deadline_s=LONG_S)
    wait_until(lambda: proxy.total(way, "lost_messages") == 1)
    assert not future.done()
    clock.pass_deadline(client)
    assert code_of(future) == "DEADLINE_EXCEEDED"
    assert runs(up) == before + (way == "down")
    assert proxy.connections == 1
    assert client.counters().late_replies == 0
    ended_well(client, up)


def test_a_stall_within_the_deadline_costs_nothing(up: Rig, proxy: ByteProxy, client: Face) -> None:
    before = runs(up)
    proxy.rule(hold=True)
    came = messages(proxy, "up")
    future = client.submit("t", X, deadline_s=LONG_S)
    wait_until(came)
    assert runs(up) == before
    came = messages(proxy, "down")
    proxy.rule("up")
    wait_until(came)
    assert not future.done()
    proxy.rule()
    assert np.array_equal(future.result(LONG_S).value, X + 1)
    assert proxy.connections == 1
    ended_well(client, up)


@pytest.mark.parametrize("way", WAYS)
def test_a_stall_beyond_the_deadline(
    up: Rig, proxy: ByteProxy, clock: Clock, client: Face, way: Direction
) -> None:
    """What arrives when it is over is answered to nobody; the connection goes on."""
    proxy.rule(way, hold=True)
    came = messages(proxy, way)
    future = client.submit("t", X, deadline_s=LONG_S)
    wait_until(came)
    clock.pass_deadline(client)
    assert code_of(future) == "DEADLINE_EXCEEDED"
    proxy.rule()
    wait_until(lambda: client.counters().late_replies == 1)
    assert proxy.connections == 1
    ended_well(client, up)


def test_a_frame_that_takes_longer_than_silence_may_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is under way nothing else passes, nor does libzmq hear anything before it is whole:
    neither end may take that for the other's death, be it a request or a reply."""
    monkeypatch.setattr(sockets, "_HEARTBEAT_MS", HEARTBEAT_MS)
    monkeypatch.setattr(sockets, "_HEARTBEAT_TIMEOUT_MS", SLOW_S * 1000 // 8)
    spec = TensorSpec("float32", ("rows", LARGE.shape[1]))
    with ExitStack() as stack:
        up = stack.enter_context(rig(run_root()))
        up.worker(11, {1: "e"})
        up.publish(task("t", ["e"], contract=Contract(spec, spec)))
        asked: list[tuple[Face, ByteProxy, Any]] = []
        for way in WAYS:
            proxy = stack.enter_context(ByteProxy(up.server.client_endpoints[1]))
            client = SyncFace(proxy.endpoint, connect_timeout_s=LONG_S, shared_memory="off")
            stack.callback(client.close)
            assert client.infer("t", LARGE, deadline_s=LONG_S).value[0, 0] == 2
            proxy.rule(way, bytes_s=LARGE.nbytes // SLOW_S)
            asked.append((client, proxy, client.submit("t", LARGE, deadline_s=LONG_S)))
        for client, proxy, future in asked:
            assert np.array_equal(future.result(LONG_S).value, LARGE + 1)
            assert proxy.connections == 1
            assert client.counters().disconnects == 0
        wait_until(up.idle)


def test_a_partition_in_one_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other direction is well, and no end of the connection is seen: who hears nothing gives
    up, client or Dispatcher, and what was in flight is withdrawn."""
    monkeypatch.setattr(sockets, "_HEARTBEAT_MS", HEARTBEAT_MS)
    monkeypatch.setattr(sockets, "_HEARTBEAT_TIMEOUT_MS", SILENCE_MS)
    monkeypatch.setattr(sockets, "SLOWEST_NS_PER_BYTE", 0)  # no frame here takes its time
    with ExitStack() as stack:
        up = stack.enter_context(rig(run_root()))
        worker = up.worker(11, {1: "e"})
        worker.behave["e"] = lambda v: None
        up.publish(task("t", ["e"]))
        cut: list[tuple[Face, ByteProxy, Direction, Any]] = []
        for face, way in product((SyncFace, AsyncFace), WAYS):
            proxy = stack.enter_context(ByteProxy(up.server.client_endpoints[1]))
            client = face(proxy.endpoint, connect_timeout_s=LONG_S, shared_memory="off")
            stack.callback(client.close)
            cut.append((client, proxy, way, client.submit("t", X, deadline_s=LONG_S)))
        wait_until(lambda: len(worker.seen) == len(cut))
        for _, proxy, way, _ in cut:
            proxy.rule(way, swallow=True)
        for client, proxy, way, future in cut:
            assert code_of(future) == "CONNECTION_LOST"
            assert client.counters().disconnects >= 1
            assert proxy.total(way, "lost") > 0
        worker.behave.clear()
        for client, proxy, _, _ in cut:
            proxy.begin_anew()  # what was begun meanwhile is beyond repair
            ended_well(client, up)
        assert up.exchange.stats.events["client_gone"] >= len(cut)

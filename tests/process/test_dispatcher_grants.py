"""A real Dispatcher and clients of its host: granted memory on the wire, byte by byte."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grants_rig
import numpy as np
import pytest
import zmq
from dispatcher_rig import RawClient, Rig, rig, task, wait_until
from grants_rig import DOWN, UP, Side, attached, granted, invited

from blockflow.client import Client
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import Contract, TensorSpec
from blockflow.dispatcher.clients import is_local
from blockflow.tensormq.janitor import run_root
from blockflow.wire import client as wire
from blockflow.wire.grants import Ask, Attach, Granted, Refused, encode_side
from blockflow.wire.tensor import TensorDesc

SPEC = TensorSpec("float32", ("rows", 256))
X = np.arange(64 * 256, dtype=np.float32).reshape(64, 256)

sides = grants_rig.sides


@pytest.fixture
def up() -> Iterator[Rig]:
    with rig(run_root()) as r:
        worker = r.worker(11, {1: "e", 2: "held"})
        worker.behave["e"] = lambda a: a
        kw = {"contract": Contract(SPEC, SPEC), "max_rows": 4096}
        paths = {"t": ["e"], "same": ["e"], "slow": ["held"]}
        r.publish(*(replace(task(name, path), **kw) for name, path in paths.items()))
        yield r


def send(
    client: RawClient,
    where: tuple[int, int],
    *frames: bytes,
    name: str = "t",
    dims: tuple[int, ...] = X.shape,
) -> bytes:
    rid = client.new_id()
    request = wire.Request(rid, (name,), 10_000, TensorDesc("float32", dims), where)
    client.send(wire.encode_to_dispatcher(request), *frames)
    return rid


def code(client: RawClient) -> str:
    (result,) = client.answer()[0].results
    assert result.error is not None
    return str(result.error.code)


@pytest.mark.parametrize("which", [0, 1], ids=["ipc", "tcp"])
def test_inputs_and_results_go_through_slots(up: Rig, sides: list[Side], which: int) -> None:
    client = up.client(which)
    side = attached(sides, client)
    mine, results = granted(side, UP), granted(side, DOWN)
    for i in range(3 * results.slots):
        slot = i % mine.slots
        side.segments[mine.grant].slot(slot, X.nbytes)[:] = memoryview(X + i).cast("B")
        send(client, (mine.grant, slot))
        reply, frames = client.answer()
        (result,) = reply.results
        assert frames == []
        assert reply.received_ns > 0
        place = result.place
        assert place.grant == results.grant
        memory = side.segments[results.grant]
        got = np.frombuffer(memory.slot(place.slot, X.nbytes), np.float32).reshape(X.shape)
        assert np.array_equal(got, X + i)
        if i >= 5:  # the first five stay out
            memory.marks[place.slot] = place.generation
            assert place.slot >= 5
    legs = up.server._gauges()["legs"]
    n = 3 * results.slots
    want = {"slot": n, "slot_bytes": n * X.nbytes, "message": 0, "message_bytes": 0, "copies": n}
    assert legs == {"in": want, "out": want}
    assert up.server._gauges()["grants"]["clients"] == 1
    wait_until(up.idle)


def test_no_free_slot_no_wait(up: Rig, sides: list[Side]) -> None:
    client = up.client()
    side = attached(sides, client)
    results = granted(side, DOWN)
    for _ in range(results.slots):
        client.ask("t", X)
        assert client.answer()[0].results[0].place is not None
    (got,) = client.infer("t", X)
    assert np.array_equal(got, X)
    # Too large for the slots that there are: a message as well.
    side.segments[results.grant].marks[0] = 1
    large = np.ones((200, 256), np.float32)
    (got,) = client.infer("t", large)
    assert np.array_equal(got, large)


def test_what_is_computed_is_what_was_checked(up: Rig, sides: list[Side]) -> None:
    """The client writes into its slot after the request has left, and all the while."""
    entered: list[Any] = []
    go = [False]

    def held(a: np.ndarray) -> np.ndarray:
        entered.append(1)
        wait_until(lambda: go[0])
        return a.copy()

    up.workers[0].behave["held"] = held
    client = up.client()
    side = attached(sides, client)
    mine = granted(side, UP)
    memory = side.segments[mine.grant].slot(0, X.nbytes)
    memory[:] = memoryview(X).cast("B")
    send(client, (mine.grant, 0), name="slow")
    wait_until(lambda: entered)
    memory[:] = b"\xff" * X.nbytes  # NaN everywhere
    go[0] = True
    _, frames = client.answer()
    assert np.array_equal(np.frombuffer(frames[0], np.float32).reshape(X.shape), X)
    send(client, (mine.grant, 0))
    assert code(client) == "NON_FINITE_INPUT"
    wait_until(up.idle)


def test_a_hole_in_the_segment_reads_as_zeros(up: Rig, sides: list[Side]) -> None:
    client = up.client()
    side = attached(sides, client)
    mine, results = granted(side, UP), granted(side, DOWN)
    side.segments[mine.grant].slot(0, X.nbytes)[:] = memoryview(X).cast("B")
    for number in (mine.grant, results.grant):
        mapping = side.segments[number]._data.obj
        assert isinstance(mapping, mmap.mmap)
        mapping.madvise(mmap.MADV_REMOVE)
    send(client, (mine.grant, 0))
    place = client.answer()[0].results[0].place
    assert not any(side.segments[results.grant].slot(place.slot, X.nbytes))


def test_slots_that_are_not_the_clients_are_refused(up: Rig, sides: list[Side]) -> None:
    alice, bob, carol = up.client(), up.client(), up.client()
    side = attached(sides, alice)
    granted(attached(sides, bob), DOWN)
    mine, results = granted(side, UP), granted(side, DOWN)
    side.segments[mine.grant].slot(0, X.nbytes)[:] = memoryview(X).cast("B")
    send(bob, (mine.grant, 0))
    assert code(bob) == "INVALID_REQUEST"
    send(carol, (mine.grant, 0))
    assert code(carol) == "CONNECTION_LOST"
    for where in ((mine.grant, mine.slots), (results.grant, 0), (4242, 0)):
        send(alice, where)
        assert code(alice) in ("INVALID_REQUEST", "MALFORMED_MESSAGE")
    send(alice, (mine.grant, 0), dims=(4096, 256))
    assert code(alice) == "INVALID_REQUEST"
    send(alice, (mine.grant, 0), X.tobytes())
    assert code(alice) == "MALFORMED_MESSAGE"
    for odd in ((0, 0), (1, -1), (1, 16), (2**32, 0), (1, 2, 3), ("1", 0)):
        rid = alice.new_id()
        raw = [limits.PROTOCOL_VERSION, 10, rid, ["t"], 1000, [8, [1, 256], None, None], list(odd)]
        alice.send(wire.encode(raw))
        assert code(alice) == "MALFORMED_MESSAGE"
    send(alice, (mine.grant, 0))
    assert alice.answer()[0].results[0].place is not None


def test_an_invitation_is_good_once_and_for_its_client(up: Rig, sides: list[Side]) -> None:
    client = up.client()
    way = invited(client)
    first = Side(way.path)
    sides.append(first)
    first.say(Attach(way.token))
    granted(first, UP)
    again = Side(way.path)
    sides.append(again)
    again.say(Attach(way.token))
    assert again.closed()
    # A new one takes the place of the connection before.
    second = attached(sides, client)
    granted(second, UP)
    assert first.closed()
    assert up.server._gauges()["grants"]["segments"] == 1


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\xc1",
        b"x" * 5000,
        encode_side(Attach(b"t" * 16)),
        encode_side(Ask(UP, 1)),
        encode_side(Refused(UP, 1, "")),
    ],
)
def test_nonsense_on_the_side_socket_ends_it_alone(
    up: Rig, sides: list[Side], packet: bytes
) -> None:
    client = up.client()
    good = attached(sides, client)
    bad = Side(invited(up.client()).path)
    sides.append(bad)
    bad.socket.send(packet)
    assert bad.closed()
    granted(good, UP)


def test_descriptors_that_a_client_sends_are_dropped(up: Rig, sides: list[Side]) -> None:
    client = up.client()
    way = invited(client)
    before = len(os.listdir("/proc/self/fd"))
    side = Side(way.path)
    sides.append(side)
    for packet in (encode_side(Attach(way.token)), encode_side(Ask(UP, X.nbytes))):
        socket.send_fds(side.socket, [packet], [0, 1, 2])
    assert isinstance(side.answer(), Granted)
    side.close()
    side.segments.clear()
    wait_until(lambda: up.server._gauges()["grants"]["clients"] == 0)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_flood_of_connections_disturbs_nobody(up: Rig, sides: list[Side]) -> None:
    client = up.client()
    side = attached(sides, client)
    mine = granted(side, UP)
    path = invited(client).path
    flood: list[socket.socket] = []
    try:
        for _ in range(300):
            s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            flood.append(s)
            try:
                s.connect(path)
            except BlockingIOError:
                continue
        side.segments[mine.grant].slot(0, X.nbytes)[:] = memoryview(X).cast("B")
        send(client, (mine.grant, 0))
        assert client.answer()[0].results[0].error is None
        assert len(up.server._grants._sides) <= 1 + 16
    finally:
        for s in flood:
            s.close()
    wait_until(lambda: len(up.server._grants._sides) == 1)


def test_clients_of_other_hosts_get_no_way() -> None:
    class Frame:
        def __init__(self, peer: str | None) -> None:
            self.peer = peer

        def get(self, name: str) -> str:
            if self.peer is None:
                raise zmq.ZMQError(22)
            return self.peer

    for peer in ("127.0.0.1", "127.3.2.1", "::1", "localhost:1000:1000:77", "::ffff:127.0.0.1"):
        assert is_local(Frame(peer))  # type: ignore[arg-type]
    for peer in ("10.0.0.7", "192.168.127.1", "fe80::1", "::2", "", None):
        assert not is_local(Frame(peer))  # type: ignore[arg-type]


def test_the_sdk_and_a_real_dispatcher(up: Rig) -> None:
    for endpoint in up.server.client_endpoints:
        with Client(endpoint) as client:
            client.infer("t", X)
            wait_until(
                lambda c=client: c.shared_memory.result_slots and c.shared_memory.upload_slots
            )
            result = client.infer("t", X)
            assert np.array_equal(result.value, X)
            assert (result.upload.way, result.download.way) == ("slot", "slot")
            assert result.upload.ms is not None
            assert result.download.ms is not None
            parts = result.upload.ms + result.total_ms + result.download.ms
            assert parts == pytest.approx(result.rtt_ms)
        wait_until(lambda: up.server._gauges()["grants"]["bytes"] == 0)


def test_tasks_that_end_at_one_block_share_no_slot(up: Rig) -> None:
    """The slot would be free, and taken anew, when the first of them lets go of it."""
    with Client(up.server.client_endpoints[0]) as client:
        client.infer("t", X)
        wait_until(lambda: client.shared_memory.result_slots)
        both = client.infer(["t", "same"], X, results="view")
        kept = both["same"].value
        del both
        later = client.infer("t", X + 1, results="view")
        assert later.download.way == "view"
        assert np.array_equal(later.value, X + 1)
        assert np.array_equal(kept, X)
        assert not np.shares_memory(kept, client.infer(["t", "same"], X)["t"].value)


def test_a_result_that_its_client_has_no_memory_for_fails_alone(
    up: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, scarce = np.empty, threading.Event()

    def refuse(*args: Any, **kw: Any) -> Any:
        if scarce.is_set() and threading.current_thread().name == "blockflow-client":
            raise MemoryError
        return empty(*args, **kw)

    with Client(up.server.client_endpoints[0]) as client:
        client.infer("t", X)
        wait_until(lambda: client.shared_memory.result_slots)
        monkeypatch.setattr(np, "empty", refuse)
        scarce.set()
        for _ in range(client.shared_memory.result_slots + 1):  # each slot is given back
            with pytest.raises(BlockFlowError, match="no memory for a result") as caught:
                client.infer("t", X)
            assert caught.value.code == "NO_SPACE"
        scarce.clear()
        result = client.infer("t", X)
        assert np.array_equal(result.value, X)
        assert result.download.way == "slot"


def test_a_defect_of_the_client_ends_its_requests(up: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planted")

    client = Client(up.server.client_endpoints[0])
    with client, monkeypatch.context() as patch:
        patch.setattr("blockflow.client.connection.make_result", broken)
        with pytest.raises(BlockFlowError, match=r"cannot be read: .*planted") as caught:
            client.infer("t", X)
        assert caught.value.code == "INTERNAL"
        patch.undo()
        assert np.array_equal(client.infer("t", X).value, X)
        # One that the thread does not outlive ends everybody's wait, the present caller's too.
        waiting = client.submit("slow", X, deadline_s=30)
        patch.setattr("blockflow.client.core.Pending", broken)
        for ended in (waiting, client.submit("t", X)):
            with pytest.raises(BlockFlowError, match=r"thread failed: .*planted") as caught:
                ended.result(10)
            assert caught.value.code == "INTERNAL"

"""Messages without an end, and with far too many frames, from a peer that speaks ZMTP by hand."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
import zmq
from dispatcher_rig import PATIENCE_S, Rig, X, rig, task, wait_until

from blockflow.bench.fuzz import zmtp
from blockflow.dispatcher import unread
from blockflow.dispatcher.descriptors import OwnMemory, bytes_received
from blockflow.tensormq.curve import Gatekeeper, as_client
from blockflow.tensormq.janitor import run_root
from blockflow.tensormq.keys import ClientKeys, KeyPair
from blockflow.tensormq.sockets import new_context
from blockflow.wire import client as wire

MIB = 1024 * 1024
BOUND = 16 * MIB
MUCH = 2048 * MIB
FLOODS = 80


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """With small bounds: the large ones need gigabytes to be shown."""
    monkeypatch.setattr(unread, "CONNECTION_BYTES", BOUND)
    monkeypatch.setattr(unread, "UNEXPLAINED_BYTES", BOUND)
    with rig(run_root()) as r:
        r.worker(11, {1: "e"})
        r.publish(task("t", ["e"]))
        yield r


def send_until_cut_off(up: Rig, frame: bytes) -> None:
    """A message of such frames without an end, while others are served."""
    host, _, port = up.server.client_endpoints[1].removeprefix("tcp://").rpartition(":")
    piece = frame * (64 * 1024 // len(frame) + 1)
    sent = 0
    with zmtp.connect(host, int(port), PATIENCE_S) as sock:

        def send() -> None:
            nonlocal sent
            with suppress(ConnectionError):
                while sent < MUCH:
                    sock.sendall(piece)
                    sent += len(piece)

        thread = threading.Thread(target=send)
        thread.start()
        witness = up.client()
        while thread.is_alive():
            np.testing.assert_array_equal(witness.infer("t", X)[0], X + 1)
        thread.join()
    assert 0 < sent < MUCH


@pytest.mark.parametrize("body", [bytes(65536), b"", bytes(40)], ids=["large", "empty", "small"])
def test_a_message_without_an_end_is_cut_off(up: Rig, body: bytes) -> None:
    client = up.client(1)  # of the same port: it stays
    client.infer("t", X)
    memory = OwnMemory()
    before = memory.read()
    for times in (1, 2):
        send_until_cut_off(up, zmtp.frame(body, more=True))
        assert up.server._gauges()["unread"] == times
    # ZeroMQ frees it, and the Dispatcher gives it back.
    wait_until(lambda: memory.read() - before < 32 * MIB)
    memory.close()
    np.testing.assert_array_equal(client.infer("t", X)[0], X + 1)
    wait_until(up.idle)


def test_a_message_of_too_many_frames_is_thrown_away_as_it_is_read(up: Rig) -> None:
    host, _, port = up.server.client_endpoints[1].removeprefix("tcp://").rpartition(":")
    witness = up.client(1)
    witness.infer("t", X)
    with zmtp.connect(host, int(port), PATIENCE_S) as sock:
        sock.sendall(zmtp.frame(b"", more=True) * 100_000 + zmtp.frame(b"", more=False))
        np.testing.assert_array_equal(witness.infer("t", X)[0], X + 1)
        wait_until(lambda: up.server._clients.evicted)
        with suppress(ConnectionError):
            while sock.recv(65536):
                pass
    assert not up.exchange.stats.events["defects"]
    np.testing.assert_array_equal(witness.infer("t", X)[0], X + 1)


def test_a_name_longer_than_there_are_ends_its_connection(up: Rig) -> None:
    """libzmq copies it for each message, and the Dispatcher would keep it for as long as itself."""
    host, _, port = up.server.client_endpoints[1].removeprefix("tcp://").rpartition(":")
    witness = up.client(1)
    witness.infer("t", X)
    for count in range(1, 9):
        name = bytes([count]) * (4 * MIB)
        ended = False
        with zmtp.connect(host, int(port), PATIENCE_S, name) as sock:
            sock.settimeout(0.05)
            while not ended:  # its first message may be another connection's, as far as is known
                with suppress(TimeoutError):
                    try:
                        sock.sendall(zmtp.frame(b"x", more=False))
                        ended = not sock.recv(65536)
                    except ConnectionError:
                        ended = True
        # By its name, or because more of it lay unread before that was looked at.
        assert up.server._clients.evicted + up.server._clients.watch.ended >= count
        np.testing.assert_array_equal(witness.infer("t", X)[0], X + 1)
    wait_until(lambda: all(len(name) <= 255 for name in up.server._clients.present))
    evicted = up.server._clients.evicted
    with zmtp.connect(host, int(port), PATIENCE_S, b"n" * 255) as sock:
        sock.sendall(zmtp.frame(b"x", more=False))
        np.testing.assert_array_equal(witness.infer("t", X)[0], X + 1)
    assert up.server._clients.evicted == evicted


def test_who_sends_too_many_frames_and_goes_harms_nobody(up: Rig) -> None:
    """By the time such a message is read, its descriptor may be anything: another client's
    connection, which stays, and in this process a file of any kind."""
    host, _, port = up.server.client_endpoints[1].removeprefix("tcp://").rpartition(":")
    message = zmtp.frame(b"", more=True) * 2000 + zmtp.frame(b"", more=False)
    refused: list[OSError] = []
    over = threading.Event()

    def flood() -> None:
        for _ in range(FLOODS):
            try:
                with zmtp.connect(host, int(port), PATIENCE_S) as sock, suppress(ConnectionError):
                    sock.sendall(message)
            except OSError as exc:  # before it had sent anything: another's fault is laid on it
                refused.append(exc)

    def open_files() -> None:
        while not over.wait(0.0005):
            for fd in [os.eventfd(0) for _ in range(8)]:
                os.close(fd)

    floods = [threading.Thread(target=flood) for _ in range(3)]
    threads = [*floods, threading.Thread(target=open_files)]
    for thread in threads:
        thread.start()
    witness = up.client(1)
    while any(t.is_alive() for t in floods):
        np.testing.assert_array_equal(witness.infer("t", X)[0], X + 1)
    over.set()
    for thread in threads:
        thread.join()
    assert not refused
    assert not up.exchange.stats.events["defects"]
    np.testing.assert_array_equal(witness.infer("t", X)[0], X + 1)
    wait_until(up.idle)


def test_a_few_frames_too_many_are_a_malformed_message(up: Rig) -> None:
    client = up.client(1)
    for extra in (1, 20, 900):
        client.send(b"x", *[b"y"] * (1 + extra))
    wait_until(lambda: up.exchange.stats.events["malformed_client"] == 3)
    np.testing.assert_array_equal(client.infer("t", X)[0], X + 1)
    assert not up.server._clients.evicted


@pytest.fixture
def unread_by_anybody() -> Iterator[tuple[Rig, str, int]]:
    """A new Dispatcher that has no routes yet, and where it listens."""
    with rig(run_root()) as up:
        up.stop()
        up.server._opens_ns = up.server._clock() + 3_600_000_000_000
        host, _, port = up.server.client_endpoints[1].removeprefix("tcp://").rpartition(":")
        yield up, host, int(port)


def test_what_nobody_reads_yet_is_bounded(
    monkeypatch: pytest.MonkeyPatch, unread_by_anybody: tuple[Rig, str, int]
) -> None:
    """Whole messages without a tensor; ZeroMQ itself would take in any number of them."""
    monkeypatch.setattr(unread, "CONNECTION_BYTES", BOUND)
    up, host, port = unread_by_anybody
    server = up.server
    piece = zmtp.frame(bytes(65536), more=False)
    sent = 0
    with zmtp.connect(host, port, PATIENCE_S) as sock:
        sock.setblocking(False)
        with suppress(ConnectionError):
            while sent < MUCH:
                with suppress(BlockingIOError):
                    sent += sock.send(piece[sent % len(piece) :])
                server.step(0)
    assert BOUND < sent < MUCH
    assert server._gauges()["unread"] == 1


def test_one_that_floods_and_resets_with_a_heartbeat_on_the_way_ends_nobody(
    unread_by_anybody: tuple[Rig, str, int],
) -> None:
    """zeromq/libzmq#4364: with a high-water mark, libzmq ends the process when it decodes a
    heartbeat after the connection has ended, since it had stopped reading at the mark. If this
    process ends here, that is it."""
    up, host, port = unread_by_anybody
    flood = zmtp.frame(b"x", more=False) * 200 + zmtp.command(b"\x04PING\0\x64")
    for _ in range(5):
        with zmtp.connect(host, port, PATIENCE_S) as sock:
            sock.sendall(3 * flood)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: up.server.step(10) or not up.server._clients.watch._marks)
    up.server._opens_ns = up.server._clock()
    clients = up.server._clients
    assert clients.socket.poll(0), "what they had sent is there"
    wait_until(lambda: up.server.step(10) or not clients.socket.poll(0))
    assert not up.exchange.stats.events["malformed_client"], "nobody waits for an answer"


def test_what_those_who_have_gone_had_asked_is_not_computed(
    unread_by_anybody: tuple[Rig, str, int],
) -> None:
    """Some by names of their own. Who is back under such a name is served at once."""
    up, host, port = unread_by_anybody
    server, events = up.server, up.exchange.stats.events
    asked = [wire.encode_to_dispatcher(wire.Describe(bytes([n]) * 16)) for n in range(100)]
    flood = b"".join(zmtp.frame(header, more=False) for header in asked)
    broken = zmtp.frame(b"x", more=False)
    for name in (b"", b"me", b"", b"you"):
        with zmtp.connect(host, port, PATIENCE_S, name) as sock:
            sock.sendall(50 * flood + broken)
    wait_until(lambda: server.step(10) or not server._clients.watch._marks)
    server._opens_ns = server._clock()
    rounds = 0
    while server._clients.socket.poll(0):
        server.step(0)
        rounds += 1
    assert rounds < 4 * 5000 // 16, "one does not cost a round"
    assert not events["malformed_client"] and server._clients.evicted == 0
    with zmtp.connect(host, port, PATIENCE_S, b"me") as back:
        back.sendall(zmtp.frame(asked[7], more=False))
        wait_until(lambda: server.step(10) or select.select([back], [], [], 0)[0])
        assert bytes([7]) * 16 in back.recv(4096)


@pytest.mark.parametrize("encrypted", [False, True])
def test_what_messages_take_on_the_wire_is_known(encrypted: bool) -> None:
    sizes = [[0], [40], [40, 600], [222], [223], [255], [256], [1, 2, 3], [70_000]]
    context, server, own = new_context(), KeyPair.make(), KeyPair.make()
    keeper = Gatekeeper(context)
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    if encrypted:
        keeper.protect("test", server, lambda key: key == own.public)(router)
        as_client(ClientKeys(own, server.public))(dealer)
    dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    dealer.send(b"hello")
    frames = router.recv_multipart(copy=False)
    before = bytes_received(int(frames[0].get(zmq.SRCFD)))
    for wanted in sizes:
        dealer.send_multipart([bytes(n) for n in wanted])
        frames = router.recv_multipart(copy=False)
        received = bytes_received(int(frames[0].get(zmq.SRCFD)))
        assert before is not None and received is not None
        assert received - before == unread.wire_bytes(wanted, encrypted=encrypted), wanted
        before = received
    for sock in (router, dealer):
        sock.close(0)
    context.term()

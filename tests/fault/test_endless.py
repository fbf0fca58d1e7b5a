"""Messages without an end, and with far too many frames, from a peer that speaks ZMTP by hand."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from dispatcher_rig import PATIENCE_S, Rig, X, rig, task, wait_until

from blockflow.bench.fuzz import zmtp
from blockflow.dispatcher import unfinished
from blockflow.dispatcher.descriptors import OwnMemory
from blockflow.tensormq.janitor import run_root

MIB = 1024 * 1024
BOUND = 16 * MIB
MUCH = 2048 * MIB
FLOODS = 80


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """With small bounds: the large ones need gigabytes to be shown."""
    monkeypatch.setattr(unfinished, "MESSAGE_BYTES", BOUND)
    monkeypatch.setattr(unfinished, "UNEXPLAINED_BYTES", BOUND)
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
        assert up.server._gauges()["endless"] == times
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


def test_nobody_is_judged_while_nobody_reads() -> None:
    """A new Dispatcher that has no routes yet: whole messages wait in the clients' socket."""
    with rig(run_root()) as up:
        server = up.server
        up.stop()
        server._opens_ns = server._clock() + 3_600_000_000_000
        looks = 0

        def look(now_ns: int, held: int, *, drained: bool) -> None:
            nonlocal looks
            looks += 1

        server._clients.watch.look = look  # type: ignore[method-assign]
        host, _, port = server.client_endpoints[1].removeprefix("tcp://").rpartition(":")
        with zmtp.connect(host, int(port), PATIENCE_S):
            wait_until(lambda: server.step(10) or server._clients.watch._marks)
            for _ in range(20):
                server.step(10)
            assert not looks and server._clients.next_look_ms(watching=False) is None
            server._opens_ns = server._clock()
            wait_until(lambda: server.step(min(50, server._timeout_ms())) or looks)

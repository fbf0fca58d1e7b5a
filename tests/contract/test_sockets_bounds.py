"""Sockets at their bounds: how long silence may last, how large a frame, a machine without room."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import sockets_rig
import zmq
from refusals_rig import no_descriptor
from sockets_rig import receive

from blockflow.client.dealer import Dealer
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.tensormq import sockets
from blockflow.tensormq.curve import Gatekeeper, as_client
from blockflow.tensormq.keys import ClientKeys, KeyPair
from blockflow.tensormq.push import PushCache
from blockflow.tensormq.sockets import bind_pull, bind_router, new_context

run_dir, ctx, transport = sockets_rig.run_dir, sockets_rig.ctx, sockets_rig.transport


@pytest.mark.parametrize(("secure", "silent_ms"), [(False, 5_000), (True, 15_000)])
def test_silence_may_last_as_long_as_the_largest_frame(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path, secure: bool, silent_ms: int
) -> None:
    """libzmq hears nothing until a frame is whole; the kernel's word is quick all the same, but
    while libzmq en- or decrypts it reads nothing."""
    pair = KeyPair.make()
    there = Gatekeeper(ctx).protect("t", pair, lambda key: key == pair.public) if secure else None
    here = as_client(ClientKeys(pair, pair.public)) if secure else None
    pull, endpoint = bind_pull(ctx, "tcp", run_dir, 1, protect=there)
    push = sockets.connect_push(ctx, endpoint, protect=here)
    router, bound = bind_router(ctx, ["tcp://127.0.0.1:0"], protect=there)
    client = Dealer(ctx, bound[0], here)
    try:
        for sock in (pull, push, router, client.socket):
            slowest_ms = limits.MAX_MESSAGE_BYTES * sockets.SLOWEST_NS_PER_BYTE // 1_000_000
            assert slowest_ms > limits.MAX_DEADLINE_MS
            assert min(sock.get(zmq.HEARTBEAT_TIMEOUT), sock.get(zmq.HEARTBEAT_TTL)) > slowest_ms
            assert sock.get(zmq.TCP_MAXRT) == silent_ms
    finally:
        client.close(0)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "curve"])
def test_the_largest_frame_arrives(
    ctx: zmq.Context[zmq.Socket[bytes]],
    run_dir: Path,
    secure: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CURVE makes it longer on the wire, towards a worker and towards a client alike."""
    most = 100_000
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", most)
    pair = KeyPair.make()
    there = Gatekeeper(ctx).protect("t", pair, lambda key: key == pair.public) if secure else None
    here = as_client(ClientKeys(pair, pair.public)) if secure else None
    pull, endpoint = bind_pull(ctx, "tcp", run_dir, 1, protect=there)
    push = PushCache(ctx, zmq.Poller(), protect=here)
    router, bound = bind_router(ctx, ["tcp://127.0.0.1:0"], protect=there)
    client = Dealer(ctx, bound[0], here)
    try:
        for size in (most - 40, most):
            assert push.send(endpoint, [b"header", bytes(size)])
            assert receive(pull, push) == [b"header", bytes(size)]
            client.socket.send_multipart([b"header", bytes(size)])
            who, *frames = receive(router)
            assert frames == [b"header", bytes(size)]
            router.send_multipart([who, *frames])
            assert receive(client.socket) == frames
    finally:
        push.close()
        client.close(0)


def test_a_machine_without_room_is_not_a_bad_address(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path, transport: str
) -> None:
    """Who could not start for that is started again; for a bad address he is given up."""
    for code in (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM, errno.ENOBUFS):

        class Full(zmq.Socket[bytes]):
            def bind(self, address: str) -> Any:
                raise zmq.ZMQError(code)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ctx, "_socket_class", Full)
            with pytest.raises(SystemError_) as e:
                bind_pull(ctx, transport, run_dir, 1)
        assert (e.value.code, e.value.retryable) == ("NO_SPACE", True)


@pytest.mark.parametrize(
    ("code", "raised"), [(errno.EMFILE, SystemError_), (zmq.ETERM, zmq.ContextTerminated)]
)
def test_no_descriptor_for_the_socket_itself(
    code: int,
    raised: type[Exception],
    ctx: zmq.Context[zmq.Socket[bytes]],
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refused(zmq.Socket[bytes]):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise zmq.ContextTerminated() if code == zmq.ETERM else zmq.ZMQError(code)

    monkeypatch.setattr(ctx, "_socket_class", Refused)
    with pytest.raises(raised) as e:
        bind_pull(ctx, "ipc", run_dir, 1)
    assert code == zmq.ETERM or getattr(e.value, "code", "") == "NO_SPACE"


def test_no_descriptor_for_the_look_at_who_listens(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{run_dir}/d1.sock")

    monkeypatch.setattr(sockets.std_socket, "socket", no_descriptor)
    with pytest.raises(SystemError_) as e:
        bind_pull(ctx, "ipc", run_dir, 1)
    assert e.value.code == "NO_SPACE"


def test_without_threads_it_is_said_rather_than_that_libzmq_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(BlockFlowError) as refused:
        new_context()
    assert refused.value.code == "NO_SPACE"
    assert "ulimit" in refused.value.hint


@pytest.mark.parametrize("free", [0, 5])
def test_nor_without_descriptors(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six are taken with the first socket; where libzmq finds none for an epoll, it aborts."""
    taken: list[int] = []

    def eventfd(*_: int) -> int:
        if len(taken) == free:
            no_descriptor()
        taken.append(os.dup(0))
        return taken[-1]

    monkeypatch.setattr(sockets.os, "eventfd", eventfd)
    with pytest.raises(SystemError_) as refused:
        new_context()
    assert refused.value.code == "NO_SPACE" and "ulimit -v, -n" in refused.value.hint
    for fd in taken:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

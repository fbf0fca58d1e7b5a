"""A data socket by tcp: connections that take descriptors, and say nothing."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sockets_rig
import zmq
from sockets_rig import receive, until
from zmq.utils.monitor import parse_monitor_message

from blockflow.tensormq import entrance
from blockflow.tensormq.curve import Gatekeeper, as_client
from blockflow.tensormq.keys import ClientKeys, KeyPair
from blockflow.tensormq.push import PushCache
from blockflow.tensormq.sockets import bind_pull, new_context
from blockflow.tensormq.tcp_peers import TcpPeers

run_dir, ctx = sockets_rig.run_dir, sockets_rig.ctx

LIMIT = 256
"""Descriptors that the receiving process may have; a quarter of them is not for connections."""

RECEIVER = """
import resource, sys
from pathlib import Path
from blockflow.tensormq.sockets import bind_pull, new_context
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
context = new_context()
pull, endpoint = bind_pull(context, "tcp", Path(sys.argv[2]), 1)
print(endpoint, flush=True)
while True:
    said = pull.recv()
    print(said.decode(), flush=True)
    if said == b"end":
        break
    open("/dev/null").close()  # it has descriptors for what it does itself
pull.close()
context.term()
print("ended", flush=True)
"""


@pytest.fixture
def receiver(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    told = [sys.executable, "-c", RECEIVER, str(LIMIT), str(run_dir)]
    with subprocess.Popen(told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as made:
        try:
            yield made
        finally:
            made.kill()


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def ended(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):  # ZeroMQ's greeting
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_silent_connections_leave_descriptors_and_keep_nobody_out(
    receiver: subprocess.Popen[str], ctx: zmq.Context[zmq.Socket[bytes]]
) -> None:
    assert receiver.stdout is not None and receiver.stderr is not None
    endpoint = receiver.stdout.readline().strip()
    early = PushCache(ctx, zmq.Poller())
    early.send(endpoint, [b"early"])
    until(lambda: early.flush() >= 0 and not early.pending(), "the first connection")
    assert receiver.stdout.readline() == "early\n"
    silent = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * LIMIT)), hard))
    late = PushCache(ctx, zmq.Poller())
    try:
        for _ in range(2 * LIMIT):
            silent.append(socket.create_connection(("127.0.0.1", port_of(endpoint)), 10))
            silent[-1].setblocking(False)
        most = LIMIT - LIMIT // 8
        # Those that are left, accepted or not, leave room for what the receiver does.
        until(lambda: sum(map(ended, silent)) >= 2 * LIMIT - most, "the others to be shut")
        for cache, said in ((early, b"still"), (late, b"late"), (late, b"end")):
            cache.send(endpoint, [said])
            until(lambda c=cache: c.flush() >= 0 and not c.pending(), "it to leave")
            assert receiver.stdout.readline() == said.decode() + "\n"
        assert receiver.stdout.readline() == "ended\n", "its thread ends with the socket"
        assert receiver.wait(10) == 0
        assert "descriptors are short" in receiver.stderr.read()
    finally:
        early.close()
        late.close()
        for sock in silent:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_says_nothing_is_ended_by_and_by(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockflow.tensormq.sockets.HANDSHAKE_MS", 100)
    pull, endpoint = bind_pull(ctx, "tcp", run_dir, 1)
    push = PushCache(ctx, zmq.Poller())
    push.send(endpoint, [b"here"])
    assert receive(pull, push) == [b"here"]
    with socket.create_connection(("127.0.0.1", port_of(endpoint)), 10) as silent:
        while silent.recv(64):  # ZeroMQ's greeting, and then the end
            pass
    push.send(endpoint, [b"still here"])
    assert receive(pull, push) == [b"still here"]
    push.close()


def test_what_the_kernel_says_of_a_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as theirs,
        listener.accept()[0] as ours,
        open(os.devnull) as file,
    ):
        peers = TcpPeers(listener.getsockname()[1])
        files = open_files(os.getpid())
        mark = peers.came(ours.fileno())
        assert mark is not None
        theirs.sendall(b"hello")
        assert ours.recv(5, socket.MSG_WAITALL) == b"hello"
        assert peers.brought(ours.fileno(), mark) == 5
        # Its far end, a file, and what is closed are none of its connections.
        assert [peers.came(fd) for fd in (theirs.fileno(), file.fileno(), 1 << 20)] == [None] * 3
        assert peers.brought(ours.fileno(), mark + 1) is None
        assert not peers.shut(ours.fileno(), mark + 1)
        assert peers.shut(ours.fileno(), mark)
        assert theirs.recv(1) == b"" and ours.fileno() > 0
        before = peers.used()
        with open(os.devnull), open(os.devnull):
            assert peers.used() == (before and before + 2), "where the kernel counts them"
        assert open_files(os.getpid()) == files
        peers.close()


def test_a_data_socket_without_room_for_its_entrance(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error with a code, and nothing stays of the socket."""

    def no_thread(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    context = new_context()
    monkeypatch.setattr(entrance.threading, "Thread", no_thread)
    with pytest.raises(Exception, match="can't start new thread") as e:
        bind_pull(context, "tcp", run_dir, 1)
    assert getattr(e.value, "code", "") == "NO_SPACE"
    context.term()  # would wait for any that is open


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "curve"])
def test_no_handshake_of_zeromq_s_is_shorter_than_it_is_taken_for(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path, secure: bool
) -> None:
    """Else who has come through it would count as silent."""
    pair = KeyPair.make()
    there = Gatekeeper(ctx).protect("t", pair, lambda key: key == pair.public) if secure else None
    pull, endpoint = bind_pull(ctx, "tcp", run_dir, 1, protect=there)
    events = pull.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    push = ctx.socket(zmq.PUSH)
    if secure:
        as_client(ClientKeys(pair, pair.public))(push)
    push.connect(endpoint)
    fd = int(parse_monitor_message(receive(events))["value"])
    assert parse_monitor_message(receive(events))["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    peers = TcpPeers(port_of(endpoint))
    mark = peers.came(fd)
    assert mark is not None
    least = entrance.HANDSHAKE_BYTES[zmq.CURVE if secure else zmq.NULL]
    assert least <= (peers.brought(fd, mark) or 0) <= least + 100
    peers.close()
    pull.disable_monitor()
    events.close(0)
    push.close(0)

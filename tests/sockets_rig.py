"""What tests of the sockets share: a context, a run directory, and waiting for a message."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.push import PushCache
from blockflow.tensormq.sockets import new_context

TIMEOUT_S = 10.0
NOBODY = 65534
STRANGER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
for reuse in (0, 1):
    for share in (0, 1):
        for host in ("127.0.0.1", ""):
            with socket.socket() as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, share)
                try:
                    s.bind((host, int(sys.argv[1])))
                    s.listen()
                    print("taken", reuse, share, host)
                except OSError:
                    pass
"""


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with RunDir.create() as made:
        yield made.path


@pytest.fixture
def ctx() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = new_context()
    yield made
    made.destroy(linger=0)


@pytest.fixture(params=["ipc", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {TIMEOUT_S} s for {what}"
        time.sleep(0.001)


def receive(sock: zmq.Socket[bytes], push: PushCache | None = None) -> list[bytes]:
    """The next message; the sending loop turns meanwhile."""

    def arrived() -> bool:
        if push is not None:
            push.flush()
        return bool(sock.poll(1))

    until(arrived, "a message")
    return sock.recv_multipart()


def a_stranger_takes(port: int, uid: int = NOBODY) -> str:
    """How another user can listen on a port of this machine; '' = in no way."""
    told = [sys.executable, "-c", STRANGER, str(port), str(uid)]
    return subprocess.run(told, capture_output=True, text=True, check=True, timeout=60).stdout

"""What tests of the sockets share: a context, a run directory, and waiting for a message."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.push import PushCache
from blockflow.tensormq.sockets import new_context

TIMEOUT_S = 10.0


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

"""Few descriptors, and far too many of everything else: connections, names of tasks.

With 64 descriptors for each of its processes a system starts, serves, refuses what it has none for,
and replaces what dies; libzmq would end a process that finds none for a connection of a worker.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import plain_http
import pytest
from control_rig import echo_repository
from dispatcher_rig import Rig, rig, task, wait_until
from up_rig import up
from warm_rig import Warm

from blockflow.client import Client
from blockflow.control.children import most_children
from blockflow.control.rest.connections import MAX_CONNECTIONS, most_connections
from blockflow.core.limits import MAX_TASKS_PER_REQUEST
from blockflow.tensormq.janitor import run_root
from blockflow.wire import client as wire
from blockflow.wire.tensor import TensorDesc

X = np.arange(4, dtype=np.float32).reshape(1, 4)
PATIENCE_S = 60.0
FEW = 64
FLOOD = 100
HALF_OPEN = 1000
NAMES = int(os.environ.get("BLOCKFLOW_NAMES", "100000"))
"""A million by hand take half a minute."""
AT_A_TIME = 4
BODY = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0"


class Place:
    """A running ``blockflow up``, from outside."""

    def __init__(self, ready: dict[str, Any]) -> None:
        self.rest = ready["rest"]
        self.clients = ready["clients"][0]

    def get(self, path: str) -> Any:
        """As often as it takes: in a flood of connections a new one may be turned away, too."""
        answers: list[httpx.Response] = []

        def answered() -> bool:
            with suppress(httpx.RemoteProtocolError, httpx.ReadError):
                answers.append(plain_http.get(self.rest + path, timeout=PATIENCE_S))
            return bool(answers)

        wait_until(answered, PATIENCE_S)
        (answer,) = answers
        assert answer.is_success, answer.text
        return answer.json()

    def update(self, body: Any) -> httpx.Response:
        return plain_http.post(f"{self.rest}/v1/system-update", json=body, timeout=PATIENCE_S)

    def worker(self, name: str) -> dict[str, Any]:
        found = self.get("/v1/workers")
        (one,) = [w for w in (*found["workers"], found["dispatcher"]) if w["name"] == name]
        return dict(one)


def serves(client: Client) -> None:
    assert np.array_equal(client.infer("t", X, deadline_s=30).value, X)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextmanager
def connections(port: int, count: int, text: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections to a port that say ``text`` and no more."""
    with ExitStack() as stack:
        begun = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            begun.append(one)
        for one in begun:
            one.settimeout(PATIENCE_S)
            with suppress(OSError):  # it was accepted and ended at once
                wait_writable(one)
                one.sendall(text)
        yield begun


def wait_writable(sock: socket.socket) -> None:
    """Until the connection stands."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    assert poll.poll(PATIENCE_S * 1000), "no connection in time"


def has_ended(sock: socket.socket) -> bool:
    """Whether the other side has ended the connection; reads what it said before."""
    sock.setblocking(False)
    try:
        while sock.recv(1024):
            pass
    except BlockingIOError:
        return False
    except OSError:  # with a reset
        pass
    return True


@pytest.mark.timeout(400)  # on a machine that others share
def test_a_system_with_64_descriptors(tmp_path: Path, warm: Warm) -> None:
    echo_repository(tmp_path / "blocks")
    with up(tmp_path, start=partial(warm.popen, descriptors=FEW)) as (process, ready):
        place = Place(ready)
        assert place.update(BODY).is_success
        with Client(place.clients, connect_timeout_s=PATIENCE_S) as client:
            serves(client)
            dispatcher = place.worker("dispatcher")["pid"]
            # More processes than there are descriptors for: refused, and the old epoch serves.
            many = {**BODY, "blocks": [{"name": "a", "replicas": 20}, "b"]}
            error = place.update(many).json()["error"]
            assert (error["code"], error["details"]["cause"]["code"]) == (
                "UPDATE_FAILED",
                "NO_SPACE",
            )
            assert place.get("/v1/status")["epoch"] == 1
            # More connections: those that are there are served, and a worker can be replaced.
            with (
                connections(port_of(place.clients), FLOOD) as flood,
                connections(port_of(place.rest), FLOOD),
            ):
                serves(client)
                # All that were too many have been turned away; libzmq takes one after the other.
                wait_until(lambda: sum(map(has_ended, flood)) >= FLOOD - FEW // 2, PATIENCE_S)
                wait_until(lambda: descriptors(dispatcher) < FEW - 8, PATIENCE_S)
                old = place.worker("a#0")
                os.kill(old["pid"], signal.SIGKILL)

                def replaced() -> bool:
                    new = place.worker("a#0")
                    return new["incarnation"] > old["incarnation"] and new["state"] == "ready"

                wait_until(replaced, PATIENCE_S)
                serves(client)
            with Client(place.clients, connect_timeout_s=PATIENCE_S) as late:
                serves(late)
            assert place.worker("dispatcher")["pid"] == dispatcher
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.timeout(400)  # on a machine that others share
def test_a_thousand_half_open_connections(tmp_path: Path, warm: Warm) -> None:
    """Silent ones, and half a greeting; at the clients' port and at REST."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 4 * HALF_OPEN:
        pytest.skip(f"{before[1]} descriptors are too few for this test's own sockets")
    echo_repository(tmp_path / "blocks")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * HALF_OPEN, before[1]))
    try:
        with up(tmp_path, start=warm.popen) as (process, ready):
            place = Place(ready)
            assert place.update(BODY).is_success
            dispatcher = place.worker("dispatcher")["pid"]
            pids = (process.pid, dispatcher)
            with Client(place.clients, connect_timeout_s=PATIENCE_S) as client:
                serves(client)
                held = [descriptors(pid) for pid in pids]
                with (
                    connections(port_of(place.clients), HALF_OPEN // 2),
                    connections(port_of(place.clients), HALF_OPEN // 2, GREETING),
                    connections(port_of(place.rest), HALF_OPEN),
                ):
                    wait_until(lambda: descriptors(dispatcher) >= held[1] + HALF_OPEN, PATIENCE_S)
                    serves(client)
                    with Client(place.clients, connect_timeout_s=PATIENCE_S) as late:
                        serves(late)
                    assert place.get("/v1/health/ready")
                    most = held[0] + MAX_CONNECTIONS + FEW
                    wait_until(lambda: descriptors(process.pid) <= most, PATIENCE_S)
                # A few more for connections of the system's own that have come to be meanwhile.
                wait_until(lambda: descriptors(dispatcher) <= held[1] + 8, PATIENCE_S)
                wait_until(lambda: descriptors(process.pid) <= held[0] + 8, PATIENCE_S)
                serves(client)
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize(
    ("soft", "children", "rest"),
    [(16, 0, 4), (64, 4, 8), (1024, 124, 128), (65_536, 8188, 512), (-1, np.inf, 512)],
)
def test_what_a_limit_is_enough_for(soft: int, children: float, rest: int) -> None:
    assert (most_children(soft), most_connections(soft)) == (children, rest)


# --- names ---------------------------------------------------------------------------------------


class Growth:
    """Objects that are alive now and were not at the start; counted by the interpreter."""

    def __init__(self) -> None:
        self._before = sys.getallocatedblocks()

    def count(self) -> int:
        return sys.getallocatedblocks() - self._before


def name_unknown_tasks(up: Rig, count: int) -> None:
    """Ask for ``count`` tasks that do not exist, as many as possible at a time."""
    client = up.client()
    names = [f"x{n:07}" for n in range(MAX_TASKS_PER_REQUEST)]
    request = wire.Request(b"r" * 16, tuple(names), 10_000, TensorDesc("float32", (1, 4)))
    header, body = wire.encode_to_dispatcher(request), X.tobytes()
    listed = b"".join(b"\xa8" + name.encode() for name in names)
    before, found, after = header.partition(listed)
    assert found
    owed = 0
    for first in range(0, count, MAX_TASKS_PER_REQUEST):
        fresh = b"".join([b"\xa8x%07d" % n for n in range(first, first + MAX_TASKS_PER_REQUEST)])
        client.socket.send_multipart([before + fresh + after, body])
        owed += 1
        if owed == AT_A_TIME:
            while owed:
                assert client.socket.poll(PATIENCE_S * 1000)
                client.socket.recv_multipart()
                owed -= 1
    while owed:
        client.answer()
        owed -= 1


def test_many_unknown_tasks_leave_nothing() -> None:
    """What each request, or each time that requests are looked for, leaves shows with less."""
    with rig(run_root()) as up:
        up.worker(11, {1: "e"})
        up.publish(task("t", ["e"]))
        rejected = up.exchange.stats.rejected
        name_unknown_tasks(up, 10_000)  # what is made once is there
        growth = Growth()
        name_unknown_tasks(up, NAMES)
        assert growth.count() < 500
        assert rejected["UNKNOWN_TASK"] == (10_000 + NAMES) // MAX_TASKS_PER_REQUEST
        assert list(up.exchange.stats.tasks) == ["t"]
        assert len(up.exchange.table) == 0
        assert np.array_equal(up.client().infer("t", X)[0], X + 1)
        wait_until(up.idle)


def test_a_planted_leak_of_names_is_counted() -> None:
    growth = Growth()
    kept = [f"x{n:07}" for n in range(20_000)]
    assert growth.count() > 10_000
    assert kept

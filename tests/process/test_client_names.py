"""A client of a name: the look-up holds up nobody, and each of the name's addresses is tried."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import zmq
from dispatcher_rig import wait_until
from fake_dispatcher import FakeDispatcher

from blockflow.client import AsyncClient, Client, names
from blockflow.core.errors import BlockFlowError

X = np.ones((1, 4), np.float32)
LONG_S = 60.0
SOON_S = 15.0
"""A wait for a look-up that hangs would be for ever."""


class Server:
    """A name server: answers with ``addresses``, or not while it hangs."""

    def __init__(self) -> None:
        self.addresses: list[str] = ["127.0.0.1"]
        self.asked = 0
        self.threads: set[str] = set()
        self.answers = threading.Event()
        self.answers.set()

    def resolve(self, host: str) -> list[str]:
        assert host == "dispatcher.invalid"
        self.asked += 1
        self.threads.add(threading.current_thread().name)
        assert self.answers.wait(LONG_S)
        return self.addresses


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server()
    monkeypatch.setattr(names, "resolve", made.resolve)
    yield made
    made.answers.set()
    wait_until(lambda: "blockflow-names" not in {t.name for t in threading.enumerate()})


def named(fake: FakeDispatcher) -> str:
    """Its address by a name that nobody else knows, libzmq included."""
    return f"tcp://dispatcher.invalid:{fake.endpoint.rpartition(':')[2]}"


def code_of(call: Callable[[], Any], match: str) -> str:
    with pytest.raises(BlockFlowError, match=match) as e:
        call()
    return e.value.code


def test_libzmq_is_given_numbers_and_nothing_is_dropped_twice(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not find it would look up, in the midst of everything."""
    calls: list[tuple[str, str]] = []

    def note(name: str) -> None:
        real = getattr(zmq.Socket, name)

        def noted(sock: Any, endpoint: str) -> Any:
            if endpoint.startswith("tcp://"):
                calls.append((name, endpoint))
            return real(sock, endpoint)  # raises, where there is no such connection

        monkeypatch.setattr(zmq.Socket, name, noted)

    with ExitStack() as stack:
        with FakeDispatcher() as fake:
            note("connect")
            note("disconnect")
            client = stack.enter_context(Client(named(fake), connect_timeout_s=LONG_S))
            assert np.array_equal(client.infer("echo", X).value, X)
        wait_until(lambda: client.counters().disconnects == 1)
        wait_until(lambda: server.asked >= 3)
        with FakeDispatcher(fake.endpoint):
            assert np.array_equal(client.infer("echo", X, deadline_s=LONG_S).value, X)
    assert {e for _, e in calls} == {fake.endpoint}
    kinds = [name for name, _ in calls]
    assert (set(kinds[::2]), set(kinds[1::2])) == ({"connect"}, {"disconnect"})
    assert server.threads == {"blockflow-names"}


def test_a_look_up_that_hangs_holds_up_no_constructor_call_or_close(server: Server) -> None:
    server.answers.clear()
    began = time.monotonic()
    client = Client("tcp://dispatcher.invalid:5755", connect_timeout_s=0.3)
    assert code_of(lambda: client.infer("echo", X), "no address was found yet") == "NOT_RUNNING"
    late = code_of(lambda: client.infer("echo", X, deadline_s=0.1), "could not be sent")
    assert late == "DEADLINE_EXCEEDED"
    pending = client.submit("echo", X)
    client.close()
    assert code_of(pending.result, "the client was closed") == "CANCELLED"
    assert time.monotonic() - began < SOON_S
    assert server.asked == 1
    server.answers.set()  # what comes of it now is for nobody


def test_nor_an_event_loop(server: Server) -> None:
    server.answers.clear()

    async def main() -> None:
        async with AsyncClient("tcp://dispatcher.invalid:5755", connect_timeout_s=0.3) as client:
            with pytest.raises(BlockFlowError, match="no address was found yet") as e:
                await client.infer("echo", X)
            assert e.value.code == "NOT_RUNNING"

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < SOON_S


def test_a_name_server_that_falls_silent_costs_no_deadline(server: Server) -> None:
    with ExitStack() as stack:
        with FakeDispatcher() as fake:
            client = stack.enter_context(Client(named(fake), connect_timeout_s=0.3))
            client.infer("echo", X)
            server.answers.clear()
            asked = server.asked
        wait_until(lambda: server.asked > asked)
        began = time.monotonic()
        lost = code_of(lambda: client.infer("echo", X), "no address was found yet")
        assert lost == "CONNECTION_LOST"
        assert time.monotonic() - began < SOON_S
        with FakeDispatcher(fake.endpoint):
            server.answers.set()
            wait_until(lambda: client.counters().connects == 2)
            assert np.array_equal(client.infer("echo", X).value, X)


@pytest.mark.parametrize(
    "error", [socket.gaierror(socket.EAI_NONAME, "not known"), UnicodeError("too long")]
)
def test_a_host_whose_name_is_not_known_is_told_as_such(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def nobody(*_: object, **__: object) -> None:
        nonlocal asked
        asked += 1
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    with Client("tcp://nohost.invalid:5755", connect_timeout_s=0.2) as client:
        wait_until(lambda: asked >= 2)
        why = r"no address was found.*'nohost.invalid'"
        assert code_of(lambda: client.infer("echo", X), why) == "NOT_RUNNING"


def test_of_several_addresses_each_is_tried(server: Server) -> None:
    server.addresses = ["127.0.0.3", "127.0.0.2", "127.0.0.1"]
    with FakeDispatcher() as fake, Client(named(fake), connect_timeout_s=LONG_S) as client:
        assert np.array_equal(client.infer("echo", X, deadline_s=LONG_S).value, X)
        assert server.asked == 3


def test_a_name_that_stands_for_another_address_is_followed(server: Server) -> None:
    with ExitStack() as stack:
        with FakeDispatcher() as fake:
            port = fake.endpoint.rpartition(":")[2]
            client = stack.enter_context(Client(named(fake), connect_timeout_s=LONG_S))
            client.infer("echo", X)
            server.addresses = ["127.0.0.2"]
        with FakeDispatcher(f"tcp://127.0.0.2:{port}"):
            wait_until(lambda: client.counters().disconnects == 1)
            assert np.array_equal(client.infer("echo", X, deadline_s=LONG_S).value, X)


def test_a_name_of_ipv6_alone(server: Server) -> None:
    server.addresses = ["[::1]"]
    try:
        fake = FakeDispatcher("tcp://[::1]:*")
    except zmq.ZMQError:
        pytest.skip("no IPv6 on this machine")
    with fake, Client(named(fake), connect_timeout_s=LONG_S) as client:
        assert np.array_equal(client.infer("echo", X, deadline_s=LONG_S).value, X)


@pytest.mark.parametrize("close", ["client.close()", "pass"])
def test_the_exit_does_not_wait_for_a_look_up(close: str) -> None:
    code = (
        "import threading\nfrom blockflow.client import Client, names\n"
        "asked = threading.Event()\n"
        "names.resolve = lambda host: (asked.set(), threading.Event().wait())\n"
        "client = Client('tcp://dispatcher.invalid:5755')\n"
        "assert asked.wait(30)\n"
        f"{close}\nprint('end')\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_child_of_a_fork_amid_a_look_up_has_its_own() -> None:
    code = (
        "import os, sys, threading\nimport numpy as np\n"
        "from blockflow.client import Client, names\n"
        "asked = threading.Event()\n"
        "names.resolve = lambda host: (asked.set(), threading.Event().wait())\n"
        "client = Client('tcp://dispatcher.invalid:5755')\n"
        "assert asked.wait(30)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    names.resolve = lambda host: ['127.0.0.1']\n"
        "    x = np.ones((1, 1 << 18), np.float32)\n"
        "    with Client('tcp://dispatcher.invalid:' + sys.argv[1]) as own:\n"
        "        print(own.infer('echo', x).task, flush=True)\n"
        "else:\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    with FakeDispatcher() as fake:
        words = [sys.executable, "-c", code, fake.endpoint.rpartition(":")[2]]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["echo", "0"], "")

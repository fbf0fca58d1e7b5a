"""What listens at a client's address is no Dispatcher: it is told so, and found when it comes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import zmq
from dispatcher_rig import wait_until
from fake_dispatcher import FakeDispatcher

from blockflow.client import Client, line
from blockflow.client.dealer import Dealer
from blockflow.core.errors import BlockFlowError

X = np.ones((1, 4), np.float32)
LONG_S = 60.0
FAILED = zmq.EVENT_CONNECT_RETRIED
BANNER = b"SSH-2.0-OpenSSH_9.2\r\n"
REFUSAL = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Stranger:
    """Says ``words`` to whoever comes; ``stays``, or hangs up then.

    Attributes:
        came: how many have.
    """

    def __init__(self, words: bytes, stays: bool, stack: ExitStack) -> None:
        self.came = 0
        self._words, self._stays, self._stack = words, stays, stack
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        stack.callback(self._end)

    def _run(self) -> None:
        while True:
            try:
                peer = self._listener.accept()[0]
            except OSError:
                return
            self._stack.enter_context(peer)
            self.came += 1
            peer.sendall(self._words)
            if not self._stays:
                peer.recv(100)  # what is unread would be reset, with the answer
                peer.close()

    def _end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()


@contextmanager
def stranger(words: bytes, *, stays: bool) -> Iterator[Stranger]:
    with ExitStack() as stack:
        yield Stranger(words, stays, stack)


def trouble_of(client: Client) -> str:
    with pytest.raises(BlockFlowError) as e:
        client.infer("echo", X, deadline_s=LONG_S)
    assert e.value.code == "NOT_RUNNING"
    return str(e.value)


@pytest.mark.parametrize("words", [BANNER, b"220 mail ESMTP\r\n" * 40, b""])
def test_one_that_greets_otherwise_and_stays_is_left(
    words: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ takes it for a peer of long ago, and waits with it for ever."""
    monkeypatch.setattr(line, "_HANDSHAKE_NS", 300_000_000)
    with ExitStack() as stack:
        with stranger(words, stays=True) as there:
            address = f"tcp://127.0.0.1:{there.port}"
            client = stack.enter_context(Client(address, connect_timeout_s=LONG_S))
            impatient = stack.enter_context(Client(address, connect_timeout_s=0.5))
            assert "speaks another protocol" in trouble_of(impatient)
            assert "`blockflow status`" in trouble_of(impatient)
            wait_until(lambda: there.came > 4, LONG_S)  # they come again
        with FakeDispatcher(address):
            assert np.array_equal(client.infer("echo", X, deadline_s=LONG_S).value, X)


def test_it_is_told_as_soon_as_it_is_connected() -> None:
    with (
        stranger(BANNER, stays=True) as there,
        Client(f"tcp://127.0.0.1:{there.port}", connect_timeout_s=0.5) as client,
    ):
        wait_until(lambda: there.came)
        assert "speaks another protocol" in trouble_of(client)


def test_one_that_speaks_http_may_be_another_service() -> None:
    with (
        stranger(REFUSAL, stays=False) as there,
        Client(f"tcp://127.0.0.1:{there.port}", connect_timeout_s=0.5) as client,
    ):
        wait_until(lambda: there.came > 1)
        told = trouble_of(client)
    assert "does it ask for keys" in told
    assert "REST" in told and "`blockflow status`" in told


def test_nothing_is_heard_of_an_attempt_that_was_dropped() -> None:
    """It might say that there is a connection, where there is none any more."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with FakeDispatcher() as fake:
            dealer = Dealer(context, fake.endpoint)
            seen: list[int] = []
            wait_until(lambda: dealer.monitor.poll(0))
            dealer.hang_up()
            assert list(dealer.events()) == []
            dealer.dial(fake.endpoint)
            wait_until(
                lambda: (
                    seen.extend(kind for kind, _ in dealer.events())
                    or int(zmq.EVENT_HANDSHAKE_SUCCEEDED) in seen
                )
            )
            dealer.close(0)
    finally:
        context.destroy(0)


def test_attempts_that_fail_leave_nothing_behind() -> None:
    """Each event has a value of its own, a time that is partly chance. pyzmq's reader would keep
    every one of them as a member of its enumeration, as long as this process lives."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    members = zmq.Event._value2member_map_
    try:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # nobody else has the port, and nobody listens there
            endpoint = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
            dealer = Dealer(context, endpoint)
            before, failed = len(members), list[int]()
            for _ in range(3):
                wait_until(lambda: dealer.monitor.poll(0))
                failed += [value for kind, value in dealer.events() if kind == FAILED]
                dealer.dial(endpoint)
            assert len(set(failed)) > 1 and len(members) == before
            dealer.close(0)
    finally:
        context.destroy(0)

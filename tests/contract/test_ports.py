"""Held ports: nobody but their holder's Dispatchers listens there."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest
from sockets_rig import a_stranger_takes

from blockflow.tensormq import ports
from blockflow.tensormq.ports import hold, listen_beside
from blockflow.tensormq.sockets import bind_router, connect_dealer, new_context

WAIT_MS = 10_000
V4 = socket.AF_INET


@pytest.fixture
def held() -> Iterator[socket.socket]:
    with hold("127.0.0.1", 0, V4) as made:
        yield made


def refused(code: int = errno.EADDRINUSE) -> pytest.RaisesExc[OSError]:
    return pytest.RaisesExc(OSError, check=lambda e: e.errno == code)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_cannot_listen_there(held: socket.socket) -> None:
    port = held.getsockname()[1]
    assert a_stranger_takes(port) == ""
    with listen_beside("127.0.0.1", port, V4, 1):
        assert a_stranger_takes(port) == ""
    assert a_stranger_takes(port) == ""
    held.close()
    assert a_stranger_takes(port) != ""  # the test would see it


def test_nor_can_another_system_of_this_user(held: socket.socket) -> None:
    port = held.getsockname()[1]
    for _ in range(2):
        with refused():
            hold("127.0.0.1", port, V4)
        with refused():
            socket.create_server(("127.0.0.1", port))
        listen_beside("127.0.0.1", port, V4, 1).close()
    held.close()
    hold("127.0.0.1", port, V4).close()


def test_nobody_answers_while_it_is_only_held(held: socket.socket) -> None:
    with refused(errno.ECONNREFUSED):
        socket.create_connection(held.getsockname())


def test_where_nothing_is_held_a_stranger_is_no_company() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, refused():
        listen_beside("127.0.0.1", taken.getsockname()[1], V4, 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::]"])
def test_one_dispatcher_after_the_other_is_found_on_it(host: str) -> None:
    """Also right after the last one has closed its connections (TIME_WAIT)."""
    family = socket.AF_INET6 if host.startswith("[") else V4
    try:
        held = hold(host.strip("[]"), 0, family)
    except OSError as e:
        pytest.skip(f"{host} cannot be listened on: {e}")
    port = held.getsockname()[1]
    for _ in range(3):
        with new_context() as context:
            before = len(os.listdir("/proc/self/fd"))
            router, (bound,) = bind_router(context, [f"tcp://{host}:{port}"])
            assert bound.endswith(f":{port}")
            dealer = connect_dealer(context, f"tcp://{host.replace('[::]', '127.0.0.1')}:{port}")
            dealer.send(b"x")
            assert router.poll(WAIT_MS) and router.recv_multipart()[1] == b"x"
            router.close(0)
            dealer.close(0)
        assert len(os.listdir("/proc/self/fd")) <= before
    held.close()
    with refused(errno.ECONNREFUSED):
        socket.create_connection(("127.0.0.1", port))


def test_a_free_port_that_somebody_is_quicker_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as quicker:
        found = ports._free
        numbers = iter([quicker.getsockname()[1]] * 3)
        monkeypatch.setattr(ports, "_free", lambda *a: next(numbers, 0) or found(*a))
        with hold("127.0.0.1", 0, V4) as held:
            assert held.getsockname()[1] != quicker.getsockname()[1]

"""Frames that ZeroMQ encrypts: it has written them, by its word, before it has begun to."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from blockflow.dispatcher import clients, descriptors
from blockflow.dispatcher.clients import TRACKED_BYTES, Sent
from blockflow.dispatcher.debt import SLOW_CLIENT_NS
from blockflow.dispatcher.descriptors import Sealed, bytes_taken, mark
from tests import client_port_rig
from tests.client_port_rig import LARGE, MS, A, Scene
from tests.dispatcher_rig import wait_until

s = client_port_rig.s
HUGE = bytes(128 * TRACKED_BYTES)
BYTES_S = 4_200_000
"""Of a slow link."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    with far, near:
        yield near, far


def test_the_peer_has_it_when_it_has_acknowledged_as_much(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = ends
    fd, name, taken = near.fileno(), mark(near.fileno()), bytes_taken(near.fileno())
    assert name is not None and taken is not None
    made = SimpleNamespace(done=False)
    first = Sealed(made, fd, name, taken, 1000, None)
    second = Sealed(made, fd, name, taken, 500, first)
    near.sendall(bytes(1000))
    wait_until(lambda: bytes_taken(fd) == taken + 1000)
    assert first.plain and not first.done
    made.done = True
    assert first.done and not second.done
    near.sendall(bytes(500))
    wait_until(lambda: second.done)
    later = Sealed(made, fd, name, taken + 1500, 1, second)
    assert not later.done
    assert Sealed(made, fd, name + 1, taken + 1500, 1, None).done  # its connection is no more
    near.close()
    assert later.done


def test_who_takes_an_encrypted_reply_slowly_is_not_cut_off_for_the_next(
    s: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0
    s.port._encrypted = True
    for module in (clients, descriptors):
        monkeypatch.setattr(module, "bytes_taken", lambda fd: taken)
    fd = s.accepted()
    assert s.heard(A, fd)
    assert s.send(A, HUGE) is s.send(A, LARGE) is Sent.YES
    whole = len(HUGE) + len(LARGE)
    s.router.trackers[0].done = True  # a copy has been made
    for now_ns in range(100 * MS, 2 * SLOW_CLIENT_NS, 100 * MS):
        taken = min(whole, BYTES_S * now_ns // 1_000_000_000)
        s.router.trackers[1].done = taken >= len(HUGE)
        assert s.port.flush(now_ns) == []
        assert (s.port.backlog_bytes() == 0) == (taken == whole)
    assert s.send(A, LARGE, now_ns=2 * SLOW_CLIENT_NS) is Sent.YES  # it takes no more
    s.router.trackers[2].done = True
    assert s.port.flush(3 * SLOW_CLIENT_NS) == []
    assert s.port.backlog_bytes() == len(LARGE)
    lost = [s.port.flush(3 * SLOW_CLIENT_NS + n * 100 * MS) for n in range(1, 40)]
    assert [(A, Sent.SLOW)] in lost

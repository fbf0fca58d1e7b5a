"""Marks: what tells a connection from every other, also where a sandbox knows no socket cookies."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from blockflow.dispatcher import descriptors
from blockflow.tensormq import tcp_peers
from blockflow.tensormq.tcp_peers import TcpPeers

NO_SUCH_OPTION = 9999


class Emulated(socket.socket):
    """qemu takes any option that it does not know for one of four bytes."""

    def getsockopt(self, *args: Any) -> Any:
        if args[1] == tcp_peers.SO_COOKIE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().getsockopt(*args)


def refuse(*_: object) -> int:
    ctypes.set_errno(errno.EINVAL)
    return -1


@pytest.fixture(params=["the kernel", "a sandbox", "an emulator"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "a sandbox":
        monkeypatch.setattr(descriptors, "SO_COOKIE", NO_SUCH_OPTION)
        monkeypatch.setattr(tcp_peers, "SO_COOKIE", NO_SUCH_OPTION)
    elif request.param == "an emulator":
        monkeypatch.setattr(descriptors, "_LIBC", SimpleNamespace(getsockopt=refuse))
        monkeypatch.setattr(socket, "socket", Emulated)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture(params=["the dispatcher", "an entrance"])
def mark(
    request: pytest.FixtureRequest, server: socket.socket
) -> Iterator[Callable[[int], int | None]]:
    if request.param == "the dispatcher":
        yield descriptors.mark
    else:
        peers = TcpPeers(server.getsockname()[1])
        yield peers.came
        peers.close()


def test_a_connection_has_a_mark_of_its_own(
    server: socket.socket, mark: Callable[[int], int | None]
) -> None:
    """Without one the Dispatcher hears nobody."""
    with socket.create_connection(server.getsockname()), server.accept()[0] as first:
        fd, name = first.fileno(), mark(first.fileno())
        assert name is not None and mark(fd) == name
        copy = os.dup(fd)
        assert mark(copy) == name
        os.close(copy)
    assert mark(fd) is None, "closed"
    with socket.create_connection(server.getsockname()), server.accept()[0] as second:
        assert mark(second.fileno()) not in (None, name)


def test_what_is_no_socket_has_none(mark: Callable[[int], int | None]) -> None:
    read, write = os.pipe()
    assert mark(read) is None
    os.close(read)
    os.close(write)

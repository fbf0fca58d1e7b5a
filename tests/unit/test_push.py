"""Sending sockets by endpoint, over sockets that take what they are told to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import zmq

from blockflow.core.errors import RequestError, SystemError_
from blockflow.tensormq import push
from blockflow.tensormq.push import PushCache, Unsent

HERE, THERE = "ipc:///here", "ipc:///there"


class Socket:
    """Takes ``room`` messages more."""

    def __init__(self) -> None:
        self.room = 0
        self.sent: list[tuple[Any, bool]] = []
        self.closed: list[int | None] = []

    def _take(self, frames: Any, copy: bool) -> None:
        if not self.room:
            raise zmq.Again
        self.room -= 1
        self.sent.append((frames, copy))

    def send(self, frame: Any, flags: int) -> None:
        self._take([frame], True)

    def send_multipart(self, frames: Sequence[Any], flags: int, copy: bool) -> None:
        self._take(list(frames), copy)

    def close(self, linger_ms: int | None) -> None:
        self.closed.append(linger_ms)


class Poller:
    def __init__(self) -> None:
        self.watched: list[Any] = []

    def register(self, socket: Any, flags: int, /) -> None:
        assert socket not in self.watched and flags == zmq.POLLOUT
        self.watched.append(socket)

    def unregister(self, socket: Any, /) -> None:
        self.watched.remove(socket)


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sockets: dict[str, Socket] = {}
        self.poller = Poller()
        monkeypatch.setattr(push, "connect_push", self.connect)
        self.cache = PushCache(None, self.poller, max_pending=2)  # type: ignore[arg-type]

    def connect(self, ctx: object, endpoint: str, hwm: int, protect: object) -> Socket:
        return self.sockets.setdefault(endpoint, Socket())


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_what_waits_keeps_its_order_and_tensors_are_not_copied(scene: Scene) -> None:
    cache = scene.cache
    assert cache.send(HERE, [b"1", b"x"])
    assert cache.send(HERE, [b"2", b"x"])
    assert not cache.send(HERE, [b"3"]), "two are as many as may wait"
    socket = scene.sockets[HERE]
    assert scene.poller.watched == [socket] and cache.pending() == 2
    socket.room = 1
    assert cache.flush() == 1 and scene.poller.watched == [socket]
    socket.room = 3
    assert cache.send(HERE, [b"3"]), "and not before the second one"
    assert cache.flush() == 2 and not scene.poller.watched
    assert socket.sent == [([b"1", b"x"], False), ([b"2", b"x"], False), ([b"3"], True)]


def test_the_dead_get_nothing_more_and_who_is_not_needed_what_was_taken(scene: Scene) -> None:
    for endpoint in (HERE, THERE):
        scene.cache.send(endpoint, [b"1"], tag=endpoint)
    assert scene.cache.drop(HERE) == [Unsent(HERE, [b"1"], HERE)]
    assert scene.cache.retain([THERE]) == []
    assert scene.cache.retain([]) == [Unsent(THERE, [b"1"], THERE)]
    assert scene.sockets[HERE].closed == [0], "at once"
    assert scene.sockets[THERE].closed == [None], "after the linger time"
    assert not scene.poller.watched and scene.cache.close() == []


def test_without_a_descriptor_for_the_socket_a_message_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever sends answers for it, and lives."""
    scene = Scene(monkeypatch)
    connect = scene.connect

    def none(*_: Any) -> Any:
        raise SystemError_("NO_SPACE", "no socket can be made: Too many open files")

    monkeypatch.setattr(push, "connect_push", none)
    assert [scene.cache.send(HERE, [b"h"]) for _ in range(5)] == [False] * 5
    assert scene.cache.endpoints() == [] and len(caplog.records) == 3  # the 1st, 2nd and 4th
    monkeypatch.setattr(push, "connect_push", connect)
    assert scene.cache.send(HERE, [b"h"])

    def bad(*_: Any) -> Any:
        raise RequestError("INVALID_REQUEST", "no address")

    monkeypatch.setattr(push, "connect_push", bad)
    with pytest.raises(RequestError):
        scene.cache.send(THERE, [b"h"])


def test_a_message_that_cannot_be_sent_whole_does_not_go_on_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with zmq.Context() as ctx, ctx.socket(zmq.PULL) as there, ctx.socket(zmq.PUSH) as here:
        there.rcvtimeo, here.linger = 5_000, 0
        there.bind("inproc://there")
        here.connect("inproc://there")
        monkeypatch.setattr(push, "connect_push", lambda *_: here)
        send = here.send

        def scarce(part: Any, *args: Any, **kw: Any) -> Any:
            if part == b"no room":
                raise MemoryError
            return send(part, *args, **kw)

        monkeypatch.setattr(here, "send", scarce)
        cache = PushCache(ctx, zmq.Poller())
        with pytest.raises(MemoryError):
            cache.send("inproc://there", [b"head", b"no room"])
        assert cache.send("inproc://there", [b"other", b"tensor"])
        got = [there.recv_multipart() for _ in range(2)]
        assert got == [[b"head", b""], [b"other", b"tensor"]]

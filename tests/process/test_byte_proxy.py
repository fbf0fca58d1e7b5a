"""The byte-level proxy of the network faults: what it does to a stream, what its ledger says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import byte_proxy
import pytest
import zmq
from byte_proxy import ByteProxy, Framer
from dispatcher_rig import wait_until

MESSAGES = [[b"one"], [b"two", b"x" * 300], [b"", b"", b"three"]]


@pytest.fixture
def sockets() -> Iterator[tuple[Any, Any, ByteProxy]]:
    """A PUSH that reaches its PULL through a proxy."""
    context = zmq.Context()
    context.linger = 0
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    with ByteProxy(f"tcp://127.0.0.1:{port}") as proxy:
        push.setsockopt(zmq.RECONNECT_IVL, 10)
        push.connect(proxy.endpoint)
        try:
            yield push, pull, proxy
        finally:
            context.destroy()


def exchange(push: Any, pull: Any) -> list[list[bytes]]:
    for message in MESSAGES:
        push.send_multipart(message)
    return [take(pull) for _ in MESSAGES]


def take(pull: Any) -> list[bytes]:
    assert pull.poll(10_000)
    return list(pull.recv_multipart())


@pytest.mark.parametrize("size", [0, 1, 7])
def test_what_passes_is_what_came(sockets: tuple[Any, Any, ByteProxy], size: int) -> None:
    push, pull, proxy = sockets
    proxy.rule(slice_bytes=size)
    assert exchange(push, pull) == MESSAGES
    wait_until(lambda: not proxy.findings())
    if size:
        # The greeting may have passed before.
        assert proxy.total("up", "writes") >= sum(len(p) for m in MESSAGES for p in m) / size
    assert proxy.total("up", "messages") == len(MESSAGES)


def test_a_lost_message_is_in_the_ledger_and_nothing_else_is_lost(
    sockets: tuple[Any, Any, ByteProxy],
) -> None:
    push, pull, proxy = sockets
    proxy.rule("up", lose=1)
    for message in MESSAGES:
        push.send_multipart(message)
    assert [take(pull) for _ in MESSAGES[1:]] == MESSAGES[1:]
    assert proxy.total("up", "lost_messages") == 1
    wait_until(lambda: proxy.findings() == ["up: 5 bytes lost"])


def test_what_is_held_is_in_the_ledger_until_it_passes(
    sockets: tuple[Any, Any, ByteProxy],
) -> None:
    push, pull, proxy = sockets
    assert exchange(push, pull) == MESSAGES
    proxy.rule("up", hold=True)
    push.send(b"late")
    wait_until(lambda: proxy.findings() == ["up: 6 bytes not delivered"])
    assert not pull.poll(0)
    proxy.rule()
    assert take(pull) == [b"late"]
    wait_until(lambda: not proxy.findings())


def test_a_reset_loses_what_is_held(sockets: tuple[Any, Any, ByteProxy]) -> None:
    push, pull, proxy = sockets
    assert exchange(push, pull) == MESSAGES
    proxy.rule("up", hold=True)
    push.send(b"gone")
    wait_until(lambda: proxy.total("up", "messages") == len(MESSAGES) + 1)
    assert proxy.reset() == 1
    proxy.rule()

    def comes_through() -> bool:
        push.send(b"next")  # lost as well if its socket does not know of the reset yet
        return bool(pull.poll(100))

    wait_until(comes_through)
    assert take(pull) == [b"next"]
    assert proxy.connections == 2
    wait_until(lambda: proxy.findings() == ["up: 6 bytes not delivered"])


def test_an_altered_byte_is_found(
    sockets: tuple[Any, Any, ByteProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a proxy that changes what it passes on."""
    push, pull, proxy = sockets
    assert exchange(push, pull) == MESSAGES
    put = byte_proxy._Way._put

    async def spoil(self: Any, data: bytes) -> None:
        await put(self, data.replace(b"good", b"evil"))

    monkeypatch.setattr(byte_proxy._Way, "_put", spoil)
    push.send(b"good")
    assert take(pull) == [b"evil"]
    wait_until(lambda: proxy.findings() == ["up: bytes altered"])


def test_units_are_the_same_however_the_stream_is_cut() -> None:
    greeting = b"\xff" * 64
    # A command; a message with a heartbeat between its parts; one with a long length.
    units = [b"\x04\x03abc", b"\x01\x01x\x04\x01p\x00\x00", b"\x02" + bytes(7) + b"\x02hi"]
    stream = greeting + b"".join(units)
    for cut in range(1, len(stream)):
        framer = Framer()
        found = [u for n in range(0, len(stream), cut) for u in framer.feed(stream[n : n + cut])]
        assert b"".join(u.data for u in found) == stream
        assert [u.data for u in found[-3:]] == units
        assert [u.message for u in found[-3:]] == [False, True, True]

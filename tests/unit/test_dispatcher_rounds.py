"""The Dispatcher's loop: results and requests have their turns, whatever a message takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blockflow.dispatcher.server import DispatcherServer

MS = 1_000_000


@pytest.mark.parametrize("side", ["requests", "results"])
@pytest.mark.parametrize(("took_ms", "handled"), [(0, 100), (2, 3), (9, 1)])
def test_a_round_of_large_tensors_is_short(side: str, took_ms: int, handled: int) -> None:
    """Of requests of 16 MB each, 32 took 80 ms at the least, for which results waited."""
    now = 0
    left: list[bytes] = [b"message"] * 100

    def take(*_: Any) -> None:
        nonlocal now
        now += took_ms * MS
        left.pop()

    server: Any = SimpleNamespace(
        _clock=lambda: now,
        _reader=SimpleNamespace(read=lambda: left[:1], waits=True),
        _clients=SimpleNamespace(receive=lambda _: (b"client", left[:1]), more=lambda: True),
        exchange=SimpleNamespace(on_client=take, on_return=take),
    )
    serve: Any = {
        "requests": DispatcherServer._serve_clients,
        "results": DispatcherServer._serve_returns,
    }[side]
    serve(server)
    most = {"requests": 32, "results": 64}[side]
    assert 100 - len(left) == min(handled, most)


class Emptied:
    """Both sockets of a Dispatcher, with so many messages each; a read of none is an error."""

    def __init__(self, messages: int) -> None:
        self.left = [b"message"] * messages

    @property
    def waits(self) -> bool:
        return bool(self.left)

    def more(self) -> bool:
        return bool(self.left)

    def read(self) -> list[bytes]:
        return [self.left.pop()]

    def receive(self, _: int) -> tuple[bytes, list[bytes]]:
        return b"client", self.read()


@pytest.mark.parametrize("serve", ["_serve_clients", "_serve_returns"])
def test_a_socket_that_was_emptied_is_not_read_in_vain(serve: str) -> None:
    """pyzmq makes an exception of such a read: it costs as much as to ask three times."""
    sockets, handled = Emptied(2), []
    server: Any = SimpleNamespace(
        _clock=lambda: 0,
        _reader=sockets,
        _clients=sockets,
        exchange=SimpleNamespace(
            on_client=lambda *given: handled.append(given),
            on_return=handled.append,
            defect=lambda _: pytest.fail("it was read in vain"),
        ),
    )
    getattr(DispatcherServer, serve)(server)
    assert len(handled) == 2 and not sockets.left


@pytest.mark.parametrize(("every_us", "looked"), [(100, 20), (6000, 1000)])
def test_what_nobody_waits_for_has_its_turn_beside_messages(every_us: int, looked: int) -> None:
    """It took a third of a round's calls; a deadline is looked at in each."""
    now, seen, ticks = 0, 0, 0

    def come(_: int) -> list[tuple[int, int]]:
        nonlocal now
        now += every_us * 1000
        return [(7, 1)]

    def tick(_: int) -> None:
        nonlocal ticks
        ticks += 1

    def look(*_: Any) -> None:
        nonlocal seen
        seen += 1

    server = DispatcherServer.__new__(DispatcherServer)
    parts: dict[str, Any] = {
        "_clock": lambda: now,
        "_poller": SimpleNamespace(poll=come),
        "_returns": None,
        "_clients": SimpleNamespace(
            socket=None, departures=None, look=look, next_look_ms=lambda: None
        ),
        "_grants": SimpleNamespace(
            watches=lambda _: False, tick=lambda _: None, next_due=lambda: None
        ),
        "_mailbox": SimpleNamespace(fileno=lambda: 3),
        "_push": SimpleNamespace(flush=lambda: 0),
        "_desk": SimpleNamespace(ebb=lambda _: None),
        "_chores_ns": 0,
        "_opens_ns": None,
        "_drained": 1,
        "_empty_due": False,
        "_cpu_latency": SimpleNamespace(hold=lambda _: None),
        "exchange": SimpleNamespace(
            tick=tick,
            next_due=lambda: now + 1500,
            wakefulness=SimpleNamespace(wanted_us=lambda _: None),
            planner=SimpleNamespace(version=1),
        ),
    }
    vars(server).update(parts)
    for _ in range(1000):
        server.step(0)
    assert (ticks, seen, server._wait_ms) == (1000, looked, 1)
    come_none: Any = SimpleNamespace(poll=lambda _: [])
    server._poller = come_none
    server.step(0)
    assert seen == looked + 1, "nothing came: it has time"

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
        _reader=SimpleNamespace(read=lambda: left[:1]),
        _clients=SimpleNamespace(receive=lambda _: (b"client", left[:1]) if left else None),
        exchange=SimpleNamespace(on_client=take, on_return=take),
    )
    serve: Any = {
        "requests": DispatcherServer._serve_clients,
        "results": DispatcherServer._serve_returns,
    }[side]
    serve(server)
    most = {"requests": 32, "results": 64}[side]
    assert 100 - len(left) == min(handled, most)

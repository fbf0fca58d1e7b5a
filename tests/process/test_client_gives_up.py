"""Who stops waiting for an answer leaves nothing of it behind in the client."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from dispatcher_rig import wait_until
from fake_dispatcher import FakeDispatcher

from blockflow.client import AsyncClient, Client
from blockflow.client.pending import PendingRequest

X = np.ones((1, 4), np.float32)


@pytest.mark.parametrize("call", ["tasks", "wait_ready", "infer"])
def test_ctrl_c_ends_what_was_waited_for(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a wait for tasks that are absent goes on asking for them."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(PendingRequest, "result", interrupted)
    args: dict[str, tuple[Any, ...]] = {"infer": ("silent", X), "wait_ready": ("absent",)}
    with FakeDispatcher() as fake, Client(fake.endpoint) as client:
        with pytest.raises(KeyboardInterrupt):
            getattr(client, call)(*args.get(call, ()))
        wait_until(lambda: not client._connection._io._ends)


def test_a_wait_that_a_coroutine_gives_up_is_not_asked_for() -> None:
    async def main(endpoint: str) -> None:
        async with AsyncClient(endpoint) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.wait_ready("absent", timeout_s=3600), 0.05)
            wait_until(lambda: not client._connection._io._ends)

    with FakeDispatcher() as fake:
        asyncio.run(main(fake.endpoint))

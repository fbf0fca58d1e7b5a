"""A call that has failed holds nothing: whoever catches the error has the input's memory back, also
where no garbage collector runs."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
import weakref
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from blockflow.client import AsyncClient, Client
from blockflow.core.errors import BlockFlowError


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody answers."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def kept() -> tuple[Any, weakref.ref[Any]]:
    x = np.ones((4, 1024), np.float32)
    return x, weakref.ref(x)


def gone(ref: weakref.ref[Any]) -> bool:
    """A circle would stay for ever. The thread that has told of the failure may be on its way out
    of the call yet."""
    until = time.monotonic() + 10
    while ref() is not None and time.monotonic() < until:
        time.sleep(0.001)
    return ref() is None


def test_a_failed_call_leaves_no_circle(nobody: str) -> None:
    with Client(nobody, connect_timeout_s=0.1) as client:
        x, ref = kept()
        code = "OK"
        try:  # pytest would keep the error, and so the frames
            client.infer("task", x, deadline_s=5)
        except BlockFlowError as e:
            code = e.code
        del x
        assert code == "NOT_RUNNING"
        assert gone(ref)


def test_nor_does_one_that_is_awaited(nobody: str) -> None:
    async def call(client: AsyncClient, x: Any) -> str:
        try:
            await client.infer("task", x, deadline_s=5)
        except BlockFlowError as e:
            return e.code
        return "OK"

    async def main() -> None:
        async with AsyncClient(nobody, connect_timeout_s=0.1) as client:
            x, ref = kept()
            assert await call(client, x) == "NOT_RUNNING"
            del x
            assert gone(ref)

    asyncio.run(main())


def test_the_package_says_that_it_is_typed() -> None:
    assert (files("blockflow") / "py.typed").is_file()

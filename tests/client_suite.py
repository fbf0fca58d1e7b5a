"""Both clients and both ways of tensors, for the tests that all of them pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from client_faces import AsyncFace, SyncFace
from fake_dispatcher import FakeDispatcher

from blockflow.core.errors import BlockFlowError

X = np.arange(12, dtype=np.float32).reshape(3, 4)


Make = Callable[..., Any]


@pytest.fixture(params=["off", "auto"], ids=["messages", "slots"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """In the one way the suite's small tensors go through granted memory as large ones would."""
    if request.param == "auto":
        for module in ("client.sharing", "dispatcher.grants"):
            monkeypatch.setattr(f"blockflow.{module}.MIN_TENSOR_BYTES", 1)
    return str(request.param)


@contextmanager
def maker(face: Make, **always: Any) -> Iterator[Make]:
    """Makes clients of an address, which are closed at the end."""
    made: list[Any] = []

    def build(address: str, **kw: Any) -> Any:
        made.append(face(address, **always, **kw))
        return made[-1]

    yield build
    for client in made:
        client.close()


@pytest.fixture(params=[SyncFace, AsyncFace], ids=["sync", "async"])
def make(request: pytest.FixtureRequest, way: str) -> Iterator[Make]:
    with maker(request.param, shared_memory=way) as build:
        yield build
    names = [t.name for t in threading.enumerate()]
    assert "blockflow-client" not in names


@pytest.fixture
def dispatcher() -> Iterator[FakeDispatcher]:
    with FakeDispatcher() as fake:
        yield fake


def code_of(call: Callable[[], Any]) -> str:
    with pytest.raises(BlockFlowError) as info:
        call()
    return info.value.code

"""What callers of both clients may get wrong: the call is refused, and the client serves on."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from client_faces import AsyncFace, SyncFace
from fake_dispatcher import FakeDispatcher

from blockflow.client import AsyncClient, Client
from blockflow.core.errors import BlockFlowError

X = np.ones((1, 4), np.float32)


@pytest.fixture
def dispatcher() -> Iterator[FakeDispatcher]:
    with FakeDispatcher() as fake:
        yield fake


@pytest.fixture(params=[SyncFace, AsyncFace], ids=["sync", "async"])
def client(request: pytest.FixtureRequest, dispatcher: FakeDispatcher) -> Iterator[Any]:
    face = request.param(dispatcher.endpoint)
    yield face
    face.close()


def code_of(call: Callable[[], Any]) -> str:
    with pytest.raises(BlockFlowError) as info:
        call()
    return info.value.code


@pytest.mark.parametrize(
    "names", [[1], [b"echo"], b"echo", [None, "echo"], None, 5, "", ["\ud800"]]
)
def test_waiting_for_what_is_no_name_is_refused_and_disturbs_nobody(
    client: Any, dispatcher: FakeDispatcher, names: Any
) -> None:
    held = client.submit("held", X)
    dispatcher.wait_for(lambda: len(dispatcher.requests) == 1)
    assert code_of(lambda: client.wait_ready(names, timeout_s=0.1)) == "INVALID_REQUEST"
    dispatcher.release()
    assert np.array_equal(held.result(5).value, X)


def test_waiting_for_a_str_is_waiting_for_one_task(client: Any) -> None:
    assert "echo" in client.wait_ready("echo", timeout_s=5)
    with pytest.raises(BlockFlowError, match="not published in time: absent"):
        client.wait_ready("absent", timeout_s=0.1)


def test_patience_beyond_what_a_poller_counts_disturbs_nobody(client: Any) -> None:
    assert code_of(lambda: client.wait_ready("absent", timeout_s=0.1)) == "NOT_READY"
    # Connected, and with no other time to wake up at.
    assert "echo" in client.tasks(timeout_s=1e300)
    assert np.array_equal(client.infer("echo", X).value, X)


@pytest.mark.parametrize(
    "rid",
    [
        uuid.UUID(bytes=bytes(range(16))).int,
        10**10,
        pytest.param(10**5000, id="not-even-printable"),
        -1,
        np.int64(5),
        1.5,
    ],
)
def test_a_number_is_no_request_id(client: Any, rid: Any) -> None:
    assert code_of(lambda: client.infer("echo", X, request_id=rid)) == "INVALID_REQUEST"


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_request_ids_are_sixteen_bytes_of_any_kind(client: Any, make: Any) -> None:
    raw = bytes(range(16))
    assert client.infer("echo", X, request_id=make(raw)).request_id == raw
    assert client.infer("echo", X, request_id=uuid.UUID(bytes=raw)).request_id == raw


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "arguments",
    [
        {"address": 5},
        {"address": b"tcp://127.0.0.1:1"},
        {"address": "ipc://\ud800"},
        {"connect_timeout_s": 0},
        {"connect_timeout_s": float("nan")},
        {"connect_timeout_s": float("inf")},
        {"connect_timeout_s": "5"},
        {"max_pending": 0},
        {"max_pending": 1.5},
        {"max_pending": "5"},
    ],
)
def test_a_client_is_not_made_with_odd_arguments(kind: Any, arguments: dict[str, Any]) -> None:
    assert code_of(lambda: kind(**arguments)) == "INVALID_REQUEST"

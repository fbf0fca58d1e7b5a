"""What callers of both clients may get wrong: the call is refused, and the client serves on."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import client_suite
import numpy as np
import pytest
from client_faces import AsyncFace, SyncFace
from client_suite import code_of
from fake_dispatcher import FakeDispatcher

from blockflow.client import AsyncClient, Client
from blockflow.core.errors import BlockFlowError

X = np.ones((1, 4), np.float32)


dispatcher = client_suite.dispatcher


@pytest.fixture(params=[SyncFace, AsyncFace], ids=["sync", "async"])
def client(request: pytest.FixtureRequest, dispatcher: FakeDispatcher) -> Iterator[Any]:
    face = request.param(dispatcher.endpoint)
    yield face
    face.close()


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
    for ask in (client.tasks, client.wait_ready):
        assert code_of(lambda ask=ask: ask(timeout_s=float("nan"))) == "INVALID_REQUEST"
    assert np.array_equal(client.infer("echo", X).value, X)


@pytest.mark.parametrize("name", ["deadline_s", "retries", "errors", "results", "tasks"])
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_beyond_what_can_be_written_are_refused_like_others(
    client: Any, name: str, sign: int
) -> None:
    given = sign * 10**5000
    call = {"tasks": "echo", "x": X, name: [given] if name == "tasks" else given}
    assert code_of(lambda: client.infer(**call)) == "INVALID_REQUEST"


def in_callback(client: Any, dispatcher: FakeDispatcher, call: Callable[[], Any]) -> Any:
    """What ``call`` gives, or raises, in a callback of the client: in its own thread."""
    outcome: Future[Any] = Future()

    def callback(_: Any) -> None:
        try:
            outcome.set_result(call())
        except BaseException as exc:
            outcome.set_exception(exc)

    first = client.submit("held", X)
    dispatcher.wait_for(lambda: len(dispatcher.requests) == 1)
    first.add_done_callback(callback)  # not answered yet: it will run in the client's thread
    dispatcher.release()
    return outcome.result(10)


@pytest.mark.parametrize(
    "wait",
    [
        lambda c: c.infer("echo", X, deadline_s=1),
        lambda c: c.submit("echo", X, deadline_s=1).result(),
        lambda c: c.submit("echo", X, deadline_s=1).exception(5),
        lambda c: c.tasks(),
        lambda c: c.wait_ready(["echo"]),
    ],
    ids=["infer", "result", "exception", "tasks", "wait_ready"],
)
def test_a_callback_cannot_wait_for_its_own_client(dispatcher: FakeDispatcher, wait: Any) -> None:
    with Client(dispatcher.endpoint) as client:
        with pytest.raises(BlockFlowError, match=r"INVALID_REQUEST.*use submit"):
            in_callback(client, dispatcher, lambda: wait(client))
        assert np.array_equal(client.infer("echo", X, deadline_s=5).value, X)


@pytest.mark.parametrize("wait", ["infer", "tasks", "wait_ready"])
def test_nor_can_an_event_loop_in_a_callback(dispatcher: FakeDispatcher, wait: str) -> None:
    args = ("echo", X) if wait == "infer" else ()
    client = AsyncClient(dispatcher.endpoint)
    with pytest.raises(BlockFlowError, match=r"INVALID_REQUEST.*use submit"):
        in_callback(client, dispatcher, lambda: asyncio.run(getattr(client, wait)(*args)))
    assert np.array_equal(asyncio.run(client.infer("echo", X)).value, X)
    asyncio.run(client.close())


def test_a_callback_may_submit_read_and_wait_for_another_client(
    client: Any, dispatcher: FakeDispatcher
) -> None:
    chained = in_callback(client, dispatcher, lambda: client.submit("echo", X))
    assert np.array_equal(chained.result(5).value, X)
    dispatcher.requests.clear()
    with Client(dispatcher.endpoint) as other:
        found = in_callback(client, dispatcher, lambda: (chained.result(), other.infer("echo", X)))
    assert [r.task for r in found] == ["echo", "echo"]


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("call", ["infer", "wait_ready"])
def test_callbacks_of_several_clients_cannot_wait_for_one_another(
    dispatcher: FakeDispatcher, number: int, call: str
) -> None:
    clients = [Client(dispatcher.endpoint) for _ in range(number)]
    meet = threading.Barrier(number)
    ended: list[Future[Any]] = [Future() for _ in clients]

    def callback(i: int, _: Any) -> None:
        meet.wait(10)  # each thread is in its callback
        other = clients[(i + 1) % number]
        try:
            ended[i].set_result(getattr(other, call)(*(("echo", X) if call == "infer" else ())))
        except BlockFlowError as exc:
            ended[i].set_exception(exc)

    for i, client in enumerate(clients):
        client.submit("held", X).add_done_callback(partial(callback, i))
    dispatcher.wait_for(lambda: len(dispatcher.requests) == number)
    dispatcher.release()
    errors = [f.exception(10) for f in ended]
    refused = [e for e in errors if e is not None]
    assert refused
    assert all("cannot wait for a client that waits" in str(e) for e in refused)
    for client in clients:
        assert np.array_equal(client.infer("echo", X).value, X)
        client.close()


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_callback_that_wants_to_end_its_thread_ends_nobody_elses_requests(
    client: Any, dispatcher: FakeDispatcher, end: type[BaseException]
) -> None:
    def callback(_: Any) -> None:
        raise end

    first, second = (client.submit("held", X) for _ in range(2))
    dispatcher.wait_for(lambda: len(dispatcher.requests) == 2)
    first.add_done_callback(callback)
    dispatcher.release()
    assert np.array_equal(second.result(5).value, X)
    assert np.array_equal(client.infer("echo", X).value, X)


def test_a_callback_may_close_its_client(dispatcher: FakeDispatcher) -> None:
    sync = Client(dispatcher.endpoint)
    in_callback(sync, dispatcher, sync.close)
    dispatcher.requests.clear()
    asynchronous = AsyncClient(dispatcher.endpoint)
    in_callback(asynchronous, dispatcher, lambda: asyncio.run(asynchronous.close()))
    for thread in threading.enumerate():
        if thread.name == "blockflow-client":
            thread.join(5)
            assert not thread.is_alive()


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


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_client_is_not_copied_nor_sent_to_another_process(
    dispatcher: FakeDispatcher, kind: Any, how: Callable[[Any], Any]
) -> None:
    """Pickling asks the same method."""
    made = kind(dispatcher.endpoint)
    with pytest.raises(TypeError, match=f"an? {kind.__name__}: .*make one in each process"):
        how(made)
    asyncio.run(made.close()) if kind is AsyncClient else made.close()


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_nor_is_a_request_under_way(client: Any, how: Callable[[Any], Any]) -> None:
    """Nobody would end a copy."""
    with pytest.raises(TypeError, match=r"a PendingRequest: .*pass on its result\(\)"):
        how(client.submit("held", X))


@pytest.mark.parametrize("names", [b"two", bytearray(b"two"), memoryview(b"two")])
def test_bytes_are_no_names_of_tasks(client: Any, names: Any) -> None:
    with pytest.raises(BlockFlowError, match=f"not {type(names).__name__}") as e:
        client.infer(names, X)
    assert e.value.code == "INVALID_REQUEST"


def test_a_name_that_would_act_on_a_terminal_is_shown_as_text(client: Any) -> None:
    with pytest.raises(BlockFlowError, match="printable") as e:
        client.infer("echo\n\x1b[2J", X)
    assert e.value.code == "INVALID_REQUEST"
    assert str(e.value).isprintable()


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), 5])
def test_a_dtype_is_a_name(client: Any, dtype: Any) -> None:
    with pytest.raises(BlockFlowError, match="a string, not") as e:
        client.infer("echo", X, dtype=dtype)
    assert e.value.code == "INVALID_REQUEST"
    assert np.array_equal(client.infer("echo", X, dtype="float32").value, X)


def test_awaiting_in_a_callback_is_refused_as_waiting_is(dispatcher: FakeDispatcher) -> None:
    client = AsyncClient(dispatcher.endpoint)

    async def wait() -> Any:
        return await client.submit("echo", X, deadline_s=1)

    with pytest.raises(BlockFlowError, match=r"INVALID_REQUEST.*use submit"):
        in_callback(client, dispatcher, lambda: asyncio.run(wait()))
    asyncio.run(client.close())

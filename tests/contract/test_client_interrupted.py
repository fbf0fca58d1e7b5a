"""What a signal's handler raises may leave the lock of a request taken: its caller can wait for the
answer yet, and nobody else has any trouble."""

from __future__ import annotations

import concurrent.futures
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from fake_dispatcher import FakeDispatcher

from blockflow.client import Client
from blockflow.client.thread import SharedLock

X = np.ones((1, 4), np.float32)


@pytest.fixture
def client() -> Iterator[Client]:
    with FakeDispatcher() as fake, Client(fake.endpoint) as made:
        yield made


OURS = tuple(f"blockflow.client.{name}" for name in ("io", "pending", "thread", "wakeup"))
FUTURES = (*OURS, "concurrent.futures._base")


@contextmanager
def interrupted(at: int, places: tuple[str, ...]) -> Iterator[list[str]]:
    """Raise KeyboardInterrupt at the ``at``-th place of what is run where the interpreter looks for
    signals: where a function of these modules begins, and where one of C that it calls returns."""
    seen: list[str] = []

    def look_for_signals(frame: Any, event: str, _: Any) -> None:
        if event in ("call", "c_return") and frame.f_globals.get("__name__") in places:
            seen.append(frame.f_code.co_name)
            if len(seen) == at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        sys.setprofile(look_for_signals)
        try:
            yield seen
        finally:
            sys.setprofile(None)


def let_go(pending: Any) -> None:
    """As at the end of its thread, which the tests' is not."""
    while pending.lock._is_owned():
        pending.lock._lock.release()
    for waiter in pending._waiters:
        waiter.event._cond.acquire(blocking=False)
        waiter.event._cond.release()
    SharedLock.held.depth = 0


def look(pending: Any) -> None:
    pending.done()
    pending.exception(5)


def wait(pending: Any) -> None:
    with suppress(RuntimeError):  # of threading's own event, which is told so in its wait
        concurrent.futures.wait([pending], 5)


@pytest.mark.parametrize("call", [look, wait])
def test_wherever_a_wait_is_interrupted_others_are_served(
    client: Client, call: Callable[[Any], None]
) -> None:
    """The event in which several are waited for may be left taken as well; then nobody waits in it
    any more."""
    asked: list[Any] = []
    seen: list[str] = []
    while len(seen) >= len(asked):
        asked.append(client.submit("echo", X))
        with interrupted(len(asked), (*FUTURES, "threading")) as seen:
            call(asked[-1])
        assert client.submit("echo", X).result(5).task == "echo"
    assert len(asked) > 10
    for pending in asked:
        let_go(pending)
    assert all(pending.result(5).task == "echo" for pending in asked)


def test_wherever_a_call_is_interrupted_others_are_served(client: Client) -> None:
    found: list[str] = []
    seen: list[str] = []
    while len(seen) >= len(found):
        with interrupted(len(found) + 1, (*FUTURES, "threading")) as seen:
            client.submit("echo", X)
        thread = threading.Thread(target=lambda: found.append(client.infer("echo", X).task))
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
    assert len(found) > 10


def test_a_client_ends_with_such_a_lock_taken_and_tells_its_owner_later(client: Client) -> None:
    pending = client.submit("held", X)
    pending.lock.acquire()
    io = client._connection._io
    io.shut_down()  # as at the program's end
    assert io.ended.done()
    with pytest.raises(Exception, match="CANCELLED"):
        pending.result(5)
    let_go(pending)
    io._thread.join(5)
    assert not io._thread.is_alive()

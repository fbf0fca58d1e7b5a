"""The lock that a client's thread takes as well as its callers; and that the thread is one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest

from blockflow.client import Client
from blockflow.client.ends import Ends, Owner
from blockflow.client.outcome import Failed
from blockflow.client.thread import ClientThread, SharedLock
from blockflow.core.errors import RequestError


@contextmanager
def nobody() -> Iterator[str]:
    """An address where nobody answers."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{bound.getsockname()[1]}"


def elsewhere(lock: SharedLock) -> bool:
    """What another thread is told."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(lock.locked()))
    thread.start()
    thread.join()
    return found[0]


def test_whether_it_is_held_is_told_to_who_holds_it_and_to_others() -> None:
    held, lock = SharedLock.held, SharedLock()
    assert not lock.locked() and not elsewhere(lock)
    with lock, lock:
        assert lock.locked() and elsewhere(lock)
        assert held.depth == 2
    assert not lock.locked() and not elsewhere(lock)
    assert held.depth == 0


def test_who_waits_in_a_condition_of_it_holds_it_no_more() -> None:
    """Whatever the Condition of this Python asks of its lock."""
    held, lock = SharedLock.held, SharedLock()
    condition = threading.Condition(cast(Any, lock))
    seen: list[bool] = []

    def other() -> None:
        with condition:  # which is free by now
            seen.append(lock.locked())
            condition.notify()

    with condition, condition:
        thread = threading.Thread(target=other)
        thread.start()
        assert condition.wait(60)
        assert held.depth == 2
    thread.join()
    assert seen == [True] and held.depth == 0 and not lock.locked()


def test_a_thread_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where gevent has replaced them: its first wait would stop its maker's."""
    ran: list[int] = []
    begun = ClientThread(lambda: ran.append(1))
    begun.start()
    begun.join()
    begun.check("tcp://127.0.0.1:1")
    assert ran == [1]
    feigned = ClientThread(lambda: ran.append(2))
    feigned.run()
    assert ran == [1]
    monkeypatch.setattr(ClientThread, "start", lambda self: setattr(self, "_feigned", True))
    with pytest.raises(RequestError, match="needs a thread") as refused:
        Client("tcp://127.0.0.1:1")
    assert refused.value.code == "INVALID_REQUEST"


def test_callbacks_may_close_one_another_s_clients() -> None:
    """At the same moment, as when both have lost the same Dispatcher."""
    both = threading.Barrier(2)
    closed = threading.Semaphore(0)
    with nobody() as address:
        clients = [Client(address, connect_timeout_s=0.01) for _ in range(2)]

        def close_other(other: Client) -> None:
            both.wait(20)
            other.close()
            closed.release()

        for one, other in (clients, clients[::-1]):
            pending = one.submit("task", np.ones((1, 4), np.float32), deadline_s=5)
            pending.add_done_callback(lambda _, other=other: close_other(other))
        assert all(closed.acquire(timeout=20) for _ in clients)
    for client in clients:
        client.close()


def test_who_holds_a_client_s_lock_waits_for_no_client_s_thread() -> None:
    """As in the handler of a signal that came in the middle of a call: a callback of the client
    that it closes may want the lock."""
    lock = SharedLock()
    wanted, closed = threading.Event(), threading.Event()

    def callback(_: object) -> None:
        wanted.set()
        with lock:
            pass

    def handler(client: Client) -> None:
        with lock:
            pending = client.submit("task", np.ones((1, 4), np.float32), deadline_s=5)
            pending.add_done_callback(callback)
            assert wanted.wait(20)
            client.close()
        closed.set()

    with nobody() as address, Client(address, connect_timeout_s=0.01) as client:
        threading.Thread(target=handler, args=(client,), daemon=True).start()
        assert closed.wait(20)


def test_one_that_never_gets_free_holds_up_nobody_else() -> None:
    """Who is in passing at his own when he should be told is told soon, not when that is looked at
    again."""
    told: list[Any] = []
    ends, left, taken = Ends(), SharedLock(), SharedLock()
    outcome = Failed(b"", RequestError("CANCELLED", "by the test"))

    def aside(call: Callable[..., Any], *given: Any) -> int:
        """As the client's thread, until it has to wait."""
        thread = threading.Thread(target=call, args=given)
        thread.start()
        thread.join()
        due = ends.next_wakeup()
        assert due is not None and not told
        return due

    with left, taken:
        now = due = aside(ends.tell_to, Owner(told.append, left.gets_free), outcome)
        for _ in range(20):
            now, due = due, aside(ends.retry, due)
        assert aside(ends.tell_to, Owner(told.append, taken.gets_free), outcome) <= now < due

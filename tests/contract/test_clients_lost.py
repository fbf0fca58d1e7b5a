"""Both clients without a Dispatcher: nobody there yet, one that dies, one that stays away."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from fake_dispatcher import FakeDispatcher

from tests import client_suite
from tests.client_suite import Make, X, code_of

way, make, dispatcher = client_suite.way, client_suite.make, client_suite.dispatcher


def test_nobody_there_is_an_error_within_the_connect_timeout(make: Make, tmp_path: Any) -> None:
    client = make(f"ipc://{tmp_path}/none.sock", connect_timeout_s=0.3)
    start = time.monotonic()
    assert code_of(lambda: client.infer("echo", X)) == "NOT_RUNNING"
    assert code_of(lambda: client.tasks()) == "NOT_RUNNING"
    assert code_of(lambda: client.wait_ready(timeout_s=0.2)) == "NOT_RUNNING"
    assert time.monotonic() - start < 3


def test_requests_wait_for_a_dispatcher_that_starts_late(make: Make, tmp_path: Any) -> None:
    address = f"ipc://{tmp_path}/late.sock"
    client = make(address)
    pending = client.submit("echo", X)
    with FakeDispatcher(address):
        assert np.array_equal(pending.result(10).value, X)


def test_a_dead_dispatcher_loses_what_is_in_flight_and_no_more(make: Make, tmp_path: Any) -> None:
    address = f"ipc://{tmp_path}/d.sock"
    first = FakeDispatcher(address)
    client = make(address)
    in_flight = client.submit("held", X)
    first.wait_for(lambda: len(first.requests) == 1)
    first.stop()
    assert code_of(lambda: in_flight.result(5)) == "CONNECTION_LOST"
    waiting = client.submit("echo", X)
    with FakeDispatcher(address):
        assert np.array_equal(waiting.result(10).value, X)
        assert np.array_equal(client.infer("echo", X).value, X)
        assert client.counters().disconnects == 1


def test_a_request_with_retries_goes_to_the_next_dispatcher(make: Make, tmp_path: Any) -> None:
    address = f"ipc://{tmp_path}/d.sock"
    first = FakeDispatcher(address)
    client = make(address, connect_timeout_s=20)
    in_flight = client.submit("held", X, retries=1, deadline_s=60)
    first.wait_for(lambda: len(first.requests) == 1)
    first.stop()
    with FakeDispatcher(address) as second:
        second.wait_for(lambda: len(second.requests) == 1)
        (before,), (again,) = first.requests, second.requests
        assert (before.tries, again.tries) == (1, 2)
        assert (before.request_id, before.tasks) == (again.request_id, again.tasks)
        second.release()
        assert np.array_equal(in_flight.result(20).value, X)
    assert client.counters().retries == 1


def test_a_dispatcher_that_stays_away_is_connection_lost(make: Make, tmp_path: Any) -> None:
    address = f"ipc://{tmp_path}/d.sock"
    first = FakeDispatcher(address)
    client = make(address, connect_timeout_s=0.3)
    client.infer("echo", X)
    first.stop()
    assert code_of(lambda: client.infer("echo", X)) == "CONNECTION_LOST"

"""One suite for both clients and both ways of tensors: they must not drift apart."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
import uuid
from typing import Any

import numpy as np
import pytest
from fake_dispatcher import TASKS, FakeDispatcher

from blockflow.client import AsyncClient
from blockflow.core.errors import RequestError
from blockflow.wire.client import Reply, encode_to_client
from tests import client_suite
from tests.client_suite import Make, X, code_of

RID = bytes(range(16))

way, make, dispatcher = client_suite.way, client_suite.make, client_suite.dispatcher


def test_one_task_gives_a_result_with_its_times(make: Make, dispatcher: FakeDispatcher) -> None:
    result = make(dispatcher.endpoint).infer("echo", X)
    assert np.array_equal(result.value, X)
    assert result.value.flags.writeable
    assert (result.task, result.dtype, result.epoch) == ("echo", "float32", 1)
    assert [t.block for t in result.timings] == ["b1", "b2"]
    first = result.timings[0]
    assert (first.transit_ms, first.wait_ms, first.overhead_ms, first.compute_ms) == (
        0.001,
        2.0,
        0.03,
        4.0,
    )
    assert first.total_ms == pytest.approx(6.031)
    assert (result.total_ms, result.ingress_ms, result.egress_ms) == (12.092, 0.01, 0.02)
    assert result.compute_ms == 8.0
    assert result.rtt_ms > 0
    assert len(result.request_id) == 16


def test_several_tasks_give_a_map(make: Make, dispatcher: FakeDispatcher) -> None:
    client = make(dispatcher.endpoint)
    results = client.infer(["echo", "double"], X)
    assert list(results) == ["echo", "double"]
    assert np.array_equal(results["double"].value, np.concatenate([X, X]))
    assert len(dispatcher.requests) == 1
    assert list(client.infer(["echo"], X)) == ["echo"]


def test_errors_are_raised_or_returned(make: Make, dispatcher: FakeDispatcher) -> None:
    client = make(dispatcher.endpoint)
    assert code_of(lambda: client.infer("fail", X)) == "BLOCK_FAILED"
    assert code_of(lambda: client.infer(["echo", "fail"], X)) == "BLOCK_FAILED"
    mixed = client.infer(["echo", "fail"], X, errors="return")
    assert np.array_equal(mixed["echo"].value, X)
    assert mixed["fail"].code == "BLOCK_FAILED"
    assert client.infer("fail", X, errors="return").code == "BLOCK_FAILED"
    assert code_of(lambda: client.infer("nonsense", X)) == "UNKNOWN_TASK"
    assert code_of(lambda: client.infer("echo", X, errors="ignore")) == "INVALID_REQUEST"


def test_many_requests_in_flight_on_one_connection(make: Make, dispatcher: FakeDispatcher) -> None:
    client = make(dispatcher.endpoint)
    inputs = [np.full((1, 4), i, dtype=np.float32) for i in range(200)]
    pending = [client.submit("held", x) for x in inputs]
    dispatcher.wait_for(lambda: len(dispatcher.requests) == 200)
    assert not any(p.done() for p in pending)
    dispatcher.release()
    for x, p in zip(inputs, pending, strict=True):
        assert np.array_equal(p.result(10).value, x)
    counters = client.counters()
    assert (counters.connects, counters.submitted, counters.answered) == (1, 200, 200)


def test_threads_share_a_client(make: Make, dispatcher: FakeDispatcher) -> None:
    client = make(dispatcher.endpoint)
    wrong: list[int] = []

    def work(n: int) -> None:
        for i in range(20):
            x = np.full((1, 4), 100 * n + i, dtype=np.float32)
            if not np.array_equal(client.infer("echo", x).value, x):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_a_deadline_ends_the_request_even_if_nobody_answers(
    make: Make, dispatcher: FakeDispatcher
) -> None:
    client = make(dispatcher.endpoint)
    client.wait_ready()
    start = time.monotonic()
    assert code_of(lambda: client.infer("silent", X, deadline_s=0.2)) == "DEADLINE_EXCEEDED"
    took = time.monotonic() - start
    assert 0.29 <= took < 1.5
    assert dispatcher.requests[0].deadline_ms <= 200


def test_without_a_deadline_the_topologys_own_holds(make: Make) -> None:
    with FakeDispatcher(deadline_ms=150) as fake:
        client = make(fake.endpoint)
        assert code_of(lambda: client.infer("silent", X)) == "DEADLINE_EXCEEDED"
        assert 100 <= fake.requests[0].deadline_ms <= 150
        # A new epoch may have other deadlines.
        fake.deadline_ms, fake.epoch = 7000, 2
        client.infer("echo", X)
        client.infer("echo", X)
        assert fake.requests[-1].deadline_ms > 5000


@pytest.mark.parametrize("bad", [0, -1, 61, float("nan"), float("inf"), "1"])
def test_impossible_deadlines_are_refused(
    make: Make, dispatcher: FakeDispatcher, bad: float
) -> None:
    client = make(dispatcher.endpoint)
    with pytest.raises(RequestError) as e:
        client.infer("echo", X, deadline_s=bad)
    assert e.value.code == "INVALID_REQUEST"
    assert repr(bad) in e.value.message, "what was given, not what it was taken for"


def test_cancel_reaches_the_dispatcher(make: Make, dispatcher: FakeDispatcher) -> None:
    client = make(dispatcher.endpoint)
    pending = client.submit("held", X)
    dispatcher.wait_for(lambda: len(dispatcher.requests) == 1)
    assert pending.cancel()
    assert code_of(lambda: pending.result(5)) == "CANCELLED"
    dispatcher.wait_for(lambda: dispatcher.cancelled == [pending.request_id])
    assert not pending.cancel()
    dispatcher.release()  # the late answer is dropped and counted
    client.infer("echo", X)
    assert client.counters().late_replies == 1


def test_a_cancelled_request_ends_as_one_with_an_error(
    make: Make, dispatcher: FakeDispatcher
) -> None:
    """As docs/client.md has it: for concurrent.futures it was not cancelled."""
    pending = make(dispatcher.endpoint).submit("held", X)
    assert pending.cancel()
    assert code_of(lambda: pending.result(5)) == "CANCELLED"
    assert pending.done() and not pending.cancelled()
    assert concurrent.futures.wait([pending], timeout=5).done == {pending}


def test_what_submit_gives_can_be_awaited(dispatcher: FakeDispatcher) -> None:
    async def run() -> None:
        async with AsyncClient(dispatcher.endpoint) as client:
            first = client.submit("echo", X)
            assert np.array_equal((await first).value, X)
            assert (await first) is first.result()  # again, now that it is there
            both = await asyncio.gather(client.submit("echo", X), client.submit("double", X))
            assert [r.task for r in both] == ["echo", "double"]
            with pytest.raises(RequestError) as e:
                await client.submit("nonsense", X)
            assert e.value.code == "UNKNOWN_TASK"
            held = client.submit("held", X)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await held
            assert code_of(lambda: held.result(5)) == "CANCELLED"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("rid", "want"),
    [
        (RID, RID),
        (bytearray(RID), RID),
        (memoryview(RID), RID),
        (uuid.UUID(bytes=RID), RID),
        (RID.hex(), RID),
    ],
)
def test_request_ids_may_be_given(
    make: Make, dispatcher: FakeDispatcher, rid: Any, want: bytes
) -> None:
    client = make(dispatcher.endpoint)
    assert client.infer("echo", X, request_id=rid).request_id == want


@pytest.mark.parametrize(
    "rid",
    [
        *(b"short", "xyz", b"\0" * 16, int.from_bytes(RID), 10**10, -1, np.int64(5), 1.5),
        pytest.param(10**5000, id="not-even-printable"),
    ],
)
def test_bad_request_ids_are_refused(make: Make, dispatcher: FakeDispatcher, rid: Any) -> None:
    client = make(dispatcher.endpoint)
    assert code_of(lambda: client.infer("echo", X, request_id=rid)) == "INVALID_REQUEST"


def test_a_duplicate_id_leaves_the_first_request_alone(
    make: Make, dispatcher: FakeDispatcher
) -> None:
    client = make(dispatcher.endpoint)
    rid = b"\x07" * 16
    first = client.submit("held", X, request_id=rid)
    assert code_of(lambda: client.infer("held", X, request_id=rid)) == "DUPLICATE_REQUEST"
    dispatcher.wait_for(lambda: len(dispatcher.requests) == 1)
    dispatcher.release()
    assert np.array_equal(first.result(5).value, X)


def test_an_id_is_free_again_when_the_reply_has_come(
    make: Make, dispatcher: FakeDispatcher
) -> None:
    client = make(dispatcher.endpoint)
    rid = b"\x07" * 16
    first = client.submit("held", X, request_id=rid)
    dispatcher.wait_for(lambda: len(dispatcher.requests) == 1)
    first.cancel()
    assert code_of(lambda: first.result(5)) == "CANCELLED"
    assert code_of(lambda: client.infer("echo", X + 1, request_id=rid)) == "DUPLICATE_REQUEST"
    dispatcher.release()
    client.infer("echo", X)  # whose answer comes behind the late one
    assert np.array_equal(client.infer("echo", X + 1, request_id=rid).value, X + 1)


def test_more_than_max_pending_is_refused_at_once(make: Make, dispatcher: FakeDispatcher) -> None:
    client = make(dispatcher.endpoint, max_pending=2)
    kept = [client.submit("held", X) for _ in range(2)]
    assert code_of(lambda: client.infer("held", X)) == "OVERLOADED"
    dispatcher.wait_for(lambda: len(dispatcher.requests) == 2)
    dispatcher.release()
    assert all(p.result(5) for p in kept)


@pytest.mark.parametrize("tasks", [[], ["a"] * 2, ["x" * 65], [""], ["t"] * 17, [7], ["\ud800"]])
def test_bad_task_lists_are_refused(
    make: Make, dispatcher: FakeDispatcher, tasks: list[Any]
) -> None:
    client = make(dispatcher.endpoint)
    assert code_of(lambda: client.infer(tasks, X)) == "INVALID_REQUEST"


def test_tasks_are_described(make: Make, dispatcher: FakeDispatcher) -> None:
    tasks = make(dispatcher.endpoint).tasks()
    assert set(tasks) == set(TASKS)
    assert tasks["echo"].path == ("b1", "b2")
    assert str(tasks["echo"].contract.input) == "float32[rows, 4]"


def test_wait_ready_waits_for_the_named_tasks(make: Make, dispatcher: FakeDispatcher) -> None:
    dispatcher.published = ()
    client = make(dispatcher.endpoint)
    assert client.tasks(timeout_s=10) == {}  # or it may hear nothing in time: TIMEOUT
    assert code_of(lambda: client.wait_ready(["echo"], timeout_s=0.15)) == "NOT_READY"
    done: list[Any] = []
    waiter = threading.Thread(target=lambda: done.append(client.wait_ready(["echo"], timeout_s=10)))
    waiter.start()
    asked = dispatcher.describes
    dispatcher.wait_for(lambda: dispatcher.describes > asked + 1)
    assert not done
    dispatcher.published = TASKS
    waiter.join(10)
    assert "echo" in done[0]


@pytest.mark.parametrize("address", ["nonsense", "tcp://", "tcp://127.0.0.1:99999", "http://x"])
def test_a_bad_address_is_an_error(make: Make, address: str) -> None:
    assert code_of(lambda: make(address)) == "INVALID_REQUEST"


@pytest.mark.parametrize("retries", [-1, 255, 1.0, None])
def test_impossible_retries_are_refused(
    make: Make, dispatcher: FakeDispatcher, retries: Any
) -> None:
    client = make(dispatcher.endpoint)
    assert code_of(lambda: client.infer("echo", X, retries=retries)) == "INVALID_REQUEST"


def test_close_ends_what_is_in_flight(make: Make, dispatcher: FakeDispatcher) -> None:
    client = make(dispatcher.endpoint)
    pending = client.submit("held", X)
    dispatcher.wait_for(lambda: len(dispatcher.requests) == 1)
    client.close()
    assert code_of(lambda: pending.result(5)) == "CANCELLED"
    dispatcher.wait_for(lambda: dispatcher.cancelled == [pending.request_id])
    assert code_of(lambda: client.submit("echo", X)) == "CANCELLED"
    client.close()


def test_nonsense_from_the_peer_is_counted_and_survived(
    make: Make, dispatcher: FakeDispatcher
) -> None:
    client = make(dispatcher.endpoint)
    pending = client.submit("held", X, request_id=b"\x05" * 16)
    dispatcher.wait_for(lambda: len(dispatcher.requests) == 1)
    dispatcher.send_raw([b"\xc1"])
    dispatcher.send_raw([b""])
    dispatcher.send_raw([encode_to_client(Reply(b"\x09" * 16, 1, ()))])
    assert np.array_equal(client.infer("echo", X).value, X)
    assert client.counters().malformed == 2
    assert client.counters().late_replies == 1
    # A broken reply to a known request ends that request.
    dispatcher.send_raw([encode_to_client(Reply(b"\x05" * 16, 1, ()))])
    assert code_of(lambda: pending.result(5)) == "MALFORMED_MESSAGE"


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (np.zeros((0, 4), np.float32), "EMPTY_INPUT"),
        (np.float32(1.0), "CONTRACT_MISMATCH"),
        (np.zeros((1,) * 9, np.float32), "CONTRACT_MISMATCH"),
        (np.zeros((2, 2), np.complex64), "CONTRACT_MISMATCH"),
        (np.array(["a"]), "CONTRACT_MISMATCH"),
        (np.broadcast_to(np.float32(0), (2**20, 2**10)), "TOO_LARGE"),
        ([[1], [1, 2]], "CONTRACT_MISMATCH"),
        (None, "CONTRACT_MISMATCH"),
    ],
)
def test_what_cannot_travel_is_refused_before_it_is_sent(
    make: Make, dispatcher: FakeDispatcher, x: Any, code: str
) -> None:
    client = make(dispatcher.endpoint)
    assert code_of(lambda: client.infer("echo", x)) == code
    assert dispatcher.requests == []


def test_large_tensors_arrive_whole(make: Make, dispatcher: FakeDispatcher) -> None:
    x = np.arange(1_000_000, dtype=np.float32).reshape(10, -1)
    client = make(dispatcher.endpoint)
    assert np.array_equal(client.infer("echo", x).value, x)
    assert np.array_equal(client.infer("echo", x.T).value, x.T)


async def test_cancelling_the_awaiting_task_cancels_the_request(
    dispatcher: FakeDispatcher,
) -> None:
    async with AsyncClient(dispatcher.endpoint) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.infer("held", X)
        await asyncio.to_thread(dispatcher.wait_for, lambda: len(dispatcher.cancelled) == 1)


async def test_async_requests_overlap(dispatcher: FakeDispatcher) -> None:
    async with AsyncClient(dispatcher.endpoint) as client:
        results = await asyncio.gather(*(client.infer("slow", X) for _ in range(20)))
    assert len(results) == 20
    assert len(dispatcher.requests) == 20


def test_errors_are_request_errors(make: Make, dispatcher: FakeDispatcher) -> None:
    with pytest.raises(RequestError) as info:
        make(dispatcher.endpoint).infer("silent", X, deadline_s=0.05)
    assert info.value.retryable

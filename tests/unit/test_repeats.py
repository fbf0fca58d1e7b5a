"""Replies that are remembered for clients that ask again."""

from __future__ import annotations

from typing import Any

import pytest
from client_core_rig import rid

from blockflow.core.errors import RequestError
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import RouteTable, StageRoute, TaskRoute
from blockflow.dispatcher.entry import Answer, Entry, TaskEnd
from blockflow.dispatcher.inflight import InFlightTable
from blockflow.dispatcher.plan import Planner
from blockflow.dispatcher.repeats import (
    MAX_AGE_NS,
    MAX_RESULTS,
    ResultMemory,
    find_known,
    request_digest,
)
from blockflow.dispatcher.retry import RetryBudget
from blockflow.wire.client import Request
from blockflow.wire.tensor import TensorDesc

CONTRACT = Contract(TensorSpec("float32", ("rows", 4)), TensorSpec("float32", ("rows", 4)))
DESC = TensorDesc("float32", (1, 4))


def new_table(replayable: bool = True) -> InFlightTable:
    planner = Planner()
    stage = StageRoute(1, "e", "e#0", 11, "ipc://11", "tensormq", replayable=replayable)
    planner.replace(RouteTable(1, 1, {1: stage}, {"t": TaskRoute("t", ("e",), CONTRACT)}))
    return InFlightTable(7, planner, RetryBudget(10))


def admit(table: InFlightTable, n: int, digest: bytes = b"d", client: bytes = b"c") -> Entry:
    planner = table._planner
    return table.admit(
        client,
        rid(n),
        ("t",),
        planner.plan([planner.task("t")]),
        rows=1,
        deadline_ns=10**9,
        received_ns=0,
        retained=None,
        charged=16,
        digest=digest,
    )


def ended(table: InFlightTable, n: int, digest: bytes = b"d", error: str = "") -> Entry:
    entry = admit(table, n, digest)
    if error:
        table.fail(entry, RequestError(error, "x"))
    else:
        table.outcome(entry.ticket, 1, 0, 11, Answer("y", (), 0))
    return entry


def request(n: int = 1, tries: int = 2, **changes: Any) -> Request:
    given: dict[str, Any] = {"tasks": ("t",), "tensor": DESC, **changes}
    return Request(rid(n), deadline_ms=100, tries=tries, **given)


def test_the_digest_is_of_tasks_dims_and_elements() -> None:
    x = memoryview(bytes(16))
    same = request_digest(request(1), x)
    assert request_digest(request(2, tries=1), x) == same  # the id is another matter
    others = [
        request_digest(request(tasks=("t", "u")), x),
        request_digest(request(tasks=("tu",)), x),
        request_digest(request(tensor=TensorDesc("float32", (2, 2))), x),
        request_digest(request(tensor=TensorDesc("int32", (1, 4))), x),
        request_digest(request(), memoryview(bytes(15) + b"\1")),
    ]
    assert len({same, *others}) == 6


def test_the_same_request_gets_the_same_frames() -> None:
    memory = ResultMemory(1000)
    memory.remember(ended(new_table(), 1), [b"header", b"tensor"], 0)
    assert memory.recall(rid(1), b"d", 5) == (b"header", b"tensor")
    assert memory.recall(rid(1), b"d", 5) == (b"header", b"tensor")
    assert memory.recall(rid(1), b"other", 5) is None
    assert memory.recall(rid(2), b"d", 5) is None
    assert memory.gauges() == {"results": 1, "bytes": 12, "remembered": 1, "answered": 2}


def test_it_is_bounded_in_bytes_count_and_age() -> None:
    table = new_table()
    memory = ResultMemory(1000)
    for n in range(1, 7):
        memory.remember(ended(table, n), [bytes(200)], n)
    assert len(memory) == 5
    assert memory.recall(rid(1), b"d", 7) is None
    assert memory.recall(rid(6), b"d", 7) is not None
    memory.remember(ended(table, 7), [bytes(251)], 7)
    assert memory.recall(rid(7), b"d", 7) is None
    assert memory.events["too_large"] == memory.events["forgotten"] == 1
    assert memory.recall(rid(6), b"d", 5 + MAX_AGE_NS) is not None
    assert len(memory) == 1  # the others are older
    memory.remember(ended(table, 7), [bytes(250)], 7)
    assert memory.recall(rid(7), b"d", 7) is not None
    assert memory.recall(rid(6), b"d", 6 + MAX_AGE_NS) is None
    assert memory.gauges()["bytes"] == 250
    memory = ResultMemory(1 << 30)
    for n in range(1, MAX_RESULTS + 10):
        memory.remember(ended(table, n), [b"x"], 0)
    assert len(memory) == MAX_RESULTS


def test_a_later_reply_replaces_an_earlier_one() -> None:
    table = new_table()
    memory = ResultMemory(1000)
    memory.remember(ended(table, 1), [b"one"], 0)
    memory.remember(ended(table, 1, b"e"), [b"three"], 1)
    assert memory.recall(rid(1), b"d", 2) is None
    assert memory.recall(rid(1), b"e", 2) == (b"three",)
    assert memory.gauges()["bytes"] == 5


def test_failures_may_run_again_unless_a_block_must_not() -> None:
    memory = ResultMemory(1000)
    memory.remember(ended(new_table(), 1, error="OVERLOADED"), [b"x"], 0)
    assert len(memory) == 0
    memory.remember(ended(new_table(replayable=False), 1, error="WORKER_LOST"), [b"x"], 0)
    assert len(memory) == 1
    # With one task's result beside another one's failure it would run in vain.
    half = ended(new_table(), 2)
    half.tasks = ("t", "u")
    half.kept["u"] = TaskEnd("u", half.plan, 0, RequestError("BLOCK_FAILED", "x"), 0)
    memory.remember(half, [b"x"], 0)
    assert memory.recall(rid(2), b"d", 0) == (b"x",)
    memory.remember(ended(new_table(), 3), [b"y"], MAX_AGE_NS)
    assert memory.gauges()["results"] == 1  # the others are too old


def test_what_is_in_flight_is_attached_to_the_new_connection() -> None:
    table, memory = new_table(), ResultMemory(1000)
    mine, others = memoryview(bytes(16)), memoryview(bytes(15) + b"\1")
    entry = admit(table, 1, request_digest(request(), mine))
    assert find_known(memory, table, b"new", request(tries=1), mine, 0) is None
    assert find_known(memory, table, b"new", request(), others, 0) is None
    assert find_known(memory, table, b"new", request(), mine, 0) == ()
    assert entry.client == b"new"
    assert (table.of_client(b"c"), table.of_client(b"new")) == (0, 1)
    assert table.client_gone(b"c") == []
    # It heard late of the break, and had sent it by the new connection already.
    assert find_known(memory, table, b"new", request(), mine, 0) == ()
    assert (table.of_client(b"new"), memory.events["attached"]) == (1, 2)


def test_two_clients_may_have_chosen_the_same_name() -> None:
    table = new_table()
    first, second = admit(table, 1), admit(table, 1, b"e", client=b"other")
    with pytest.raises(RequestError) as caught:
        table.attach(b"other", first)
    assert caught.value.code == "DUPLICATE_REQUEST"
    assert table.named(b"c", rid(1)) is first
    assert table.named(b"other", rid(1)) is second
    table.outcome(first.ticket, 1, 0, 11, Answer("y", (), 0))
    assert table.find(rid(1), b"e") is second


def test_what_was_answered_is_found() -> None:
    table, memory, x = new_table(), ResultMemory(1000), memoryview(bytes(16))
    memory.remember(ended(table, 1, request_digest(request(), x)), [b"frame"], 0)
    assert find_known(memory, table, b"new", request(), x, 5) == (b"frame",)
    assert find_known(memory, table, b"new", request(2), x, 5) is None
    assert find_known(memory, table, b"new", request(), memoryview(b"\1" * 16), 5) is None


def test_elements_are_read_only_of_what_may_be_known() -> None:
    """They may be 256 MiB, of a request that nobody has let in."""
    table, memory = new_table(), ResultMemory(1000)
    x = memoryview(bytes(16))
    memory.remember(ended(table, 1, request_digest(request(), x)), [b"frame"], 0)
    admit(table, 2, request_digest(request(2), x))
    gone = memoryview(bytearray(16))
    gone.release()  # whoever reads it fails
    other = {"tensor": TensorDesc("float32", (2, 4))}
    for unlike in (request(3), request(1, **other), request(2, **other), request(1, tries=1)):
        assert find_known(memory, table, b"new", unlike, gone, 5) is None
    for like in (request(1), request(2)):
        with pytest.raises(ValueError, match="released"):
            find_known(memory, table, b"new", like, gone, 5)


def test_what_may_come_again_outlives_its_connection() -> None:
    table = new_table()
    entry, other = admit(table, 1), admit(table, 2, digest=b"")
    table.client_gone(b"c")
    assert len(table) == 1
    assert (entry.client, table.of_client(b"c")) == (b"", 0)
    assert table.find(rid(2), b"") is None
    assert other.client == b"c"
    out = table.outcome(entry.ticket, 1, 0, 11, Answer("y", (), 0))
    assert len(out) == 2
    assert len(table) == 0
    assert table.find(rid(1), b"d") is None

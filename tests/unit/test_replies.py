"""What a client is told of a request that has ended, or was not admitted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recovery_rig import CONTRACT, World

from blockflow.core import limits
from blockflow.core.errors import RequestError
from blockflow.core.routing import RouteTable, TaskRoute
from blockflow.dispatcher.entry import Answer
from blockflow.dispatcher.replies import Descriptions, make_refusal, make_reply
from blockflow.dispatcher.stats import DispatcherStats
from blockflow.dispatcher.tensors import Result
from blockflow.wire.client import (
    UNASKED,
    Description,
    Place,
    Reply,
    Request,
    TaskResult,
    Timing,
    decode_to_client,
)
from blockflow.wire.data import HopTiming
from blockflow.wire.tensor import TensorDesc

DESC = TensorDesc("float32", (1, 4))
PLACE = Place(1, 2, 3)


@pytest.mark.parametrize("path", [("trunk",), ("trunk", "mid")])
def test_a_reply_says_how_each_task_ended(path: tuple[str, ...]) -> None:
    """What had set out when another canary was tried counts for that one no more."""
    w = World(trunk=[1], head_a=[2], mid=[3], head_b=[4])
    entry = w.admit("a", "deep", "b")
    trials = {t.name: ("trunk",) for t in entry.plan.tasks}
    changes = {"epoch": 3, "version": 8, "canaries": frozenset({"deep"}), "trials": trials}
    entry.plan = replace(entry.plan, **changes)
    entry.received_ns, entry.ingress_ns = 10, 5
    a, deep, b = entry.plan.ends
    hops = tuple(HopTiming(n, 1, 2, 3, 4) for n in range(len(entry.plan.blocks)))
    error = RequestError("BLOCK_FAILED", "x")
    entry.outcomes = {
        a: Answer(Result(DESC, b"frame", None), hops, 80),
        deep: Answer(Result(DESC, None, PLACE), hops, 101),  # by a clock of another core
        b: error,
    }
    stats = DispatcherStats()
    stats.publish(entry.tasks, {"deep": path})
    reply, frames = make_reply(entry, entry.results(), 100, stats)
    assert (reply.request_id, reply.epoch, reply.received_ns) == (entry.request_id, 3, 10)
    assert frames == [b"frame"]

    def way(end: int) -> tuple[Timing, ...]:
        return tuple(Timing(entry.plan.blocks[n], hops[n]) for n in entry.plan.lineage[end])

    assert reply.results == (
        TaskResult("a", DESC, None, way(a), 5, 20, 90),
        TaskResult("deep", DESC, None, way(deep), 5, 0, 90, PLACE, True),
        TaskResult("b", None, error, (), 5, 0, 90),
    )
    counted = {n: (t.ok, dict(t.failed)) for n, t in stats.tasks.items()}
    assert counted == {"a": (1, {}), "deep": (1, {}), "b": (0, {"BLOCK_FAILED": 1})}
    tried = stats.tasks["deep"].variants
    assert (tried["canary"].ok, tried["stable"].ok) == (int(path == ("trunk",)), 0)


def test_a_refusal_names_each_task_once() -> None:
    error = RequestError("OVERLOADED", "x")
    refused = make_refusal(Request(bytes(15) + b"\1", ("a", "b", "a"), 1, DESC), error, 4, 7)
    assert refused.epoch == 4
    assert refused.results == tuple(TaskResult(t, None, error, total_ns=7) for t in "ab")


def routes(version: int, tasks: int) -> RouteTable:
    names = [f"t{i}" for i in range(tasks)]
    return RouteTable(1, version, {}, {n: TaskRoute(n, ("a",), CONTRACT) for n in names})


def test_a_description_is_written_once_for_all_who_are_told_unasked() -> None:
    told = Descriptions({})
    first = told.answer(UNASKED, routes(1, 1))
    assert told.answer(UNASKED, routes(1, 1)) == first
    table = routes(2, 2)
    second = told.answer(UNASKED, table)
    assert told.answer(UNASKED, table) is second != first
    asked = decode_to_client(told.answer(bytes(15) + b"\1", table))
    assert isinstance(asked, Description) and len(asked.tasks) == 2
    again = told.answer(bytes(15) + b"\2", table)  # each is told under its own question
    assert again == told.answer(bytes(15) + b"\1", table).replace(b"\0\1", b"\0\2", 1)
    assert told.answer(UNASKED, table) is second


def test_who_asks_for_more_than_a_message_holds_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Descriptions({})
    monkeypatch.setattr(limits, "MAX_DESCRIPTION_BYTES", 6_000)
    refused = decode_to_client(told.answer(bytes(15) + b"\1", routes(1, 40)))
    assert isinstance(refused, Reply) and refused.results[0].error is not None
    assert refused.results[0].error.code == "TOO_LARGE"
    assert isinstance(decode_to_client(told.answer(UNASKED, routes(2, 1))), Description)

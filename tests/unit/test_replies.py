"""What a client is told of a request that has ended, or was not admitted."""

from __future__ import annotations

from dataclasses import replace

from recovery_rig import World

from blockflow.core.errors import RequestError
from blockflow.dispatcher.entry import Answer
from blockflow.dispatcher.replies import make_refusal, make_reply
from blockflow.dispatcher.stats import DispatcherStats
from blockflow.dispatcher.tensors import Result
from blockflow.wire.client import Place, Request, TaskResult, Timing
from blockflow.wire.data import HopTiming
from blockflow.wire.tensor import TensorDesc

DESC = TensorDesc("float32", (1, 4))
PLACE = Place(1, 2, 3)


def test_a_reply_says_how_each_task_ended() -> None:
    w = World(trunk=[1], head_a=[2], mid=[3], head_b=[4])
    entry = w.admit("a", "deep", "b")
    entry.plan = replace(entry.plan, epoch=3, version=8, canaries=frozenset({"deep"}))
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
    stats.publish(entry.tasks, {"deep": ("trunk",)})
    reply, frames = make_reply(entry, 100, stats)
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
    assert (tried["canary"].ok, tried["stable"].ok) == (1, 0)


def test_a_refusal_names_each_task_once() -> None:
    error = RequestError("OVERLOADED", "x")
    refused = make_refusal(Request(bytes(15) + b"\1", ("a", "b", "a"), 1, DESC), error, 4, 7)
    assert refused.epoch == 4
    assert refused.results == tuple(TaskResult(t, None, error, total_ns=7) for t in "ab")

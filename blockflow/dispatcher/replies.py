"""What the Dispatcher says to clients: replies, refusals, descriptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.core.routing import RouteTable
from blockflow.dispatcher.entry import Entry, TaskEnd
from blockflow.dispatcher.stats import DispatcherStats
from blockflow.dispatcher.tensors import Result
from blockflow.wire import client as wire

ANY_TASK = "*"
"""Stands for the task in the reply to what names none that could be read."""

_HEAD_BYTES = 32
"""Of a description: version, kind and id."""


def make_reply(
    entry: Entry, ends: Sequence[TaskEnd], now_ns: int, stats: DispatcherStats
) -> tuple[wire.Reply, list[Any]]:
    """A request's terminal reply and its tensors' frames; ``ends`` are its results, and every
    outcome is counted."""
    frames: list[Any] = []
    results: list[wire.TaskResult] = []
    total = now_ns - entry.received_ns
    for task, plan, end, outcome, ingress in ends:
        tried, trial = task in plan.canaries, plan.trials.get(task, ())
        if isinstance(outcome, BlockFlowError):
            stats.failed(task, outcome.code, canary=tried, trial=trial)
            results.append(
                wire.TaskResult(
                    task, None, outcome, ingress_ns=ingress, total_ns=total, canary=tried
                )
            )
            continue
        result: Result = outcome.payload
        egress = max(0, now_ns - outcome.sent_ns)
        way, blocks = plan.lineage[end], plan.blocks
        timings = [wire.Timing(blocks[t.node], t) for t in outcome.timings if t.node in way]
        if result.place is None:
            frames.append(result.frame)
        results.append(
            wire.TaskResult(
                task,
                result.tensor,
                None,
                tuple(timings),
                ingress,
                egress,
                total,
                result.place,
                tried,
            )
        )
        stats.succeeded(task, total, ingress, egress, now_ns, canary=tried, trial=trial)
    reply = wire.Reply(entry.request_id, entry.plan.epoch, tuple(results), entry.received_ns)
    return reply, frames


def make_refusal(
    request: wire.Request | Entry, error: BlockFlowError, epoch: int, total_ns: int
) -> wire.Reply:
    """The reply to a request that was not admitted, or whose own reply could not be made: each task
    that it names has ``error``."""
    results = [
        wire.TaskResult(task, None, error, total_ns=total_ns)
        for task in dict.fromkeys(request.tasks)
    ]
    return wire.Reply(request.request_id, epoch, tuple(results))


class Descriptions:
    """What clients are told of the published tasks and of the limits, ``credits`` among them.

    Written once per publication: after each the clients ask, all of them, and while tens of
    milliseconds go into a description of thousands of tasks no request is served.
    """

    def __init__(self, credits: Mapping[str, int]) -> None:
        self._bounds = {
            "protocol_version": limits.PROTOCOL_VERSION,
            **credits,
            "max_message_bytes": limits.MAX_MESSAGE_BYTES,
            "max_tasks_per_request": limits.MAX_TASKS_PER_REQUEST,
            "max_deadline_ms": limits.MAX_DEADLINE_MS,
        }
        self._table: RouteTable | None = None
        self._body = wire.description_body(0, [], self._bounds)
        self._refusal: BlockFlowError | None = None
        self._unasked = b""

    def answer(self, question: bytes, table: RouteTable | None) -> bytes:
        """The header frame for whoever asked ``question``, by the routes of now."""
        if table is not None and table is not self._table:
            self._publish(table)
        if self._refusal is not None:
            refused = wire.TaskResult(ANY_TASK, None, self._refusal)
            return wire.encode_to_client(wire.Reply(question, 0, (refused,)))
        if question != wire.UNASKED:
            return wire.encode_description(question, self._body)
        # One for all clients, to whom a change is told at the same moment.
        self._unasked = self._unasked or wire.encode_description(question, self._body)
        return self._unasked

    def _publish(self, table: RouteTable) -> None:
        tasks = (t.to_dict() for t in table.tasks.values())
        self._table, self._unasked, self._refusal = table, b"", None
        self._body = wire.description_body(table.epoch, tasks, self._bounds)
        size, most = sum(map(len, self._body)) + _HEAD_BYTES, limits.MAX_DESCRIPTION_BYTES
        if size > most:  # of an update that another release has taken; ours refuses it
            self._refusal = RequestError(
                "TOO_LARGE",
                f"what there is to tell of {len(table.tasks)} tasks has {size} bytes, more than"
                f" {most}",
                hint="requests are served; deploy fewer tasks for clients to be told of them",
            )

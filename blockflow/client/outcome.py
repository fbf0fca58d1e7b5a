"""What the client's core tells its shell: how a request or a question ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.core.errors import BlockFlowError, WireError, make_error
from blockflow.core.records import record
from blockflow.core.routing import TaskRoute
from blockflow.wire.client import Reply, TaskResult

_WHOLE_REQUEST = "*"
"""Task name of a result that stands for all tasks of the request."""


@record
class Answered:
    """A reply came: one result per asked task, in order, each with its tensor's frame or None.

    Where a result lies in a granted slot, its place stands for the frame. ``received_ns`` is the
    Dispatcher's stamp of the receipt (0 = unknown), ``by_slot`` says how the input went there.
    """

    request_id: bytes
    epoch: int
    results: tuple[TaskResult, ...]
    frames: tuple[Any, ...]
    submitted_ns: int
    received_ns: int = 0
    by_slot: bool = False


@dataclass(frozen=True, slots=True)
class Described:
    """The published tasks: the answer to a question."""

    request_id: bytes
    tasks: dict[str, TaskRoute]


@dataclass(frozen=True, slots=True)
class Failed:
    """The request or question ended without a reply."""

    request_id: bytes
    error: BlockFlowError


Outcome = Answered | Described | Failed


@dataclass(slots=True)
class Link:
    """The connection as the core sees it.

    Attributes:
        address: for error texts.
        connect_timeout_ns: how long a call waits for a connection before it fails.
        since_ns: when the connection was lost (or first asked for).
        trouble: why the last attempt failed, when the transport says so.
        denied: whether it was for want of a key, or of the right one.
    """

    address: str
    connect_timeout_ns: int
    since_ns: int
    up: bool = False
    ever_up: bool = False
    trouble: str = ""
    denied: bool = False

    def gives_up_at(self, asked_ns: int) -> int:
        """When a call of ``asked_ns`` stops waiting for a connection."""
        return max(asked_ns, self.since_ns) + self.connect_timeout_ns

    def gave_up(self, asked_ns: int, now_ns: int) -> bool:
        """Whether a call of ``asked_ns`` has waited long enough to say that nobody is there."""
        return not self.up and self.gives_up_at(asked_ns) <= now_ns

    def lost(self, why: str) -> BlockFlowError:
        """CONNECTION_LOST, or NOT_RUNNING when there never was a connection."""
        if self.denied:
            return make_error(
                "UNAUTHORIZED",
                "the Dispatcher takes no connection without an authorised key",
                where=self.address,
                hint="on its machine `blockflow keys new` makes a key file for client_keys "
                "(BLOCKFLOW_CLIENT_KEYS), and `blockflow keys authorise` lets the key of one in",
            )
        trouble = f" ({self.trouble})" if self.trouble else ""
        if self.ever_up:
            return make_error(
                "CONNECTION_LOST",
                why + trouble,
                where=self.address,
                hint="the client reconnects by itself; the same id may be sent again",
            )
        return make_error(
            "NOT_RUNNING",
            f"no BlockFlow Dispatcher answers at this address{trouble}",
            where=self.address,
            hint="start one with `blockflow up`, or pass its address",
        )


def misfit(
    results: Sequence[TaskResult], tasks: Sequence[str], frames: Sequence[Any], address: str
) -> BlockFlowError | None:
    """What is wrong with a reply for these tasks; None = nothing."""
    framed = [r for r in results if r.tensor is not None and r.place is None]
    if [r.task for r in results] == list(tasks) and len(framed) == len(frames):
        return None
    text = f"the reply has tasks {[r.task for r in results]} and {len(frames)} frames"
    return WireError("MALFORMED_MESSAGE", text, where=address)


def answered(
    msg: Reply,
    results: tuple[TaskResult, ...],
    frames: Sequence[Any],
    submitted_ns: int,
    by_slot: bool,
) -> Answered:
    """The outcome of a reply that fits."""
    rest, rid, epoch = iter(frames), msg.request_id, msg.epoch
    whole = tuple([r.place or (None if r.tensor is None else next(rest)) for r in results])
    return Answered(rid, epoch, results, whole, submitted_ns, msg.received_ns, by_slot)


def per_task(results: Sequence[TaskResult], tasks: Sequence[str]) -> tuple[TaskResult, ...]:
    """A reply's results, an error of the whole request being each task's own."""
    if len(results) == 1 and results[0].task == _WHOLE_REQUEST and results[0].error is not None:
        one = results[0]
        return tuple([TaskResult(t, None, one.error, total_ns=one.total_ns) for t in tasks])
    return tuple(results)

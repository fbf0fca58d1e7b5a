"""Returns: what the results in a worker's message mean for the requests that wait for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import zmq

from blockflow.core.errors import BlockError, BlockFlowError, make_error
from blockflow.core.scarcity import is_scarcity
from blockflow.core.text import worth_a_line
from blockflow.dispatcher.entry import Answer, Drop, Instruction
from blockflow.dispatcher.inflight import InFlightTable
from blockflow.dispatcher.stats import DispatcherStats
from blockflow.dispatcher.tensors import TensorDesk
from blockflow.tensormq.channel import InBuffer
from blockflow.wire.data import Data, Failure, Item, Withdraw, decode_data_plane

_LOG = logging.getLogger("blockflow.dispatcher")


class Returns:
    """Results by item: each is cut out, or fails, by itself.

    Args:
        desk: cuts results out of what came.
        table: who waits for them.
        stats: counts what is not of this protocol.
        carry_out: does what follows.
        defect: is told where an exception was caught.
    """

    def __init__(
        self,
        desk: TensorDesk,
        table: InFlightTable,
        stats: DispatcherStats,
        carry_out: Callable[[Sequence[Instruction]], None],
        defect: Callable[[str], None],
    ) -> None:
        self._desk = desk
        self._table = table
        self._stats = stats
        self._carry_out = carry_out
        self._defect = defect

    def read(self, frames: Sequence[zmq.Frame], now: int) -> None:
        """One message of a worker; what is not of this protocol is counted and dropped."""
        if not 1 <= len(frames) <= 2:
            self._malformed(f"{len(frames)} frames")
            return
        try:
            msg = decode_data_plane(frames[0].buffer)
        except BlockFlowError as exc:
            self._malformed(str(exc))
            return
        if isinstance(msg, Failure):
            for item in msg.items:
                self._fail(msg, item, msg.error, now)
            return
        if isinstance(msg, Withdraw):
            self._malformed("a withdrawal, which only workers take")
            return
        self._on_data(msg, frames[1].buffer if len(frames) == 2 else None, now)

    def _on_data(self, msg: Data, frame: memoryview | None, now: int) -> None:
        try:
            buffer = self._desk.open(msg, frame)
        except BlockFlowError as exc:
            why = f"a result of incarnation {msg.sender}: {exc.__cause__ or exc}"
            self._count("unreadable_data", why)
            for item in msg.items:
                self._fail(msg, item, exc, now)
            return
        instructions: list[Instruction] = []
        try:
            self.take(msg, buffer, now, instructions)
        finally:
            buffer.release()
            if instructions:
                self._carry_out(instructions)

    def _fail(self, msg: Data | Failure, item: Item, error: BlockFlowError, now: int) -> None:
        place = item.request_id, item.attempt, item.hop, msg.sender
        self._carry_out(self._table.failure(*place, error, now))

    def _malformed(self, why: str) -> None:
        self._count("malformed_data", f"data message refused: {why}")

    def _count(self, event: str, what: str) -> None:
        n = self._stats.events[event] = self._stats.events[event] + 1
        if worth_a_line(n):
            _LOG.warning("%s (%s: %d so far)", what, event, n)

    def take(self, msg: Data, buffer: InBuffer, now: int, out: list[Instruction]) -> None:
        """Add what follows to ``out``, item by item: should a defect be met, what came of the items
        before it is there all the same."""
        start = 0
        for item in msg.items:
            out += self._taken(msg, item, buffer, start, now)
            start += item.rows

    def _taken(
        self, msg: Data, item: Item, buffer: InBuffer, start: int, now: int
    ) -> list[Instruction]:
        place = item.request_id, item.attempt, item.hop, msg.sender
        entry = self._table.expecting(*place)
        if isinstance(entry, Drop):
            return []  # late, double or forged: nothing but its slot is to be freed
        if item.rows != entry.rows:
            text = f"{item.rows} rows came for a request of {entry.rows}"
            return self._table.failure(*place, BlockError("OUTPUT_MISMATCH", text), now)
        try:
            # Of several tasks' one result each gets a frame: a slot is free when one has read it.
            keep = bool(entry.digest) or entry.plan.ends.count(item.hop) > 1
            payload = self._desk.cut(buffer, start, item.rows, entry.client, keep)
        except Exception as exc:  # this one request pays for it
            self._defect(f"the result of request {entry.request_id.hex()}")
            return self._table.failure(*place, own_failure(exc, "at its result"), now)
        return self._table.answered(entry, item.hop, Answer(payload, item.hops, msg.sent_ns))


def own_failure(exc: Exception, where: str) -> BlockFlowError:
    """What a client is told of an exception in the Dispatcher, met ``where``."""
    if isinstance(exc, BlockFlowError):
        return exc
    if is_scarcity(exc):
        text = "the Dispatcher has no memory, thread or descriptor for the request"
        return make_error("NO_SPACE", text, hint="try again later, or send less at once")
    return make_error("INTERNAL", f"{type(exc).__name__} {where}")

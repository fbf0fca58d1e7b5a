"""Intake: received frames become tickets, or a reason why not. It reads no socket itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blockflow.core.errors import BlockFlowError, RequestError, SystemError_, WireError
from blockflow.core.text import worth_a_line
from blockflow.tensormq.channel import Consumer, InBuffer
from blockflow.wire.data import Data, Item, Withdraw, decode_data_plane
from blockflow.worker.stage import Stage
from blockflow.worker.ticket import Source, Ticket

_LOG = logging.getLogger("blockflow.worker")


@dataclass(slots=True)
class Arrival:
    """What one message has brought: tickets to queue, items to fail with their reasons, requests
    that are withdrawn (:class:`~blockflow.wire.data.Withdraw`)."""

    tickets: list[Ticket] = field(default_factory=list)
    refused: list[tuple[Item, BlockFlowError]] = field(default_factory=list)
    withdrawn: tuple[tuple[bytes, int], ...] = ()


def deadline_of(item: Item, sent_ns: int, now: int) -> int:
    """When ``item`` is too late, by the monotonic clock that a host's processes have in common.

    It counts from the sender's stamp: what a message spends in a socket, or before a process that
    was stopped, is the request's own time. The sender has rounded the time left down to whole
    milliseconds, so this is the Dispatcher's deadline or up to 1 ms per hop before it, never after.
    A stamp ahead of ``now``, the time of the receipt, is of another clock and gives nothing.
    """
    return min(sent_ns, now) + item.remaining_ms * 1_000_000


class Intake:
    """Decodes, opens and checks. Whatever the frames hold, it returns.

    Args:
        stages: of this worker, by number.
        consumer: opens tensors.
    """

    def __init__(self, stages: Mapping[int, Stage], consumer: Consumer) -> None:
        self._stages = stages
        self._consumer = consumer
        self._next_key = 0
        self.malformed = 0

    def new_key(self) -> int:
        self._next_key += 1
        return self._next_key

    def take(self, header: bytes, frame: Any | None, now: int) -> Arrival:
        """One message.

        Args:
            header: its first frame.
            frame: its second one, None without.
            now: when it was received.
        """
        arrival = Arrival()
        try:
            msg = decode_data_plane(header)
        except WireError as exc:
            self._refuse(str(exc))
            return arrival
        if not isinstance(msg, Data):
            if isinstance(msg, Withdraw):
                arrival.withdrawn = msg.requests
            else:
                self._refuse("a failure, which only the Dispatcher takes")
            return arrival
        try:
            buffer = self._consumer.open(msg.tensor, frame)
        except BlockFlowError as exc:
            if all(deadline_of(item, msg.sent_ns, now) <= now for item in msg.items):
                # Its owner did not wait for it to be opened either, and it is nobody's fault.
                late = RequestError("DEADLINE_EXCEEDED", "expired on the way")
                arrival.refused = [(item, late) for item in msg.items]
                return arrival
            self._refuse(str(exc))
            # The sender's fault or its death, never the client's, whose error WireError would be.
            code = "INTERNAL" if isinstance(exc, WireError) else exc.code
            known = isinstance(exc, RequestError)
            error = exc if known else SystemError_(code, exc.message, hint=exc.hint)
            arrival.refused = [(item, error) for item in msg.items]
            return arrival
        self._admit(msg, buffer, now, arrival)
        return arrival

    def _admit(self, msg: Data, buffer: InBuffer, now: int, arrival: Arrival) -> None:
        errors: dict[int, BlockFlowError | None] = {}
        fitting = 0
        for item in msg.items:
            number = item.path.nodes[item.hop].stage
            if number not in errors:
                errors[number] = self._misfit(number, msg)
            fitting += errors[number] is None
        if not fitting:
            buffer.release()
        desc = msg.tensor
        source = Source(desc.dtype, desc.dims[1:], fitting, buffer=buffer)
        sent = min(msg.sent_ns, now)
        row = 0
        for item in msg.items:
            stage = item.path.nodes[item.hop].stage
            error = errors[stage]
            if error is not None:
                arrival.refused.append((item, error))
            else:
                arrival.tickets.append(
                    Ticket(
                        self.new_key(),
                        item,
                        stage,
                        source,
                        row,
                        now,
                        now,
                        now,
                        deadline_of(item, sent, now),
                        now - sent,
                        item.task,
                    )
                )
            row += item.rows

    def _misfit(self, number: int, msg: Data) -> BlockFlowError | None:
        """Why stage ``number`` cannot run the tensor, by what the header says of it."""
        stage = self._stages.get(number)
        if stage is None:
            return RequestError("BLOCK_UNAVAILABLE", f"stage {number} is not in this worker")
        try:
            stage.output_dims(msg.tensor.dtype, msg.tensor.dims)
        except RequestError as exc:
            return exc
        return None

    def _refuse(self, why: str) -> None:
        self.malformed += 1
        if worth_a_line(self.malformed):
            _LOG.warning("message refused (%d so far): %s", self.malformed, why)

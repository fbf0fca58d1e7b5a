"""Delivery: what leaves a worker. Outputs go to the next hops, failures to the Dispatcher.

The first half is pure: which rows go where. The second half publishes and sends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, RequestError, make_error
from blockflow.core.model import tensor_bytes
from blockflow.core.routing import DISPATCHER_STAGE, RouteTable, StageRoute
from blockflow.tensormq.channel import OutBuffer, Payload, Producer
from blockflow.tensormq.push import PushCache, Unsent
from blockflow.wire.data import Data, Failure, HopTiming, Item, encode_data, encode_failure
from blockflow.wire.tensor import TensorDesc
from blockflow.worker.ticket import Batch, Ticket

_LOG = logging.getLogger("blockflow.worker")

_HEADER_ROOM = limits.MAX_HEADER_BYTES - 160
"""A header's bytes that items may fill; the rest holds what a message has once."""
_FAILURE_ROOM = limits.MAX_HEADER_BYTES - 2200


@dataclass(slots=True)
class Part:
    """One message: rows ``start..stop`` of a batch's output, all to ``stage``.

    ``members`` are tickets with the path node that receives them (their own node towards the
    Dispatcher).
    """

    stage: int
    start: int
    stop: int
    members: list[tuple[Ticket, int]]
    header: int


def plan_parts(
    batch: Batch, local: Collection[int]
) -> tuple[list[Part], list[tuple[Ticket, int, int]]]:
    """Part a batch's output by next hop; failed tickets are left out.

    Args:
        batch: with its ``errors``.
        local: stages of this worker: they need no message.

    Returns:
        The messages, and for local successors (ticket, path node, first row).
    """
    parts: list[Part] = []
    stays: list[tuple[Ticket, int, int]] = []
    growing: dict[tuple[int, int], Part] = {}
    row = 0
    for ticket in batch.tickets:
        start, row = row, row + ticket.rows
        if ticket.key in batch.errors:
            continue
        size = _item_bytes(ticket.item)
        times: dict[int, int] = {}  # two branches to one stage are two messages
        for stage, hop in _targets(ticket.item):
            if stage in local:
                stays.append((ticket, hop, start))
                continue
            nth = times[stage] = times.get(stage, 0) + 1
            part = growing.get((stage, nth))
            if (
                part is None
                or part.stop != start
                or part.header + size > _HEADER_ROOM
                or len(part.members) == limits.MAX_ITEMS_PER_MESSAGE
            ):
                part = growing[(stage, nth)] = Part(stage, start, start, [], 0)
                parts.append(part)
            part.stop = row
            part.header += size
            part.members.append((ticket, hop))
    return parts, stays


def _targets(item: Item) -> Iterable[tuple[int, int]]:
    path, hop = item.path, item.hop
    for child in path.children(hop):
        yield path.nodes[child].stage, child
    if path.nodes[hop].terminal:
        yield DISPATCHER_STAGE, hop


def _item_bytes(item: Item) -> int:
    """Upper bound of an item's size in a header, one more hop's timing included."""
    return 56 + 11 * len(item.path.nodes) + 37 * (len(item.timings) + 1)


def timing(ticket: Ticket, batch: Batch, sent_ns: int) -> HopTiming:
    """Where a ticket's time in this worker went; the parts add up to ``sent - received``."""
    compute = batch.compute_to_ns - batch.compute_from_ns
    wait = batch.started_ns - ticket.ready_ns
    return HopTiming(
        ticket.item.hop,
        ticket.transit_ns,
        max(0, wait),
        max(0, sent_ns - ticket.received_ns - wait - compute),
        compute,
    )


def next_item(ticket: Ticket, batch: Batch, hop: int, sent_ns: int) -> Item:
    """The ticket's item as it goes on to node ``hop``."""
    item = ticket.item
    return Item(
        item.request_id,
        item.attempt,
        item.epoch,
        item.path,
        hop,
        item.rows,
        max(0, ticket.deadline_ns - sent_ns) // 1_000_000,
        (*item.timings, timing(ticket, batch, sent_ns)),
    )


@dataclass(frozen=True, slots=True)
class _Tag:
    """What to answer for when a message never leaves."""

    items: tuple[Item, ...]
    revoke: Callable[[], None] | None


class Delivery:
    """The sending side of a worker; used by its data thread.

    Args:
        incarnation: of this worker.
        mode: ``tensormq`` or ``zeromq``.
        local: its own stages.
        push: sending sockets.
        shm: producer of slots, None when the worker has no arena.
        inline: producer of whole-tensor frames.
    """

    def __init__(
        self,
        incarnation: int,
        mode: str,
        local: Collection[int],
        push: PushCache,
        shm: Producer | None,
        inline: Producer,
    ) -> None:
        self._incarnation = incarnation
        self._handles = mode == "tensormq" and shm is not None
        self._local = local
        self._push = push
        self._shm = shm
        self._inline = inline
        self.routes = RouteTable(0, 0)
        self.undeliverable = 0

    def set_routes(self, table: RouteTable) -> None:
        """Work by ``table`` from now on; sockets that it has no use for are closed."""
        self.routes = table
        self._unsent(self._push.retain({r.endpoint for r in table.stages.values()}))

    def peer_gone(self, incarnation: int) -> None:
        """That process is dead: take back what it held, drop its socket."""
        for producer in (self._shm, self._inline):
            if producer is not None:
                producer.peer_gone(incarnation)
        for route in self.routes.stages.values():
            if route.incarnation == incarnation:
                self._unsent(self._push.drop(route.endpoint))

    def producer_for(self, batch: Batch) -> Producer | None:
        """Where the batch's output must lie; None when it does not leave this worker."""
        found: Producer | None = None
        for ticket in batch.tickets:
            for stage, _ in _targets(ticket.item):
                if stage not in self._local:
                    if self._shm is not None and self._by_handle(stage):
                        return self._shm
                    found = self._inline
        return found

    def deliver(self, batch: Batch, producer: Producer | None) -> list[tuple[Ticket, int, int]]:
        """Send a computed batch on; fails what cannot be sent.

        Returns:
            Local successors, as :func:`plan_parts`; the caller gives them ``batch.result``. If
            there are any and the batch has an ``out``, the buffer is held for them: unhold it
            later.
        """
        parts, stays = plan_parts(batch, self._local)
        out = batch.out
        if out is None or producer is None:
            return stays
        sendable: list[tuple[Part, StageRoute]] = []
        for part in parts:
            route = self.routes.stages.get(part.stage)
            if route is None:
                self._no_route(part, batch)
            else:
                sendable.append((part, route))
        if producer is self._shm:
            slots = [s for s in sendable if self._by_handle(s[0].stage)]
            slots = slots[: producer.max_consumers]
        else:
            slots = sendable[: producer.max_consumers]
        chosen = {id(part) for part, _ in slots}
        copied = [s for s in sendable if id(s[0]) not in chosen]
        if not slots:
            # Nobody takes the buffer as it is (the routes have changed, or every ticket failed).
            if stays:
                batch.result = batch.result.clone()
            copies = self._copies(copied, out, batch)
            batch.out = None
            producer.discard(out)
            self._send_copies(copies, batch)
            return stays
        if stays:
            producer.hold(out)
        # Copied first: once published, consumers may release the slot and it may be written anew.
        copies = self._copies(copied, out, batch)
        payloads = producer.publish(out, [route.incarnation for _, route in slots])
        for (part, route), payload in zip(slots, payloads, strict=True):
            whole = part.stop - part.start == out.dims[0]
            self._send(
                part,
                route,
                payload if whole else payload.rows(part.start, part.stop),
                batch,
                lambda payload=payload: producer.revoke(payload),  # type: ignore[misc]
            )
        self._send_copies(copies, batch)
        return stays

    def fail(self, items: Sequence[Item], error: BlockFlowError) -> None:
        """Tell the Dispatcher that these items failed at their ``hop``."""
        route = self.routes.stages.get(DISPATCHER_STAGE)
        if route is None:
            self._lost(len(items), "no route to the Dispatcher")
            return
        chunk: list[Item] = []
        room = _FAILURE_ROOM
        for item in (*items, None):
            size = 0 if item is None else _item_bytes(item)
            full = len(chunk) == limits.MAX_ITEMS_PER_MESSAGE or (chunk and size > room)
            if chunk and (item is None or full):
                msg = Failure(self._incarnation, time.monotonic_ns(), error, tuple(chunk))
                header = encode_failure(msg)
                if len(header) > limits.MAX_HEADER_BYTES:  # a long text in a wide script
                    short = make_error(error.code, error.message[:200])
                    header = encode_failure(replace(msg, error=short))
                if not self._push.send(route.endpoint, [header]):
                    self._lost(len(chunk), "the Dispatcher takes no messages")
                chunk, room = [], _FAILURE_ROOM
            if item is not None:
                chunk.append(item)
                room -= size

    def close(self) -> None:
        """Close the sockets; what they hold is still delivered within the linger time."""
        self._lost(len(self._push.close()), "terminated")

    # --- sending ---------------------------------------------------------------------------------

    def _by_handle(self, stage: int) -> bool:
        route = self.routes.stages.get(stage)
        return self._handles and route is not None and route.mode == "tensormq"

    def _copies(
        self, sends: Sequence[tuple[Part, StageRoute]], out: OutBuffer, batch: Batch
    ) -> list[tuple[Part, StageRoute, Payload]]:
        """Whole tensors for those that cannot have the buffer itself."""
        row_bytes = tensor_bytes(out.dtype, out.dims[1:])
        batch.copies += len(sends)
        return [
            (
                part,
                route,
                Payload(
                    TensorDesc(out.dtype, (part.stop - part.start, *out.dims[1:])),
                    bytes(out.memory[part.start * row_bytes : part.stop * row_bytes]),
                ),
            )
            for part, route in sends
        ]

    def _send_copies(
        self, copies: Sequence[tuple[Part, StageRoute, Payload]], batch: Batch
    ) -> None:
        for part, route, payload in copies:
            self._send(part, route, payload, batch, None)

    def _send(
        self,
        part: Part,
        route: StageRoute,
        payload: Payload,
        batch: Batch,
        revoke: Callable[[], None] | None,
    ) -> None:
        sent_ns = time.monotonic_ns()
        items = tuple([next_item(t, batch, hop, sent_ns) for t, hop in part.members])
        header = encode_data(Data(self._incarnation, sent_ns, payload.desc, items))
        frames: list[Any] = [header] if payload.frame is None else [header, payload.frame]
        tag = _Tag(items, revoke)
        if not self._push.send(route.endpoint, frames, tag=tag):
            self._give_up(tag, route.stage)

    def _unsent(self, messages: Sequence[Unsent]) -> None:
        for message in messages:
            if isinstance(message.tag, _Tag):
                self._give_up(message.tag, None)
            else:
                self._lost(1, "a failure for a Dispatcher that is gone")

    def _give_up(self, tag: _Tag, stage: int | None) -> None:
        if tag.revoke is not None:
            tag.revoke()
        if stage == DISPATCHER_STAGE:
            self._lost(len(tag.items), "the Dispatcher takes no messages")
        else:
            self.fail(
                tag.items, RequestError("BLOCK_UNAVAILABLE", "the next hop takes no messages")
            )

    def _no_route(self, part: Part, batch: Batch) -> None:
        now = time.monotonic_ns()
        self.fail(
            [next_item(t, batch, hop, now) for t, hop in part.members],
            RequestError("BLOCK_UNAVAILABLE", f"no route to stage {part.stage}"),
        )

    def _lost(self, count: int, why: str) -> None:
        """Nobody can be told; the Dispatcher's deadline answers for these."""
        if count:
            self.undeliverable += count
            _LOG.warning("%d items undeliverable: %s", count, why)

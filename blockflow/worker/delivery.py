"""Delivery: what leaves a worker. Outputs go to the next hops, failures to the Dispatcher."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockflow.core import limits
from blockflow.core.departed import Departed
from blockflow.core.errors import BlockFlowError, RequestError, SystemError_, make_error
from blockflow.core.records import record
from blockflow.core.routing import DISPATCHER_STAGE, RouteTable, StageRoute
from blockflow.tensormq.channel import OutBuffer, Payload, Producer
from blockflow.tensormq.push import PushCache, Unsent
from blockflow.wire.data import Data, Draft, Failure, Item, encode_data, encode_failure
from blockflow.wire.tensor import TensorDesc
from blockflow.worker.parting import Part, item_bytes, next_item, plan_parts, spent
from blockflow.worker.readers import Readers
from blockflow.worker.ticket import Batch, Ticket

_LOG = logging.getLogger("blockflow.worker")

_FAILURE_ROOM = limits.MAX_HEADER_BYTES - 2200
_NO_MEMORY = SystemError_("NO_SPACE", "no memory to copy the output to", hint="try again later")


@record
class _Tag:
    """What to answer for when a message never leaves.

    ``members`` are tickets with the node that the message was for.
    """

    members: Sequence[tuple[Ticket, int]]
    batch: Batch
    revoke: Callable[[], None] | None

    def items(self) -> list[Item]:
        now = time.monotonic_ns()
        return [next_item(t, self.batch, hop, now) for t, hop in self.members]


@dataclass(slots=True)
class Shipment:
    """A batch's messages before its result is there: made, leased and addressed, but not sent.

    The slot is held until they are sent, so that no consumer's death frees it under the engine.
    """

    routes: RouteTable
    letters: list[tuple[Part, StageRoute, Payload, Draft]]
    stays: list[tuple[Ticket, int, int]]


class Delivery:
    """The sending side of a worker; used under its lock.

    Args:
        incarnation: of this worker.
        mode: ``tensormq`` or ``zeromq``.
        local: its own stages.
        push: sending sockets.
        shm: producer of slots, None when the worker has no arena.
        inline: producer of whole-tensor frames.
        own_copy: of a tensor, in memory of its own.
    """

    def __init__(
        self,
        incarnation: int,
        mode: str,
        local: Collection[int],
        push: PushCache,
        shm: Producer | None,
        inline: Producer,
        own_copy: Callable[[Any], Any] = lambda tensor: tensor.clone(),
    ) -> None:
        self._incarnation = incarnation
        self._handles = mode == "tensormq" and shm is not None
        self._local = local
        self._push = push
        self._shm = shm
        self._inline = inline
        self._readers = Readers(shm)
        self.own_copy = own_copy
        self._gone = Departed()
        self._work_by(RouteTable(0, 0))
        self.undeliverable = 0

    def set_routes(self, table: RouteTable) -> None:
        """Work by ``table`` from now on; sockets that it has no use for are closed."""
        self._work_by(table := table.without(self._gone))
        devices = {r.incarnation: r.device for r in table.stages.values()}
        for producer in (self._shm, self._inline):
            if producer is not None:
                producer.set_devices(devices)
        self._readers.keep(table.stages)
        self._unsent(self._push.retain({r.endpoint for r in table.stages.values()}))

    def peer_gone(self, incarnation: int) -> None:
        """That process is dead: take back what it held, drop its socket, send it nothing more.

        A table that was published before may still name it (workers that retire stay in it until
        they are drained); what was sent there would wait, with its slots, for the next one.
        """
        for producer in (self._shm, self._inline):
            if producer is not None:
                producer.peer_gone(incarnation)
        dead = [r.endpoint for r in self.routes.stages.values() if r.incarnation == incarnation]
        self._gone.add(incarnation)
        self._work_by(self.routes.without(self._gone))
        for endpoint in dead:
            self._unsent(self._push.drop(endpoint))

    def _work_by(self, table: RouteTable) -> None:
        self.routes = table
        routes = table.stages.items()
        self._by_handle = {s for s, r in routes if self._handles and r.mode == "tensormq"}
        self._once = {s for s, r in routes if not r.replayable}

    def producer_for(self, batch: Batch) -> Producer | None:
        """Where the batch's output must lie; None when it does not leave this worker. The batch has
        its ``plan`` from now on."""
        parts, _ = batch.plan = plan_parts(batch, self._local)
        found: Producer | None = None
        for part in parts:
            if part.stage in self._by_handle:
                return self._shm
            found = self._inline
        return found

    def _plan(self, batch: Batch) -> tuple[list[Part], list[tuple[Ticket, int, int]]]:
        """Of a batch that may have failed in part."""
        whole = None if batch.errors else batch.plan
        return plan_parts(batch, self._local) if whole is None else whole

    def consumers_of(self, batch: Batch) -> set[int]:
        """Incarnations that the batch's output goes to by handle."""
        routes, (parts, _) = self.routes.stages, self._plan(batch)
        return {routes[p.stage].incarnation for p in parts if p.stage in self._by_handle}

    def stays(self, batch: Batch) -> bool:
        """Whether some of the batch's output goes on within this worker."""
        return bool(self._plan(batch)[1])

    def replayable(self, stage: int) -> bool:
        """Whether this stage may run a second time on the same request."""
        return stage not in self._once

    def prepare(self, batch: Batch, producer: Producer) -> None:
        """Make the messages of a batch that is about to be computed, if all of them are handles.

        What :meth:`deliver` then has left to do is to write the times and to send. The output's
        way is not known better afterwards, unless a request fails or the routes change.
        """
        out = batch.out
        if out is None or producer is not self._shm:
            return
        parts, stays = self._plan(batch)
        routes = self.routes
        ways: list[tuple[Part, StageRoute]] = []
        for part in parts:
            if part.stage not in self._by_handle:
                return
            route = routes.stages[part.stage]
            if not producer.reaches(out, route.incarnation):
                return
            ways.append((part, route))
        if not 0 < len(ways) <= producer.max_consumers:
            return
        self._readers.meet(ways)
        producer.hold(out)
        payloads = producer.publish(out, [route.incarnation for _, route in ways], batch.until_ns)
        letters = []
        for (part, route), payload in zip(ways, payloads, strict=True):
            mine = part.of(payload)
            draft = Draft(self._incarnation, mine.desc, [(t.item, hop) for t, hop in part.members])
            letters.append((part, route, payload, draft))
        batch.shipment = Shipment(routes, letters, stays)

    def deliver(self, batch: Batch, producer: Producer | None) -> list[tuple[Ticket, int, int]]:
        """Send a computed batch on; fails what cannot be sent.

        Returns:
            Local successors, as :func:`plan_parts`; the caller gives them ``batch.result``. If
            there are any and the batch has an ``out``, the buffer is held for them: unhold it
            later.
        """
        shipment: Shipment | None = batch.shipment
        out = batch.out
        if out is None or producer is None:
            return self._plan(batch)[1]
        if shipment is None:
            return self._deliver(batch, producer, out)
        batch.shipment = None
        if not batch.errors and shipment.routes is self.routes:
            for part, route, payload, draft in shipment.letters:
                self._post(part, route, payload, draft, batch, producer)
            if not shipment.stays:
                producer.unhold(out)
            return shipment.stays
        for _, _, payload, _ in shipment.letters:
            producer.revoke(payload)
        stays = self._deliver(batch, producer, out, held=True)
        producer.unhold(out)
        return stays

    def _deliver(
        self, batch: Batch, producer: Producer, out: OutBuffer, held: bool = False
    ) -> list[tuple[Ticket, int, int]]:
        """Send what was not prepared, or not for this outcome (then the buffer is ``held``)."""
        parts, stays = self._plan(batch)
        sendable: list[tuple[Part, StageRoute]] = []
        for part in parts:
            route = self.routes.stages.get(part.stage)
            if route is None:
                lost = f"no route to stage {part.stage} any more"
                self._fail_part(part, batch, RequestError("WORKER_LOST", lost))
            else:
                sendable.append((part, route))
        if producer is self._shm:
            slots = [
                s
                for s in sendable
                if s[0].stage in self._by_handle and producer.reaches(out, s[1].incarnation)
            ]
            slots = slots[: producer.max_consumers]
            self._readers.meet(slots)
        else:
            slots = sendable[: producer.max_consumers]
        chosen = {id(part) for part, _ in slots}
        copied = [s for s in sendable if id(s[0]) not in chosen]
        if not slots:
            # Nobody takes the buffer as it is (the routes have changed, or every ticket failed).
            stays = self._copied_for(stays, batch)
            copies = self._copies(copied, out, batch)
            batch.out = None
            if not held:
                producer.discard(out)
            self._send_copies(copies, batch)
            return stays
        if stays:
            producer.hold(out)
        # Copied first: once published, consumers may release the slot and it may be written anew.
        copies = self._copies(copied, out, batch)
        payloads = producer.publish(out, [route.incarnation for _, route in slots], batch.until_ns)
        for (part, route), payload in zip(slots, payloads, strict=True):
            self._send(
                part,
                route,
                part.of(payload),
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
            size = 0 if item is None else item_bytes(item)
            full = len(chunk) == limits.MAX_ITEMS_PER_MESSAGE or (chunk and size > room)
            if chunk and (item is None or full):
                msg = Failure(self._incarnation, time.monotonic_ns(), error, tuple(chunk))
                header = encode_failure(msg)
                if len(header) > limits.MAX_HEADER_BYTES:  # a long text on a long path
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

    def _copies(
        self, sends: Sequence[tuple[Part, StageRoute]], out: OutBuffer, batch: Batch
    ) -> list[tuple[Part, StageRoute, Payload]]:
        """Whole tensors for those that cannot have the buffer itself; one for the same rows."""
        whole = Payload(TensorDesc(out.dtype, out.dims), out.memory)
        made: dict[tuple[object, ...], Payload] = {}
        copies: list[tuple[Part, StageRoute, Payload]] = []
        for part, route in sends:
            rows = part.start, part.stop, part.shape
            try:
                if rows not in made:
                    own = part.of(whole)
                    made[rows] = Payload(own.desc, bytes(own.frame or b""))
                copies.append((part, route, made[rows]))
            except MemoryError:
                self._fail_part(part, batch, _NO_MEMORY)
        batch.copies += len(made)
        return copies

    def _copied_for(
        self, stays: list[tuple[Ticket, int, int]], batch: Batch
    ) -> list[tuple[Ticket, int, int]]:
        """The result in memory of its own for local successors; without any they fail."""
        if not stays:
            return stays
        try:
            batch.result = self.own_copy(batch.result)
        except RuntimeError:
            now = time.monotonic_ns()
            self.fail([next_item(t, batch, hop, now) for t, hop, _ in stays], _NO_MEMORY)
            return []
        batch.copies += 1
        return stays

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
        tag = _Tag(part.members, batch, revoke)
        if not self._push.send(route.endpoint, frames, tag=tag):
            self._give_up(tag, route.stage)

    def _post(
        self,
        part: Part,
        route: StageRoute,
        payload: Payload,
        draft: Draft,
        batch: Batch,
        producer: Producer,
    ) -> None:
        """Send a message that was prepared."""
        sent_ns = time.monotonic_ns()
        left: list[int] = []
        hops: list[int] = []
        for ticket, _ in part.members:
            ns = ticket.deadline_ns - sent_ns
            left.append(ns // 1_000_000 if ns > 0 else 0)
            hops += (ticket.item.hop, ticket.transit_ns, *spent(ticket, batch, sent_ns))
        header = draft.finish(sent_ns, left, hops)
        tag = _Tag(part.members, batch, lambda: producer.revoke(payload))
        if not self._push.send(route.endpoint, (header,), tag=tag):
            self._give_up(tag, route.stage)

    def _unsent(self, messages: Sequence[Unsent]) -> None:
        for message in messages:
            if isinstance(message.tag, _Tag):
                self._give_up(message.tag, None, gone=True)
            else:
                self._lost(1, "a failure for a Dispatcher that is gone")

    def _give_up(self, tag: _Tag, stage: int | None, gone: bool = False) -> None:
        if tag.revoke is not None:
            tag.revoke()
        if stage == DISPATCHER_STAGE:
            self._lost(len(tag.members), "the Dispatcher takes no messages")
        elif gone:
            self.fail(tag.items(), RequestError("WORKER_LOST", "the next hop's worker is gone"))
        else:
            self.fail(
                tag.items(), RequestError("BLOCK_UNAVAILABLE", "the next hop takes no messages")
            )

    def _fail_part(self, part: Part, batch: Batch, error: BlockFlowError) -> None:
        now = time.monotonic_ns()
        self.fail([next_item(t, batch, hop, now) for t, hop in part.members], error)

    def _lost(self, count: int, why: str) -> None:
        """Nobody can be told; the Dispatcher's deadline answers for these."""
        if count:
            self.undeliverable += count
            _LOG.warning("%d items undeliverable: %s", count, why)

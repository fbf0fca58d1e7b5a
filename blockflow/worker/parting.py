"""Parting: which rows of a computed batch go where, and what their headers say. Pure.

A batch is parted by next hop: the rows that go the same way ride in one message. So are the rows of
a padded batch by their own lengths.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from blockflow.core import limits
from blockflow.tensormq.channel import Payload
from blockflow.wire.data import Item, pack_timing
from blockflow.worker.ticket import Batch, Ticket

_HEADER_ROOM = limits.MAX_HEADER_BYTES - 160
"""A header's bytes that items may fill; the rest holds what a message has once."""


@dataclass(slots=True)
class Part:
    """One message: rows ``start..stop`` of a batch's output, all to ``stage``.

    ``members`` are tickets with the path node that receives them (their own node towards the
    Dispatcher). ``shape`` are the dims after the rows that a padded batch's rows are cut back to;
    None: all of the output's.
    """

    stage: int
    start: int
    stop: int
    members: list[tuple[Ticket, int]]
    header: int
    shape: tuple[int, ...] | None = None

    def of(self, whole: Payload) -> Payload:
        """Its part of the batch's output."""
        if self.shape is None and self.stop - self.start == whole.desc.dims[0]:
            return whole
        return whole.rows(self.start, self.stop, self.shape)


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
    growing: dict[int, Part] = {}
    row = 0
    for ticket in batch.tickets:
        item = ticket.item
        start, row = row, row + item.rows
        if ticket.key in batch.errors:
            continue
        for stage, hop in item.path.targets[item.hop]:
            if stage in local:
                stays.append((ticket, hop, start))
                continue
            size = item_bytes(item)
            shape = batch.cuts.get(ticket.key)
            part = growing.get(stage)
            if (
                part is None
                or part.stop != start
                or part.shape != shape
                or part.header + size > _HEADER_ROOM
                or len(part.members) == limits.MAX_ITEMS_PER_MESSAGE
            ):
                part = growing[stage] = Part(stage, start, start, [], 0, shape)
                parts.append(part)
            part.stop = row
            part.header += size
            part.members.append((ticket, hop))
    return parts, stays


def item_bytes(item: Item) -> int:
    """Upper bound of an item's size in a header, one more hop's timing included."""
    return 96 + len(item.path.wire) + len(item.timings)


def spent(ticket: Ticket, batch: Batch, sent_ns: int) -> tuple[int, int, int]:
    """Where a ticket's time in this worker went: wait, overhead and compute, as
    :class:`~blockflow.wire.data.HopTiming` has them; they add up to ``sent - received``."""
    compute = batch.compute_to_ns - batch.compute_from_ns
    wait = batch.started_ns - ticket.ready_ns
    overhead = sent_ns - ticket.received_ns - wait - compute
    return wait if wait > 0 else 0, overhead if overhead > 0 else 0, compute


def next_item(ticket: Ticket, batch: Batch, hop: int, sent_ns: int) -> Item:
    """The ticket's item as it goes on to node ``hop``."""
    item, left = ticket.item, ticket.deadline_ns - sent_ns
    return Item(
        item.request_id,
        item.attempt,
        item.epoch,
        item.path,
        hop,
        item.rows,
        left // 1_000_000 if left > 0 else 0,
        item.timings + pack_timing(item.hop, ticket.transit_ns, *spent(ticket, batch, sent_ns)),
        item.task,
        item.alone,
    )

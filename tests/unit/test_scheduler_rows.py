"""Where a batch's rows lie: so that who runs them next, or after that, finds its own together."""

from __future__ import annotations

from dataclasses import replace

import torch
from scheduler_rig import ticket

from blockflow.batching.policy import Run
from blockflow.worker.buffer_pool import BufferPool
from blockflow.worker.gathering import gathered
from blockflow.worker.parting import plan_parts
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.ticket import Batch, Source, Ticket

TASKS = [[1, 2, 4, 7], [1, 2, 5], [1, 3], [1, 2, 4, 6]]


def batch_of(stage: int, tickets: list[Ticket]) -> Batch:
    """As the worker of ``stage`` runs them, in order of their arrival."""
    scheduler = Scheduler({stage: {"policy": "window"}})
    for one in tickets:
        scheduler.arrive(one, 0)
    return scheduler._take(Run(stage, tuple(t.key for t in tickets)))


def test_rows_that_part_later_lie_together_on_the_way() -> None:
    """Tasks that have several blocks in common part at the last of these. What lies there in the
    order in which it came would be put together first, by a copy of the whole batch."""
    came = [ticket(n, [TASKS[n % len(TASKS)]]) for n in range(12)]
    batch = batch_of(1, came)
    parts, _ = plan_parts(batch, ())
    assert [p.stage for p in parts] == [2, 3]
    for stage, hop in ((2, 1), (4, 2)):
        (part,) = [p for p in parts if p.stage == stage]
        count = len(part.members)
        source = Source("float32", (4,), count, tensor=torch.zeros(count, 4))
        sent = [
            replace(t, stage=stage, source=source, start=row, item=replace(t.item, hop=hop))
            for row, (t, _) in enumerate(part.members)
        ]
        batch = batch_of(stage, sent)
        assert gathered(batch.tickets, (), 0, BufferPool())[1] == 0, stage
        parts, _ = plan_parts(batch, ())
        assert len({p.stage for p in parts}) == len(parts) == 2, "a message for each next block"


def test_of_a_padded_batch_those_of_one_length_come_first() -> None:
    """What goes to one block is one message for each length, however it goes on from there."""
    came = [replace(ticket(n, [TASKS[n % 2]]), cut=(1 + n // 2 % 2,)) for n in range(8)]
    batch = batch_of(1, came)
    assert [t.shape for t in batch.tickets] == [(1,)] * 4 + [(2,)] * 4
    ways = [t.item.path.nodes[2].stage for t in batch.tickets]
    assert ways == [4, 4, 5, 5] * 2

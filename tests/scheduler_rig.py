"""Tickets for a Scheduler."""

from __future__ import annotations

import os
from collections.abc import Sequence

from blockflow.core.routing import merge_paths
from blockflow.wire.data import HopTiming, Item, pack_timings
from blockflow.worker.ticket import Source, Ticket

MS = 1_000_000


def ticket(
    key: int,
    paths: Sequence[Sequence[int]] = ((1,),),
    *,
    hop: int = 0,
    rows: int = 1,
    now: int = 0,
    deadline: int = 1000 * MS,
    timings: int = 0,
    alone: bool = False,
) -> Ticket:
    tree, _ = merge_paths(paths)
    done = pack_timings(HopTiming(n, 2**40, 2**40, 2**40, 2**40) for n in range(timings))
    item = Item(os.urandom(16), 1, 1, tree, hop, rows, 1000, done, alone=alone)
    stage = tree.nodes[hop].stage
    source = Source("float32", (4,), 1)
    return Ticket(key, item, stage, source, 0, now, now, now, deadline, 5)

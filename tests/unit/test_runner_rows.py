"""The engine thread: whose rows it takes, and what may not run a second time."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from blockflow.core.routing import merge_paths
from blockflow.wire.data import Item
from blockflow.worker.ticket import Batch, Source, Ticket
from tests.unit.test_worker_runner import Bench


def batch_of(starts: Sequence[int], values: Sequence[float]) -> Batch:
    """Tickets of a row each, in one source whose rows are full of ``values``."""
    whole = torch.tensor(values).unsqueeze(1).repeat(1, 2)
    source = Source("float32", (2,), len(starts), tensor=whole)
    tree, _ = merge_paths([[1]])
    tickets = tuple(
        Ticket(key, Item(os.urandom(16), 1, 1, tree, 0, 1, 1000), 1, source, at, 0, 0, 0, 2**62, 0)
        for key, at in enumerate(starts)
    )
    return Batch(1, tickets)


def test_rows_of_one_message_that_do_not_lie_side_by_side_stay_whose_they_are() -> None:
    """The one between them has expired, or their order is another one."""
    bench = Bench(zero_copy=False)
    for starts in ((0, 2), (2, 0), (1, 2, 0)):
        batch = batch_of(starts, (5.0, 6.0, 7.0))
        with torch.inference_mode():
            bench.runner.compute(batch)
        assert batch.result[:, 0].tolist() == [2 * (5.0 + at) for at in starts]


def test_where_nothing_may_run_twice_a_failed_batch_fails_as_a_whole() -> None:
    bench = Bench(zero_copy=False)
    batch = batch_of((0, 1, 2), (5.0, 13.0, 7.0))
    batch.replayable = False
    with torch.inference_mode():
        bench.runner.compute(batch)
    assert bench.engine.calls == [3]
    assert {k: e.code for k, e in batch.errors.items()} == dict.fromkeys(range(3), "BLOCK_FAILED")
    assert all("must not run twice" in e.message for e in batch.errors.values())

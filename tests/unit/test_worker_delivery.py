"""What a worker does with an output whose way has changed while it was computed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from blockflow.core.errors import BlockFlowError
from blockflow.core.routing import merge_paths
from blockflow.tensormq.inline import InlineProducer
from blockflow.tensormq.views import as_torch
from blockflow.wire.data import Item
from blockflow.worker.delivery import Delivery
from blockflow.worker.ticket import Batch, Source, Ticket


class NoSockets:
    """Nothing is sent here: there is no route."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"push.{name}")


def computed(local: set[int]) -> tuple[Delivery, InlineProducer, Batch]:
    """1 -> (2 here, 3 elsewhere), and 3 has no route any more."""
    producer = InlineProducer()
    push: Any = NoSockets()
    delivery = Delivery(1, "tensormq", local, push, producer, producer)
    item = Item(os.urandom(16), 1, 1, merge_paths([[1, 2], [1, 3]])[0], 0, 2, 1000)
    source = Source("float32", (2,), 1, tensor=torch.ones(2, 2))
    batch = Batch(1, (Ticket(0, item, 1, source, 0, 0, 0, 0, 2**62, 0),))
    batch.out = out = producer.reserve("float32", (2, 2))
    assert out is not None
    batch.result = as_torch(out.memory, "float32", (2, 2))
    return delivery, producer, batch


def test_what_stays_gets_memory_of_its_own_when_nobody_else_takes_the_slot() -> None:
    delivery, producer, batch = computed({1, 2})
    slot = batch.result
    ((ticket, hop, start),) = delivery.deliver(batch, producer)
    assert (ticket.item.path.nodes[hop].stage, start) == (2, 0)
    assert batch.out is None and batch.copies == 1
    assert batch.result.data_ptr() != slot.data_ptr()


def test_without_memory_of_its_own_what_stays_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    delivery, producer, batch = computed({1, 2})
    failed: list[tuple[int, str]] = []

    def fail(items: Sequence[Item], error: BlockFlowError) -> None:
        failed.extend((i.path.nodes[i.hop].stage, error.code) for i in items)

    class Full:
        def clone(self) -> Any:
            raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(delivery, "fail", fail)
    batch.result = Full()
    assert delivery.deliver(batch, producer) == []
    assert sorted(failed) == [(2, "NO_SPACE"), (3, "WORKER_LOST")]
    assert batch.out is None and batch.copies == 0

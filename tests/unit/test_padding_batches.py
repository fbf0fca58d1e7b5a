"""Padded batches: what a worker makes of tensors of several lengths, and of what comes out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, Padding, TensorSpec
from blockflow.core.routing import merge_paths
from blockflow.dispatcher.tensors import TensorDesk
from blockflow.engine.base import Engine, EngineOptions
from blockflow.repository.padding import blank, cut, padded
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.channel import Producer
from blockflow.tensormq.inline import InlineProducer
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.tensormq.views import as_numpy, as_torch
from blockflow.wire.data import Data, Item
from blockflow.wire.tensor import TensorDesc
from blockflow.worker.failpoints import FailPoints
from blockflow.worker.parting import plan_parts
from blockflow.worker.runner import Runner
from blockflow.worker.stage import Stage
from blockflow.worker.ticket import Batch, Source, Ticket
from blockflow.worker.turns import NEVER_NS
from tests.padding_rig import LENGTH, VECTORS


@settings(deadline=None, max_examples=50)
@given(
    parts=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4
    ),
    more=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_what_was_padded_is_cut_back(
    parts: list[tuple[int, int, int]], more: tuple[int, int]
) -> None:
    tensors = [torch.randn(dims) for dims in parts]
    shape = tuple(max(p[i + 1] for p in parts) + more[i] for i in (0, 1))
    whole = padded(tensors, shape, -7)
    assert whole.shape == (sum(p[0] for p in parts), *shape)
    assert (whole == -7).sum() == whole.numel() - sum(t.numel() for t in tensors)
    row = 0
    for t in tensors:
        mine = whole[row : row + len(t)]
        assert torch.equal(cut(mine, t.shape[1:]), t)
        blank(mine, t.shape[1:], 5)
        row += len(t)
    assert not (whole == -7).any()
    assert (whole == 5).sum() == whole.numel() - sum(t.numel() for t in tensors)

    place = torch.full_like(whole, 9)  # what a former tensor has left there is not to be seen
    assert padded(tensors, shape, -7, place) is place
    assert torch.equal(place, padded(tensors, shape, -7))


class Adds(Engine):
    """x + 1, so that positions of padding do not stay what they were."""

    zero_copy = False

    def load(self, artifact: Path) -> None:
        self.given: list[Tensor] = []

    def run(self, x: Any, out: Any | None = None) -> Any:
        self.given.append(x)
        if (x == 13).any():
            raise ValueError("thirteen")
        return torch.add(x, 1, out=out) if out is not None else x + 1

    @property
    def copies_out(self) -> int:
        return 0 if self.zero_copy else 1

    def close(self) -> None:
        pass


class Bench:
    """Two stages in one worker, both padded along ``length`` (stage 2 with ``second``)."""

    def __init__(self, zero_copy: bool = False, second: float = 0) -> None:
        self.engines = {}
        stages = {}
        for number, value in ((1, -5), (2, second)):
            contract = Contract(VECTORS, VECTORS)
            padding = Padding("length", value)
            info = BlockInfo(f"b{number}", "1", "0" * 64, "test", contract, 0, 0, padding=padding)
            self.engines[number] = engine = Adds(info, EngineOptions())
            engine.zero_copy = zero_copy
            engine.load(Path())
            stages[number] = Stage(StageSpec(number, info), engine)
        self.stages = stages
        self.runner = Runner(stages, FailPoints("", Path()))

    def compute(self, batch: Batch, slot: bool = False) -> Batch:
        stage = self.stages[batch.stage]
        batch.cuts = stage.cuts(batch)
        if slot:
            dims = stage.output_dims("float32", (batch.rows, *batch.shape))
            batch.out = InlineProducer().reserve("float32", dims)
        with torch.inference_mode():
            self.runner.compute(batch)
        stage.meter.given(batch)
        return batch


def ticket(key: int, x: Tensor, path: tuple[int, ...] = (1, 2)) -> Ticket:
    item = Item(os.urandom(16), 1, 1, merge_paths([path])[0], 0, len(x), 1000)
    source = Source("float32", tuple(x.shape[1:]), 1, tensor=x)
    return Ticket(key, item, path[0], source, 0, 0, 0, 0, NEVER_NS, 0)


def mixed(path: tuple[int, ...] = (1, 2)) -> list[Ticket]:
    return [ticket(k, torch.full((r, n, 2), float(k)), path) for k, (r, n) in enumerate(DIMS)]


DIMS = ((1, 3), (2, 5), (1, 3), (1, 1))
"""(rows, length) of a batch's tickets."""


@pytest.mark.parametrize("slot", [False, True])
@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_padded_batch(slot: bool, zero_copy: bool) -> None:
    bench = Bench(zero_copy)
    batch = bench.compute(Batch(1, tuple(mixed()), pad_to=(5, 2)), slot)
    (given_,) = bench.engines[1].given
    assert given_.shape == (5, 5, 2) and given_[0, :, 0].tolist() == [0, 0, 0, -5, -5]
    assert batch.cuts == {0: (3, 2), 1: (5, 2), 2: (3, 2), 3: (1, 2)}
    row = 0
    for t in batch.tickets:
        rows = batch.result[row : row + t.rows]
        assert (cut(rows, t.shape) == t.key + 1).all()
        assert not rows[:, t.shape[0] :].any(), "zeros beyond: stage 2 goes on with it"
        row += t.rows
    meter = bench.stages[1].meter
    assert (meter.elements_in, meter.elements_padded) == (50, 50 - 2 * (3 + 10 + 3 + 1))
    if batch.out is not None:
        assert torch.equal(as_torch(batch.out.memory, "float32", (5, 5, 2)), batch.result)


def followers(batch: Batch) -> tuple[Ticket, ...]:
    """As the executor makes them."""
    source = Source("float32", tuple(batch.result.shape[1:]), 4, tensor=batch.result)
    _, stays = plan_parts(batch, {1, 2})
    return tuple(
        Ticket(t.key, t.item, 2, source, start, 0, 0, 0, NEVER_NS, 0, 0, batch.cuts.get(t.key))
        for t, _, start in stays
    )


def test_a_batch_that_stays_together_is_not_padded_again() -> None:
    bench = Bench()
    first = bench.compute(Batch(1, tuple(mixed()), pad_to=(5, 2)))
    tickets = followers(first)
    assert [t.shape for t in tickets] == [(3, 2), (5, 2), (3, 2), (1, 2)]
    bench.compute(Batch(2, tickets, pad_to=(5, 2)))
    assert bench.engines[2].given[0].data_ptr() == first.result.data_ptr(), "no copy"


def test_a_block_with_another_value_gets_its_own() -> None:
    bench = Bench(second=9)
    tickets = followers(bench.compute(Batch(1, tuple(mixed()), pad_to=(5, 2))))
    bench.compute(Batch(2, tickets, pad_to=(5, 2)))
    assert bench.engines[2].given[0][0, :, 0].tolist() == [1, 1, 1, 9, 9]


def test_a_part_of_a_padded_batch_is_cut() -> None:
    """It goes on alone, with its like, or with another's longer rows."""
    bench = Bench()
    a, b, c, d = followers(bench.compute(Batch(1, tuple(mixed()), pad_to=(5, 2))))
    for tickets, pad_to, shape in (
        ((a,), (), (1, 3, 2)),
        ((b,), (), (2, 5, 2)),
        ((a, c), (), (2, 3, 2)),
        ((c, d), (3, 2), (2, 3, 2)),
        ((d, b), (5, 2), (3, 5, 2)),
        ((a, ticket(9, torch.ones(1, 7, 2), (2,))), (7, 2), (2, 7, 2)),
    ):
        bench.compute(Batch(2, tickets, pad_to=pad_to))
        x = bench.engines[2].given[-1]
        assert x.shape == shape and x.is_contiguous()
        row = 0
        for t in tickets:
            mine = x[row : row + t.rows]
            assert (cut(mine, t.shape) == (1 if t.key == 9 else t.key + 1)).all()
            assert not mine[:, t.shape[0] :].any()
            row += t.rows


@pytest.mark.parametrize("slot", [False, True])
def test_a_bad_item_of_a_padded_batch_fails_alone(slot: bool) -> None:
    bench = Bench()
    tickets = [*mixed(), ticket(4, torch.full((1, 4, 2), 13.0))]
    batch = bench.compute(Batch(1, tuple(tickets), pad_to=(5, 2)), slot)
    assert list(batch.errors) == [4] and "thirteen" in batch.errors[4].message
    row = 0
    for t in tickets[:4]:
        assert (cut(batch.result[row : row + t.rows], t.shape) == t.key + 1).all()
        row += t.rows


def test_an_output_without_the_dim_is_not_cut() -> None:
    contract = Contract(VECTORS, TensorSpec("float32", ("rows", 3)))
    info = BlockInfo("h", "1", "0" * 64, "test", contract, 0, 0, padding=LENGTH)
    stage = Stage(StageSpec(1, info), Adds(info, EngineOptions()))
    assert stage.cuts(Batch(1, tuple(mixed()), pad_to=(5, 2))) == {}


def test_rows_of_one_length_are_one_message() -> None:
    tickets = sorted(mixed((1, 7)), key=lambda t: t.shape)
    batch = Bench().compute(Batch(1, tuple(tickets), pad_to=(5, 2)))
    parts, stays = plan_parts(batch, {1})
    assert stays == []
    assert [(p.start, p.stop, p.shape, len(p.members)) for p in parts] == [
        (0, 1, (1, 2), 1),
        (1, 3, (3, 2), 2),
        (3, 5, (5, 2), 1),
    ]


class NoGrants:
    def place(self, client: bytes, part: memoryview) -> None:
        """No client has memory here."""


@pytest.mark.parametrize("by_slot", [False, True])
def test_the_dispatcher_makes_a_cut_result_contiguous(tmp_path: Path, by_slot: bool) -> None:
    """Clients get elements in row-major order, whatever the batch was padded to."""
    producer: Producer
    consumer = ShmConsumer(tmp_path)
    if by_slot:
        producer = ShmProducer(Arena.create(tmp_path, 11, 1 << 16, 4))
    else:
        producer = InlineProducer()
    out = producer.reserve("float32", (3, 4, 2))
    assert out is not None
    whole = as_numpy(out.memory, "float32", (3, 4, 2))
    whole[...] = np.arange(24).reshape(3, 4, 2)
    (payload,) = producer.publish(out, [1])
    part = payload.rows(0, 3, (3, 2))
    assert part.desc.strides is not None
    desk = TensorDesk(InlineProducer(), consumer, NoGrants())  # type: ignore[arg-type]
    message = Data(11, 0, part.desc, ())
    buffer = desk.open(message, part.frame)
    result = desk.cut(buffer, 1, 2, b"client")
    buffer.release()
    assert result.tensor == TensorDesc("float32", (2, 3, 2))
    assert np.frombuffer(result.frame, np.float32).tolist() == whole[1:, :3].ravel().tolist()
    consumer.close()
    producer.close()

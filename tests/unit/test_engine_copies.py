"""What an engine copies within a run, and what it does where the last operator cannot write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import BlockError
from blockflow.core.model import TensorSpec
from blockflow.engine.base import EngineOptions
from blockflow.engine.copies import RunCopies
from blockflow.engine.exported import ExportedEngine
from blockflow.engine.registry import create_engine
from blockflow.engine.replay import GraphRecorder
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel

ROWS = TensorSpec("float32", ("rows", 6))
Load = Callable[..., ExportedEngine]


class Counting:
    """Stands before a function and counts its calls."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.calls = 0
        self._function = function

    def __call__(self, *args: Tensor) -> Tensor:
        self.calls += 1
        return self._function(*args)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    repository = BlockRepository(tmp_path)

    def make(module: nn.Module, spec: TensorSpec = ROWS, precision: str = "fp32") -> Any:
        torch.manual_seed(0)
        loaded = LoadedModel(module.eval().requires_grad_(False), "test", spec)
        export_model(loaded, repository, names=["b"])
        engine = create_engine(repository.info("b"), EngineOptions(precision=precision))
        with repository.artifact("b") as path:
            engine.load(path)
        return engine

    return make


def watched(engine: Any) -> tuple[Counting, Counting]:
    """The engine's two functions: the plain one and the one that writes."""
    engine._forward, engine._into = Counting(engine._forward), Counting(engine._into)
    return engine._forward, engine._into


class Twice(nn.Module):
    """Ends in a sum, which torch refuses to write over a part of what it adds."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x


def test_a_refused_write_happens_once(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    """What refuses once is not asked again: each time would cost a forward."""
    engine = load(Twice())
    plain, into = watched(engine)
    assert engine.copies_out == 0
    memory = torch.randn(30)
    x, out = memory[:18].view(3, 6), memory[12:].view(3, 6)
    want = x * 2
    with caplog.at_level(logging.WARNING, "blockflow.engine"):
        assert engine.run(x, out) is out
    torch.testing.assert_close(out, want)
    # the batch that was hit is counted, and whoever asks now knows of the copy beforehand
    assert (engine.copied.outputs, engine.copies_out) == (1, 1)
    for _ in range(3):
        engine.run(torch.randn(2, 6), torch.empty(2, 6))
        assert engine.copied.outputs == 1
    assert (into.calls, plain.calls) == (1, 4)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "blockflow.engine"]
    assert "'b'" in said and "memory location" in said


class Looks(nn.Module):
    """Fails on an index outside the table; its last operator could be written."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.table(x))


def test_a_failing_block_is_not_a_refused_write(load: Load) -> None:
    """It is not run a second time, and goes on writing into slots."""
    engine = load(Looks(), TensorSpec("int64", ("rows",)))
    plain, into = watched(engine)
    with pytest.raises(BlockError) as e:
        engine.run(torch.tensor([1, 9]), torch.empty(2, 6))
    assert e.value.code == "BLOCK_FAILED"
    engine.run(torch.tensor([1, 2]), torch.empty(2, 6))
    assert (into.calls, plain.calls) == (2, 0)
    assert (engine.copied.outputs, engine.copies_out) == (0, 0)


def test_where_both_ways_fail_nothing_is_given_up(load: Load) -> None:
    engine: Any = load(Twice())
    plain, into = watched(engine)
    engine._forward = Counting(lambda x: plain(x)[:, :5])
    overlapping = torch.randn(30)
    with pytest.raises(BlockError) as e:
        engine.run(overlapping[:18].view(3, 6), overlapping[12:].view(3, 6))
    assert e.value.code == "OUTPUT_MISMATCH" and engine.copies_out == 0
    engine._forward = plain
    engine.run(torch.randn(2, 6))  # the refusal of the run before is not this one's
    engine.run(torch.randn(2, 6), torch.empty(2, 6))
    assert (into.calls, engine.copies_out) == (2, 0)


def test_a_conversion_writes_into_the_slot(load: Load) -> None:
    """At a lower precision the last operator is the conversion back: no copy after it."""
    layer = nn.Linear(6, 6)
    engine = load(layer, precision="bf16")
    engine.warm_up()
    assert engine.copies_out == 0
    x, out = torch.randn(3, 6), torch.full((3, 6), 7.0)
    assert engine.run(x, out) is out
    torch.testing.assert_close(out, layer(x), rtol=0.05, atol=0.05)
    assert (engine.copied.inputs, engine.copied.outputs) == (0, 0)


class Decides(nn.Module):
    """Its result's dtype is the contract's at any precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


def test_nothing_to_convert_is_a_copy_at_any_precision(load: Load) -> None:
    engine = load(Decides(), precision="bf16")
    engine.warm_up()
    assert engine.copies_out == 1
    engine.run(torch.randn(3, 6), torch.empty(3, dtype=torch.int64))
    assert engine.copied.outputs == 1


def test_a_block_of_views_copies_its_result_once(load: Load) -> None:
    """With a slot into that, so that nobody copies the copy."""
    engine = load(nn.Unflatten(1, (2, 3)))
    engine.run(torch.randn(3, 6))
    assert (engine.copied.inputs, engine.copied.outputs) == (0, 1)
    assert engine.copies_out == 0
    x, out = torch.randn(3, 6), torch.empty(3, 2, 3)
    assert engine.run(x, out) is out
    assert torch.equal(out, x.view(3, 2, 3))
    assert engine.copied.outputs == 1


def test_a_replayed_graph_copies_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the device: its kernels read and write memory of the graph's own."""

    class Stream:
        def wait_stream(self, other: object) -> None: ...

    class Graph:
        def replay(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    copied = RunCopies()
    replay = GraphRecorder(copied)(lambda x: x * 2, torch.ones(2, 2))
    assert (copied.inputs, copied.outputs) == (0, 0)
    replay(torch.ones(2, 2))
    assert (copied.inputs, copied.outputs) == (1, 1)

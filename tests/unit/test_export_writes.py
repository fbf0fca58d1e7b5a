"""Blocks that would write into their input, which is a read-only slot, are noticed and mended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.registry import create_engine
from blockflow.engine.workshop import EngineWorkshop
from blockflow.repository.artifact import FORMATS, writes_input
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.repository.verify import _check_dims, _step


class Rectifies(nn.Module):
    """Its second part begins with an in-place relu of values that are not negative already."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_write_that_changes_nothing_is_a_write() -> None:
    assert writes_input(nn.ReLU(inplace=True), torch.ones(2, 4))
    assert writes_input(lambda x: x.view(-1).add_(0), torch.ones(2, 4))
    assert not writes_input(nn.ReLU(), -torch.ones(2, 4))


@pytest.mark.parametrize("format_", FORMATS)
def test_the_stored_block_leaves_its_input_alone(tmp_path: Path, format_: str) -> None:
    repository = BlockRepository(tmp_path)
    model = Rectifies().eval()
    loaded = LoadedModel(model, "rectifies", TensorSpec("float32", ("rows", 4)))
    export_model(loaded, repository, names=("a", "b"), cuts=("second",), format=format_)
    engine = create_engine(repository.info("b"), EngineOptions())
    with repository.artifact("b") as path:
        engine.load(path)
    x = torch.tensor([[-1.0, 2.0, -3.0, 4.0]])
    before, version = x.clone(), x._version
    engine.run(x)
    engine.run(x, torch.empty(1, 2))
    assert torch.equal(x, before)
    assert x._version == version


class SomeTimes(nn.Module):
    """Writes into its input for some values only, which no example need have."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 5).any()):
            x.mul_(0.5)
        return x + 1


class Holds(nn.Module):
    """A trace keeps the branch of what was scripted already."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(SomeTimes())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Chooses(nn.Module):
    """The same as torch.export takes it."""

    def forward(self, x: Tensor) -> Tensor:
        def high(x: Tensor) -> Tensor:
            x.mul_(0.5)
            return x + 1

        return torch.cond((x > 5).any(), high, lambda x: x + 1, (x,))


SOMETIMES: dict[str, Callable[[], nn.Module]] = {
    "torchscript-scripted": SomeTimes,
    "torchscript-traced": Holds,
    "pt2": Chooses,
}
SPEC = TensorSpec("float32", ("rows", 4))
HIGH = torch.full((2, 4), 9.0)


def leaves_alone(engine: Engine, copies: int) -> None:
    for out in (None, torch.empty(2, 4)):
        x = HIGH.clone()
        assert torch.equal(engine.run(x, out), HIGH * 0.5 + 1)
        assert torch.equal(x, HIGH)
        assert engine.copied.inputs == copies


@pytest.mark.parametrize("format_", FORMATS)
def test_a_block_that_writes_for_some_values_is_stored_with_a_copy(
    tmp_path: Path, format_: str
) -> None:
    repository = BlockRepository(tmp_path)
    loaded = LoadedModel(SOMETIMES[format_]().eval(), "sometimes", SPEC)
    export_model(loaded, repository, names=("s",), format=format_)
    engine = create_engine(repository.info("s"), EngineOptions())
    with repository.artifact("s") as path:
        engine.load(path)
    leaves_alone(engine, 0)  # a part of the block, and not one more beside it


@pytest.mark.parametrize("format_", FORMATS)
def test_what_was_stored_without_is_given_a_copy(tmp_path: Path, format_: str) -> None:
    """Files of versions that looked at one example."""
    path, block = tmp_path / "file", SOMETIMES[format_]().eval()
    low = torch.ones(2, 4)
    with torch.no_grad():
        if format_ == "pt2":
            dims = ({0: torch.export.Dim("rows", min=1, max=64)},)
            program = torch.export.export(block, (low,), dynamic_shapes=dims, strict=False)
            program.example_inputs = None
            with path.open("wb") as f:
                torch.export.save(program, f)
        else:
            made = torch.jit.script(block) if block.__class__ is SomeTimes else None
            torch.jit.save(made or torch.jit.trace(block, low, check_trace=False), str(path))
    info = BlockInfo("s", "1", "0" * 64, format_, Contract(SPEC, SPEC), 0, 0)
    engine = create_engine(info, EngineOptions())
    engine.load(path)
    engine.warm_up()
    leaves_alone(engine, 1)
    if format_ == "pt2":
        with pytest.raises(ExportError, match="may write into its input"):
            EngineWorkshop().make("aoti", info, path, [], tmp_path / "package")


def test_a_write_that_no_graph_told_of_is_found() -> None:
    job: Any = SimpleNamespace(format="pt2", pieces=[])
    with pytest.raises(ExportError, match="writes into its input"):
        _step(job, torch.relu_, "b", torch.ones(2, 4))


def test_a_result_of_another_dtype_than_the_contract_says_is_found() -> None:
    spec = TensorSpec("float32", ("rows", 4))
    x = torch.ones(2, 4)
    _check_dims(Contract(spec, spec), x, x, "b")
    with pytest.raises(ExportError, match="gives float64"):
        _check_dims(Contract(spec, spec), x, x.double(), "b")

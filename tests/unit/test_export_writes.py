"""Blocks that would write into their input, which is a read-only slot, are noticed and mended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.model import TensorSpec
from blockflow.engine.base import EngineOptions
from blockflow.engine.registry import create_engine
from blockflow.repository.artifact import FORMATS, writes_input
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel


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

"""Blocks that rely on their writes, or on another's: stored as the model computes, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import TensorSpec
from blockflow.repository.artifact import FORMATS, read_artifact
from blockflow.repository.export import export_model, export_tree
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel


class SkipsTheWritten(nn.Module):
    """What its skip connection carries is what the in-place relu has left of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.relu(x)) + x


@pytest.mark.parametrize("format_", FORMATS)
def test_what_relies_on_the_write_is_stored_as_the_model_computes_it(
    tmp_path: Path, format_: str
) -> None:
    torch.manual_seed(0)
    repository, model, x = BlockRepository(tmp_path), SkipsTheWritten().eval(), torch.randn(16, 4)
    with torch.no_grad():
        expected = model(x.clone())
    loaded = LoadedModel(model, "skips", TensorSpec("float32", ("rows", 4)))
    export_model(loaded, repository, names=("s",), format=format_)
    with repository.artifact("s") as path, torch.no_grad():
        before = x.clone()
        torch.testing.assert_close(read_artifact(path, format_)(x), expected)
    assert torch.equal(x, before)


class HeadThatWrites(nn.Module):
    """Head ``b`` gets what head ``a`` has left of the trunk's output."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.a = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.a(h), self.b(h)


def test_heads_of_which_one_writes_for_the_other_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    repository, model = BlockRepository(tmp_path), HeadThatWrites().eval()
    loaded = LoadedModel(model, "heads", TensorSpec("float32", ("rows", 4)))
    with pytest.raises(ExportError) as e:
        export_tree(loaded, repository, blocks={"t": "trunk", "a": "a", "b": "b"})
    text = "block 'b' reads what a writes into, after it: trunk, a cross to it"
    assert e.value.message == text and "inplace=True" in e.value.hint
    assert repository.names() == []


class TrunkThatKeeps(nn.Module):
    """What cannot be traced by calls, so that operators are what is known of it."""

    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.kept = nn.Linear(4, 4), torch.zeros(0)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = x + 1
            return self.linear(self.kept)

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a = self.Trunk(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 1000:
            raise ValueError("too many")
        return self.a(self.trunk(x) + self.trunk.kept)


def test_a_submodule_gives_its_result_alone(tmp_path: Path) -> None:
    loaded = LoadedModel(TrunkThatKeeps().eval(), "keeps", TensorSpec("float32", ("rows", 4)))
    with pytest.raises(ExportError) as e:
        export_tree(loaded, BlockRepository(tmp_path), blocks={"t": "trunk", "a": "a"})
    assert e.value.message.startswith("not only the result of submodule 'trunk' is used outside")
    assert "made in trunk" in e.value.message and "made in trunk.linear" in e.value.message


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2)).eval()
    loaded = LoadedModel(model, "whole", TensorSpec("float32", ("rows", 4)))
    export_model(loaded, BlockRepository(tmp_path), names=("whole",))
    assert model[0].inplace is True

"""Models to export, and exports that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import TensorSpec
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel

ROW = TensorSpec("float32", ("rows", 4))
SCRIPTED, TRACED = "torchscript-scripted", "torchscript-traced"


class DigitHeads(nn.Module):
    """A trunk in two blocks and three heads, as the zoo's digits."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk1, self.trunk2 = nn.Linear(4, 4), nn.ReLU()
        sizes = {"digit": 10, "parity": 2, "high": 2}
        self.heads = nn.ModuleDict({task: nn.Linear(4, n) for task, n in sizes.items()})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.trunk2(self.trunk1(x))
        return {task: head(y) for task, head in self.heads.items()}


@pytest.fixture
def repo(tmp_path: Path) -> BlockRepository:
    return BlockRepository(tmp_path / "blocks")


def refused(module: nn.Module, repo: BlockRepository, **options: Any) -> ExportError:
    spec = options.pop("spec", ROW)
    with pytest.raises(ExportError) as e:
        export_model(LoadedModel(module, "test", spec), repo, **{"prefix": "m"} | options)
    assert repo.names() == [], "nothing is stored unless all is well"
    return e.value

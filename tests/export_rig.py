"""Models to export, and exports that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from blockflow.core.errors import ExportError
from blockflow.core.model import TensorSpec
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel

ROW = TensorSpec("float32", ("rows", 4))
SCRIPTED, TRACED = "torchscript-scripted", "torchscript-traced"


@pytest.fixture
def repo(tmp_path: Path) -> BlockRepository:
    return BlockRepository(tmp_path / "blocks")


def refused(module: nn.Module, repo: BlockRepository, **options: Any) -> ExportError:
    spec = options.pop("spec", ROW)
    with pytest.raises(ExportError) as e:
        export_model(LoadedModel(module, "test", spec), repo, **{"prefix": "m"} | options)
    assert repo.names() == [], "nothing is stored unless all is well"
    return e.value

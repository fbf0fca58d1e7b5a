"""Which blocks may be computed by two threads at once: those whose run leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.launchspec import StageSpec
from blockflow.core.model import TensorSpec
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.registry import create_engine
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel, load_model
from blockflow.worker.stage import Stage

SPEC = TensorSpec("float32", ("rows", 4))
TOKENS = TensorSpec("int64", ("rows", "length"), {"length": (1, 16)})
SMALL = {"layers": 1, "width": 16, "heads": 2, "max_length": 16}


class Scratch(nn.Module):
    """Puts something down in its own memory and reads it again."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.kept.copy_(torch.ones_like(self.kept) * 2)
        return x * self.kept


class ByAView(Scratch):
    def forward(self, x: Tensor) -> Tensor:
        self.kept[1:].view(-1).mul_(0.5)
        return x + self.kept * 0


class Rectified(nn.Module):
    """Writes in place, but into results of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.inner(x)) + self.inner.bias


def loaded(model: LoadedModel, folder: Path) -> Engine:
    repository = BlockRepository(folder)
    export_model(model, repository, names=["b"])
    info = repository.info("b")
    engine = create_engine(info, EngineOptions())
    with repository.artifact("b", digest=info.digest) as path:
        engine.load(path)
    return engine


@pytest.mark.parametrize("make", [Scratch, ByAView])
def test_a_block_that_writes_what_other_runs_see_has_no_twin(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    engine = loaded(LoadedModel(make().eval(), "m", SPEC), tmp_path)
    assert engine.twin() is None
    stage = Stage(StageSpec(1, engine.block), engine)
    stage.widen(3)
    assert (stage.width, stage.engines) == (1, [engine])


@pytest.mark.parametrize(
    "make",
    [
        lambda: LoadedModel(Rectified().eval(), "m", SPEC),
        lambda: load_model("digits", seed=0),
        lambda: load_model("transformer", seed=0, arguments=SMALL, input_spec=TOKENS),
    ],
    ids=["in place", "digits", "transformer"],
)
def test_models_as_they_are_served_have_twins(
    make: Callable[[], LoadedModel], tmp_path: Path
) -> None:
    stage = Stage(StageSpec(1, (engine := loaded(make(), tmp_path)).block), engine)
    stage.widen(3)
    assert stage.width == 3
    stage.widen(2)
    assert stage.width == 3, "what there is stays; the lanes bound what runs"
    assert len(set(map(id, stage.free))) == 3

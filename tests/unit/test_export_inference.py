"""Scripts that compute without gradients do so around everything: models are made, and exported,
within ``torch.inference_mode()``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from blockflow.repository.artifact import read_artifact
from blockflow.repository.export import export_model, export_tree
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests import export_rig
from tests.export_rig import ROW, SCRIPTED, TRACED, refused

repo = export_rig.repo
Mode = Callable[[], AbstractContextManager[Any]]


class Tied(nn.Module):
    """One weight in two places, a buffer, and a first module that would write into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.body[1].weight  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x))
        return y


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopied:
        raise TypeError("this model holds a connection")


@pytest.mark.parametrize("format_", ["pt2", SCRIPTED, TRACED])
@pytest.mark.parametrize("made_in", [nullcontext, torch.inference_mode])
@pytest.mark.parametrize("exported_in", [torch.inference_mode, torch.no_grad, nullcontext])
def test_models_are_exported_in_any_mode(
    format_: str, made_in: Mode, exported_in: Mode, repo: BlockRepository
) -> None:
    with made_in():
        module = Tied().eval()
    x = torch.ones(2, 4)
    with torch.inference_mode():
        wanted = module(x)
    mode = torch.is_inference_mode_enabled()
    with exported_in():
        export_model(LoadedModel(module, "m", ROW), repo, names=["m"], format=format_)
    assert torch.is_inference_mode_enabled() == mode
    assert module.head.weight is module.body[1].weight, "the caller's model is as it was"
    with repo.artifact("m") as path:
        got = read_artifact(path, format_)(x)
    assert torch.allclose(got, wanted, atol=1e-6)
    assert repo.info("m").parameters == sum(p.numel() for p in module.parameters())


def test_a_tree_is_exported_there_too(repo: BlockRepository) -> None:
    with torch.inference_mode():
        module = Tied().eval()
        export_tree(LoadedModel(module, "m", ROW), repo, blocks={"body": "body", "head": "head"})
    assert sorted(repo.names()) == ["body", "head"]


def test_one_that_cannot_be_taken_out_of_it_says_what_to_do(repo: BlockRepository) -> None:
    with torch.inference_mode():
        module = Uncopied(4, 4).eval()
        error = refused(module, repo)
    assert error.code == "EXPORT_FAILED" and error.where == "test"
    assert "holds a connection" in error.message and "build it outside" in error.hint

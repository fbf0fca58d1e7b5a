"""A result depends on no call before or after its own: what keeps state or draws random numbers is
refused, with the block and the cause."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests import export_rig
from tests.export_rig import ROW, SCRIPTED, TRACED, refused

repo = export_rig.repo


class Counts(nn.Module):
    """Block and model count in step: they never differ from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.n: Tensor
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x + self.n


class CountsInPython(nn.Module):
    """The block keeps the number of the export; the model counts on."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x + self.n


class HandsOutItsState(nn.Module):
    """Every result is the same memory: compared without a copy, it equals itself."""

    def __init__(self) -> None:
        super().__init__()
        self.sum: Tensor
        self.register_buffer("sum", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.sum += 1
        return self.sum.expand(x.shape[0], 4)


class HandsOutOneTensor(nn.Module):
    """The same in Python: a traced block writes the number of the export again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.memory = 0, torch.zeros(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.memory.fill_(self.n).expand(x.shape[0], 4)


class KeepsItsMemory(nn.Module):
    """Each result is right, until the next call writes another one over it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor
        self.register_buffer("memory", torch.zeros(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.memory[: x.shape[0]].copy_(x * 2)


class KeepsTheLargest(nn.Module):
    """The same input again changes nothing; somebody else's does."""

    def __init__(self) -> None:
        super().__init__()
        self.peak: Tensor
        self.register_buffer("peak", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.peak.copy_(torch.maximum(self.peak, x.abs().max()))
        return x / self.peak


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("module", "format_", "where"),
    [
        (Counts, "pt2", "m"),
        (Counts, SCRIPTED, "m"),
        (Counts, TRACED, "m"),
        (HandsOutItsState, SCRIPTED, "m"),
        (CountsInPython, "pt2", "test"),
        (CountsInPython, TRACED, "test"),
        (HandsOutOneTensor, TRACED, "test"),
        (KeepsTheLargest, "pt2", "m"),
        (KeepsTheLargest, SCRIPTED, "m"),
        (Draws, "pt2", "m"),
        (Draws, SCRIPTED, "m"),
        (Draws, TRACED, "m"),
    ],
)
def test_what_changes_from_call_to_call_is_refused(
    repo: BlockRepository, module: type[nn.Module], format_: str, where: str
) -> None:
    error = refused(module().eval(), repo, format=format_)
    assert (error.code, error.where) == ("EXPORT_MISMATCH", where)
    assert "gives two results for one input: they differ by" in error.message
    assert "random numbers" in error.hint and "state between calls" in error.hint


@pytest.mark.parametrize("format_", [SCRIPTED, TRACED])
def test_a_result_that_a_later_call_changes_is_refused(repo: BlockRepository, format_: str) -> None:
    """A worker that hosts the next block as well would still hold it."""
    error = refused(KeepsItsMemory().eval(), repo, format=format_)
    assert (error.code, error.where) == ("EXPORT_MISMATCH", "m")
    assert "memory of the block's own" in error.message
    export_model(
        LoadedModel(nn.Sequential(KeepsItsMemory(), nn.ReLU()).eval(), "test", ROW),
        repo,
        prefix="m",
        format=format_,
    )

"""What is larger than the machine's memory is told as that, and not as a defect."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.repository.spec_text import parse_spec
from tests import export_rig
from tests.export_rig import ROW

repo = export_rig.repo

VAST = (2_000_000_000, 500_000_000)
"""Of four bytes each it is more than any machine has addresses for."""


class Vast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.empty(VAST).sum()


@pytest.mark.parametrize(
    ("module", "spec", "code", "says"),
    [
        (nn.ReLU(), TensorSpec("float32", ("rows", *VAST)), "NO_SPACE", "an input [2, 2000000000,"),
        (
            nn.ReLU(),
            TensorSpec("int32", ("rows", 1_000_000, VAST[1])),
            "NO_SPACE",
            "does not fit into memory",
        ),
        (nn.ReLU(), TensorSpec("float32", ("rows", 2**31 - 1, 2**31 - 1)), "EXPORT_FAILED", "made"),
        (Vast(), ROW, "NO_SPACE", "the model fails on float32[rows, 4]"),
    ],
)
def test_what_no_memory_holds(
    repo: BlockRepository, module: nn.Module, spec: TensorSpec, code: str, says: str
) -> None:
    with pytest.raises(BlockFlowError) as e:
        export_model(LoadedModel(module.eval(), "test", spec), repo, prefix="m")
    assert e.value.code == code and says in e.value.message and e.value.hint


@pytest.mark.parametrize("elements", [0, 2**31])
def test_a_size_that_no_dim_has(elements: int) -> None:
    with pytest.raises(ValueError, match=rf"has {elements} elements, not 1 to 2147483647"):
        parse_spec(f"float32[rows,{elements}]")

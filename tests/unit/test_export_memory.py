"""What is larger than the machine's memory is told as that, and not as a defect."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.core.model import TensorSpec
from blockflow.repository.export import export_model, export_tree
from blockflow.repository.probe import example_input
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
    ("dims", "dtype", "code", "says"),
    [
        (VAST, "float32", "NO_SPACE", "an input [2, 2000000000,"),
        ((1_000_000, VAST[1]), "int32", "NO_SPACE", "does not fit into memory"),
        ((2**31 - 1, 2**31 - 1), "float32", "EXPORT_FAILED", "made"),
    ],
)
def test_what_no_memory_holds(dims: tuple[int, ...], dtype: str, code: str, says: str) -> None:
    with pytest.raises(BlockFlowError) as e:
        example_input(TensorSpec(dtype, ("rows", *dims)), {"rows": 2})
    assert e.value.code == code and says in e.value.message and e.value.hint


def test_a_model_that_needs_what_no_memory_holds(repo: BlockRepository) -> None:
    with pytest.raises(BlockFlowError, match=r"the model fails on float32\[rows, 4\]") as e:
        export_model(LoadedModel(Vast().eval(), "test", ROW), repo, prefix="m")
    assert e.value.code == "NO_SPACE" and e.value.hint


def test_a_row_that_could_never_be_sent_is_not_made(
    repo: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dozen inputs of up to eight rows would be, until the machine has no memory left."""
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", 4 * 60)
    just, larger = (
        LoadedModel(
            nn.ReLU().eval(),
            "test",
            TensorSpec("float32", ("rows", "length", wide), {"length": (12, 64)}),
        )
        for wide in (5, 6)
    )
    assert export_model(just, repo, prefix="m").blocks
    for export in (
        lambda: export_model(larger, repo, prefix="m"),
        lambda: export_tree(larger, repo, blocks={"m": ""}),
    ):
        with pytest.raises(RequestError, match=r"\[1, 12, 6\] at least, has 288 bytes") as e:
            export()
        assert e.value.code == "TOO_LARGE" and "240" in e.value.message and e.value.hint


@pytest.mark.parametrize("elements", [0, 2**31])
def test_a_size_that_no_dim_has(elements: int) -> None:
    with pytest.raises(ValueError, match=rf"has {elements} elements, not 1 to 2147483647"):
        parse_spec(f"float32[rows,{elements}]")

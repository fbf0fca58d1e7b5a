"""TorchScript blocks of one process: what fails in one of them is its request, and no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import BlockError
from blockflow.core.model import TensorSpec
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests import engine_rig
from tests.engine_rig import CASES

pytestmark = pytest.mark.contract
threads = engine_rig.threads


class Bounded(nn.Module):
    """``max_norm`` writes into the table, so that freezing leaves it an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 3, max_norm=1.0), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x.abs() * 3).int().clamp(max=7)))


@pytest.mark.parametrize("name", [c for c in CASES if CASES[c].engine == "torchscript"])
def test_two_blocks_that_keep_attributes_fail_by_themselves(
    shelf: BlockRepository, name: str
) -> None:
    """As frozen modules they ended the process, when the second one had to say what was wrong."""
    torch.manual_seed(0)
    module, spec = Bounded().eval(), TensorSpec("float32", ("rows", 6))
    block = CASES[name].stored(shelf, "bounded", lambda: LoadedModel(module, "test", spec))
    x, blocks = torch.randn(3, 6), [block.load(block.create()) for _ in range(2)]
    for made in blocks:
        made.warm_up()
        with torch.no_grad():
            torch.testing.assert_close(made.run(x), module(x))
    for made in reversed(blocks):
        with pytest.raises(BlockError) as e:
            made.run(torch.full((2, 6), float("nan")))
        assert e.value.code == "BLOCK_FAILED"
        made.run(x)

"""What goes into a manifest as its maker has called it, and as large as it is; and what a model
calls as others call something else."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from blockflow.core.model import Contract, TensorSpec
from blockflow.repository.job import Job, Piece
from blockflow.repository.manifest import parse_manifest
from blockflow.repository.pieces import _manifest
from blockflow.repository.report import silent
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel, load_model


def test_whatever_a_model_is_called_and_however_large_it_gives_a_manifest(tmp_path: Path) -> None:
    """A name of a file need not be UTF-8; a row of several dynamic dims may be of any size."""
    spec = TensorSpec("float32", ("rows", "a", "b"), {"a": (1, 2**31 - 1), "b": (1, 2**31 - 1)})
    model = LoadedModel(nn.Identity(), "m\udcff:" + "x" * 5000, spec)
    piece = Piece("b", model.module, Contract(spec, spec), torch.zeros(2, 1, 1), "p" * 5000)
    job = Job(model, BlockRepository(tmp_path), [piece], [["b"]], dict, "pt2", "1", False, silent)
    manifest = parse_manifest(_manifest(job, piece, 0.1, None).to_json(), where="", folder="b")
    assert manifest.measured is not None and manifest.source is not None and manifest.chain
    assert manifest.measured.output_bytes == 2**53
    assert manifest.source.model.startswith(r"m\udcff:xx") and len(manifest.source.part) == 4096
    assert manifest.chain.model == manifest.source.model


class Named(nn.Module):
    """It has parts of its own by the name that torch gives to what makes weights; none yet."""

    def __init__(self) -> None:
        super().__init__()
        self.parametrizations = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_what_is_called_as_torch_calls_what_makes_weights_stays() -> None:
    model = load_model(f"{__name__}:Named", input_spec=TensorSpec("float32", ("rows", 4))).module
    assert type(model).__name__ == "Named" and model(torch.ones(1)) == 2

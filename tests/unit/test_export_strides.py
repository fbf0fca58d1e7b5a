"""Between blocks a tensor lies in the order of its dims, whatever strides it came out with. So it
is at the export: compiled code would keep others, and read what a worker gives it wrongly."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import TensorSpec
from blockflow.repository import export
from blockflow.repository.job import Piece
from blockflow.repository.probe import example_input, probe_bindings
from blockflow.repository.sources import LoadedModel

SPEC = TensorSpec("float32", ("rows", 3, 4))


class Turns(nn.Module):
    """As patches of an image become tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1).transpose(1, 2)


class TurnsBack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).view(len(x), -1)


def pieces(last: nn.Module) -> list[Piece]:
    stages, both = [Turns(), last], ["a", "b"]
    loaded = LoadedModel(nn.Sequential(*stages), "t", SPEC)
    examples = [example_input(SPEC, binding) for binding in probe_bindings(SPEC)]
    return export._chain(loaded, stages, both, both, SPEC, examples)[0]


def test_a_block_is_exported_for_what_a_worker_gives_it() -> None:
    assert [piece.example.is_contiguous() for piece in pieces(nn.Linear(3, 2))] == [True, True]


def test_one_that_needs_other_strides_is_told_what_helps() -> None:
    with pytest.raises(ExportError) as e:
        pieces(TurnsBack())
    assert e.value.where == "b" and "reshape()" in e.value.hint

"""Probing: the dims of a result are told by their sizes under two inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import ROWS, TensorSpec
from blockflow.repository.export import export_model
from blockflow.repository.probe import infer_spec, probe_bindings
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


NARROW = {"a": (1, 4), "b": (1, 4)}


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("float32", ("rows", "a", "b"), NARROW),
        TensorSpec("float32", ("rows", "a", "b"), {"a": (2, 5), "b": (2, 5)}),
        TensorSpec("float32", ("rows", "a", "b"), {"a": (1, 2), "b": (1, 2)}),
        TensorSpec("float32", ("rows", "a", "b", "c", "d", "e")),
    ],
    ids=str,
)
def test_dims_of_like_ranges_are_told_apart(spec: TensorSpec) -> None:
    bindings = probe_bindings(spec)
    pairs = [(bindings[0][n], bindings[1][n]) for n in (ROWS, *spec.dynamic)]
    assert len(set(pairs)) == len(pairs) and all(a != b for a, b in pairs)
    assert infer_spec("y", spec, bindings, [torch.empty(spec.resolve(b)) for b in bindings]) == spec


def test_the_contract_of_two_narrow_dims(tmp_path: Path) -> None:
    repository = BlockRepository(tmp_path / "blocks")
    spec = TensorSpec("float32", ("rows", "a", "b"), NARROW)
    export_model(LoadedModel(Doubles().eval(), "doubles", spec), repository, names=("d",))
    assert repository.info("d").contract.output.dims == ("rows", "a", "b")


def test_dims_that_cannot_be_told_apart_are_refused() -> None:
    spec = TensorSpec("float32", ("rows", "a", "b", "c"), dict.fromkeys("abc", (1, 2)))
    bindings = probe_bindings(spec)
    with pytest.raises(ExportError, match="too narrow to tell which") as e:
        infer_spec("y", spec, bindings, [torch.empty(spec.resolve(b)) for b in bindings])
    assert e.value.code == "NOT_SPLITTABLE"

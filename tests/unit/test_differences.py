"""By how much results differ: one value that suppresses does not make all others equal."""

from __future__ import annotations

from math import inf, isnan, nan

import pytest
import torch
from torch import Tensor, nn

from blockflow.bench.profiling.child import errors_of
from blockflow.core.model import TensorSpec
from blockflow.engine.workshop import EngineWorkshop
from blockflow.repository.convert import convert_block
from blockflow.repository.differences import Scale, difference
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.repository.verdict import verdict
from tests import export_rig
from tests.export_rig import TRACED, refused
from tests.variants import read_torchlib_once

repo = export_rig.repo

SPEC = TensorSpec("float32", ("rows", 32))
FILLS = (-1e9, -1e4, -50.0, torch.finfo(torch.float32).min / 2)


def exact(y: Tensor, reference: Tensor) -> float:
    return difference(y, reference, Scale.exact([reference]))


def test_floats_are_a_part_of_the_largest() -> None:
    assert exact(torch.tensor([1.0, -8.0]), torch.tensor([1.5, -8.0])) == 0.5 / 8
    assert exact(torch.zeros(2), torch.zeros(2)) == 0
    assert exact(torch.zeros(2), torch.zeros(3)) == inf


def test_of_integers_it_is_the_share() -> None:
    classes = torch.tensor([999, 3, 3, 3])
    assert exact(torch.tensor([999, 3, 7, 3]), classes) == 0.25
    assert exact(torch.tensor([True, False]), torch.tensor([True, True])) == 0.5
    assert exact(torch.tensor([2**60]), torch.tensor([2**60 + 1])) == 1


def test_infinities_and_nan_equal_themselves_only() -> None:
    y = torch.tensor([-inf, nan, 2.0])
    assert exact(y, y.clone()) == 0
    assert exact(torch.tensor([1.0, 2.0]), torch.tensor([-inf, 2.0])) == inf
    assert exact(torch.tensor([-inf, 2.0]), torch.tensor([1.0, 2.0])) == inf
    assert isnan(exact(torch.tensor([nan, 2.0]), torch.tensor([1.0, 2.0])))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_suppresses_is_measured_by_itself(fill: float, dtype: torch.dtype) -> None:
    """A coarser dtype does not hit it: that is small, and makes nothing else small."""
    reference = torch.tensor([[fill, 0.5, 0.25], [0.125, fill, 0.5]])
    near, far = reference.to(dtype), reference.clone()
    far[1, 2] = 0.25
    assert exact(near, reference) < 4e-3
    assert exact(far, reference) == 0.5
    assert exact(torch.where(reference == fill, fill / 2, reference), reference) == 0.5


def test_several_that_suppress() -> None:
    reference = torch.tensor([-1e9, -1e9, -1e4, -1e4, 0.5])
    assert exact(torch.tensor([-1e9, -1e9, -1e4, -1e4, 0.25]), reference) == 0.5
    several = [torch.tensor([-1e9, 0.5]), torch.tensor([-1e9, 0.25])]
    assert difference(torch.tensor([-1e9, 0.0]), several[0], Scale.exact(several)) == 1
    assert Scale.of(several).least == 0.5


@pytest.mark.parametrize(
    "ordinary",
    [
        [1.0, 1.0, 1e-6, 1e-5],  # probabilities
        [500.0, 0.25, 0.5],  # a peak, there once
        [255.0, 255.0, 0.0, 0.0],
        [6.0, 6.0, 6.0, 2.0, 0.1],
        [0.0, 0.0],
        [7.0, 7.0],
    ],
)
def test_a_results_own_largest_values_are_its_scale(ordinary: list[float]) -> None:
    assert Scale.of([torch.tensor(ordinary)]).apart == inf


def test_both_verdicts_are_of_what_is_not_suppressed() -> None:
    reference = torch.tensor([[-1e9, 0.5], [-1e9, 0.25]])
    y = torch.tensor([[-1e9, 0.35], [-1e9, 0.25]])
    assert errors_of([y, reference], [reference.double()] * 2) == [pytest.approx(0.3), 0]
    found = verdict(lambda _: y, [(torch.zeros(2, 4), reference)], 0.1)
    assert "differs by 0.3" in found.refused


# --- exports and conversions ---------------------------------------------------------------------


class MaskedOK(nn.Module):
    """The first class is never the answer."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.inner, self.out, self.fill = nn.Linear(32, 64), nn.Linear(64, 8), fill

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x)).masked_fill(torch.arange(8) == 0, self.fill)


class Masked(MaskedOK):
    def hidden(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inner(x))
        return h - h.mean(0)


class Drops(MaskedOK):
    def hidden(self, x: Tensor) -> Tensor:
        return torch.dropout(self.inner(x), 0.5, True)


@pytest.mark.parametrize("fill", FILLS)
def test_a_mask_hides_neither_rows_nor_dropout(repo: BlockRepository, fill: float) -> None:
    torch.manual_seed(0)
    for model, said in ((Masked, "depends on the rows beside it"), (Drops, "two results")):
        assert said in refused(model(fill).eval(), repo, spec=SPEC, format=TRACED).message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_mask_is_exported(repo: BlockRepository, dtype: str) -> None:
    torch.manual_seed(0)
    spec = TensorSpec(dtype, ("rows", 32))
    good, bad = (m(-1e4).to(getattr(torch, dtype)).eval() for m in (MaskedOK, Masked))
    assert "rows beside it" in refused(bad, repo, spec=spec, format=TRACED).message
    export_model(LoadedModel(good, "test", spec), repo, prefix="good")
    assert repo.names() == ["good"]


def test_the_error_of_int8_is_that_of_the_classes_that_are_left(repo: BlockRepository) -> None:
    pytest.importorskip("onnxruntime")
    read_torchlib_once()
    torch.manual_seed(0)
    export_model(LoadedModel(MaskedOK(-1e9).eval(), "test", SPEC), repo, prefix="m")
    report = convert_block(repo, "m", "onnx", EngineWorkshop())
    assert max(report.errors.values()) < 1e-5
    report = convert_block(repo, "m", "onnx-int8", EngineWorkshop(), tolerance=10)
    assert min(report.errors.values()) > 0.1

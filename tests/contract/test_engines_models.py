"""Any model, type and precision: every engine computes what the model computes, or says why not."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import BlockError
from blockflow.core.model import TensorSpec
from blockflow.engine.base import EngineOptions
from blockflow.engine.exported import ExportedEngine
from blockflow.engine.registry import create_engine
from blockflow.engine.workshop import EngineWorkshop
from blockflow.repository.convert import convert_block
from blockflow.repository.echo import save_echo
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests import engine_rig
from tests.engine_rig import (
    CASES,
    LIGHT,
    NATIVE,
    SPEC,
    Case,
    Stored,
    at,
    convolution,
    expected,
    quantised,
    with_option,
)
from tests.variants import read_torchlib_once, skip_without

pytestmark = pytest.mark.contract
threads = engine_rig.threads
Modules = Callable[[], nn.Module]


@cache
def source(module: Modules) -> nn.Module:
    """One of its kind, whose weights its blocks have."""
    torch.manual_seed(0)
    return module().eval().requires_grad_(False)


def stored(shelf: BlockRepository, case: Case, module: Modules, spec: TensorSpec) -> Stored:
    """The block of :func:`source`, on the shelf."""
    name = f"{module.__name__}-{spec.dtype}"
    return case.stored(shelf, name, lambda: LoadedModel(source(module), "test", spec))


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        *((name, EngineOptions(precision=p), 0.1) for name, p in at("bf16")),
        *(
            (name, EngineOptions(extra={"memory_format": "channels_last"}), 1e-5)
            for name in with_option("memory_format")
        ),
    ],
)
def test_precision_and_layout(
    shelf: BlockRepository, name: str, options: EngineOptions, tolerance: float
) -> None:
    block = convolution(shelf, CASES[name])
    made = block.load(block.create(options))
    x, out = torch.randn(2, 3, 8, 8), torch.empty(2, 3, 8, 8)
    y = made.run(x, out)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected(made, x), rtol=tolerance, atol=tolerance)


class Clip(nn.Module):
    """A weight of five dimensions beside one of four, which alone ``channels_last`` is for."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.frames = nn.Conv2d(3, 4, 3), nn.Conv3d(1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.frames(self.image(x).unsqueeze(1))


@pytest.mark.parametrize("name", with_option("memory_format"))
def test_a_layout_is_that_of_four_dimensional_weights(shelf: BlockRepository, name: str) -> None:
    block, x = stored(shelf, CASES[name], Clip, SPEC), torch.randn(2, 3, 8, 8)
    made = block.load(block.create(EngineOptions(extra={"memory_format": "channels_last"})))
    torch.testing.assert_close(made.run(x), source(Clip)(x), rtol=1e-4, atol=1e-5)


def assert_runs_at(shelf: BlockRepository, name: str, precision: str, module: Modules) -> None:
    """The engine computes at this precision what ``module`` does, about."""
    block = stored(shelf, CASES[name], module, TensorSpec("float32", ("rows", 6)))
    made = block.load(block.create(EngineOptions(precision=precision)))
    x = torch.randn(3, 6)
    torch.testing.assert_close(made.run(x), source(module)(x), rtol=0.1, atol=0.1)


class Converts(nn.Module):
    """A conversion within, and one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).to(torch.float64).square().to(torch.float32)


@pytest.mark.parametrize(("name", "precision"), at("bf16", "fp16"))
def test_a_block_that_converts_runs_at_any_precision(
    shelf: BlockRepository, name: str, precision: str
) -> None:
    """What the trace notes of dtypes beside its conversions holds at fp32 only."""
    assert_runs_at(shelf, name, precision, Converts)


class Turns(nn.Module):
    """Rotary positions: pairs of features, as complex numbers, turned by stored ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(1.0, 4.0)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.layer(x).float().reshape(-1, 3, 2))
        return torch.view_as_real(pairs * self.turns).flatten(1)


@pytest.mark.parametrize(("name", "precision"), at("fp32", "bf16", "fp16"))
def test_complex_numbers_stay_complex(shelf: BlockRepository, name: str, precision: str) -> None:
    assert_runs_at(shelf, name, precision, Turns)


@pytest.mark.parametrize(("name", "variant"), quantised())
def test_int8(shelf: BlockRepository, name: str, variant: str) -> None:
    block = convolution(shelf, replace(CASES[name], variant=variant))
    made = block.create(EngineOptions(precision="int8"))
    assert made.variant == variant
    block.load(made)
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(made.run(x), expected(made, x), rtol=0.1, atol=0.3)
    made.close()


class Picky(nn.Module):
    """Looks tokens up: an index outside the table fails inside the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


# OpenVINO gives zeros for such an index
@pytest.mark.parametrize("name", [c for c in LIGHT if c != "openvino"])
def test_a_failing_computation_is_a_block_error(shelf: BlockRepository, name: str) -> None:
    spec = TensorSpec("int64", ("rows", "length"), {"length": (1, 9)})
    block = stored(shelf, CASES[name], Picky, spec)
    made = block.load(block.create())
    made.warm_up()
    with pytest.raises(BlockError) as e:
        made.run(torch.full((2, 3), 99))
    assert e.value.code == "BLOCK_FAILED" and e.value.where == block.info.name
    # the engine is still good
    assert made.run(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 2)


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"fail_on_value": 5}, "BLOCK_FAILED"), ({"fail_on_load": 1}, "LOAD_FAILED"),
     ({"unknown": 1}, "LOAD_FAILED"), ({"delay_ms": "x"}, "LOAD_FAILED")],
)  # fmt: skip
def test_echo_fails_when_told_to(tmp_path: Path, settings: dict, code: str) -> None:
    repo = BlockRepository(tmp_path)
    info = save_echo(repo, "e", SPEC, settings=settings)
    made = create_engine(info, EngineOptions())
    x = torch.zeros(2, 3, 8, 8)
    x[1, 0, 0, 0] = 5

    def load_and_run() -> None:
        with repo.artifact("e") as path:
            made.load(path)
        made.run(x)

    with pytest.raises(BlockError) as e:
        load_and_run()
    assert e.value.code == code


class SideEffects(nn.Module):
    """Graph forms that a rewriting engine could lose: unused in-place results, sizes, two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 1)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.twice = nn.BatchNorm1d(4)
        self.norm.running_mean.uniform_(-1, 1)
        self.twice.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1)
        y = self.conv(y)
        # the convolution's result is used twice: its norm must not be folded away
        z = self.norm(y) + y
        return self.twice(self.conv(x)).relu_().view(x.size(0), x.size(2) * 4) + z.flatten(1).sum(
            1, keepdim=True
        )


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.position = nn.Parameter(torch.randn(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position[: x.size(1)]
        return self.mix(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize(
    ("module", "spec"),
    [
        (SideEffects, TensorSpec("float32", ("rows", 3, 6))),
        (Attends, TensorSpec("float32", ("rows", "length", 8), {"length": (1, 32)})),
    ],
)
def test_engines_compute_what_the_model_computes(
    shelf: BlockRepository, name: str, module: Modules, spec: TensorSpec
) -> None:
    block = stored(shelf, CASES[name], module, spec)
    made = block.load(block.create())
    for rows, length in ((1, 1), (3, 32), (2, 7)):
        x = torch.randn(spec.resolve({"rows": rows, "length": length}))
        torch.testing.assert_close(made.run(x), source(module)(x), rtol=1e-4, atol=1e-5)


class Places(nn.Module):
    """Makes tensors where its input is: an export writes the device down."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor([2.0]))
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        columns = torch.arange(x.shape[3], device=x.device).to(x.dtype) * self.steps
        return torch.relu(self.conv(x) + columns + torch.zeros(8, 1, device=x.device))


def test_a_program_computes_on_the_device_that_it_is_loaded_onto(shelf: BlockRepository) -> None:
    """As on a GPU, on the one other device that every build of torch has: it holds no values, and
    takes part in no operation with another one's tensors."""
    block = stored(shelf, CASES["pt2"], Places, SPEC)
    made = ExportedEngine(block.info, EngineOptions("meta"))
    block.load(made)
    made.warm_up()
    for rows in (1, 3):
        x = torch.zeros(rows, 3, 8, 8, device="meta")
        y = made.run(x)
        assert (y.device, y.shape) == (x.device, x.shape)
        out = torch.empty_like(y)
        assert made.run(x, out) is out


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(NATIVE, ["float16", "float64", "int64"]),
        ("openvino", "bfloat16"),  # ONNX Runtime has no such kernels on a CPU
    ],
)
def test_other_dtypes(shelf: BlockRepository, name: str, dtype: str) -> None:
    block = stored(shelf, CASES[name], Twice, TensorSpec(dtype, ("rows", 4)))
    made = block.load(block.create())
    for rows in (1, 5):
        x = torch.arange(rows * 4).reshape(rows, 4).to(getattr(torch, dtype))
        out = torch.empty_like(x)
        assert made.run(x, out) is out
        assert torch.equal(out, x + x)
    made.close()


class Next(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_openvino_takes_no_integers_that_it_would_change(shelf: BlockRepository) -> None:
    block = stored(shelf, CASES["openvino"], Next, TensorSpec("int64", ("rows",)))
    made = block.load(block.create())
    ends = torch.tensor([-(2**31), 2**31 - 2])
    assert torch.equal(made.run(ends), ends + 1)
    for far in (2**31 - 1, 2**31, -(2**31) - 1, 2**40):
        with pytest.raises(BlockError, match="32 bits") as e:
            made.run(torch.tensor([1, far]))
        assert e.value.code == "BLOCK_FAILED"
    made.close()


class Hashed(nn.Module):
    """Token numbers to rows of a table: ``factor`` times what goes in is no index, but a value."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.table = nn.Embedding(1000, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x * self.factor) % 1000)


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.long()


@pytest.mark.parametrize(
    ("module", "dtype", "says"),
    [
        (Hashed(3), "int64", ""),
        (Hashed(31), "int64", "fails on [8, 4]"),
        (Hashed(2**40), "int64", "operator Mul, may exceed 32 bits"),
        (Whole(), "float32", "operator Cast, may exceed 32 bits"),
    ],
)
def test_integers_that_openvino_would_change_within_a_block(
    tmp_path: Path, module: nn.Module, dtype: str, says: str
) -> None:
    pytest.importorskip("openvino")
    skip_without("onnx", "onnxruntime")
    read_torchlib_once()
    repo, spec = BlockRepository(tmp_path), TensorSpec(dtype, ("rows", 4))
    export_model(LoadedModel(module.eval(), "m", spec), repo, names=["m"])
    report = convert_block(repo, "m", "onnx", EngineWorkshop())
    assert "onnxruntime" in report.errors and says in report.refused.get("openvino", "")
    assert bool(says) == ("openvino" in report.refused)
    if says:
        return
    made = create_engine(repo.info("m"), EngineOptions(), "openvino")
    with repo.artifact("m", variant="onnx") as path:
        made.load(path)
    near = torch.tensor([[0, 1, -(2**24 // 3), 2**24 // 3]])
    assert torch.equal(made.run(near), module(near))
    with pytest.raises(BlockError, match="32 bits, which hold this block's integers") as e:
        made.run(near + 1)
    assert e.value.code == "BLOCK_FAILED"
    made.close()


def test_openvino_takes_and_gives_no_doubles_that_it_would_change(shelf: BlockRepository) -> None:
    block = stored(shelf, CASES["openvino"], Twice, TensorSpec("float64", ("rows", 4)))
    made = block.load(block.create())
    fits = torch.tensor([[1.5e38, -1.5e38, math.nan, 0]], dtype=torch.float64)
    torch.testing.assert_close(made.run(fits), fits * 2, equal_nan=True)
    for far, which in ((1e39, "an input"), (-math.inf, "an input"), (-3e38, "a result")):
        with pytest.raises(BlockError, match=f"32 bits, which {which} exceeds") as e:
            made.run(torch.tensor([[0, math.nan, 0, far]], dtype=torch.float64))
        assert e.value.code == "BLOCK_FAILED"
    made.close()

"""All engines with the files that they run, for their contract; a new one is one entry in CASES."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.engines import ENGINES, VARIANTS, EngineKind
from blockflow.core.model import BlockInfo, TensorSpec
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.registry import create_engine
from blockflow.engine.workshop import EngineWorkshop
from blockflow.repository.convert import convert_block
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests.variants import read_torchlib_once, skip_without

SPEC = TensorSpec("float32", ("rows", 3, 8, 8))


class Convolution(nn.Module):
    """Same dims out as in, so that it stands beside echo; fails on a value in TorchScript, too."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.relu(x)))


def model() -> Convolution:
    torch.manual_seed(0)
    return Convolution().eval().requires_grad_(False)


def convolution(shelf: BlockRepository, case: Case) -> Stored:
    """The block of most tests, for one case."""
    return case.stored(shelf, "block", lambda: LoadedModel(model(), "test", SPEC))


@dataclass(frozen=True)
class Case:
    """One engine with the file that it runs.

    Attributes:
        native: it computes outside torch: its threads are its own, and it straightens an input
            that has strides.
        inside: how often the framework copies a result of a batch of any size.
    """

    engine: str
    format: str = "pt2"
    variant: str | None = None
    native: bool = False
    inside: int = 0

    @property
    def kind(self) -> EngineKind:
        """What the registry says that the engine can do."""
        return ENGINES[self.engine]

    @property
    def file(self) -> str:
        return self.variant or self.format

    def runs_at(self, precision: str) -> bool:
        """Whether it runs this very file at ``precision``; another may need another file."""
        return self.file in self.kind.files.get(precision, ())

    def stored(self, shelf: BlockRepository, name: str, make: Callable[[], LoadedModel]) -> Stored:
        """A model in this case's form; skips where the machine lacks what it takes.

        An export takes a quarter of a second and a variant more: what is on the shelf by that name
        is not made again, and tests leave it as it is.
        """
        name = f"{name}-{self.format}"
        if self.variant is not None:
            skip_without(self.variant, self.engine)
        if name not in shelf.names():
            export_model(make(), shelf, names=[name], format=self.format)
        if self.variant is not None and self.variant not in shelf.info(name).variants:
            read_torchlib_once()
            convert_block(shelf, name, self.variant, EngineWorkshop(), tolerance=0.5)
        return Stored(self, shelf, shelf.info(name))


CASES: Mapping[str, Case] = {
    "pt2": Case("exported"),
    "torchscript-scripted": Case("torchscript", "torchscript-scripted"),
    "torchscript-traced": Case("torchscript", "torchscript-traced"),
    "compiled": Case("compiled", variant="aoti"),
    "onnxruntime": Case("onnxruntime", variant="onnx", native=True),
    "openvino": Case("openvino", variant="onnx", native=True, inside=1),
    "echo": Case("echo", "echo"),
}
LIGHT = [c for c in CASES if c not in ("echo", "compiled")]
"""Those that run any model; a compilation takes half a minute, so one block stands for it."""
TORCH = [c for c in LIGHT if not CASES[c].native]
NATIVE = [c for c in LIGHT if CASES[c].native]


def at(*precisions: str) -> list[tuple[str, str]]:
    """Cases that compute in torch, with those of ``precisions`` that they have.

    What a native one makes of these is its framework's affair, and the CPU's.
    """
    return [(c, p) for c in TORCH for p in precisions if CASES[c].runs_at(p)]


def with_option(option: str) -> list[str]:
    """Cases whose engine has this option."""
    return [c for c in LIGHT if option in CASES[c].kind.options]


def quantised() -> list[tuple[str, str]]:
    """Cases that have a file for int8, with its kind."""
    return [(c, k) for c in LIGHT for k in CASES[c].kind.files.get("int8", ()) if k in VARIANTS]


@dataclass(frozen=True)
class Stored:
    """One block, for one case."""

    case: Case
    repo: BlockRepository
    info: BlockInfo

    def create(self, options: EngineOptions | None = None) -> Engine:
        return create_engine(self.info, options or EngineOptions(), self.case.engine)

    def load(self, made: Engine) -> Engine:
        with self.repo.artifact(self.info.name, variant=made.variant) as path:
            made.load(path)
        return made


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def expected(engine: Engine, x: Tensor) -> Tensor:
    if engine.block.format == "echo":
        return x
    with torch.no_grad():
        return model()(x.clone())

"""What the first export and the first conversion of a process do for all that follow, done: for
processes that are forked afterwards (warm_workers.py). Importing this does it."""

from __future__ import annotations

import tempfile
import typing
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._export.serde import serialize

from blockflow.core.model import TensorSpec
from blockflow.engine.workshop import EngineWorkshop
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests.variants import read_torchlib_once


@cache
def hints_of(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, globalns=vars(serialize.schema))


def look_at_classes_once() -> None:
    """Where torch reads a program it works out the types of a class's fields for each object anew,
    a tenth of all that an export takes."""
    once = {"get_type_hints": lambda cls, globalns: hints_of(cls)}
    serialize.typing = SimpleNamespace(**{**vars(typing), **once})  # type: ignore[attr-defined]


def rehearse() -> None:
    look_at_classes_once()
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        repository, target = BlockRepository(Path(folder) / "blocks"), Path(folder) / "onnx"
        loaded = LoadedModel(nn.Linear(2, 2).eval(), "test", TensorSpec("float32", ("rows", 2)))
        export_model(loaded, repository, names=["a"])
        if find_spec("onnx") is None or find_spec("onnxscript") is None:
            return
        read_torchlib_once()
        with repository.artifact("a") as source:  # no engine is asked, for they start threads
            EngineWorkshop().make("onnx", repository.info("a"), source, [], target)


rehearse()

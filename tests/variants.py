"""Blocks with variants for tests; what this machine cannot make or run is skipped, visibly."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch

from blockflow.core.engines import ENGINES
from blockflow.core.model import BlockInfo
from blockflow.engine.workshop import EngineWorkshop
from blockflow.repository.convert import convert_block
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel


def skip_without(kind: str, engine: str) -> None:
    """Skip the test where ``kind`` cannot be made or ``engine`` is not installed."""
    needed = ["onnx", "onnxscript"] if kind.startswith("onnx") else []
    needed += ["onnxruntime"] if kind == "onnx-int8" else []
    needed += [extra] if (extra := ENGINES[engine].extra) else []
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (the extra 'engines')")
    if kind == "aoti" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")
    if kind == "aoti" and " " in torch.__file__:
        pytest.skip("torch compiles from no path with a space in it")


def variant_of(
    repository: BlockRepository, loaded: LoadedModel, name: str, kind: str, engine: str
) -> BlockInfo:
    """Export a model as one block and convert it."""
    skip_without(kind, engine)
    export_model(loaded, repository, names=[name])
    read_torchlib_once()
    convert_block(repository, name, kind, EngineWorkshop(), tolerance=0.5)
    return repository.info(name)


@cache
def read_torchlib_once() -> None:
    """Have torch keep what it knows of ONNX, for the rest of this process.

    Each export reads the sources of five hundred functions anew, which takes longer than the rest
    of it, and finds the same each time: nothing registers others here.
    """
    if find_spec("onnxscript") is None:
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    once = staticmethod(cache(ONNXRegistry.from_torchlib))
    patch.object(ONNXRegistry, "from_torchlib", once).start()

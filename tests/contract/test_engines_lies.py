"""Variants whose results are not what the contract promises: nobody gets what lay in the slot."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from blockflow.core.engines import FIXED_ROWS
from blockflow.core.errors import BlockError
from blockflow.core.model import BlockInfo, Contract, TensorSpec, Variant
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.registry import create_engine

onnx: Any = pytest.importorskip("onnx")
helper = onnx.helper
pytestmark = pytest.mark.contract

SPEC = TensorSpec("float32", ("rows", 4))
BEFORE = -777.0
"""What another client's result left in the slot."""


def info(output: str = "float32") -> BlockInfo:
    return BlockInfo(
        name="b",
        version="1",
        digest="0" * 64,
        format="pt2",
        contract=Contract(SPEC, TensorSpec(output, ("rows", 4))),
        parameters=0,
        state_bytes=0,
        variants={"onnx": Variant("f", "0" * 64, 1)},
    )


def file(path: Path, nodes: list[Any], output: int = 1, more: list[Any] | None = None) -> Path:
    """A model whose result's dims nothing says before it has run."""
    values = {"nul": np.float32(0), "zero": [0], "one": [1], "two": [2], "three": [3]}
    kept = [onnx.numpy_helper.from_array(np.array(v), name) for name, v in values.items()]
    x = helper.make_tensor_value_info("x", 1, ["rows", 4])
    y = helper.make_tensor_value_info("y", output, None)
    graph = helper.make_graph(nodes, "g", [x], [y], [*kept, *(more or [])])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(made.SerializeToString())
    return path


def negative(then: str, path: Path) -> Path:
    """Honest for positive numbers; else three rows, or twice as many."""
    node = helper.make_node
    nodes = [
        node("Shape", ["x"], ["s"], start=0, end=1),
        node("ReduceMin", ["x"], ["m"], keepdims=0),
        node("Less", ["m", "nul"], ["q"]),
    ]
    if then == "less":
        nodes += [node("Where", ["q", "three", "s"], ["e"])]
        nodes += [node("Slice", ["x", "zero", "e", "zero"], ["y"])]
    else:
        nodes += [node("Where", ["q", "two", "one"], ["r"])]
        nodes += [node("Concat", ["r", "one"], ["rep"], axis=0)]
        nodes += [node("Tile", ["x", "rep"], ["y"])]
    return file(path, nodes)


def loaded(engine: str, path: Path, block: BlockInfo | None = None, **extra: Any) -> Engine:
    pytest.importorskip(engine)
    made = create_engine(block or info(), EngineOptions(extra=extra), engine)
    made.load(path)
    return made


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("then", ["less", "more"])
@pytest.mark.parametrize("rows", [None, 5])
def test_other_dims_by_value(tmp_path: Path, engine: str, then: str, rows: int | None) -> None:
    extra = {FIXED_ROWS: [rows]} if rows and engine == "openvino" else {}
    made = loaded(engine, negative(then, tmp_path / "m"), **extra)
    x, out = torch.arange(20.0).reshape(5, 4) + 1, torch.full((5, 4), BEFORE)
    for sign in (1, -1, 1):
        out.fill_(BEFORE)
        if sign > 0:
            torch.testing.assert_close(made.run(x, out), x)
            continue
        with pytest.raises(BlockError) as e:
            made.run(-x, out)
        assert e.value.code == "OUTPUT_MISMATCH"
    made.close()


def test_fixed_rows_of_other_dims_are_not_loaded(tmp_path: Path) -> None:
    """One row always, which no model for any number of rows shows before it runs."""
    node = helper.make_node("ReduceSum", ["x", "zero"], ["y"], keepdims=1)
    path = file(tmp_path / "m", [node])
    with pytest.raises(BlockError, match="dims are") as e:
        loaded("openvino", path, **{FIXED_ROWS: [5]})
    assert e.value.code == "OUTPUT_MISMATCH"


@pytest.mark.parametrize(("axis", "dims"), [("one", "[?,1]"), ("zero", "[4]")])
def test_what_openvino_takes_for_other_dims_it_does_not_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axis: str, dims: str
) -> None:
    """It may write beyond its memory as it does (irfft2), and end the process later."""
    pytest.importorskip("openvino")
    from blockflow.engine import open_vino

    core = SimpleNamespace(read_model=open_vino.openvino_core().read_model)  # it compiles nothing
    monkeypatch.setattr(open_vino, "openvino_core", lambda: core)
    node = helper.make_node("ReduceSum", ["x", axis], ["y"], keepdims=int(axis == "one"))
    with pytest.raises(BlockError) as e:
        loaded("openvino", file(tmp_path / "m", [node]))
    assert e.value.code == "OUTPUT_MISMATCH" and f"dims are {dims}" in e.value.message


@pytest.mark.parametrize(("output", "number"), [("float32", 16), ("bfloat16", 16), ("int32", 6)])
def test_another_dtype(tmp_path: Path, output: str, number: int) -> None:
    path = file(tmp_path / "m", [helper.make_node("Cast", ["x"], ["y"], to=number)], number)
    if output == "float32":
        with pytest.raises(BlockError) as e:
            loaded("openvino", path)
        assert e.value.code == "OUTPUT_MISMATCH"
        return
    made = loaded("openvino", path, info(output))
    x = torch.arange(12.0).reshape(3, 4) - 6
    assert made.run(x).equal(x.to(getattr(torch, output)))
    made.close()


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_nothing_beside_the_file_is_read(tmp_path: Path, engine: str) -> None:
    weight = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=1)
    descriptor = os.open(tmp_path / "beside", os.O_RDWR | os.O_CREAT)
    os.write(descriptor, np.arange(4, dtype=np.float32).tobytes())
    # the file is opened as /proc/self/fd/N: its neighbours are what the process has open
    for key, value in (("location", str(descriptor)), ("offset", "0"), ("length", "16")):
        weight.external_data.add(key=key, value=value)
    add = helper.make_node("Add", ["x", "w"], ["y"])
    path = file(tmp_path / "m", [add], more=[weight])
    try:
        with pytest.raises(BlockError, match="another file") as e:
            loaded(engine, path)
    finally:
        os.close(descriptor)
    assert e.value.code == "LOAD_FAILED"

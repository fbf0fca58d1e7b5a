"""ONNX files: every tensor of a model is found, wherever it lies, and may not be elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from blockflow.core.errors import RepositoryError
from blockflow.core.model import TensorSpec
from blockflow.core.onnxfile import (
    DATA_LOCATION,
    EXTERNAL_DATA,
    FIELDS,
    ExternalData,
    NotOnnx,
    refuse_external,
)
from blockflow.repository.repository import BlockRepository
from tests.unit.test_repository_variants import form, save_block

onnx: Any = pytest.importorskip("onnx")
helper, TensorProto = onnx.helper, onnx.TensorProto


def elsewhere(name: str = "w") -> Any:
    tensor = TensorProto(name=name, data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def model(*nodes: Any, initializer: Any = (), **more: Any) -> Any:
    x, y = (helper.make_tensor_value_info(n, 1, ["rows", 4]) for n in "xy")
    add = helper.make_node("Add", ["x", "w"], ["y"])
    graph = helper.make_graph([*nodes, add], "g", [x], [y], list(initializer))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], **more)


def inner() -> Any:
    z = helper.make_tensor_value_info("z", 1, [4])
    return helper.make_graph([], "inner", [], [z], [elsewhere("z")])


def sparse() -> Any:
    made = model()
    indices = helper.make_tensor("i", 7, [1], [0])
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(elsewhere(), indices, [4]))
    return made


def function() -> Any:
    made = model()
    node = helper.make_node("Constant", [], ["c"], value=elsewhere())
    made.functions.append(helper.make_function("d", "f", [], ["c"], [node], []))
    return made


PLACES: dict[str, Callable[[], Any]] = {
    "a weight": lambda: model(initializer=[elsewhere()]),
    "a constant": lambda: model(helper.make_node("Constant", [], ["w"], value=elsewhere())),
    "a branch": lambda: model(
        helper.make_node("If", ["x"], ["w"], then_branch=inner(), else_branch=inner())
    ),
    "a sparse weight": sparse,
    "a function": function,
}


def whole() -> bytes:
    weight = helper.make_tensor("w", 1, [4], [1.0, 2.0, 3.0, 4.0])
    content: bytes = model(initializer=[weight]).SerializeToString()
    return content


@pytest.mark.parametrize("place", PLACES)
def test_no_tensor_lies_elsewhere(place: str) -> None:
    with pytest.raises(ExternalData, match="another file"):
        refuse_external(PLACES[place]().SerializeToString())


def test_each_of_both_marks_says_so() -> None:
    location, data = elsewhere(), elsewhere()
    location.ClearField("external_data")
    data.ClearField("data_location")
    for tensor in (location, data):
        with pytest.raises(ExternalData, match="another file"):
            refuse_external(model(initializer=[tensor]).SerializeToString())


def test_functions_alone_are_no_model() -> None:
    made = model()
    made.functions.append(helper.make_function("d", "f", [], ["c"], [], []))
    made.ClearField("graph")
    with pytest.raises(NotOnnx, match="no graph"):
        refuse_external(made.SerializeToString())


def test_a_whole_model() -> None:
    refuse_external(whole())
    refuse_external(memoryview(whole()))


@pytest.mark.parametrize(("key", "size"), [(b"\xa1\x06", 8), (b"\xa5\x06", 4)])
def test_fields_of_a_fixed_size_are_passed_over(key: bytes, size: int) -> None:
    """Of a number that ONNX does not use, before all else; ``0xff`` would begin a long number."""
    for content in (bytes(size), b"\xff" * size):
        refuse_external(key + content + whole())
        with pytest.raises(ExternalData):
            refuse_external(key + content + PLACES["a weight"]().SerializeToString())
        with pytest.raises(NotOnnx, match="ends within"):
            refuse_external(whole() + key + content[1:])


def test_what_is_told_of_a_place_may_be_that_it_is_here() -> None:
    weight = helper.make_tensor("w", 1, [1], [1.0])
    weight.data_location = TensorProto.DEFAULT
    refuse_external(model(initializer=[weight]).SerializeToString())
    with pytest.raises(NotOnnx, match="unknown kind"):
        refuse_external(b"\xa3\x06" + whole())


def test_the_last_of_two_graphs_is_looked_at_as_well() -> None:
    """Protobuf merges a field that comes twice."""
    with pytest.raises(ExternalData):
        refuse_external(whole() + model(initializer=[elsewhere()]).SerializeToString())


@pytest.mark.parametrize("beyond", [1, 7])
def test_a_field_has_the_number_that_a_parser_sees(beyond: int) -> None:
    """ONNX Runtime and OpenVINO take the lowest 32 bits of five bytes: a weight in a field of such
    a number is a weight to them."""
    weight = elsewhere().SerializeToString()
    graph = model().graph.SerializeToString() + b"\xaa\x80\x80\x80"  # its fifth field, a message
    for last, wrong in ((0, ExternalData), (beyond << 4, NotOnnx)):
        inside = graph + bytes([last, len(weight)]) + weight
        with pytest.raises(wrong):
            refuse_external(b"\x3a" + bytes([128 | len(inside) & 127, len(inside) >> 7]) + inside)


def test_what_is_no_model() -> None:
    for data in (b"", b"x", b"<?xml version='1.0'?><net/>", b"\xff" * 20, b"\x3a\x7f", b"\x3b\x00"):
        with pytest.raises(NotOnnx, match="not an ONNX model"):
            refuse_external(data)
    data = whole()
    for end in range(1, len(data)):  # an error or a shorter model, never another exception
        with suppress(NotOnnx):
            refuse_external(data[:end])


def test_the_table_is_the_formats_own() -> None:
    """All ways to a tensor, by onnx's description of itself."""
    names = {"ModelProto"}
    while True:
        found: dict[str, dict[int, str]] = {}
        for name in names:
            fields = getattr(onnx, name).DESCRIPTOR.fields
            found[name] = {f.number: f.message_type.name for f in fields if f.message_type}
        more = {to for fields in found.values() for to in fields.values()} - names
        if not more:
            break
        names |= {n for n in more if hasattr(onnx, n)}
        if not {n for n in more if hasattr(onnx, n)}:
            break
    leading = {"TensorProto"}
    while True:
        more = {n for n, fields in found.items() if leading & set(fields.values())} - leading
        if not more:
            break
        leading |= more
    for name in leading:
        ways = {n: to for n, to in found[name].items() if to in leading}
        assert FIELDS[name] == ways
    assert set(FIELDS) == leading
    tensor = TensorProto.DESCRIPTOR.fields_by_name
    assert tensor["external_data"].number == EXTERNAL_DATA
    assert tensor["data_location"].number == DATA_LOCATION


@pytest.mark.parametrize("kind", ["onnx", "onnx-int8"])
def test_no_variant_is_stored_that_lies_in_two_files(tmp_path: Path, kind: str) -> None:
    repository = BlockRepository(tmp_path / "blocks")
    digest = save_block(repository, "b", spec=TensorSpec("float32", ("rows", 4))).digest
    before = sorted(p.name for p in (tmp_path / "blocks" / "b").iterdir())
    file = tmp_path / "model.onnx"
    file.write_bytes(PLACES["a weight"]().SerializeToString())
    with pytest.raises(RepositoryError, match="another file") as e:
        repository.save_variant("b", kind, form(), file, digest=digest)
    assert e.value.code == "UNSUPPORTED_FORMAT"
    assert sorted(p.name for p in (tmp_path / "blocks" / "b").iterdir()) == before
    assert repository.info("b").variants == {}
    repository.save_variant("b", kind, form(), whole(), digest=digest)

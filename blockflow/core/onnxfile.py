"""ONNX files: whether one brings all of its weights.

ONNX lets a tensor lie in another file, which no digest covers, and whose name is the model's to
choose. Frameworks look for it while they load. The file is walked in protobuf's wire format, so
that this needs none of them: of each message only the fields that may lead to a tensor. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

FIELDS: Mapping[str, Mapping[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: "TensorProto",
        6: "GraphProto",
        10: "TensorProto",
        11: "GraphProto",
        22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "TensorProto": {},
}
"""Message -> numbers of its fields that lead to tensors -> their messages (``onnx.proto3``)."""

EXTERNAL_DATA, DATA_LOCATION = 13, 14
"""Fields of a ``TensorProto``."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_GRAPH = 7
_KEY_BITS = 32
"""Of a field's number and kind. Frameworks' parsers drop what is beyond them: the field would be
another one to them than it is here."""


class NotOnnx(ValueError):
    """The bytes are no ONNX model."""


class ExternalData(ValueError):
    """A model has tensors outside its file."""


def refuse_external(data: bytes | memoryview) -> None:
    """Check a serialised ``ModelProto``.

    Raises:
        ExternalData: something of it lies elsewhere.
        NotOnnx: it cannot be read.
    """
    left = [("ModelProto", 0, len(data))]
    graphs = 0
    while left:
        message, at, end = left.pop()
        inside = FIELDS[message]
        while at < end:
            key, at = _varint(data, at, end)
            if key >> _KEY_BITS:
                raise NotOnnx(f"not an ONNX model: a field's number of more than {_KEY_BITS} bits")
            field, wire = key >> 3, key & 7
            value = 0
            start = at
            if wire == _VARINT:
                value, at = _varint(data, at, end)
            elif wire == _BYTES:
                size, start = _varint(data, at, end)
                at = start + size
            elif wire in (_FIXED32, _FIXED64):
                at += 4 if wire == _FIXED32 else 8
            else:
                raise NotOnnx("not an ONNX model: a field of an unknown kind")
            if at > end:
                raise NotOnnx("not an ONNX model: it ends within a field")
            if message == "TensorProto":
                if field == EXTERNAL_DATA or (field == DATA_LOCATION and value):
                    raise ExternalData("the model keeps tensors in another file")
            elif wire == _BYTES and field in inside:
                left.append((inside[field], start, at))
                graphs += message == "ModelProto" and field == _GRAPH
    if not graphs:
        raise NotOnnx("not an ONNX model: it has no graph")


def _varint(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise NotOnnx("not an ONNX model: a number without an end")

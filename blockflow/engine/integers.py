"""Integers: which a block may be given so that OpenVINO computes all that it makes of them.

OpenVINO's CPU plugin (2026.4.1, measured) keeps int64 in 32 bits and does not notice what exceeds
them; :data:`EXACT` it computes in 32-bit integers, other operators on integers in float32, which
holds those up to 2**24. So the span of every integer in the ONNX graph is followed, from the
input's and the contract's dims, and the largest span of the input is found with which none of them
leaves what the plugin holds. What cannot be followed is taken to leave it. int32 and narrower begin
anew at their ends in the plugin as in torch.

It looks at a graph alone, reads no weights but constants of integers and single numbers, and needs
no framework but the ``onnx`` package's messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

from blockflow.core.limits import MAX_ROWS
from blockflow.core.model import FLOAT_DTYPES, ROWS, TensorSpec, integer_range
from blockflow.engine.spans import ANY, ARITHMETIC, UNIT, Span, times, union, within

INTEGERS = "blockflow.integers"
"""What an ONNX file of ours says in its metadata: ``LEAST MOST`` of the input's integers (a dash
where the input has none), or, where there are no such, why."""
NONE_HELD = "none: "
"""How the latter begins."""

_32 = (-(2**31), 2**31 - 1)
_24 = (-(2**24), 2**24)
_BELOW_24 = (-(2**24) + 1, 2**24 - 1)
_NO_RANGE = 2**20
"""As long as a dim may be that has no range in the contract, or that is computed."""

# onnx.TensorProto.DataType
_BOOL = 9
_WRAPS: Mapping[int, str] = {2: "uint8", 3: "int8", 5: "int16", 6: "int32"}
_INT64 = 7
_WIDE = frozenset({6, 7})

_MOVED = frozenset(
    "Identity Transpose Reshape Flatten Squeeze Unsqueeze Expand Slice Tile Gather GatherElements "
    "GatherND Split DepthToSpace SpaceToDepth ReverseSequence".split()
)
"""Give elements of their first input."""
_COMPARED = frozenset("Equal Less LessOrEqual Greater GreaterOrEqual".split())
EXACT = frozenset(
    "Identity Transpose Reshape Flatten Squeeze Unsqueeze Expand Slice Tile Gather GatherElements "
    "GatherND Split Add Sub Mul Neg Abs Sign Max Min Clip BitwiseAnd BitwiseOr BitwiseXor "
    "BitwiseNot CumSum Where Concat Cast ScatterElements ScatterND".split()
)
"""Operators that the plugin computes in 32-bit integers (tests/contract holds each to it)."""
_OF_SIZES = frozenset(
    "Identity Reshape Squeeze Unsqueeze Slice Gather Concat Cast Add Sub Mul Div Mod Neg Abs Max "
    "Min Clip Where Floor Ceil Equal Less Greater Not ReduceProd".split()
)
"""What a graph computes shapes with."""
_BOUNDED: Mapping[str, Span] = {
    **dict.fromkeys("Sigmoid HardSigmoid Softmax".split(), UNIT),
    **dict.fromkeys("Tanh Sin Cos Erf Softsign Sign".split(), (-1, 1)),
}
_SINGLE = 4096
"""Elements of a constant of floats that is looked at."""


class _Beyond(Exception):
    """A value may leave what the plugin holds."""


@dataclass(frozen=True, slots=True)
class _Value:
    """Span of a tensor's elements. ``size``: it is of dims and constants alone, as shapes are: that
    it is held, the limits of tensors see to. ``constant``: it is the file's own."""

    span: Span
    size: bool = False
    constant: bool = False


def integers_held(model: Any, spec: TensorSpec) -> str:
    """What :data:`INTEGERS` shall say of a model (``onnx.ModelProto``) with inputs of ``spec``."""
    graph = _Graph(model, spec)
    if spec.dtype in FLOAT_DTYPES:
        why = graph.problem(ANY)
        return f"{NONE_HELD}{why}" if why else "-"
    low, high = integer_range(spec.dtype)
    low, high = max(low, _32[0]), min(high, _32[1])
    why = graph.problem((0, 0))
    if why:
        return f"{NONE_HELD}{why}"
    most = _farthest(high, lambda n: not graph.problem((0, n)))
    least = -_farthest(-low, lambda n: not graph.problem((-n, most)))
    return f"{least} {most}"


def _farthest(end: int, holds: Callable[[int], bool]) -> int:
    """The largest of 0 .. ``end`` that holds; 0 does, and all below one that does."""
    if holds(end):
        return end
    good, bad = 0, end
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


class _Graph:
    """A graph's operators, with the types, dims and constants of its tensors."""

    def __init__(self, model: Any, spec: TensorSpec) -> None:
        import onnx
        from onnx import inliner, shape_inference

        flat = inliner.inline_local_functions(model) if model.functions else model
        graph = shape_inference.infer_shapes(flat).graph
        self._nodes: Sequence[Any] = graph.node
        self._helper = onnx.helper
        self._input = graph.input[0].name
        self._types: dict[str, int] = {}
        self._dims: dict[str, list[int]] = {}
        self._constants: dict[str, _Value] = {}
        self._numbers: dict[str, list[int]] = {}
        given = graph.input[0].type.tensor_type.shape.dim
        names = {d.dim_param: _most(spec, dim) for d, dim in zip(given, spec.dims, strict=True)}
        names.pop("", None)  # of fixed dims
        for v in (*graph.input, *graph.value_info, *graph.output):
            kind = v.type.tensor_type
            self._types[v.name] = kind.elem_type
            if kind.HasField("shape"):
                self._dims[v.name] = [
                    d.dim_value or names.get(d.dim_param, _NO_RANGE) for d in kind.shape.dim
                ]
        for tensor in graph.initializer:
            self._constant(tensor.name, tensor)
        for node in self._nodes:
            if node.op_type == "Constant" and node.attribute[0].HasField("t"):
                self._constant(node.output[0], node.attribute[0].t)

    def _constant(self, name: str, tensor: Any) -> None:
        from onnx import numpy_helper

        self._types[name] = tensor.data_type
        self._dims[name] = list(tensor.dims)
        integers = tensor.data_type in (_INT64, _BOOL, *_WRAPS)
        span = ANY
        if integers or prod(tensor.dims) <= _SINGLE:
            array = numpy_helper.to_array(tensor)
            span = (array.min().item(), array.max().item()) if array.size else (0, 0)
            if integers and array.size <= _SINGLE:
                self._numbers[name] = [int(n) for n in array.ravel()]
        if not span[0] <= span[1]:  # a NaN
            span = ANY
        self._constants[name] = _Value(span, size=True, constant=True)

    def problem(self, given: Span) -> str:
        """What may leave the plugin's numbers with inputs of this span; '' = nothing."""
        values = {**self._constants, self._input: _Value(given)}
        try:
            for node in self._nodes:
                if node.output[0] not in self._constants:
                    self._follow(node, values)
        except _Beyond as e:
            return str(e)
        return ""

    def _follow(self, node: Any, values: dict[str, _Value]) -> None:
        args = [values.get(name, _Value(ANY)) for name in node.input]
        taken = _data(node.op_type, len(args))
        of_sizes = node.op_type in ("Shape", "Size") or (
            node.op_type in _OF_SIZES and all(args[i].size for i in taken)
        )
        exact = node.op_type in EXACT or (
            # rounding keeps the order, and changes no number of the smaller side
            node.op_type in _COMPARED and any(within(a.span, _BELOW_24) for a in args)
        )
        limit = _32 if exact else _24
        known = True
        try:
            spans = self._spans(node, args)
        except KeyError:
            known, spans = False, [ANY] * len(node.output)
        for i in taken:
            lenient = node.op_type in ("Max", "Min", "Clip") and args[i].constant
            lenient |= not known and args[i].size
            wide = self._types.get(node.input[i]) in _WIDE
            if wide and not (of_sizes or lenient or within(args[i].span, limit)):
                raise _Beyond(self._told(node, node.input[i], exact))
        for name, span in zip(node.output, spans, strict=False):
            kind = self._types.get(name, self._types.get(node.input[0] if node.input else "", 1))
            self._types[name] = kind
            if kind == _BOOL:
                span = UNIT
            elif kind in _WRAPS and not within(span, integer_range(_WRAPS[kind])):
                if kind in _WIDE and not exact and not of_sizes:
                    raise _Beyond(self._told(node, name, exact))
                span = integer_range(_WRAPS[kind])
            elif kind in _WIDE and not of_sizes and not within(span, limit):
                raise _Beyond(self._told(node, name, exact))
            values[name] = _Value(span, size=of_sizes)

    def _told(self, node: Any, name: str, exact: bool) -> str:
        bits = "32 bits" if exact else "the 24 bits of its float32"
        return f"{name!r}, of operator {node.op_type}, may exceed {bits}"

    def _spans(self, node: Any, args: Sequence[_Value]) -> list[Span]:
        """Of each output. Raises KeyError: they cannot be followed."""
        op, spans = node.op_type, [a.span for a in args]
        if any(a.HasField("g") for a in node.attribute):
            raise _Beyond(f"operator {op} holds a graph of its own, which is not followed")
        attributes = {a.name: self._helper.get_attribute_value(a) for a in node.attribute}
        dims = self._dims.get(node.input[0] if node.input else "")
        longest = _NO_RANGE if dims is None else max(dims, default=1)
        if op in _MOVED:
            return [spans[0]] * len(node.output)
        if op in _BOUNDED:
            return [_BOUNDED[op]]
        if op in _COMPARED:
            return [UNIT]
        if op in ("Shape", "Size"):
            whole = _NO_RANGE**2 if dims is None else max(1, prod(dims))
            return [(0, longest if op == "Shape" else whole)]
        if op == "Range":
            return [union(spans[:2])]
        if op in ("NonZero", "ArgMax", "ArgMin"):
            return [(0, longest)]
        if op == "TopK":
            return [spans[0], (0, longest)]
        if op == "ConstantOfShape":
            value = self._helper.get_attribute_value(node.attribute[0]) if attributes else None
            return [(0, 0) if value is None else self._one(value)]
        if op == "OneHot":
            return [spans[2]]
        if op in ("ScatterElements", "ScatterND"):
            if attributes.get("reduction", b"none") != b"none":
                raise KeyError(op)
            return [union([spans[0], spans[2]])]
        if op == "CumSum":
            return [times(spans[0], (1, self._reduced(node, dims)))]
        if op == "ReduceSum":
            return [times(spans[0], (0, self._reduced(node, dims)))]
        if op == "Mod" and attributes.get("fmod"):
            most = max(map(abs, spans[1]))
            return [(-most, most)]
        if op == "Clip":
            low = spans[1][0] if len(args) > 1 and node.input[1] else -inf
            high = spans[2][1] if len(args) > 2 and node.input[2] else inf
            return [(min(max(spans[0][0], low), high), max(min(spans[0][1], high), low))]
        return [ARITHMETIC[op](spans)]

    def _one(self, tensor: Any) -> Span:
        from onnx import numpy_helper

        value = numpy_helper.to_array(tensor).item()
        return (value, value)

    def _reduced(self, node: Any, dims: Sequence[int] | None) -> int:
        """How many elements a sum is of, at most: those along its axes."""
        if dims is None:
            return _NO_RANGE
        axes = self._numbers.get(node.input[1]) if len(node.input) > 1 else None
        return prod(dims[a] for a in (axes or range(len(dims))))


def _most(spec: TensorSpec, dim: int | str) -> int:
    if isinstance(dim, int):
        return dim
    return MAX_ROWS if dim == ROWS else spec.ranges.get(dim, (1, _NO_RANGE))[1]


def _data(op: str, count: int) -> Sequence[int]:
    """Which inputs hold what the result is made of; the others are its dims, axes and places."""
    if op in ("Gather", "GatherElements", "GatherND"):
        return range(count)
    if op in _MOVED or op in (
        "CumSum",
        "ReduceSum",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "TopK",
    ):
        return range(min(count, 1))
    if op in ("Shape", "Size", "ConstantOfShape", "DequantizeLinear", "Resize"):
        return ()
    return (0, 2) if op == "Pad" and count > 2 else range(count)

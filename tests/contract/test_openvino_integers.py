"""What OpenVINO computes of integers within the span that is found for a block is right.

The list of operators that it computes exactly is its makers' business; here each is held to it, at
the ends of the span as in between, beside ONNX Runtime, which computes with 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from blockflow.core.model import TensorSpec
from blockflow.engine.frameworks import onnxruntime, openvino_core, openvino_lacks
from blockflow.engine.integers import EXACT, NONE_HELD, integers_held

onnx: Any = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")

COLUMNS = 8
SPEC = TensorSpec("int64", ("rows", COLUMNS))
FULL = (-(2**31), 2**31 - 1)
F32 = (-(2**24), 2**24)
HINTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
"""What it computes floats in: integers are to be the same."""
PLAIN = {"INFERENCE_PRECISION_HINT": HINTS["fp32"]}


@dataclass
class Op:
    """One operator on ``x`` (int64[rows, 8]) and constants, and the span that is expected."""

    name: str
    constants: Sequence[Any] = ()
    span: tuple[int, int] = FULL
    attributes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "int64"
    gives: str | None = None
    at: int = 0  # which input ``x`` is
    shape: tuple[int, ...] = (COLUMNS,)

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}"


def i64(*values: int) -> Any:
    return np.array(values, np.int64)


SCALAR = np.int64
ODD = np.arange(COLUMNS) % 2 == 1
CASES = [
    Op("Add", [SCALAR(1)], (-(2**31), 2**31 - 2)),
    Op("Add", [SCALAR(-5)], (-(2**31) + 5, 2**31 - 1)),
    Op("Sub", [SCALAR(7)], (-(2**31) + 7, 2**31 - 1)),
    Op("Mul", [SCALAR(3)], (-715_827_882, 715_827_882)),
    Op("Neg", (), (-(2**31) + 1, 2**31 - 1)),
    Op("Abs", (), (-(2**31) + 1, 2**31 - 1)),
    Op("Sign"),
    Op("Max", [SCALAR(-(2**40))]),
    Op("Min", [SCALAR(2**62)]),
    Op("Clip", [SCALAR(-5), SCALAR(2**30)]),
    Op("BitwiseAnd", [SCALAR(0xFFFFFFF)]),
    Op("BitwiseOr", [SCALAR(5)]),
    Op("BitwiseXor", [SCALAR(5)]),
    Op("BitwiseNot"),
    Op("CumSum", [SCALAR(1)], (-(2**28), 2**28 - 1)),
    Op("Equal", [SCALAR(2**24 - 1)], gives="bool"),
    Op("Less", [SCALAR(2**24 - 1)], gives="bool"),
    Op("GreaterOrEqual", [SCALAR(-(2**24) + 1)], gives="bool"),
    Op("Greater", [SCALAR(2**24)], F32, gives="bool"),
    Op("LessOrEqual", [SCALAR(-(2**24))], F32, gives="bool"),
    Op("Where", [ODD, i64(7)], at=1),
    Op("Concat", [i64(*range(COLUMNS))[None]], attributes={"axis": 0}),
    Op("Cast", attributes={"to": 6}, gives="int32"),
    Op("Identity"),
    Op("Transpose"),
    Op("Flatten"),
    Op("Unsqueeze", [i64(1)]),
    Op("Squeeze", [i64(2)], shape=(COLUMNS, 1)),
    Op("GatherElements", [np.zeros((1, COLUMNS), np.int64)], attributes={"axis": 0}),
    Op("GatherND", [i64(0, 1)]),
    Op("Split", [i64(3, 5)], attributes={"axis": 1}),
    Op("ScatterElements", [i64(2, 0)[None], i64(5, 6)[None]], attributes={"axis": 1}),
    Op("ScatterND", [i64(0, 2)[None], i64(5)]),
    Op("Reshape", [i64(-1, 4)]),
    Op("Slice", [i64(1), i64(2**63 - 1), i64(1)]),
    Op("Gather", [i64(1, 0)], attributes={"axis": 1}),
    Op("Tile", [i64(1, 2)]),
    Op("Expand", [i64(2, 1, 1)]),
    Op("Mod", [SCALAR(1000)], F32),
    Op("Mod", [SCALAR(1000)], F32, {"fmod": 1}),
    Op("Div", [SCALAR(7)], F32),
    Op("Pow", [SCALAR(2)], (-4096, 4096)),
    Op("ReduceMax", [i64(1)], F32),
    Op("ReduceMin", [i64(1)], F32),
    Op("ReduceSum", [i64(1)], (-(2**21), 2**21)),
    Op("ArgMax", (), F32, {"axis": 1}),
    Op("Trilu", (), F32),
    Op("Pad", [i64(0, 1, 0, 1), SCALAR(3)], F32),
    # begin anew at their ends, as torch's do
    Op("Add", [np.int32(2**31 - 1)], dtype="int32"),
    Op("Mul", [np.int32(31)], dtype="int32"),
    Op("CumSum", [SCALAR(1)], dtype="int32"),
    Op("Mod", [np.int32(1000)], F32, dtype="int32"),
]


def model_of(*ops: Op) -> Any:
    """Of operators side by side: the first takes ``x0`` and gives ``y0``."""
    helper, kinds = onnx.helper, onnx.helper.np_dtype_to_tensor_dtype
    nodes, given, results, constants = [], [], [], []
    for n, op in enumerate(ops):
        takes, gives = (kinds(np.dtype(d)) for d in (op.dtype, op.gives or op.dtype))
        given.append(helper.make_tensor_value_info(f"x{n}", takes, ["r", *op.shape]))
        results.append(helper.make_tensor_value_info(f"y{n}", gives, None))
        names = [f"c{n}_{i}" for i in range(len(op.constants))]
        constants += [
            onnx.numpy_helper.from_array(np.asarray(c), name)
            for name, c in zip(names, op.constants, strict=True)
        ]
        inputs = [*names[: op.at], f"x{n}", *names[op.at :]]
        outputs = [f"y{n}", f"z{n}"] if op.name == "Split" else [f"y{n}"]
        nodes.append(helper.make_node(op.name, inputs, outputs, **op.attributes))
    graph = helper.make_graph(nodes, "g", given, results, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.fixture(scope="module", params=HINTS)
def hint(request: pytest.FixtureRequest) -> dict[str, str]:
    if openvino_lacks(request.param):
        pytest.skip(f"this CPU does not compute in {request.param}")
    return {"INFERENCE_PRECISION_HINT": HINTS[request.param]}


def inputs_of(op: Op) -> list[Any]:
    """From all of its span, its ends, and small ones; one row and several."""
    (low, high), random, made = op.span, np.random.default_rng(0), []
    for rows in (1, 5):
        x = random.integers(low, high + 1, (rows, *op.shape)).astype(op.dtype)
        made += [x, np.full_like(x, low), np.full_like(x, high), np.clip(x, -9, 9)]
    return made


@pytest.fixture(scope="module")
def computed(hint: dict[str, str]) -> list[list[tuple[Any, Any]]]:
    """By operator: what OpenVINO makes of each input, and what ONNX Runtime does. They are in one
    model, because OpenVINO takes a tenth of a second to compile any."""
    raw, core = model_of(*CASES).SerializeToString(), openvino_core()
    session = onnxruntime().InferenceSession(raw, providers=["CPUExecutionProvider"])
    compiled = core.compile_model(core.read_model(raw), "CPU", hint)
    names = [f"y{n}" for n in range(len(CASES))]
    found: list[list[tuple[Any, Any]]] = [[] for _ in CASES]
    for inputs in zip(*map(inputs_of, CASES), strict=True):
        given = {f"x{n}": x for n, x in enumerate(inputs)}
        expected, got = session.run(names, given), compiled(given)
        for name, pairs, right in zip(names, found, expected, strict=True):
            pairs.append((got[compiled.output(name)].copy(), right))
    return found


@pytest.mark.parametrize("n", range(len(CASES)), ids=map(str, CASES))
def test_what_is_within_the_span_is_computed_right(
    n: int, computed: list[list[tuple[Any, Any]]]
) -> None:
    op = CASES[n]
    held = integers_held(model_of(op), TensorSpec(op.dtype, ("rows", *op.shape)))
    assert tuple(map(int, held.split())) == op.span
    assert len(computed[n]) == 8
    for got, expected in computed[n]:
        np.testing.assert_array_equal(got, expected)


def test_integers_between_floats_stay_integers(hint: dict[str, str]) -> None:
    """An index that is computed, of what was a float, and a table of floats: one block, in which
    only the floats may lose digits."""
    helper, kind = onnx.helper, onnx.TensorProto
    table = np.arange(4096, dtype=np.float32)  # below 256 bf16 has each of them, beyond it has not
    constants = {"three": SCALAR(3), "many": SCALAR(4096), "zero": np.float32(0), "table": table}
    nodes = [
        helper.make_node("Add", ["x", "zero"], ["same"]),
        helper.make_node("Cast", ["same"], ["whole"], to=kind.INT64),
        helper.make_node("Mul", ["whole", "three"], ["more"]),
        helper.make_node("Mod", ["more", "many"], ["index"]),
        helper.make_node("Gather", ["table", "index"], ["found"]),
        helper.make_node("Cast", ["index"], ["y"], to=kind.INT64),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind.FLOAT, ["r", COLUMNS])],
        [
            helper.make_tensor_value_info("y", kind.INT64, None),
            helper.make_tensor_value_info("found", kind.FLOAT, None),
        ],
        [onnx.numpy_helper.from_array(np.asarray(c), n) for n, c in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    core = openvino_core()
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", hint)
    # Of eight bits at most, so that no precision changes what comes in.
    x = (np.arange(32 * COLUMNS, dtype=np.float32) * 8).reshape(32, COLUMNS)
    expected = x.astype(np.int64) * 3 % 4096
    got = compiled(x)
    np.testing.assert_array_equal(got[compiled.output("y")], expected)
    np.testing.assert_allclose(got[compiled.output("found")], expected, rtol=2**-8)


def test_every_operator_that_counts_as_exact_is_tried() -> None:
    assert {op.name for op in CASES if op.span != F32} >= EXACT


def test_sums_of_float32_are_why_there_is_a_span() -> None:
    """When this fails, OpenVINO has learned to count: take the operator into the exact ones."""
    model = model_of(Op("Mod", [SCALAR(1000)]))
    core = openvino_core()
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", PLAIN)
    x = np.full((1, COLUMNS), 2**24 + 1, np.int64)
    assert not np.array_equal(compiled(x)[compiled.output(0)], x % 1000)


@pytest.mark.parametrize("op", [Op("Mul", [SCALAR(2**40)]), Op("Add", [SCALAR(2**31)])], ids=str)
def test_what_exceeds_with_any_input_is_held_for_none(op: Op) -> None:
    said = integers_held(model_of(op), SPEC)
    assert said.startswith(NONE_HELD) and op.name in said and "32 bits" in said

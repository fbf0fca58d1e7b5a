"""Specs and contracts: binding, resolving, what fits behind what."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockflow.core.errors import RequestError
from blockflow.core.model import (
    DTYPE_BYTES,
    BlockInfo,
    Contract,
    Padding,
    TensorSpec,
    Variant,
    integer_range,
    tensor_bytes,
)

IMAGE = TensorSpec("float32", ("rows", 3, 8, 8))
TOKENS = TensorSpec("int64", ("rows", "length"), {"length": (2, 16)})
WIDE = TensorSpec("float32", ("rows", "length", 8), {"length": (2, 16)})
OPEN = TensorSpec("float32", ("rows", "length"))
SQUARE = TensorSpec("float32", ("rows", "n", "n"))


@pytest.mark.parametrize(
    ("dtype", "dims", "ranges"),
    [
        ("complex64", ("rows", 1), {}),
        ("float32", (), {}),
        ("float32", (1, 2), {}),
        ("float32", ("rows", 0), {}),
        ("float32", ("rows", -1), {}),
        ("float32", ("rows", 2**31), {}),
        ("float32", ("rows", True), {}),
        ("float32", ("rows", 1.5), {}),
        ("float32", ("rows", *[1] * 8), {}),
        ("float32", ("rows", "a"), {"b": (1, 2)}),
        ("float32", ("rows", "a"), {"a": (3, 2)}),
        ("float32", ("rows", "a"), {"a": (0, 2)}),
    ],
)
def test_specs_that_make_no_sense(dtype: str, dims: tuple, ranges: dict) -> None:
    with pytest.raises(ValueError):
        TensorSpec(dtype, dims, ranges)


def test_binding_gives_the_dynamic_dims() -> None:
    assert IMAGE.bind("float32", (5, 3, 8, 8)) == {"rows": 5}
    assert TOKENS.bind("int64", (5, 7)) == {"rows": 5, "length": 7}
    assert SQUARE.bind("float32", (1, 4, 4))["n"] == 4
    assert SQUARE.dynamic == ("n",)


@pytest.mark.parametrize(
    ("spec", "dtype", "dims", "code"),
    [
        (IMAGE, "float64", (1, 3, 8, 8), "CONTRACT_MISMATCH"),
        (IMAGE, "float32", (1, 3, 8), "CONTRACT_MISMATCH"),
        (IMAGE, "float32", (1, 4, 8, 8), "CONTRACT_MISMATCH"),
        (IMAGE, "float32", (0, 3, 8, 8), "EMPTY_INPUT"),
        (TOKENS, "int64", (1, 1), "CONTRACT_MISMATCH"),
        (TOKENS, "int64", (1, 17), "CONTRACT_MISMATCH"),
        (TOKENS, "int64", (1, 0), "CONTRACT_MISMATCH"),
        (SQUARE, "float32", (1, 2, 3), "CONTRACT_MISMATCH"),
        (TensorSpec("float32", ("rows",)), "float32", (), "CONTRACT_MISMATCH"),
    ],
)
def test_tensors_that_do_not_fit(spec: TensorSpec, dtype: str, dims: tuple, code: str) -> None:
    with pytest.raises(RequestError) as e:
        spec.bind(dtype, dims, where="block")
    assert e.value.code == code and e.value.where == "block"


@pytest.mark.parametrize(
    ("dtype", "dims", "words"),
    [("float64", (1, 3, 8, 8), "convert it to float32"), ("float32", (3, 8, 8), "dim 0 is rows")],
)
def test_what_to_do_with_them(dtype: str, dims: tuple, words: str) -> None:
    with pytest.raises(RequestError) as e:
        IMAGE.bind(dtype, dims)
    assert words in e.value.hint


def test_the_smallest_tensor_and_whether_there_is_a_largest() -> None:
    assert (TOKENS.least_dims(), TOKENS.least_dims(3)) == ((1, 2), (3, 2))
    assert OPEN.least_dims() == (1, 1)
    assert IMAGE.bounded and TOKENS.bounded and not OPEN.bounded
    assert not TensorSpec("float32", ("rows", "a", "b"), {"a": (1, 2)}).bounded


def test_the_range_of_an_integer() -> None:
    for dtype in ("uint8", "int8", "int16", "int32", "int64"):
        known = np.iinfo(dtype)
        assert integer_range(dtype) == (known.min, known.max)
    assert integer_range("bool") == (0, 1)


def test_sizes_in_bytes() -> None:
    assert IMAGE.row_bytes() == 4 * 3 * 64
    assert TOKENS.row_bytes() == 16 * 8
    assert (OPEN.least_row_bytes(), OPEN.row_bytes()) == (4, 4 * 1024)
    assert tensor_bytes("float16", (2**31 - 1,) * 8) == 2 * (2**31 - 1) ** 8
    known = {d: np.dtype(d).itemsize for d in DTYPE_BYTES if d != "bfloat16"}
    assert known | {"bfloat16": 2} == DTYPE_BYTES  # numpy has none of that


@pytest.mark.parametrize(
    ("taken", "given_", "why"),
    [
        (IMAGE, IMAGE, ""),
        (IMAGE, TensorSpec("float32", ("rows", 3, 8, 9)), "dim 3"),
        (WIDE, WIDE, ""),
        (TensorSpec("float32", ("rows", "n"), {"n": (2, 2**31 - 1)}), OPEN, "dim 1"),
        (WIDE, TensorSpec("float32", ("rows", 5, 8)), ""),
        (WIDE, TensorSpec("float32", ("rows", 17, 8)), "dim 1"),
        (TensorSpec("float32", ("rows", 5, 8)), WIDE, "dim 1"),
        (TensorSpec("float32", ("rows", "m", 8), {"m": (4, 16)}), WIDE, "dim 1"),
        (TensorSpec("float32", ("rows", "m", 8), {"m": (1, 32)}), WIDE, ""),
        (TensorSpec("float32", ("rows", "m"), {"m": (1, 4096)}), OPEN, "dim 1"),
        (OPEN, TensorSpec("float32", ("rows", "m"), {"m": (1, 4096)}), ""),
        (SQUARE, TensorSpec("float32", ("rows", "a", "a")), ""),
        (SQUARE, TensorSpec("float32", ("rows", 4, 4)), ""),
        (SQUARE, TensorSpec("float32", ("rows", "a", "b")), "dim 2: b into n, which is a"),
        (SQUARE, TensorSpec("float32", ("rows", 3, 4)), "dim 2: 4 into n, which is 3"),
        (IMAGE, TensorSpec("float64", ("rows", 3, 8, 8)), "dtype"),
        (IMAGE, TensorSpec("float32", ("rows", 3)), "rank"),
    ],
)
def test_what_fits_behind_what(taken: TensorSpec, given_: TensorSpec, why: str) -> None:
    assert taken.accepts(given_).startswith(why)
    assert bool(taken.accepts(given_)) is bool(why)


def test_an_output_dim_must_be_bound() -> None:
    with pytest.raises(ValueError, match="not bound"):
        Contract(IMAGE, WIDE)
    assert Contract(TOKENS, WIDE).output_dims({"rows": 3, "length": 5}) == (3, 5, 8)


dims = st.lists(st.one_of(st.integers(1, 100), st.sampled_from(["a", "b"])), max_size=7)


@given(dtype=st.sampled_from(sorted(DTYPE_BYTES)), rest=dims, values=st.integers(1, 9))
def test_resolve_and_bind_are_inverse(dtype: str, rest: list, values: int) -> None:
    spec = TensorSpec(dtype, ("rows", *rest))
    binding = {"rows": values, **{n: values + i for i, n in enumerate(spec.dynamic)}}
    assert spec.bind(dtype, spec.resolve(binding)) == binding
    assert TensorSpec.from_dict(spec.to_dict()) == spec


def test_block_info_survives_the_round_trip() -> None:
    info = BlockInfo("b", "1", "0" * 64, "pt2", Contract(TOKENS, WIDE), 5, 20)
    assert BlockInfo.from_dict(info.to_dict()) == info
    onnx = Variant("b.onnx", "1" * 64, 7, "here", {"onnxruntime": "differs"})
    choices = {"here": {"engine": "onnx"}}
    padding = Padding("length", 0.5)
    whole = replace(info, variants={"onnx": onnx}, choices=choices, padding=padding)
    assert BlockInfo.from_dict(whole.to_dict()) == whole


@given(st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=4)))
def test_nonsense_raises_what_callers_expect(data: dict) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        TensorSpec.from_dict(data)

"""What is said of a request before it costs anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockflow.core.errors import RequestError, WireError
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import TaskRoute
from blockflow.dispatcher.validate import check_contract, check_frame, check_names, check_values
from blockflow.wire.client import Request
from blockflow.wire.tensor import TensorDesc

SPEC = TensorSpec("float32", ("rows", 3, "width"), {"width": (2, 8)})
TASK = TaskRoute("t", ("b",), Contract(SPEC, TensorSpec("float32", ("rows", 1))), max_rows=4)


def test_names_must_differ() -> None:
    check_names(["a", "b"])
    with pytest.raises(RequestError) as caught:
        check_names(["b", "c", "a", "c"])
    assert caught.value.code == "INVALID_REQUEST"
    assert caught.value.where == "c"


def test_the_frame_holds_what_the_header_says() -> None:
    request = Request(b"\0" * 16, ("t",), 1000, TensorDesc("float32", (2, 3)))
    frame = memoryview(bytes(24))
    assert check_frame(request, frame) is frame
    for wrong in (None, memoryview(bytes(23)), memoryview(b"")):
        with pytest.raises(WireError) as caught:
            check_frame(request, wrong)
        assert caught.value.code == "MALFORMED_MESSAGE"


@pytest.mark.parametrize(
    ("dtype", "dims", "code", "said"),
    [
        ("float64", (1, 3, 4), "CONTRACT_MISMATCH", "dtype"),
        ("float32", (1, 3), "CONTRACT_MISMATCH", "rank"),
        ("float32", (1, 5, 4), "CONTRACT_MISMATCH", "dim 1"),
        ("float32", (1, 3, 9), "CONTRACT_MISMATCH", "2..8"),
        ("float32", (1, 3, 0), "CONTRACT_MISMATCH", "positive"),
        ("float32", (0, 3, 4), "EMPTY_INPUT", "zero rows"),
        ("float32", (5, 3, 4), "TOO_LARGE", "5 rows"),
    ],
)
def test_an_input_that_does_not_fit(dtype: str, dims: Any, code: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_contract(TensorDesc(dtype, dims), [TASK])
    assert caught.value.code == code
    assert said in caught.value.message
    assert "t" in caught.value.where


def test_what_may_limit_the_rows_is_named() -> None:
    with pytest.raises(RequestError) as caught:
        check_contract(TensorDesc("float32", (5, 3, 4)), [TASK])
    for limit in ("limits.max_rows", "max_rows of task 't'", "of a block"):
        assert limit in caught.value.hint


def test_an_input_that_fits() -> None:
    check_contract(TensorDesc("float32", (4, 3, 8)), [TASK])


def values(array: np.ndarray, dtype: str | None = None, check_finite: bool = True) -> None:
    desc = TensorDesc(dtype or str(array.dtype), array.shape)
    given = memoryview(array.tobytes())
    kept = memoryview(bytearray(len(given)))
    errors = []
    for memory, source in ((given, None), (kept, given)):
        try:
            check_values(desc, memory, check_finite, source)
        except RequestError as exc:
            errors.append(exc)
    assert len({str(e) for e in errors}) < 2 and len(errors) in (0, 2), "the same both ways"
    if errors:
        raise errors[0]
    assert kept == given


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_element_is_named(dtype: str, bad: float) -> None:
    array = np.zeros((2, 3), dtype)
    values(array)
    values(np.full((2, 3), np.finfo(dtype).max, dtype))  # the sum overflows, no element does
    array[1, 2] = bad
    with pytest.raises(RequestError) as caught:
        values(array)
    assert caught.value.code == "NON_FINITE_INPUT"
    assert "[1, 2]" in caught.value.message
    values(array, check_finite=False)


def test_non_finite_values_are_found_in_large_inputs() -> None:
    array = np.arange(700_000, dtype=np.float32)
    values(array)
    array[5] = np.finfo(np.float32).max  # its piece's squares overflow; the others' do not
    values(array)
    array[699_999] = np.nan
    with pytest.raises(RequestError, match=r"\[699999\]"):
        values(array)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x7F81])
def test_bfloat16_is_checked_by_its_exponent(bits: int) -> None:
    array = np.array([[0x3F80, 0x7F7F], [0x0000, 0xFF7F]], np.uint16)
    values(array, "bfloat16")
    array[1, 0] = bits
    with pytest.raises(RequestError, match=r"\[1, 0\]"):
        values(array, "bfloat16")


def test_a_bool_is_zero_or_one() -> None:
    values(np.array([True, False]))
    for check_finite in (False, True):
        with pytest.raises(RequestError, match="neither 0 nor 1"):
            values(np.array([1, 2], np.uint8), "bool", check_finite)


def test_integers_are_taken_as_they_come() -> None:
    values(np.array([-1, 2**62], np.int64))

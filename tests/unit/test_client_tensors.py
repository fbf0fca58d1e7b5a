"""The border between arrays and the wire."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from blockflow.client.tensors import from_wire, to_wire
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.wire.tensor import DTYPES, TensorDesc


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bfloat16"])
def test_numpy_round_trip(dtype: str) -> None:
    x = np.arange(6).reshape(2, 3).astype(dtype)
    desc, body, kind = to_wire(x)
    assert (desc, kind) == (TensorDesc(dtype, (2, 3)), "numpy")
    back = from_wire(desc, bytearray(body), kind)
    assert back.dtype == x.dtype
    assert np.array_equal(back, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_round_trip(dtype: str) -> None:
    x = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    desc, body, kind = to_wire(x)
    assert (desc, kind) == (TensorDesc(dtype, (2, 3)), "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = from_wire(desc, bytearray(body), kind)
    assert back.dtype == x.dtype
    assert torch.equal(back, x)


def test_what_a_mask_hides_is_not_sent() -> None:
    x = np.ma.masked_array(np.ones((2, 3)), mask=[[0, 1, 0], [0, 0, 0]])
    with pytest.raises(BlockFlowError, match=r"CONTRACT_MISMATCH.*masked.*x\.filled"):
        to_wire(x)
    assert bytes(to_wire(x.filled(0))[1]) == x.filled(0).tobytes()
    whole = np.ma.masked_array(np.ones((2, 3)), mask=False)
    assert bytes(to_wire(whole)[1]) == np.ones((2, 3)).tobytes()
    named = np.ma.masked_array(np.ones(3, [("a", "f8")]), mask=[(True,)] * 3)
    with pytest.raises(BlockFlowError, match="CONTRACT_MISMATCH"):
        to_wire(named)


def test_contiguous_arrays_are_not_copied() -> None:
    x = np.arange(6, dtype=np.float32)
    _, body, _ = to_wire(x)
    x[0] = 7.0
    assert np.frombuffer(body, np.float32)[0] == 7.0
    t = torch.arange(6, dtype=torch.bfloat16)
    _, body, _ = to_wire(t)
    t[0] = 7.0
    assert from_wire(TensorDesc("bfloat16", (6,)), bytearray(body), "torch")[0] == 7.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(12, dtype=np.float32).reshape(3, 4).T,
        lambda: np.arange(12, dtype=np.float32)[::-2].reshape(6, 1),
        lambda: np.broadcast_to(np.float32(3), (2, 5)),
        lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        lambda: np.arange(4, dtype=">f4"),
    ],
)
def test_other_layouts_are_copied_once(make: Any) -> None:
    x = make()
    desc, body, kind = to_wire(x)
    assert np.array_equal(from_wire(desc, bytearray(body), kind), x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).reshape(3, 4).t(),
        lambda: torch.arange(3.0).expand(2, 3),
        lambda: torch.arange(12.0, requires_grad=True).reshape(3, 4),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
    ],
)
def test_torch_layouts(make: Any) -> None:
    x = make()
    desc, body, kind = to_wire(x)
    want = x.detach().to_dense() if x.is_sparse else x.detach()
    assert torch.equal(from_wire(desc, bytearray(body), kind), want)


def test_bfloat16_patterns_in_numpy() -> None:
    x = np.array([[0x3F80, 0x4000]], dtype=np.uint16)
    desc, body, kind = to_wire(x, "bfloat16")
    assert str(desc) == "bfloat16[1, 2]"
    assert np.array_equal(from_wire(desc, bytearray(body), kind), x)
    as_torch = from_wire(desc, bytearray(body), "torch")
    assert as_torch.tolist() == [[1.0, 2.0]]


def test_plain_sequences_take_the_named_dtype() -> None:
    assert str(to_wire([[1, 2], [3, 4]], "int32")[0]) == "int32[2, 2]"
    assert str(to_wire([[1.5]])[0]) == "float64[1, 1]"


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([np.array([256, 300, -1, 3])], "uint8"),
        ([np.array([1.0, 2.5])], "int64"),
        ([[1.9, 0.5]], "uint8"),
        ([["1", "2"]], "uint8"),
        ([[None, 1]], "float32"),
        ([[1, 2]], "bool"),
        ([[float("nan"), 1.0]], "int32"),
        ([[2**40]], "int32"),
        ([["1"]], "bfloat16"),
        ([["1"]], None),
        ([[1.0]], "complex64"),
    ],
)
def test_numbers_do_not_become_others_unseen(numbers: Any, dtype: str | None) -> None:
    with pytest.raises(RequestError) as e:
        to_wire(numbers, dtype)
    assert e.value.code == "CONTRACT_MISMATCH"


def test_numbers_that_are_the_same_in_another_type_are_taken(recwarn: Any) -> None:
    for numbers, dtype in (
        ([np.array([255, 0])], "uint8"),
        ([[1.0, 2.0]], "int8"),
        ([[1, 0]], "bool"),
        ([[True]], "float32"),
        ([[2**62 + 1]], "int64"),
        ([[1e6, 1e300]], "float16"),  # infinite, which the contract minds
    ):
        desc, body, kind = to_wire(numbers, dtype)
        assert desc.dtype == dtype
        assert from_wire(desc, bytearray(body), kind).shape == (1, len(numbers[0]))
    assert not recwarn.list


def test_plain_numbers_become_bfloat16_as_torch_makes_them() -> None:
    numbers = [0.0, -0.0, 1.5, 2, True, 1 / 3, -1e-40, 3e38, 3.4e38, float("-inf")]
    numbers += [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20]  # halves go to the even one
    desc, body, kind = to_wire([numbers], "bfloat16")
    want = torch.tensor([numbers], dtype=torch.float32).bfloat16()
    assert torch.equal(from_wire(desc, bytearray(body), "torch"), want)
    assert (str(desc), kind) == (f"bfloat16[1, {len(numbers)}]", "numpy")


def test_a_nan_stays_one_in_bfloat16() -> None:
    nans = np.array([0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    desc, body, _ = to_wire([*nans, float("nan")], "bfloat16")
    assert from_wire(desc, bytearray(body), "torch").isnan().all()


def test_a_sequence_of_patterns_is_one_of_patterns() -> None:
    desc, body, kind = to_wire([np.array([0x3F80, 0x4000], np.uint16)], "bfloat16")
    assert from_wire(desc, bytearray(body), kind).tolist() == [[0x3F80, 0x4000]]


def test_arrays_travel_while_another_thread_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # as far as the import has come
    assert to_wire(np.zeros((1, 4), np.float32))[2] == "numpy"


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (np.zeros(3, np.float32), "float64"),
        (np.zeros(3, np.uint16), None),
        (np.zeros(3, np.float32), "nonsense"),
        (torch.zeros(3, dtype=torch.complex64), None),
        (torch.zeros(3), "bfloat16"),
        (torch.zeros(()), None),
        (torch.zeros(3, device="meta"), None),
        (object(), None),
        ({"a": 1}, None),
        ([1], "nonsense"),
        ([torch.zeros(3, requires_grad=True)], None),
        (["a"], "bfloat16"),
        ([[1.0], [1.0, 2.0]], "bfloat16"),
        ([10**400], "bfloat16"),
        (np.zeros(3, np.int16), "bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(x: Any, dtype: str | None) -> None:
    with pytest.raises(BlockFlowError) as info:
        to_wire(x, dtype)
    assert info.value.code == "CONTRACT_MISMATCH"


def test_a_frame_of_another_size_is_malformed() -> None:
    with pytest.raises(BlockFlowError, match="MALFORMED_MESSAGE"):
        from_wire(TensorDesc("float32", (2,)), b"1234567", "numpy")


def test_results_are_writable_even_from_read_only_frames() -> None:
    back = from_wire(TensorDesc("uint8", (3,)), b"abc", "numpy")
    back[0] = 1
    assert "torch" in sys.modules
    assert from_wire(TensorDesc("uint8", (3,)), b"abc", "torch").add_(1).tolist() == [98, 99, 100]


@pytest.mark.parametrize(
    "one",
    [
        torch.ones(1, 1, dtype=torch.bfloat16),
        torch._neg_view(torch.ones(1, 1)),  # type: ignore[no-untyped-call]
        np.ones((1, 1), ">f4"),
    ],
)
def test_what_is_expanded_is_judged_before_it_is_copied(one: Any) -> None:
    vast = 2**20, 2**20
    x = one.expand(vast) if isinstance(one, torch.Tensor) else np.broadcast_to(one, vast)
    with pytest.raises(RequestError) as caught:
        to_wire(x)
    assert caught.value.code == "TOO_LARGE"


def test_sizes_are_judged_in_elements_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError) as caught:
        to_wire(np.ones((2, 0), np.float32))
    assert caught.value.code == "EMPTY_INPUT"
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", 16)
    to_wire(np.ones(4, np.float32))
    with pytest.raises(RequestError, match="20 bytes, the limit is 16") as caught:
        to_wire(np.ones(5, np.float32))
    assert caught.value.code == "TOO_LARGE"
    for size in (15, 17):
        with pytest.raises(BlockFlowError, match="its frame"):
            from_wire(TensorDesc("float32", (4,)), bytearray(size), "numpy")


def test_a_view_that_torch_negates_in_passing_arrives_negated() -> None:
    x = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert x.is_neg()
    _, body, _ = to_wire(x)
    assert np.frombuffer(body, np.float32).tolist() == [-2.0, -4.0]


def test_too_many_dims_and_too_few_are_helped_differently() -> None:
    for rank, says in ((0, "x[None]"), (9, "reshape")):
        with pytest.raises(RequestError) as e:
            to_wire(np.ones((1,) * rank, np.float32))
        assert e.value.code == "CONTRACT_MISMATCH" and says in e.value.hint

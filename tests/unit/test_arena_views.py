"""Views: every dtype, zero copy, quiet about read-only memory."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from blockflow.core.model import DTYPE_BYTES
from blockflow.tensormq.views import as_numpy, as_torch

DTYPES = sorted(DTYPE_BYTES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_views_show_the_same_memory(dtype: str) -> None:
    memory = memoryview(bytearray(2 * 3 * DTYPE_BYTES[dtype]))
    tensor, array = as_torch(memory, dtype, (2, 3)), as_numpy(memory, dtype, (2, 3))
    tensor.fill_(1)
    expected = torch.ones(2, 3, dtype=getattr(torch, dtype))
    if dtype == "bfloat16":
        assert array.dtype == np.uint16
        assert (array == expected.view(torch.uint16).numpy()).all()
    else:
        assert (array == expected.numpy()).all()
    assert tensor.data_ptr() == array.ctypes.data


@pytest.mark.parametrize("dtype", DTYPES)
def test_read_only_memory_gives_no_warning(dtype: str) -> None:
    memory = memoryview(bytes(4 * DTYPE_BYTES[dtype]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_torch(memory, dtype, (4,)).shape == (4,)
        assert not as_numpy(memory, dtype, (4,)).flags.writeable


@pytest.mark.parametrize("dims", [(0,), (0, 3), (2, 0, 4)])
def test_zero_elements(dims: tuple[int, ...]) -> None:
    assert as_torch(memoryview(b""), "float32", dims).shape == dims
    assert as_numpy(memoryview(b""), "bfloat16", dims).shape == dims


def test_strides_in_elements() -> None:
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    memory = memoryview(whole).cast("B")
    assert (as_numpy(memory, "float32", (4, 3), (1, 4)) == whole.T).all()
    assert (as_torch(memory, "float32", (4, 3), (1, 4)).numpy() == whole.T).all()


def test_a_view_keeps_its_memory_alive() -> None:
    tensor = as_torch(memoryview(bytearray(b"\1" * 64)), "uint8", (64,))
    assert int(tensor.sum()) == 64

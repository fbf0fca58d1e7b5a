"""The memory of results: whose it is, and how it lies."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from blockflow.client.tensors import from_wire
from blockflow.wire.tensor import TensorDesc

RECEIVE_BUFFER = 8192
"""Bytes of libzmq's, in which small frames lie side by side."""


def received(nbytes: int, at: int) -> tuple[bytearray, memoryview]:
    """A frame as libzmq gives it: somewhere in a buffer that is to be written to."""
    buffer = bytearray(RECEIVE_BUFFER + nbytes)
    frame = memoryview(buffer)[at : at + nbytes]
    frame[:] = np.arange(nbytes // 4, dtype=np.float32).tobytes()
    return buffer, frame


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_small_result_is_aligned_and_holds_no_buffer(kind: Any) -> None:
    for rows, at in product((1, 3, 500), (0, 1, 3, 11)):
        buffer, frame = received(16 * rows, at)
        value = from_wire(TensorDesc("float32", (rows, 4)), frame, kind)
        array = value.numpy() if kind == "torch" else value
        assert array.flags.aligned and array.flags.writeable
        assert array.tolist() == np.arange(4 * rows, dtype=np.float32).reshape(rows, 4).tolist()
        memoryview(array).tolist()  # which unaligned ones refuse
        frame[:] = bytes(len(frame))
        assert array[0, 1] == 1.0, "it is no view of what was received"
        frame.release()
        buffer.clear()  # raises while anything refers to it


def test_a_large_result_is_not_copied() -> None:
    x = np.arange(4096, dtype=np.float32)
    frame = memoryview(bytearray(x.tobytes()))
    value = from_wire(TensorDesc("float32", (64, 64)), frame, "numpy")
    frame[:4] = np.float32(7).tobytes()
    assert value[0, 0] == 7.0
    assert isinstance(from_wire(TensorDesc("float32", (64, 64)), frame, "torch"), torch.Tensor)

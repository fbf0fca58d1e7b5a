"""Tensors over received or reserved memory, without a copy.

numpy has no bfloat16: :func:`as_numpy` gives its bits as uint16. A view of a consumer's memory must
not be written: the pages behind it are mapped read-only, and a write is a SIGSEGV.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from blockflow.core.model import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

_NUMPY_NAMES: Mapping[str, str] = {name: name for name in DTYPE_BYTES} | {"bfloat16": "uint16"}
NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {k: np.dtype(v) for k, v in _NUMPY_NAMES.items()}


def as_numpy(
    memory: memoryview, dtype: str, dims: Sequence[int], strides: Sequence[int] | None = None
) -> np.ndarray[Any, Any]:
    """An array of ``dims`` over ``memory``; ``strides`` in elements, None = row-major."""
    kind = NUMPY_DTYPES[dtype]
    if strides is None:
        return np.frombuffer(memory, kind, prod(dims)).reshape(dims)
    return np.ndarray(tuple(dims), kind, memory, strides=tuple(s * kind.itemsize for s in strides))


def as_torch(
    memory: memoryview, dtype: str, dims: Sequence[int], strides: Sequence[int] | None = None
) -> torch.Tensor:
    """A tensor of ``dims`` over ``memory``; ``strides`` in elements, None = row-major."""
    torch, dtypes = _torch()
    kind, count = dtypes[dtype], prod(dims)
    if not count:
        return torch.empty(tuple(dims), dtype=kind)  # torch refuses buffers of zero bytes
    if strides is None:
        return torch.frombuffer(memory, dtype=kind, count=count).view(tuple(dims))
    return torch.frombuffer(memory, dtype=kind).as_strided(tuple(dims), tuple(strides))


def typed(
    raw: torch.Tensor, dtype: str, dims: Sequence[int], strides: Sequence[int] | None = None
) -> torch.Tensor:
    """A tensor of ``dims`` over a one-dimensional uint8 tensor, wherever that lies."""
    torch, dtypes = _torch()
    if not prod(dims):
        return torch.empty(tuple(dims), dtype=dtypes[dtype], device=raw.device)
    flat = raw.view(dtypes[dtype])
    if strides is None:
        return flat[: prod(dims)].view(tuple(dims))
    return flat.as_strided(tuple(dims), tuple(strides), flat.storage_offset())


@functools.cache
def _torch() -> tuple[Any, Mapping[str, Any]]:
    """torch, imported by the first process that needs tensors, and its dtypes by our names."""
    import torch

    # torch warns once per process of buffers that are not writable. Ours are read-only on purpose,
    # so the one warning is spent here instead of in a log where it would look like a finding.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)
    return torch, {name: getattr(torch, name) for name in DTYPE_BYTES}

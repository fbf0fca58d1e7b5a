"""The border between a caller's arrays and the wire: numpy and torch in, numpy and torch out.

torch is never imported from here: a tensor can only be passed by a program that has imported it.
bfloat16, which numpy lacks, travels as its 16-bit patterns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from blockflow.client.request import shown
from blockflow.core import limits
from blockflow.core.errors import RequestError, WireError
from blockflow.wire.tensor import DTYPES, TensorDesc

Kind = Literal["numpy", "torch"]

_NAMES = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}
"""numpy works out the name of a type each time that it is asked (ten calls)."""

_SHARED_BYTES = 8192
"""Up to this size a frame may lie in libzmq's receive buffer, at any address: a result would keep
all of it, and its elements would not be aligned."""


def to_wire(x: Any, dtype: str | None = None) -> tuple[TensorDesc, memoryview, Kind]:
    """Describe ``x`` and expose its elements without a copy where they are contiguous.

    Args:
        x: numpy array, torch tensor (any device) or nested sequence of numbers; rank 1..8.
        dtype: the type that must travel. Needed only for bfloat16 patterns in a uint16 array, and
            for sequences, whose numbers are converted to it (to bfloat16 by way of float32, to the
            nearest, of two to the even one).

    Returns:
        Descriptor, bytes (they keep the source alive) and the kind of result to give back.

    Raises:
        RequestError: CONTRACT_MISMATCH, EMPTY_INPUT or TOO_LARGE; INVALID_REQUEST: ``dtype`` is no
            name.
    """
    _check_name(dtype)
    if dtype is not None and dtype not in DTYPES:
        raise _cannot_travel(dtype)
    torch = sys.modules.get("torch")
    # While another thread imports torch there may be no such name yet, and no tensor either.
    tensor_type = getattr(torch, "Tensor", None)
    if tensor_type is not None and isinstance(x, tensor_type):
        array, name = _from_torch(torch, x)
        kind: Kind = "torch"
    else:
        array, name = _from_numpy(x, dtype)
        kind = "numpy"
    if dtype is not None and dtype != name:
        raise _mismatch(f"the input is {name}, not {dtype}", "convert it before the call")
    if name not in DTYPES:
        raise _cannot_travel(name)
    if not 1 <= array.ndim <= limits.MAX_RANK:
        hint = "use reshape to make two dims one" if array.ndim else "dim 0 is rows: use x[None]"
        raise _mismatch(f"rank {array.ndim} is outside 1..{limits.MAX_RANK}", hint)
    desc = TensorDesc(name, array.shape)
    if array.size == 0:
        raise RequestError("EMPTY_INPUT", f"no elements in {desc}", hint="send at least one row")
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return desc, memoryview(array.reshape(-1).view(np.uint8)), kind


def from_wire(desc: TensorDesc, frame: Any, kind: Kind) -> Any:
    """A result, aligned and to be written to; inverse of :func:`to_wire`. A large one lies over the
    received frame's memory, a small one is copied.

    Raises:
        WireError: MALFORMED_MESSAGE: the frame's size is not the descriptor's, or no array has its
            dims (without an element they can be of any size).
    """
    view = memoryview(frame)
    if view.nbytes != desc.nbytes:
        raise WireError(
            "MALFORMED_MESSAGE", f"{desc} has {desc.nbytes} bytes, its frame {view.nbytes}"
        )
    as_bits = desc.dtype == "bfloat16"
    # A result belongs to its caller, who may write into it, and keep it.
    if view.readonly or view.nbytes <= _SHARED_BYTES:
        view = memoryview(bytearray(view))
    array = np.frombuffer(view, dtype="uint16" if as_bits else desc.dtype)
    try:
        array = array.reshape(desc.dims)
    except ValueError as exc:
        raise WireError("MALFORMED_MESSAGE", f"{desc} is no array: {exc}") from exc
    if kind == "numpy":
        return array
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(array.view(np.int16) if as_bits else array)
    return tensor.view(torch.bfloat16) if as_bits else tensor


def _from_torch(torch: Any, x: Any) -> tuple[Any, str]:
    name = str(x.dtype).removeprefix("torch.")
    if x.is_meta:
        raise _mismatch("a tensor on the device 'meta' has no elements", "send one that has")
    try:
        _check_size(name, x.shape, x.numel() * x.element_size())
        x = x.detach()
        if x.device.type != "cpu":
            x = x.cpu()
        # Negative or conjugated views, sparse and other layouts have no numpy form before this.
        if x.layout is not torch.strided or x.is_neg():
            x = (x.to_dense() if x.layout is not torch.strided else x).resolve_neg()
        if name == "bfloat16":
            return x.contiguous().view(torch.int16).numpy(), name
        return x.numpy(), name
    except (TypeError, RuntimeError) as exc:  # what torch lacks is the latter
        raise _mismatch(f"dtype {name} cannot travel: {exc}", "convert it first") from exc


def _from_numpy(x: Any, dtype: str | None) -> tuple[Any, str]:
    as_bits = dtype == "bfloat16"
    if isinstance(x, np.ndarray | np.generic):
        array = np.asarray(x)
        # Below a mask lies no data. (numpy.ma is loaded by whoever has one, not by others.)
        if type(x) is not np.ndarray and array.dtype.names is None and np.ma.is_masked(x):
            raise _mismatch("elements are masked, and a mask cannot travel", "use x.filled(...)")
    else:
        try:
            array = _from_sequence(x, dtype)
        except (TypeError, ValueError, OverflowError, RuntimeError) as exc:
            # The last one is torch's, in whose tensors a sequence may have its numbers.
            raise _mismatch(f"not an array: {exc}", "pass a numpy array or a tensor") from exc
    name = _NAMES.get(array.dtype) or str(array.dtype.name)
    _check_size(name, array.shape, array.nbytes)
    if name == "bfloat16":  # the ml_dtypes extension type
        return array.view(np.uint16), name
    if as_bits and name == "uint16":
        name = "bfloat16"
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array, name


def _from_sequence(x: Any, dtype: str | None) -> Any:
    """An array of a sequence's numbers, in the type that is asked for.

    Raises:
        ValueError: they are no numbers, or not these numbers in that type.
    """
    array = np.asarray(x)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"its elements are {array.dtype.name}, not numbers")
    if dtype is None:
        return array
    with np.errstate(over="ignore"):  # an infinity is told as such
        if dtype == "bfloat16":
            # made of patterns, if uint16; plain numbers are int64 or float64 here
            return array if array.dtype.name == "uint16" else _bfloat16_patterns(array)
        wanted = np.dtype(dtype)
        if wanted.kind == "f" or array.dtype == wanted:
            return array.astype(wanted, copy=False)
        with np.errstate(invalid="ignore"):
            made = array.astype(wanted)
    # numpy wraps numbers around that come from an array, and cuts fractions off.
    if not np.array_equal(made.astype(np.longdouble), array.astype(np.longdouble)):
        raise ValueError(f"not all of its numbers are {dtype}")
    return made


def _bfloat16_patterns(x: Any) -> Any:
    """The upper halves of float32 elements, rounded to the nearest, of two to the even one."""
    x = x.astype(np.float32)
    bits = x.view(np.uint32)
    rounded = bits + (0x7FFF + ((bits >> 16) & 1))
    quiet = bits | 0x0040_0000  # a NaN rounded could become an infinity
    return (np.where(np.isnan(x), quiet, rounded) >> 16).astype(np.uint16)


def _check_size(name: str, dims: Iterable[int], nbytes: int) -> None:
    """Before anything is copied: what was expanded takes no memory until then."""
    if nbytes > limits.MAX_MESSAGE_BYTES:
        raise RequestError(
            "TOO_LARGE",
            f"{name}{list(dims)} has {nbytes} bytes, the limit is {limits.MAX_MESSAGE_BYTES}",
            hint="send fewer rows per request",
        )


def _check_name(dtype: Any) -> None:
    if dtype is not None and not isinstance(dtype, str):
        raise RequestError(
            "INVALID_REQUEST",
            f"dtype is the name of a type, a string, not {shown(dtype)}",
            where="dtype",
            hint=f"one of {', '.join(DTYPES)}",
        )


def _cannot_travel(name: str) -> RequestError:
    return _mismatch(f"dtype {name} cannot travel", f"use one of {', '.join(DTYPES)}")


def _mismatch(message: str, hint: str) -> RequestError:
    return RequestError("CONTRACT_MISMATCH", message, hint=hint)

"""Tensor descriptors: what a header says of the tensor that it carries or refers to."""

from __future__ import annotations

from math import prod
from typing import Any

from blockflow.core import limits
from blockflow.core.errors import WireError
from blockflow.core.model import DTYPE_BYTES
from blockflow.core.records import record
from blockflow.wire.codec import is_int, malformed

DTYPES: tuple[str, ...] = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)
"""Wire code of a dtype = its index here. Append only."""

_CODE = {name: i for i, name in enumerate(DTYPES)}
_U64 = 2**64 - 1
_U32 = 2**32 - 1
_INTS = {int}


@record
class Handle:
    """Names a tensor in an arena: ~25 bytes on the wire whatever the tensor's size.

    Attributes:
        incarnation: of the arena's owner; names the arena.
        slot: index of the slot in the arena's mark table.
        lane: which of the slot's release marks belongs to the receiver.
        generation: of the slot; a mark or a read with another generation is stale.
        offset: of the first byte in the arena.
    """

    incarnation: int
    slot: int
    lane: int
    generation: int
    offset: int


@record
class TensorDesc:
    """dtype, dims, and where the elements are: ``handle`` or, when None, the next message frame.

    Tensors are contiguous in row-major order unless ``strides`` (in elements) says otherwise.
    """

    dtype: str
    dims: tuple[int, ...]
    handle: Handle | None = None
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * prod(self.dims)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.dims))}]"

    def to_wire(self) -> list[Any]:
        h = self.handle
        return [
            _CODE[self.dtype],
            list(self.dims),
            None if self.strides is None else list(self.strides),
            None if h is None else [h.incarnation, h.slot, h.lane, h.generation, h.offset],
        ]


def desc_from_wire(raw: Any, what: str) -> TensorDesc:
    """Decode and check a descriptor: known dtype, rank <= 8, dims within bounds, <= 256 MiB.

    Zero-sized dims pass here (the contract check answers them: EMPTY_INPUT, CONTRACT_MISMATCH).

    Raises:
        WireError: MALFORMED_MESSAGE, or TOO_LARGE by way of the message limit.
    """
    if type(raw) is not list or len(raw) != 4:
        raise malformed(what, "a tensor descriptor has 4 fields")
    code, dims, strides, handle = raw
    if type(code) is not int or not 0 <= code < len(DTYPES):
        raise malformed(what, f"unknown dtype code {code!r}")
    if type(dims) is not list or not 1 <= len(dims) <= limits.MAX_RANK:
        raise malformed(what, f"rank outside 1..{limits.MAX_RANK}")
    for d in dims:
        if type(d) is not int or not 0 <= d <= limits.MAX_DIM:
            raise malformed(what, f"dim {d!r} outside 0..{limits.MAX_DIM}")
    dtype = DTYPES[code]
    nbytes = DTYPE_BYTES[dtype] * prod(dims)
    if nbytes > limits.MAX_MESSAGE_BYTES:
        raise WireError(
            "MALFORMED_MESSAGE",
            f"{what}: tensor of {nbytes} bytes is over the limit of {limits.MAX_MESSAGE_BYTES}",
            where=what,
            details={"too_large": True},
        )
    if strides is not None:
        if type(strides) is not list or len(strides) != len(dims):
            raise malformed(what, "strides and dims differ in length")
        if not all(is_int(s, 0, limits.MAX_MESSAGE_BYTES) for s in strides):
            raise malformed(what, "stride out of range")
    if handle is not None:
        if type(handle) is not list or len(handle) != 5:
            raise malformed(what, "a handle has 5 fields")
        inc, slot, lane, gen, offset = handle
        if set(map(type, handle)) != _INTS or not (
            1 <= inc <= _U64
            and 0 <= slot <= _U32
            and 0 <= lane <= 255
            and 1 <= gen <= _U32
            and 0 <= offset <= _U64
        ):
            raise malformed(what, "handle field out of range")
        return TensorDesc(
            dtype,
            tuple(dims),
            Handle(inc, slot, lane, gen, offset),
            None if strides is None else tuple(strides),
        )
    return TensorDesc(dtype, tuple(dims), None, None if strides is None else tuple(strides))

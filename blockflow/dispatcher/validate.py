"""Checks of a decoded request before it costs anything: all of them typed, none of them waits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import isfinite

import numpy as np
import numpy.typing as npt

from blockflow.core import limits
from blockflow.core.errors import RequestError, WireError
from blockflow.core.model import FLOAT_DTYPES
from blockflow.core.routing import TaskRoute
from blockflow.wire.client import Request
from blockflow.wire.tensor import TensorDesc

_CHUNK_BYTES = 1 << 19
"""Copied and looked at in one go: it stays in the second-level cache from the one to the other."""

_BLAS_DTYPES = ("float32", "float64")
"""Whose sums of squares numpy leaves to BLAS."""

_MANY = 4096
"""Elements from which on that is quicker."""

_BF16_EXPONENT = 0x7F80


def check_names(names: Sequence[str]) -> None:
    """Task names of one request must differ.

    Raises:
        RequestError: INVALID_REQUEST.
    """
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise RequestError(
            "INVALID_REQUEST",
            f"task {twice[0]!r} is named more than once",
            where=twice[0],
            hint="name each task once",
        )


def check_frame(request: Request, frame: memoryview | None) -> memoryview:
    """The message's second frame must hold exactly the elements that the header announces.

    Returns:
        The frame.

    Raises:
        WireError: MALFORMED_MESSAGE.
    """
    want = request.tensor.nbytes
    if frame is None:
        raise WireError(
            "MALFORMED_MESSAGE",
            f"the tensor's frame is missing ({request.tensor} announced)",
            hint="send two frames: header and elements",
        )
    if frame.nbytes != want:
        raise WireError(
            "MALFORMED_MESSAGE",
            f"{request.tensor} has {want} bytes, the frame has {frame.nbytes}",
            hint="send the elements contiguous and in row-major order",
        )
    return frame


def check_contract(tensor: TensorDesc, tasks: Sequence[TaskRoute]) -> None:
    """The input must fit each task's first block and row limit.

    Raises:
        RequestError: CONTRACT_MISMATCH, EMPTY_INPUT or TOO_LARGE.
    """
    rows = tensor.dims[0]
    for task in tasks:
        task.contract.input.bind(tensor.dtype, tensor.dims, where=f"task {task.name}")
        most = min(task.max_rows, limits.MAX_ROWS)
        if rows > most:
            raise RequestError(
                "TOO_LARGE",
                f"{rows} rows are more than task {task.name!r} takes ({most})",
                where=f"task {task.name}",
                hint="send several requests, or raise what limits it in the topology: "
                f"limits.max_rows, max_rows of task {task.name!r}, or that of a block on its way",
            )


def check_values(
    tensor: TensorDesc, memory: memoryview, check_finite: bool, source: memoryview | None = None
) -> None:
    """The elements must be values of the dtype; and finite ones where a task asks for it.

    Args:
        memory: the elements, read without a copy.
        source: where they are: they are copied to ``memory``, each piece being checked there while
            it lies in the processor's cache. None: they are there already.

    Raises:
        RequestError: NON_FINITE_INPUT with the first offending element's position;
            CONTRACT_MISMATCH for a bool that is neither 0 nor 1 (undefined behaviour in kernels).
    """
    if check_finite and tensor.dtype in FLOAT_DTYPES:
        bad = _first_non_finite(tensor.dtype, memory, source)
        if bad is not None:
            index = np.unravel_index(bad, tensor.dims)
            raise RequestError(
                "NON_FINITE_INPUT",
                f"element {[int(i) for i in index]} of {tensor} is NaN or infinite",
                hint="clean the input, or set check_finite to false for the task",
            )
        return
    if source is not None:
        memory[:] = source
    if tensor.dtype == "bool":
        raw = np.frombuffer(memory, dtype=np.uint8)
        if raw.size and int(raw.max()) > 1:
            raise RequestError(
                "CONTRACT_MISMATCH",
                f"a bool element is {int(raw.max())}, neither 0 nor 1",
                hint="send one byte per element, 0 or 1",
            )


def _first_non_finite(dtype: str, memory: memoryview, source: memoryview | None) -> int | None:
    flat: npt.NDArray[np.generic]
    if dtype == "bfloat16":  # unknown to numpy: all exponent bits set means NaN or infinity
        flat = np.frombuffer(memory, dtype=np.uint16)
    else:
        flat = np.frombuffer(memory, dtype=np.dtype(dtype))
    step = max(1, _CHUNK_BYTES // flat.itemsize)
    squared = dtype in _BLAS_DTYPES and flat.size >= _MANY
    with np.errstate(over="ignore", invalid="ignore") if squared else nullcontext():
        for start in range(0, flat.size, step):
            if source is not None:
                first, last = start * flat.itemsize, (start + step) * flat.itemsize
                memory[first:last] = source[first:last]
            part = flat[start : start + step]
            # A sum of squares is finite only if all of them are, and quicker than to look at each.
            # The reverse does not hold: large ones overflow.
            if squared and isfinite(np.dot(part, part)):
                continue
            if dtype == "bfloat16":
                ok = (part & np.uint16(_BF16_EXPONENT)) != _BF16_EXPONENT  # type: ignore[operator]
            else:
                ok = np.isfinite(part)
            if not np.logical_and.reduce(ok):  # .all() without its wrapper: half the time
                return start + int(np.argmin(ok))
    return None

"""OpenVinoEngine: variants ``onnx`` and ``onnx-int8`` by OpenVINO, on the CPU.

Input tensors are laid over the slots' memory, and output tensors where their dims are fixed. The
computation runs in the calling thread; of the threads that OpenVINO starts beside it, only
``threads - 1`` compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockflow.core.engines import FIXED_ROWS
from blockflow.core.errors import BlockError
from blockflow.core.model import FLOAT_DTYPES, ROWS, BlockInfo, integer_range
from blockflow.engine.frameworks import openvino, openvino_core, openvino_lacks
from blockflow.engine.indices import INDICES, from_text
from blockflow.engine.integers import INTEGERS, NONE_HELD
from blockflow.engine.native import VIEWS, Compute, NativeEngine, refuse_external_data
from blockflow.engine.registry import precision_lacking

ov: Any = openvino()

_PRECISION: Mapping[str, str] = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "f32"}
"""Precision -> OpenVINO's hint for what is not quantised."""

_OVERLAYS_KEPT = 1024

_PREPARED_KEPT = 256
"""Of what the plugin prepares for each operator and new dims. By default it is 5000, and a block of
dynamic dims meets new ones without end. Measured on a small encoder and a U-Net: memory stops to
grow, and 32 dims in turn take as long as by default; with a quarter of it up to half as long again.
"""

_FLOAT32 = torch.finfo(torch.float32)
"""The CPU plugin makes float32 of float64, finite ones of all, and int32 of int64 (2026.4.1)."""
_INT32 = torch.iinfo(torch.int32)


class OpenVinoEngine(NativeEngine):
    """One compiled model and one infer request; one more of each for every fixed number of rows.

    A model with dynamic rows is computed in memory of OpenVINO's own, and its result copied out
    once its dims are known to be the contract's; one that is compiled for given rows writes to the
    place that it is given.
    """

    _request: Any = None
    _fixed: Mapping[int, Any] = {}

    def _open(self, path: Path, threads: int) -> Compute:
        core = openvino_core()
        if openvino_lacks(self.options.precision):
            raise precision_lacking(self.block, self.options.precision)
        refuse_external_data(path)
        config = self._config(threads)
        over, plain = Overlays(_over).over, Overlays(_array).over
        promised = _over(torch.empty(1, dtype=self._dtype)).element_type

        def runs(model: Any, rows: int | None = None) -> tuple[Any, ...]:
            if rows is not None:
                model.reshape(self.block.contract.input.resolve({ROWS: rows}))
            compiled = core.compile_model(model, "CPU", config)
            request = compiled.create_infer_request()
            made = compiled.output(0)
            if made.element_type != promised:
                raise self._mismatch(f"it gives {made.element_type.to_string()}, not {self._dtype}")
            if made.partial_shape.is_dynamic:
                return request, request.set_input_tensor, None, 1
            if rows is not None:
                self._refuse_dims(rows, tuple(made.partial_shape.to_shape()))
            copies = int(_is_view(model))
            return request, request.set_input_tensor, request.set_output_tensor, copies

        model = core.read_model(str(path))
        self._refuse_other_dims(model.output(0).partial_shape)
        held = _integers(model, self.block)
        self._indices = from_text(_said(model, INDICES))
        any_rows = runs(model)
        # a clone has the same constants: read again, each would keep those of its own
        fixed = {rows: runs(model.clone(), rows) for rows in self.options.extra.get(FIXED_ROWS, ())}
        self._request = any_rows[0]
        self._fixed = {rows: run[0] for rows, run in fixed.items()}

        def compute(x: Tensor, out: Tensor) -> int:
            if x.dtype is torch.float64 and bool((x.abs() > _FLOAT32.max).any()):
                raise OverflowError("OpenVINO computes in 32 bits, which an input exceeds")
            if held is not None and _exceeds(x, *held):
                raise OverflowError(
                    "OpenVINO computes in 32 bits, which hold this block's integers for inputs of "
                    f"{held[0]} to {held[1]} only"
                )
            request, set_input, set_output, copies = fixed.get(len(x), any_rows)
            set_input(over(x))
            if set_output is not None:
                set_output(over(out))
            # or it would copy the result into an array of its own
            results = request.infer(share_outputs=True)
            if set_output is None:
                _take(results.to_tuple()[0], plain(out))
            if _is_cut_off(out):
                raise OverflowError("OpenVINO computes in 32 bits, which a result exceeds")
            return int(copies)

        return compute

    def _refuse_other_dims(self, made: Any) -> None:
        """By what is known before a run: 2026.4.1 takes dims of an inverse FFT for others (irfft2),
        and as it computes that, it writes beyond its memory, which ends the process later."""
        dims = self.block.contract.output.dims
        if not made.compatible(ov.PartialShape([d if isinstance(d, int) else -1 for d in dims])):
            raise self._mismatch(f"dims are {made.to_string()}, the contract says {list(dims)}")

    def _refuse_dims(self, rows: int, made: tuple[int, ...]) -> None:
        contract = self.block.contract
        dims = contract.output_dims({ROWS: rows})
        if made != dims:
            raise self._mismatch(f"dims are {list(made)}, the contract says {list(dims)}")

    def warm_up(self, rows: int = 1) -> None:
        """Of every model: what a run needs is made in its first one."""
        for n in {rows, *self.options.extra.get(FIXED_ROWS, ())}:
            super().warm_up(n)

    def _config(self, threads: int) -> dict[str, Any]:
        config: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": _PRECISION[self.options.precision],
            # every worker would pin its first thread to the same first core
            "ENABLE_CPU_PINNING": False,
        }
        if self.block.contract.input.dynamic:
            # 2026.4.1 compiles attention for the dims of its first run: if those were of length 1
            # (as a warm-up's are), longer inputs give wrong results and write beyond its memory.
            # Without this fusion they do not; measured: -11% to +18% by length.
            config["SNIPPETS_MODE"] = "DISABLE"
            config["CPU_RUNTIME_CACHE_CAPACITY"] = _PREPARED_KEPT
        return config

    def _probe(self, x: Tensor) -> tuple[int, ...]:
        request = self._request.get_compiled_model().create_infer_request()
        request.set_input_tensor(_over(x))
        request.infer(share_outputs=True)
        return tuple(request.get_output_tensor().shape)

    def close(self) -> None:
        self._request, self._fixed = None, {}
        super().close()


def _take(made: Any, into: Any) -> None:
    """Copy a result out of OpenVINO's memory, if its dims are those of the slot. Given the slot,
    OpenVINO would write fewer rows there, or none, and say nothing: what lay there before would be
    sent."""
    if made.shape != into.shape:
        raise ValueError(f"the result's dims are {list(made.shape)}, not {list(into.shape)}")
    into[...] = made


def _exceeds(x: Tensor, low: int, high: int) -> bool:
    least, most = torch.aminmax(x)
    return int(least) < low or int(most) > high


def _said(model: Any, what: str) -> str:
    """What the file's metadata says; '' = nothing."""
    place = ["framework", what]
    return str(model.get_rt_info(place).astype(str)) if model.has_rt_info(place) else ""


def _integers(model: Any, block: BlockInfo) -> tuple[int, int] | None:
    """Least and greatest of the integers that the block may be given, by what its file says of
    itself (:mod:`blockflow.engine.integers`) and of before 0.2 does not; None: any.

    Raises:
        BlockError: LOAD_FAILED: there are none.
    """
    said = _said(model, INTEGERS) or "-"
    if said.startswith(NONE_HELD):
        raise BlockError(
            "LOAD_FAILED",
            f"OpenVINO does not compute its integers: {said.removeprefix(NONE_HELD)}",
            where=block.name,
            hint="keep them small where they are made (clamp, %), or use another engine",
        )
    low, high = (_INT32.min, _INT32.max) if said == "-" else map(int, said.split())
    dtype = block.contract.input.dtype
    least, most = integer_range(dtype) if dtype not in FLOAT_DTYPES else (0, 0)
    return (low, high) if least < low or high < most else None


def _is_cut_off(y: Tensor) -> bool:
    """Whether a float64 result holds float32's largest number: infinity, and what lies beyond that
    number, become it."""
    return y.dtype is torch.float64 and bool((y.abs() >= _FLOAT32.max).any())


def _is_view(model: Any) -> bool:
    """Whether a model gives its input back, with other dims: nothing computes into the result."""
    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() in VIEWS:
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Parameter")


class Overlays:
    """OpenVINO tensors, or arrays, over given memory; the same few slots come again and again.

    They hold the address, not the memory: a request keeps its last tensors, and a slot's mapping
    must not live on in it. Each is used only while its caller holds the memory.
    """

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self._make = make
        self._known: dict[tuple[int, torch.dtype, torch.Size], Any] = {}

    def over(self, x: Tensor) -> Any:
        """What lies over ``x``, which is contiguous."""
        key = (x.data_ptr(), x.dtype, x.shape)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _OVERLAYS_KEPT:
                self._known.clear()
            found = self._known[key] = self._make(x)
        return found


def _over(x: Tensor) -> Any:
    array = _array(x)
    if x.dtype is torch.bfloat16:
        return ov.Tensor(array.view(np.int16), ov.Shape(list(x.shape)), ov.Type.bf16)
    return ov.Tensor(array, shared_memory=True)


def _array(x: Tensor) -> Any:
    # Any: numpy's stub does not know the buffer protocol before Python 3.12
    memory: Any = (ctypes.c_char * (x.numel() * x.element_size())).from_address(x.data_ptr())
    # numpy has no bfloat16: OpenVINO gives its bits as those of float16
    dtype = "float16" if x.dtype is torch.bfloat16 else str(x.dtype).removeprefix("torch.")
    return np.frombuffer(memory, dtype).reshape(x.shape)

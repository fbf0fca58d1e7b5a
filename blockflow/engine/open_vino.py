"""OpenVinoEngine: variants ``onnx`` and ``onnx-int8`` by OpenVINO, on the CPU.

Input and output tensors are laid over the slots' memory. The computation runs in the calling
thread; of the threads that OpenVINO starts beside it, only ``threads - 1`` compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockflow.core.engines import FIXED_ROWS
from blockflow.core.errors import BlockError
from blockflow.core.model import FLOAT_DTYPES, ROWS, BlockInfo, integer_range
from blockflow.engine.frameworks import openvino, openvino_core, openvino_lacks
from blockflow.engine.integers import INTEGERS, NONE_HELD
from blockflow.engine.native import VIEWS, Compute, NativeEngine
from blockflow.engine.registry import precision_lacking

ov: Any = openvino()

_PRECISION: Mapping[str, str] = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "f32"}
"""Precision -> OpenVINO's hint for what is not quantised."""

_OVERLAYS_KEPT = 1024

_FLOAT32 = torch.finfo(torch.float32)
"""The CPU plugin makes float32 of float64, finite ones of all, and int32 of int64 (2026.4.1)."""
_INT32 = torch.iinfo(torch.int32)


class OpenVinoEngine(NativeEngine):
    """One compiled model and one infer request; one more of each for every fixed number of rows.

    A model with dynamic rows is computed in memory of OpenVINO's own and copied out at the end
    (2026.4.1, the CPU plugin's ``PullOutputData``); one that is compiled for given rows writes to
    the place that it is given.
    """

    _request: Any = None

    def _open(self, path: Path, threads: int) -> Compute:
        core = openvino_core()
        if openvino_lacks(self.options.precision):
            raise precision_lacking(self.block, self.options.precision)
        config = self._config(threads)
        over = Overlays().over

        def runs(model: Any, rows: int | None = None) -> tuple[Any, ...]:
            if rows is not None:
                model.reshape(self.block.contract.input.resolve({ROWS: rows}))
            compiled = core.compile_model(model, "CPU", config)
            request = compiled.create_infer_request()
            copies = compiled.output(0).partial_shape.is_dynamic or _is_view(model)
            return request, request.set_input_tensor, request.set_output_tensor, int(copies)

        model = core.read_model(str(path))
        held = _integers(model, self.block)
        any_rows = runs(model)
        fixed = {
            rows: runs(core.read_model(str(path)), rows)
            for rows in self.options.extra.get(FIXED_ROWS, ())
        }
        self._request = any_rows[0]

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
            set_output(over(out))
            # or it would copy the result into an array of its own
            request.infer(share_outputs=True)
            if _is_cut_off(out):
                raise OverflowError("OpenVINO computes in 32 bits, which a result exceeds")
            return int(copies)

        return compute

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
        return config

    def _probe(self, x: Tensor) -> tuple[int, ...]:
        request = self._request.get_compiled_model().create_infer_request()
        request.set_input_tensor(_over(x))
        request.infer(share_outputs=True)
        return tuple(request.get_output_tensor().shape)

    def close(self) -> None:
        self._request = None
        super().close()


def _exceeds(x: Tensor, low: int, high: int) -> bool:
    least, most = torch.aminmax(x)
    return int(least) < low or int(most) > high


def _integers(model: Any, block: BlockInfo) -> tuple[int, int] | None:
    """Least and greatest of the integers that the block may be given, by what its file says of
    itself (:mod:`blockflow.engine.integers`) and of before 0.2 does not; None: any.

    Raises:
        BlockError: LOAD_FAILED: there are none.
    """
    place = ["framework", INTEGERS]
    said = str(model.get_rt_info(place).astype(str)) if model.has_rt_info(place) else "-"
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
    """OpenVINO tensors over given memory; the same few slots come again and again.

    They hold the address, not the memory: a request keeps its last tensors, and a slot's mapping
    must not live on in it. Each is used only while its caller holds the memory.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.dtype, torch.Size], Any] = {}

    def over(self, x: Tensor) -> Any:
        """A tensor over ``x``, which is contiguous."""
        key = (x.data_ptr(), x.dtype, x.shape)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _OVERLAYS_KEPT:
                self._known.clear()
            found = self._known[key] = _over(x)
        return found


def _over(x: Tensor) -> Any:
    # Any: numpy's stub does not know the buffer protocol before Python 3.12
    memory: Any = (ctypes.c_char * (x.numel() * x.element_size())).from_address(x.data_ptr())
    if x.dtype is torch.bfloat16:  # numpy has no such type
        patterns = np.frombuffer(memory, np.int16).reshape(x.shape)
        return ov.Tensor(patterns, ov.Shape(list(x.shape)), ov.Type.bf16)
    dtype = str(x.dtype).removeprefix("torch.")
    return ov.Tensor(np.frombuffer(memory, dtype).reshape(x.shape), shared_memory=True)

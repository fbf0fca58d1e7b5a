"""OnnxRuntimeEngine: variants ``onnx`` and ``onnx-int8`` by ONNX Runtime, on the CPU.

Input and output are bound to the slots' memory (I/O binding). Threads: ``intra_op`` as given,
``inter_op`` one; they wait without spinning unless the option ``spin`` says so, since other workers
want the cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from blockflow.engine.frameworks import onnxruntime
from blockflow.engine.indices import INDICES, from_text
from blockflow.engine.native import (
    LAST_OPERATOR,
    VIEWS,
    Compute,
    NativeEngine,
    refuse_external_data,
)

ort: Any = onnxruntime()

# onnx.TensorProto.DataType; the numbers are part of the file format
_ELEMENT: Mapping[str, int] = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "bfloat16": 16,
}
_PROVIDERS = ["CPUExecutionProvider"]
_ERROR_ONLY = 3


class OnnxRuntimeEngine(NativeEngine):
    """One inference session and its I/O binding."""

    _session: Any = None
    _binding: Any = None

    def _open(self, path: Path, threads: int) -> Compute:
        refuse_external_data(path)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _ERROR_ONLY
        spin = "1" if self.options.extra.get("spin") else "0"
        options.add_session_config_entry("session.intra_op.allow_spinning", spin)
        session = ort.InferenceSession(str(path), options, providers=_PROVIDERS)
        (given,), (result,) = session.get_inputs(), session.get_outputs()
        take, give = given.name, result.name
        contract = self.block.contract
        input_type, output_type = _ELEMENT[contract.input.dtype], _ELEMENT[contract.output.dtype]
        binding = session.io_binding()
        bind_input, bind_output = binding.bind_input, binding.bind_output
        run = session.run_with_iobinding
        copies = int(session.get_modelmeta().custom_metadata_map.get(LAST_OPERATOR) in VIEWS)
        self._indices = from_text(session.get_modelmeta().custom_metadata_map.get(INDICES))
        self._session, self._binding = session, binding

        def compute(x: Tensor, out: Tensor) -> int:
            bind_input(take, "cpu", 0, input_type, x.shape, x.data_ptr())
            bind_output(give, "cpu", 0, output_type, out.shape, out.data_ptr())
            run(binding)
            return copies

        return compute

    def _probe(self, x: Tensor) -> tuple[int, ...]:
        session = self._session
        binding = session.io_binding()
        element = _ELEMENT[self.block.contract.input.dtype]
        binding.bind_input(session.get_inputs()[0].name, "cpu", 0, element, x.shape, x.data_ptr())
        binding.bind_output(session.get_outputs()[0].name, "cpu")
        session.run_with_iobinding(binding)
        return tuple(binding.get_outputs()[0].shape())

    def close(self) -> None:
        self._session = self._binding = None
        super().close()

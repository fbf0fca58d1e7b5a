"""EngineWorkshop: writes the variants of a block and runs them; the frameworks' side of converting.

See :mod:`blockflow.repository.convert`, which stores what is made here.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from blockflow.core.engines import AS_IT_IS, ENGINES
from blockflow.core.errors import BlockError, BlockFlowError, ExportError, SystemError_
from blockflow.core.inplace import exported_may_write
from blockflow.core.model import FLOAT_DTYPES, BlockInfo, Variant
from blockflow.core.scarcity import no_room
from blockflow.engine.archive import refuse_code
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.compiler_cache import compiler_cache
from blockflow.engine.extras import how_to_install
from blockflow.engine.frameworks import installed, onnxruntime
from blockflow.engine.indices import INDICES, Span, indices_of, span_within, to_text
from blockflow.engine.integers import INTEGERS, integers_held
from blockflow.engine.native import LAST_OPERATOR
from blockflow.engine.registry import create_engine, missing_extra

Run = Callable[[Tensor], Tensor]

_WEIGHTED = ("Conv", "Gemm", "MatMul")
_AROUND_CONVOLUTIONS = ("Add", "Relu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool")
"""ONNX operators that are quantised; the second kind so that tensors stay 8 bits wide in between
(in a transformer that would cost accuracy for nothing)."""

_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        ("onnx", "onnx-int8"),
        f"convert with --to aoti (machine code, for this machine only), or {AS_IT_IS}",
    ),
    "aoti": f"convert with --to onnx, or {AS_IT_IS}",
}
"""What helps where a form cannot be written."""

_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "onnx": ("onnx",),
    "onnx-int8": ("onnx", "onnxruntime"),
}
"""Whose packages write a form."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_OPERATOR = re.compile(r"<OpOverload\(op='([^']+)'[^>]*>")
_COMMAND = re.compile(r"Command:\n.*?\n\s*Output:\n", re.DOTALL)
"""Of a compiler, before its own words: some thousand characters of options."""

_NOT_WRITTEN = 77
"""What an output holds before a run: of any dtype, and unlikely to be a result."""


class EngineWorkshop:
    """Stateless; its methods are those of :class:`blockflow.repository.convert.Workshop`."""

    def make(
        self, kind: str, block: BlockInfo, source: Path, samples: Sequence[Tensor], target: Path
    ) -> None:
        """Write the variant ``kind`` of the exported program ``source`` to ``target``.

        Raises:
            ExportError: EXPORT_FAILED with the framework's reason.
            SystemError_: MISSING_EXTRA; NO_SPACE, of the compiler as well.
        """
        if block.format != "pt2":
            raise ExportError(
                "EXPORT_FAILED",
                f"a block of format {block.format!r} cannot be converted",
                where=block.name,
                hint="only exported programs can: export the model as pt2",
            )
        example = _example(block)
        writers: Mapping[str, Callable[[], object]] = {
            "onnx": partial(_write_onnx, block, source, target),
            "onnx-int8": partial(_write_int8, block, source, target, samples),
            "aoti": partial(_write_package, block, source, target, example),
        }
        try:
            with warnings.catch_warnings(), _quiet(), torch.no_grad():
                warnings.simplefilter("ignore")
                writers[kind]()
        except BlockFlowError as e:
            e.where = e.where or block.name
            raise
        except Exception as e:
            why = f"cannot be written as {kind}: {_reason(e)}"
            if (lacking := no_room(e, why, block.name)) is not None:
                raise lacking from e
            if kind in _EXTRAS and isinstance(_cause(e), ImportError):  # of other versions
                raise SystemError_(
                    "MISSING_EXTRA",
                    f"the packages that write {kind} do not fit together: {_reason(e)}",
                    where=block.name,
                    hint=how_to_install(*_EXTRAS[kind]),
                ) from e
            raise ExportError("EXPORT_FAILED", why, where=block.name, hint=_INSTEAD[kind]) from e

    @contextmanager
    def runners(
        self, kind: str | None, block: BlockInfo, file: Path
    ) -> Iterator[Mapping[str, Run]]:
        """Every engine that is installed here and is for that form of the block, loaded, by name.

        Each computes as in a worker: into memory that it is given, where it takes such. One that
        cannot load it raises LOAD_FAILED when it is run.

        Raises:
            SystemError_: MISSING_EXTRA when there is none; NO_SPACE: the machine has not the memory
                for one, which says nothing about the engine.
        """
        runs: dict[str, Run] = {}
        engines: dict[str, Engine] = {}
        try:
            for name, precision in _candidates(kind, block):
                made = create_engine(
                    _as_stored(kind, block), EngineOptions(precision=precision), name
                )
                engines[name] = made
                try:
                    made.load(file)
                    made.warm_up()  # as a worker does: what it spoils is found here
                    runs[name] = partial(_run, made)
                except BlockError as e:
                    runs[name] = partial(_unable, e)
            yield runs
        finally:
            for made in engines.values():
                made.close()


def _cause(e: BaseException) -> BaseException:
    """What an exporter has failed of: its own message has the advice to its developers first, and
    repeats the cause at its end."""
    while e.__cause__ is not None and str(e.__cause__).strip():
        e = e.__cause__
    return e


def _reason(e: BaseException) -> str:
    e = _cause(e)
    text = _COMMAND.sub("", _OPERATOR.sub(r"\1", _COLOURS.sub("", str(e))))
    return f"{type(e).__name__}: {' '.join(text.split())[:500]}"


def _run(engine: Engine, x: Tensor) -> Tensor:
    """As a worker does, where the function that writes into a slot is another than ``run(x)``'s."""
    if engine.copies_out:
        return cast(Tensor, engine.run(x))
    contract = engine.block.contract
    dims = contract.output_dims(contract.input.bind(str(x.dtype).removeprefix("torch."), x.shape))
    # filled: memory that was free may hold the result of the run before
    out = torch.full(dims, _NOT_WRITTEN, dtype=getattr(torch, contract.output.dtype))
    return cast(Tensor, engine.run(x, out))


def _unable(why: BlockError, _x: Tensor) -> Tensor:
    raise why


def _candidates(kind: str | None, block: BlockInfo) -> list[tuple[str, str]]:
    if kind is None:
        return [("auto", "fp32")]
    able = [
        (name, precision)
        for name, k in ENGINES.items()
        for precision, files in k.files.items()
        if kind in files and precision in ("fp32", "int8")
    ]
    lacking = {name: missing_extra(block, name) for name, _ in able}
    found = [(name, precision) for name, precision in able if lacking[name] is None]
    if not found:
        raise next(e for e in lacking.values() if e is not None)
    return found


def _as_stored(kind: str | None, block: BlockInfo) -> BlockInfo:
    """The block as it will be once the variant is pinned."""
    if kind is None:
        return block
    return replace(block, variants={kind: Variant("unset", "0" * 64, 0)})


def _example(block: BlockInfo) -> Tensor:
    """Zeros with several rows: compilers take 1 for a constant."""
    spec = block.contract.input
    binding = {n: max(spec.ranges.get(n, (1, 8))[0], 2) for n in spec.dynamic}
    return torch.zeros(spec.resolve({**binding, "rows": 2}), dtype=getattr(torch, spec.dtype))


def _read(source: Path) -> torch.export.ExportedProgram:
    with source.open("rb") as f:
        refuse_code(f)
        f.seek(0)
        return torch.export.load(f)


def _write_onnx(block: BlockInfo, source: Path, target: Path) -> Span | None:
    """Returns which integers the file takes; None: any."""
    for package in ("onnx", "onnxscript"):
        _need(package, "onnx")
    program = _read(source)
    found = indices_of(program)
    # one file: external data would lie outside what the digest covers
    torch.onnx.export(
        program, (), os.fspath(target), dynamo=True, external_data=False, verbose=False
    )
    span = span_within(found, block)
    _describe(target, block, span)
    return span


def _write_int8(block: BlockInfo, source: Path, target: Path, samples: Sequence[Tensor]) -> None:
    """Static quantisation: 8-bit weights per channel, activations by the ranges of the samples.

    Weights use 7 of the 8 bits: without VNNI instructions, sums of two products of 8-bit numbers
    are kept in 16 bits and would saturate (ONNX Runtime, "Quantize ONNX models"; measured: errors
    grow tenfold). Products of two activations stay in fp32: attention over 512 tokens lost a
    quarter of the output's range, and ONNX Runtime 1.31 computes them wrongly for one token.
    """
    _need("onnxruntime", "onnxruntime")
    onnxruntime()
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    # Beside the target, whose folder is the caller's to remove, also when this is killed.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        plain, ready = Path(folder) / "plain.onnx", Path(folder) / "ready.onnx"
        span = _write_onnx(block, source, plain)
        quant_pre_process(plain, ready, skip_symbolic_shape=True)
        graph = import_module("onnx").load(ready).graph
        weights = {w.name for w in graph.initializer}
        products = [n for n in graph.node if n.op_type == "MatMul" and n.input[1] not in weights]
        convolves = any(n.op_type == "Conv" for n in graph.node)
        quantization.quantize_static(
            ready,
            target,
            _reader(quantization.CalibrationDataReader, graph.input[0].name, samples),
            op_types_to_quantize=[*_WEIGHTED, *(_AROUND_CONVOLUTIONS if convolves else ())],
            nodes_to_exclude=[n.name for n in products],
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
        )
    _describe(target, block, span)


def _describe(target: Path, block: BlockInfo, indices: Span | None) -> None:
    """Write into the file's metadata what its engines have to know and cannot see."""
    onnx: Any = import_module("onnx")
    model = onnx.load(target)
    result = model.graph.output[0].name
    last = next((n.op_type for n in model.graph.node if result in n.output), "")
    integers = integers_held(model, block.contract.input)
    said = {LAST_OPERATOR: last, INTEGERS: integers, INDICES: to_text(indices)}
    onnx.helper.set_model_props(model, said)
    onnx.save(model, target)


def _reader(base: Any, name: str, samples: Sequence[Tensor]) -> Any:
    left = iter(samples)

    class Reader(base):  # type: ignore[misc]  # the package is an optional import
        def get_next(self) -> dict[str, Any] | None:
            x = next(left, None)
            return None if x is None else {name: x.numpy()}

    return Reader()


def _write_package(block: BlockInfo, source: Path, target: Path, example: Tensor) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ExportError(
            "EXPORT_FAILED",
            f"there is no C++ compiler {compiler!r} on this machine",
            hint="install g++ (or name another by CXX), or convert to onnx, which needs none",
        )
    if re.search(r"\s", torch.__file__):  # torch's commands for the linker do not quote it
        raise ExportError(
            "EXPORT_FAILED",
            f"torch compiles from no path with a space in it, and is at {torch.__file__!r}",
            hint="move the environment, or convert to onnx, which compiles nothing",
        )
    with compiler_cache(target.parent):
        _compile(block, source, target, example)


def _compile(block: BlockInfo, source: Path, target: Path, example: Tensor) -> None:
    from torch._inductor import aoti_compile_and_package

    program = _read(source)
    (given,) = program.graph_signature.user_inputs
    if exported_may_write(program.graph_module, str(given)):  # so would its machine code
        raise ExportError(
            "EXPORT_FAILED",
            "the block may write into its input, which others read",
            hint="export it again: this version stores such a block with a copy of its input",
        )
    indices = indices_of(program)
    if indices.computed and (block.int_below is None or example.is_floating_point()):
        raise _unbounded(block, indices.computed)
    if indices.by_length and not block.contract.input.bounded:
        raise _any_length(block, indices.by_length)
    program.example_inputs = ((example,), {})
    package = target.with_suffix(".pt2")  # the packager insists on the ending
    said = {INDICES: to_text(span_within(indices, block))}
    configs = {
        "cpp.dynamic_threads": True,  # threads are asked for at each run, not compiled in
        "aot_inductor.metadata": said,
        # torch keeps those in a folder that anybody could have made first, whatever cache is named
        "aot_inductor.precompile_headers": False,
    }
    aoti_compile_and_package(program, package_path=os.fspath(package), inductor_configs=configs)
    package.rename(target)


def _unbounded(block: BlockInfo, operator: str) -> ExportError:
    """Compiled code ends its process where an index leads out of a table."""
    floats = block.contract.input.dtype in FLOAT_DTYPES
    return ExportError(
        "EXPORT_FAILED",
        f"{operator} looks something up by numbers that the block computes of its input, which "
        "nothing bounds: machine code would end the worker where one leads out of the table",
        where=block.name,
        hint="clamp() the indices after they are integers"
        if floats
        else "export the block with --int-below (the size of the vocabulary), which is checked "
        f"then; or clamp() the indices, or {AS_IT_IS}",
    )


def _any_length(block: BlockInfo, operator: str) -> ExportError:
    """What was verified are the ends of ranges."""
    return ExportError(
        "EXPORT_FAILED",
        f"{operator} looks something up by what follows from the input, whose lengths have no end: "
        "machine code would end the worker where one leads out of the table",
        where=block.name,
        hint=f"export the block with --range, up to what the table is for; or {AS_IT_IS}",
    )


def _need(package: str, extra: str) -> None:
    if not installed(package):
        raise SystemError_(
            "MISSING_EXTRA",
            f"the conversion needs the package {package!r}",
            hint=how_to_install(extra),
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs about packages that are not there, and the quantiser about what it does."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)

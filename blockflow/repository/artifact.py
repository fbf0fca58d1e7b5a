"""Artifact: write a stage in one of the formats, read it back as the engines do.

``pt2`` (torch.export) is the default. ``torchscript-scripted`` and ``torchscript-traced`` are the
formats of the thesis; upstream has deprecated TorchScript.
"""

from __future__ import annotations

import copy
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import IO, Any, TextIO, cast

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shapes

from blockflow.core.errors import BlockFlowError, ExportError
from blockflow.core.inplace import exported_may_write, script_may_write
from blockflow.core.limits import MAX_ROWS
from blockflow.core.model import ROWS, TensorSpec
from blockflow.repository.causes import GUARD, UNTOLD, cause, reason
from blockflow.repository.folder import written
from blockflow.repository.operators import exported_operators, refuse_foreign, script_operators
from blockflow.repository.sources import scripted_part


class _CopyFirst(nn.Module):
    """Protects the input slot from a block that would write into its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.clone())


def writes_input(run: Callable[[Tensor], Tensor], example: Tensor) -> bool:
    """Whether running writes into the input, be it what stood there before.

    torch counts writes to a tensor and its views; comparing elements would miss a ``relu_`` of
    values that are not negative in the example.
    """
    x = example.clone()
    before = x._version
    with torch.no_grad():
        run(x)
    return x._version != before


def protect_input(stage: nn.Module, example: Tensor) -> nn.Module:
    """A stage that computes the same and leaves its input alone.

    Inputs are read-only views of shared slots, so ``ReLU(inplace=True)`` as a stage's first module
    would corrupt them. Such modules get ``inplace = False`` where that is the same; whatever else
    writes is given a copy. ``stage`` itself, of which the model consists, stays as it is: the model
    is what the blocks are compared with. What writes for some values only does not show with an
    example: the writers of the formats ask the graph for that.
    """
    if not writes_input(stage, example):
        return stage
    return _without_inplace(stage, example) or _CopyFirst(stage)


def _without_inplace(stage: nn.Module, example: Tensor) -> nn.Module | None:
    """A copy of ``stage``, with its tensors, whose modules do not write into its input; None where
    that is not enough, or where the write is a part of the result (``fc(relu(x)) + x``)."""
    tensors: dict[int, Any] = {id(t): t for t in (*stage.parameters(), *stage.buffers())}
    try:
        stage_copy = copy.deepcopy(stage, tensors)
    except Exception:  # a model may hold anything
        return None
    first = example.clone()
    hooks = []

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].data_ptr() == first.data_ptr():
            module.inplace = False  # type: ignore[assignment]

    for module in stage_copy.modules():
        if getattr(module, "inplace", None) is True:
            hooks.append(module.register_forward_pre_hook(look))
    try:
        with torch.no_grad():
            stage_copy(first)
    finally:
        for hook in hooks:
            hook.remove()
    if writes_input(stage_copy, example):
        return None
    with torch.no_grad():
        same = torch.equal(stage_copy(example.clone()), stage(example.clone()))
    return stage_copy if same else None


def write_artifact(
    stage: nn.Module, spec: TensorSpec, example: Tensor, format_: str, path: Path
) -> tuple[str, ...]:
    """Write ``stage`` to ``path``.

    Args:
        stage: in eval mode, one tensor in, one out.
        spec: its input contract; named dims stay dynamic.
        example: an input with at least 2 rows (1 would be taken for a constant).
        format_: a key of :data:`FORMATS`.
        path: the file.

    Returns:
        What the format may have lost, each with its place: other inputs may show it, or may not.

    Raises:
        ExportError: EXPORT_FAILED with the exporter's reason.
        SystemError_: NO_SPACE when the disk of ``path`` is full.
    """
    writer = FORMATS[format_]
    try:
        with torch.no_grad(), warnings.catch_warnings(record=True) as said:
            # TorchScript's deprecation is told once, in the docs and by the command
            warnings.simplefilter("always")
            with _Sink(path) as sink:
                writer(stage, spec, example, sink)
    except BlockFlowError:
        raise
    except Exception as e:
        raise ExportError(
            "EXPORT_FAILED",
            f"cannot be written as {format_}: {type(e).__name__}: {reason(e)}",
            hint=cause(e, spec)
            or (scripted_part(stage) if format_ == "pt2" else "")
            or _HINTS[format_],
        ) from e
    return tuple(dict.fromkeys(_fixed_at(w) for w in said if _is_fixed(w)))


def _is_fixed(said: warnings.WarningMessage) -> bool:
    """What Python found in a value, which a trace keeps for ever. Models that check their inputs'
    sizes do that, too, and torch's own functions: theirs are sizes only."""
    own = not Path(said.filename).is_relative_to(Path(torch.__file__).parent)
    return own and said.category.__name__ == "TracerWarning"


def _fixed_at(said: warnings.WarningMessage) -> str:
    what = str(said.message).partition(".")[0][:160]
    return f"{os.path.basename(said.filename)}:{said.lineno}: {what}"


def read_artifact(path: Path, format_: str) -> Callable[[Tensor], Tensor]:
    """Load what :func:`write_artifact` wrote; used to verify it before it is stored."""
    if format_ == "pt2":
        with path.open("rb") as f:
            loaded: Callable[[Tensor], Tensor] = torch.export.load(f).module()
        return loaded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted: Callable[[Tensor], Tensor] = torch.jit.load(os.fspath(path)).eval()
    return scripted


class _Sink(io.FileIO):
    """The file of an artifact, which refuses nothing before its context ends.

    torch's zip writer finishes its archive in a destructor: an error in there ends the process.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self._path = path
        self._failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        left = memoryview(data)
        try:
            while left and self._failure is None:
                left = left[super().write(left) :]  # a disk that gets full takes a part
        except OSError as e:
            self._failure = e
        return len(data)

    def __exit__(self, *raised: object) -> None:
        with written(self._path):
            self.close()
            if self._failure is not None:
                raise self._failure


def export_program(
    stage: nn.Module, spec: TensorSpec, example: Tensor
) -> torch.export.ExportedProgram:
    """``stage`` by torch.export, the named dims of ``spec`` dynamic. Raises what torch raises.

    Where it refuses a range because something in it gets 1 (what a convolution leaves of the
    shortest input) or 0 (what is left to the next multiple), it is asked again not to look for
    that. Then it takes what might be 1 for more, without a case of its own for the broadcast: it is
    verified like any, at both ends of the range.
    """
    known: dict[str, Any] = {}
    for name in (ROWS, *spec.dynamic):
        lo, hi = spec.ranges.get(name, (1, MAX_ROWS))
        if lo < hi:
            known[name] = torch.export.Dim(name, min=lo, max=hi)
    dims = {i: known[d] for i, d in enumerate(spec.dims) if d in known}

    def export() -> torch.export.ExportedProgram:
        return torch.export.export(stage, (example,), dynamic_shapes=(dims,), strict=False)

    with _quiet():
        try:
            return _without_vmap(export())
        except (torch._dynamo.exc.UserError, AssertionError) as e:
            refused = next((sign for sign in (GUARD, UNTOLD) if sign in str(e)), "")
            if not refused:
                raise
            first = e
        try:
            with shapes.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
                return _without_vmap(export())
        except Exception as e:
            raise (e if refused == UNTOLD else first) from None


def _without_vmap(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """torch.vmap is left in a program as calls that open and close it; no engine runs these."""
    opened = any(
        getattr(n.target, "__module__", "") == "torch._functorch.predispatch"
        for n in program.graph.nodes
    )
    return program.run_decompositions({}) if opened else program


def _write_pt2(stage: nn.Module, spec: TensorSpec, example: Tensor, file: IO[bytes]) -> None:
    program = export_program(stage, spec, example)
    (source,) = program.graph_signature.user_inputs
    if exported_may_write(program.graph_module, str(source)):
        program = export_program(_CopyFirst(stage), spec, example)
    refuse_foreign(exported_operators(program.graph_module))
    # the example would travel in the artifact
    program.example_inputs = None
    torch.export.save(program, file)


def _write_scripted(stage: nn.Module, _spec: TensorSpec, _example: Tensor, file: IO[bytes]) -> None:
    _save_script(torch.jit.script, stage, file)


def _write_traced(stage: nn.Module, _spec: TensorSpec, example: Tensor, file: IO[bytes]) -> None:
    _save_script(lambda s: torch.jit.trace(s, example, check_trace=False), stage, file)


def _save_script(make: Callable[[nn.Module], Any], stage: nn.Module, file: IO[bytes]) -> None:
    made = make(stage)
    refuse_foreign(script_operators(made.inlined_graph))
    if script_may_write(made.inlined_graph):
        made = make(_CopyFirst(stage))
    torch.jit.save(made, file)


Writer = Callable[[nn.Module, TensorSpec, Tensor, IO[bytes]], None]

FORMATS: Mapping[str, Writer] = {
    "pt2": _write_pt2,
    "torchscript-scripted": _write_scripted,
    "torchscript-traced": _write_traced,
}
"""Format -> writer. An engine of the same format must exist (docs/engines.md)."""


def refuse_format(format_: str) -> None:
    """Raises ExportError: EXPORT_FAILED: there is no such format."""
    if format_ not in FORMATS:
        raise ExportError(
            "EXPORT_FAILED",
            f"unknown format {format_!r}",
            hint=f"known formats: {', '.join(FORMATS)}",
        )


_HINTS: Mapping[str, str] = {
    "pt2": "docs/blocks.md lists what cannot be exported; TorchScript's formats may take it",
    "torchscript-scripted": "scripting takes a subset of Python; try pt2 or torchscript-traced",
    "torchscript-traced": "try pt2, the default",
}
"""What helps where the cause is not known, by format."""


class _Muted:
    """The standard error without what this thread writes until :meth:`end`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._muted: int | None = threading.get_ident()

    def end(self) -> None:
        """Who has taken it for the standard error meanwhile, a log handler say, may keep it."""
        self._muted = None

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._muted else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch prints the graph so far, and logs, before it raises what is told as one error.

    Not a word of other threads is lost: one of them draws the progress. What TORCH_LOGS asks for
    is logged all the same: it sets levels of its own.
    """
    log = logging.getLogger("torch")
    before, muted = log.level, _Muted(sys.stderr)
    log.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(cast("TextIO", muted)):
            yield
    finally:
        muted.end()
        log.setLevel(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Measure and verify on one thread, as a block usually runs; restores the number after."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def count_state(stage: nn.Module) -> tuple[int, int]:
    """(number of parameters, bytes of parameters and buffers), shared ones counted once."""
    parameters = sum(p.numel() for p in stage.parameters())
    held = {id(t): t for t in (*stage.parameters(), *stage.buffers())}
    return parameters, sum(t.numel() * t.element_size() for t in held.values())

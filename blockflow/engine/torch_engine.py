"""TorchEngine: what the engines that run a torch module share.

They differ in how the module is loaded; checks, inference mode, precision and the copy into the
output slot are here.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockflow.core.engines import misfits
from blockflow.core.errors import BlockError, BlockFlowError
from blockflow.core.masks import is_mask
from blockflow.core.model import BlockInfo
from blockflow.core.scarcity import no_room
from blockflow.core.text import a_kind
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.lean import OutRefused

_LOG = logging.getLogger("blockflow.engine")

Forward = Callable[[Tensor], Tensor]
Into = Callable[[Tensor, Tensor], Tensor]
"""``f(x, out)`` fills ``out``; OutRefused: only the writing failed, so the plain way may do it."""

PRECISIONS: Mapping[str, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Precision option -> dtype of weights and activations; None leaves the artifact as it is."""

MEMORY_FORMATS: Mapping[str, torch.memory_format] = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
}
"""``extra["memory_format"]`` -> layout of four-dimensional weights (what convolutions follow)."""


def _option(table: Mapping[str, Any], key: str, what: str) -> Any:
    if key not in table:
        raise ValueError(f"unknown {what} {key!r}; known: {', '.join(table)}")
    return table[key]


class TorchEngine(Engine):
    """A torch module on one device.

    The output is copied into ``out`` once, unless the format offers a function that writes there,
    or the result has to be converted to the contract's dtype: that is done on the way into ``out``.
    """

    def __init__(self, block: BlockInfo, options: EngineOptions) -> None:
        super().__init__(block, options)
        self._forward: Forward | None = None
        self._into: Into | None = None
        self._refusal = ""
        self._converts = False
        self._views = False
        self._cast: torch.dtype | None = None
        self._dtype: torch.dtype = getattr(torch, block.contract.output.dtype)

    @abstractmethod
    def _load_module(self, artifact: Path) -> nn.Module:
        """Read the artifact onto ``options.device``."""

    def _exact(self, module: nn.Module) -> Collection[int]:
        """Weights, by ``id``, that a lower precision leaves as they are."""
        return ()

    def _functions(self, module: nn.Module) -> tuple[Forward, Into | None]:
        """Last preparation, once precision and memory format are set.

        Returns:
            ``f(x)`` and, where the format has such a form, ``f(x, out)`` that writes into ``out``.
        """
        return module, None

    def _apart(self, forward: Forward) -> Forward:
        """``forward`` on a copy: it may write into its input, which is not this block's alone."""

        def run(x: Tensor) -> Tensor:
            self.copied.inputs += 1
            return forward(x.clone())

        return run

    def load(self, artifact: Path) -> None:
        try:
            # of the thread that loads; a worker's further lanes set theirs themselves
            torch.set_num_threads(self.options.threads)
            if self.options.device.startswith("cuda"):
                _use_whole_floats()
            self._cast = _option(PRECISIONS, self.options.precision, "precision")
            layout = _option(
                MEMORY_FORMATS,
                str(self.options.extra.get("memory_format", "contiguous")),
                "memory format",
            )
            with torch.inference_mode():
                module = self._load_module(artifact)
                if self._cast is not None:
                    module = self._lowered(module, self._cast)
                if layout is not torch.contiguous_format:
                    # Module.to would ask it of five-dimensional weights, too, which it does not fit
                    module = module._apply(
                        lambda t: t.to(memory_format=layout) if t.dim() == 4 else t
                    )
                self._forward, self._into = self._functions(module)
                if self._cast is not None:
                    self._into = None  # the output's dtype is the contract's, not the computed one
        except BlockFlowError:
            raise
        except Exception as e:
            name = self.block.name
            why = f"block {name!r} ({self.block.format}) cannot be loaded: {_reason(e)}"
            raise no_room(e, why, name) or BlockError(
                "LOAD_FAILED",
                why,
                where=name,
                hint="check the artifact, the torch version in its manifest and the device",
            ) from e

    def run(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        forward = self._forward
        if forward is None:
            raise BlockError("LOAD_FAILED", "the engine is not loaded", where=self.block.name)
        dims = self._fits.output_dims(x.dtype, x.shape)
        self.copied.reset()
        self._refusal = ""
        try:
            with torch.inference_mode():
                if out is not None and self._write(x, out, dims):
                    return out
                y = forward(x if self._cast is None else self._lower(x))
        except Exception as e:
            raise BlockError(
                "BLOCK_FAILED",
                f"block {self.block.name!r} failed: {_reason(e)}",
                where=self.block.name,
                hint="" if self._cast is None else self._other_precision(),
            ) from e
        if not isinstance(y, Tensor):
            raise self._mismatch(f"the result is {a_kind(y)}, not a tensor")
        if tuple(y.shape) != dims:
            raise self._mismatch(f"dims are {list(y.shape)}, the contract says {list(dims)}")
        if y.dtype != self._dtype and self._cast is None:
            raise self._mismatch(f"dtype is {y.dtype}, the contract says {self._dtype}")
        self._converts = y.dtype != self._dtype
        # a block of views only (flatten) returns the input slot, which is soon released
        self._views = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        result = self._deliver(y, out)
        if self._refusal:
            # Not the block's fault, then. It would fail again, and cost a forward each time.
            _LOG.warning(
                "block %r does not write into its slot from now on, its output is copied: %s",
                self.block.name,
                self._refusal,
            )
            self._into = None
        return result

    def _write(self, x: Tensor, out: Tensor, dims: tuple[int, ...]) -> bool:
        """Compute into ``out``. False: not done, the plain way will do it or say what is wrong."""
        into = self._into
        if into is None or tuple(out.shape) != dims or out.dtype != self._dtype:
            return False
        try:
            into(x, out)
        except OutRefused as e:
            self._refusal = str(e)  # the exception itself would hold the slot's memory
            return False
        # a result of other dims has resized the view: a mismatch, not a result
        return tuple(out.shape) == dims

    def _deliver(self, y: Tensor, out: Tensor | None) -> Tensor:
        with torch.inference_mode():
            if out is not None:
                if out.shape != y.shape or out.dtype != self._dtype:
                    raise self._mismatch(
                        f"the slot is {out.dtype}{list(out.shape)}, "
                        f"the result {y.dtype}{list(y.shape)}"
                    )
                self.copied.outputs += not self._converts
                return out.copy_(y)
            if y.dtype != self._dtype:
                return y.to(self._dtype)
            if self._views:
                self.copied.outputs += 1
                return y.clone()
            return y

    @property
    def copies_out(self) -> int:
        # What results are is known after the first run, which warms up. Views are copied whoever
        # gives the memory: into the slot at once, then.
        return 0 if self._into is not None or self._converts or self._views else 1

    def close(self) -> None:
        self._forward = self._into = None

    def _lowered(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        """``module`` with its floats in ``dtype``, but for exact ones. ``Module.to`` would take
        complex numbers along, and drop their imaginary parts with no more than a warning."""
        exact = self._exact(module)

        def lower(t: Tensor) -> Tensor:
            if not t.is_floating_point() or id(t) in exact:
                return t
            made = _fitted(t, dtype)
            if made is None:
                raise self._too_large(float(t[t.isfinite()].abs().max()), torch.finfo(dtype).max)
            return made

        return module._apply(lower)

    def _too_large(self, held: float, most: float) -> BlockError:
        precision = self.options.precision
        return BlockError(
            "UNSUPPORTED_ENGINE",
            f"block {self.block.name!r} holds numbers up to {held:.3g}, {precision} none beyond "
            f"{most:.3g}",
            where=self.block.name,
            hint="use fp32" + (", or bf16" if precision == "fp16" else ""),
            details={"field": "precision"},
        )

    def _lower(self, x: Tensor) -> Tensor:
        return x.to(self._cast) if x.is_floating_point() else x

    def _unfit(self, e: Exception) -> BlockFlowError:
        """What a load ends with that has tried the block at its precision, and it has raised."""
        name, how = self.block.name, f"{self.options.precision} by {self.name}"
        why = f"block {name!r} cannot be computed in {how}: {_reason(e)}"
        return no_room(e, why, name) or BlockError(
            "UNSUPPORTED_ENGINE",
            why,
            where=name,
            hint=self._other_precision(),
            details={"field": "precision"},
        )

    def _other_precision(self) -> str:
        precision = self.options.precision
        others = [n for n in ("exported", "openvino") if n != self.name and self._may_run(n)]
        return f"if the block computes this at fp32, {precision} does not fit it here: use fp32" + (
            f", or {precision} by {' or '.join(others)}" if others else ""
        )

    def _may_run(self, engine: str) -> bool:
        """Another engine, at this precision; what it needs may be still to be made."""
        device, precision = self.options.device, self.options.precision
        found = misfits(self.block, engine, precision, device=device)
        return all(e.code == "ARTIFACT_MISSING" for e in found)

    def _mismatch(self, why: str) -> BlockError:
        return BlockError(
            "OUTPUT_MISMATCH",
            f"block {self.block.name!r}: {why}",
            where=self.block.name,
            hint="the artifact does not keep its manifest's contract: export it again",
        )


def _fitted(t: Tensor, dtype: torch.dtype) -> Tensor | None:
    """``t`` in ``dtype``; None where numbers would become infinite. A single one becomes the last
    that there is, as in a graph, and so do a mask's, one number below 0 at many places: infinities
    make NaN where all is masked."""
    made = t.to(dtype)
    beyond = t[made.isinf() & t.isfinite()]
    if not len(beyond):
        return made
    if t.dim() and not is_mask(t.dim(), *map(float, beyond.aminmax())):
        return None
    most = torch.finfo(dtype).max
    return torch.where(t.isfinite(), t.clamp(-most, most), t).to(dtype)


def _use_whole_floats() -> None:
    """Convolutions and products of float32 with all of its bits, in this process.

    cuDNN's default are TF32's ten bits of mantissa, which are neither the artifact's precision nor
    one that anybody has asked for. By the older of torch's two interfaces: after the newer one
    (``fp32_precision``, in 2.13) torch's own questions by the older one raise, as ``torch.compile``
    asks them.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def _reason(e: Exception) -> str:
    """The first useful line of a framework's message, bounded."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    text = lines[-1] if lines and lines[0].startswith("The following operation") else ""
    return f"{type(e).__name__}: {(text or (lines[0] if lines else ''))[:500]}"

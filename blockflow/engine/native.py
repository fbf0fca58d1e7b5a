"""NativeEngine: what the engines that compute outside torch share.

They are given the input where it lies and the place where the result belongs: pointers in, pointers
out. What they nevertheless copy inside is known from their graphs, and counted. Their threads are
fixed when a block is opened; another number opens it again, from a descriptor of the file whose
digest was checked.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from blockflow.core.errors import BlockError, BlockFlowError
from blockflow.core.model import BlockInfo
from blockflow.core.onnxfile import refuse_external
from blockflow.core.scarcity import no_room
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.indices import Span, refuse_outside

Compute = Callable[[Tensor, Tensor], int]
"""``f(x, out)``: both contiguous; fills ``out`` or raises. How often the result was copied for it.
"""

VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that give their input back with other dims. As a graph's last one each is a copy: the
result is not computed into the place that is given for it."""
LAST_OPERATOR = "blockflow.last_operator"
"""What an ONNX file of ours says in its metadata, for who runs it and cannot see its graph."""


class NativeEngine(Engine):
    """One file, opened by a framework that takes raw memory."""

    def __init__(self, block: BlockInfo, options: EngineOptions) -> None:
        super().__init__(block, options)
        self._dtype: torch.dtype = getattr(torch, block.contract.output.dtype)
        self._compute: Compute | None = None
        self._indices: Span | None = None
        self._file = -1
        self._threads = 0

    @abstractmethod
    def _open(self, path: Path, threads: int) -> Compute:
        """Open the file with so many threads and not one more."""

    @abstractmethod
    def _probe(self, x: Tensor) -> tuple[int, ...]:
        """Compute ``x`` into memory of the framework's own; returns the result's dims."""

    def load(self, artifact: Path) -> None:
        try:
            # kept open: set_threads reads it again when ``artifact`` is no longer valid
            self._file = os.open(artifact, os.O_RDONLY | os.O_CLOEXEC)
            self._compute = self._open(self._path, self.options.threads)
            self._threads = self.options.threads
        except BlockFlowError:
            self.close()
            raise
        except Exception as e:
            self.close()
            raise self._not_loaded(e) from e

    def run(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        compute = self._compute
        if compute is None:
            raise BlockError("LOAD_FAILED", "the engine is not loaded", where=self.block.name)
        self.copied.reset()
        dims = self._fits.output_dims(x.dtype, x.shape)
        if out is None:
            out = torch.empty(dims, dtype=self._dtype)
        elif tuple(out.shape) != dims or out.dtype != self._dtype or not out.is_contiguous():
            raise self._mismatch(f"the slot is {out.dtype}{list(out.shape)}, not {list(dims)}")
        if not x.is_contiguous():
            x = x.contiguous()
            self.copied.inputs += 1
        try:
            refuse_outside(x, self._indices)
        except IndexError as e:
            raise self._block_failed(e) from e
        try:
            self.copied.outputs += compute(x, out)
        except Exception as e:
            raise self._failed(x, dims, e) from e
        return out

    def set_threads(self, threads: int) -> None:
        if self._compute is None or threads == self._threads:
            return  # a worker is told of both at once, though its lanes alone have changed
        pinned = self.block.variants.get(self.variant or "")
        try:
            if pinned is not None and self._digest() != pinned.digest:
                raise ValueError("the file was altered since it was loaded")
            self._compute = self._open(self._path, threads)
            self._threads = threads
        except Exception as e:
            raise self._not_loaded(e) from e

    @property
    def copies_out(self) -> int:
        return 0  # the worker has none to add; what the framework copies inside, ``copied`` says

    def close(self) -> None:
        self._compute = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def _path(self) -> Path:
        return Path(f"/proc/self/fd/{self._file}")

    def _digest(self) -> str:
        with self._path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()

    def _failed(self, x: Tensor, dims: tuple[int, ...], e: Exception) -> BlockError:
        """Find out whether the computation failed or only its result does not fit the slot."""
        try:
            made = self._probe(x)
        except Exception:
            made = dims
        if made != dims:
            return self._mismatch(f"dims are {list(made)}, the contract says {list(dims)}")
        return self._block_failed(e)

    def _block_failed(self, e: Exception) -> BlockError:
        return BlockError(
            "BLOCK_FAILED",
            f"block {self.block.name!r} failed: {reason(e)}",
            where=self.block.name,
        )

    def _mismatch(self, why: str) -> BlockError:
        return BlockError(
            "OUTPUT_MISMATCH",
            f"block {self.block.name!r}: {why}",
            where=self.block.name,
            hint="the variant does not keep its manifest's contract: convert the block again",
        )

    def _not_loaded(self, e: Exception) -> BlockFlowError:
        what = self.variant or self.block.format
        why = f"block {self.block.name!r} ({what}) cannot be loaded: {reason(e)}"
        return no_room(e, why, self.block.name) or BlockError(
            "LOAD_FAILED",
            why,
            where=self.block.name,
            hint=f"make the file anew: blockflow convert {self.block.reference} --to {what}",
        )


def refuse_external_data(path: Path) -> None:
    """Check a file that an ONNX framework is to open: nothing of it may lie in another file, which
    the framework would read and no digest covers.

    Raises:
        ExternalData, NotOnnx: it shall not.
    """
    with (
        path.open("rb") as f,
        mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as view,
    ):
        refuse_external(view)


def reason(e: Exception) -> str:
    """The useful line of a native framework's message: the last one that says something."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {(lines[-1] if lines else '')[:500]}"

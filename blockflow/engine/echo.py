"""EchoEngine: format ``echo``, the in-memory double of an engine. It returns its input.

Settings, from the artifact (a JSON object) and over it from ``EngineOptions.extra``:

- ``delay_ms``: time of one run; ``row_ms``: further time per row;
- ``add``: a number that is added to every element: which artifact ran shows in the result;
- ``touch_mib``: before each run, write to so much memory, as a forward's activations do to the
  caches (benchmarks);
- ``still``: the output is left as the memory was, at the contract's output dims: what remains is
  the hop alone (benchmarks);
- ``fail_on_value``: a run whose first element of any row equals it raises BLOCK_FAILED;
- ``crash_on_value``: the same, but the process dies (fault tests);
- ``crash_on_load``: the process dies in ``load``; ``fail_on_load``: ``load`` raises LOAD_FAILED.

Torch tensors and numpy arrays pass alike.
"""

from __future__ import annotations

import json
import os
import signal
import time
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from blockflow.core.errors import BlockError
from blockflow.core.model import BlockInfo
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.copies import RunCopies

_NUMBERS = frozenset({"add", "delay_ms", "row_ms", "touch_mib", "fail_on_value", "crash_on_value"})
_FLAGS = frozenset({"still", "fail_on_load", "crash_on_load"})
_MAX_BYTES = 64 * 1024


class EchoEngine(Engine):
    """Returns a copy of its input, late or not at all if told so."""

    def __init__(self, block: BlockInfo, options: EngineOptions) -> None:
        super().__init__(block, options)
        self._settings: dict[str, float] | None = None
        self._touched = np.zeros(0, np.uint8)

    def load(self, artifact: Path) -> None:
        try:
            with artifact.open("rb") as f:
                stored = json.loads(f.read(_MAX_BYTES))
            if not isinstance(stored, dict):
                raise ValueError("the artifact is not a JSON object")
            known = _NUMBERS | _FLAGS
            extra = {k: v for k, v in self.options.extra.items() if k in known}
            settings = {**stored, **extra}
            for key, value in settings.items():
                if key not in known or not isinstance(value, int | float):
                    raise ValueError(f"unknown or non-numeric setting {key!r}")
        except (OSError, ValueError) as e:
            raise self._failed("LOAD_FAILED", str(e)) from e
        if settings.get("crash_on_load"):
            _crash()
        if settings.get("fail_on_load"):
            raise self._failed("LOAD_FAILED", "told to fail on load")
        self._set_threads()
        self._touched = np.zeros(int(settings.get("touch_mib", 0) * 2**20), np.uint8)
        self._settings = settings

    def run(self, x: Any, out: Any | None = None) -> Any:
        settings = self._settings
        if settings is None:
            raise self._failed("LOAD_FAILED", "the engine is not loaded")
        self.copied.reset()
        dims = self._fits.output_dims(x.dtype, x.shape)
        rows = int(x.shape[0])
        delay_ms = settings.get("delay_ms", 0) + rows * settings.get("row_ms", 0)
        if delay_ms > 0:
            time.sleep(delay_ms / 1e3)
        np.add(self._touched, 1, out=self._touched)  # without the interpreter lock, as a forward
        if "fail_on_value" in settings or "crash_on_value" in settings:
            firsts = x.reshape(rows, -1)[:, 0].tolist()
            if settings.get("crash_on_value") in firsts:
                _crash()
            if settings.get("fail_on_value") in firsts:
                raise self._failed("BLOCK_FAILED", "told to fail on this value")
        if settings.get("still"):
            if out is None:
                return x.new_empty(dims) if hasattr(x, "new_empty") else np.empty(dims, x.dtype)
            if tuple(out.shape) != dims or out.dtype != x.dtype:
                raise self._wrong_slot(out)
            return out
        if out is None:
            out = x.clone() if hasattr(x, "clone") else x.copy()
        elif tuple(out.shape) != tuple(x.shape) or out.dtype != x.dtype:
            raise self._wrong_slot(out)
        else:
            out[...] = x
            self.copied.outputs += 1
        if "add" in settings:
            out += settings["add"]
        return out

    @property
    def copies_out(self) -> int:
        return 0 if self._settings is not None and self._settings.get("still") else 1

    def twin(self) -> EchoEngine:
        made = copy(self)
        made.copied, made._touched = RunCopies(), np.zeros_like(self._touched)
        return made

    def close(self) -> None:
        self._settings = None
        self._touched = np.zeros(0, np.uint8)

    def _set_threads(self) -> None:
        import torch  # here, so that the module itself stays importable without torch

        torch.set_num_threads(self.options.threads)

    def _wrong_slot(self, out: Any) -> BlockError:
        return self._failed("OUTPUT_MISMATCH", f"the slot is {out.dtype}{list(out.shape)}")

    def _failed(self, code: str, why: str) -> BlockError:
        return BlockError(code, f"block {self.block.name!r}: {why}", where=self.block.name)


def _crash() -> None:
    """Die as a segmentation fault would: no Python clean-up runs."""
    os.kill(os.getpid(), signal.SIGKILL)

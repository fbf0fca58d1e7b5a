"""TorchScriptEngine: formats ``torchscript-scripted`` and ``torchscript-traced``.

The two formats of the thesis. Upstream has deprecated TorchScript; ``pt2`` is the default.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from blockflow.core.inplace import script_may_write
from blockflow.engine.torch_engine import Forward, Into, TorchEngine

_WARM_UP_RUNS = 3
"""The profiling executor records in the first runs and compiles after them."""


class TorchScriptEngine(TorchEngine):
    """A frozen TorchScript module."""

    def _load_module(self, artifact: Path) -> nn.Module:
        return torch.jit.load(os.fspath(artifact), map_location=self.options.device).eval()

    def _functions(self, module: nn.Module) -> tuple[Forward, Into | None]:
        frozen = torch.jit.freeze(module)
        # what this version exports copies by itself and is not found here
        return self._apart(frozen) if script_may_write(frozen.graph) else frozen, None

    def warm_up(self, rows: int = 1) -> None:
        for _ in range(_WARM_UP_RUNS):
            super().warm_up(rows)

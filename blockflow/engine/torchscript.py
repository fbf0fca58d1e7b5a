"""TorchScriptEngine: formats ``torchscript-scripted`` and ``torchscript-traced``.

The two formats of the thesis. Upstream has deprecated TorchScript; ``pt2`` is the default.

A graph with conversions to float32 does not go together with weights of a lower precision (see
:mod:`blockflow.engine.mixed`). TorchScript's graphs are not rewritten for it: torch's autocast does
most of the same, at each call, and a block that it does not help is refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockflow.core.inplace import script_may_write
from blockflow.core.scarcity import is_scarcity
from blockflow.engine.torch_engine import Forward, Into, TorchEngine

_WARM_UP_RUNS = 3
"""The profiling executor records in the first runs and compiles after them."""


class TorchScriptEngine(TorchEngine):
    """A TorchScript module, frozen where it can be."""

    def _load_module(self, artifact: Path) -> nn.Module:
        return torch.jit.load(os.fspath(artifact), map_location=self.options.device).eval()

    def _functions(self, module: nn.Module) -> tuple[Forward, Into | None]:
        frozen = _frozen(module)
        forward: Forward = frozen
        if self._cast is not None and not self._computes(frozen):
            frozen = _frozen(_raised(module))
            forward = _autocast(frozen, torch.device(self.options.device).type, self._cast)
            try:
                forward(self._lower(self._zeros(1)))
            except Exception as e:
                raise self._unfit(e) from e
        # what this version exports copies by itself and is not found here
        return self._apart(forward) if script_may_write(frozen.inlined_graph) else forward, None

    def _computes(self, forward: Forward) -> bool:
        try:
            forward(self._lower(self._zeros(1)))
        except Exception as e:
            if is_scarcity(e):
                raise
            return False
        return True

    def warm_up(self, rows: int = 1) -> None:
        for _ in range(_WARM_UP_RUNS):
            super().warm_up(rows)


def _frozen(module: nn.Module) -> Any:
    """``module`` with its weights as constants; ``module`` itself where one stays an attribute, as
    what an operator may write into does.

    Of two frozen modules that have kept attributes, in one process, the later one's failed run ends
    the process in torch 2.13 (``InterpreterStateImpl::callstack``, asked where it failed).
    """
    frozen = torch.jit.freeze(module)
    return frozen if frozen.graph.findNode("prim::GetAttr") is None else module


def _raised(module: nn.Module) -> nn.Module:
    """``module`` with its vectors in float32: autocast converts what products and convolutions are
    given, not what norms are, and these take vectors of float32 with any input."""
    return module._apply(lambda t: t.float() if t.is_floating_point() and t.dim() < 2 else t)


def _autocast(forward: Forward, device: str, dtype: torch.dtype) -> Forward:
    def run(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=dtype):
            return forward(x)

    return run

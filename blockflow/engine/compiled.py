"""CompiledEngine: variant ``aoti``, a package of machine code that torch's AOTInductor has made.

The package is a shared library: opening it runs it, so it is for packages that one has made oneself
(docs/engines.md). Its result lies in memory of its own and is copied into the slot once.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from blockflow.engine.copies import RunCopies
from blockflow.engine.indices import INDICES, from_text, refuse_outside
from blockflow.engine.torch_engine import TorchEngine

_MODEL = "model"
_UNPACKED = re.compile(r" (/.*/aotinductor_\w+)/")


class CompiledEngine(TorchEngine):
    """An AOTInductor package; threads are torch's pool, whose size it follows at each call."""

    def _load_module(self, artifact: Path) -> nn.Module:
        # What torch._inductor.aoti_load_package comes down to, without the seconds that importing
        # the compiler takes. Arguments: one runner, on the CPU; one thread calls it.
        before = _unpacked()
        loader = torch._C._aoti.AOTIModelPackageLoader(str(artifact), _MODEL, True, 1, -1)
        _remove(_unpacked() - before)
        return Package(loader, self.copied)


class Package(nn.Module):
    """Runs what a loader has loaded, but for indices that lead out of its tables."""

    def __init__(self, loader: torch._C._aoti.AOTIModelPackageLoader, copied: RunCopies) -> None:
        super().__init__()
        self._loader = loader
        self._copied = copied
        self._indices = from_text(loader.get_metadata().get(INDICES))

    def forward(self, x: Tensor) -> Tensor:
        refuse_outside(x, self._indices)  # what the code finds itself ends the process
        if not x.is_contiguous():  # strides are compiled in and not checked
            x = x.contiguous()
            self._copied.inputs += 1
        (y,) = self._loader.boxed_run([x])
        return y


def _unpacked() -> set[str]:
    """Folders of which this process has mapped libraries that look like a loader's."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    return set(_UNPACKED.findall(maps))


def _remove(folders: Collection[str]) -> None:
    """Remove what a loader has unpacked to; the libraries are mapped by now.

    A loader removes its own at its end, which a killed process does not reach.
    """
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)

"""ExportedEngine: format ``pt2``, an exported program (torch.export) run eagerly."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import BinaryIO

import torch
from torch import fx, nn

from blockflow.core.engines import OWN_WEIGHTS, WEIGHTS
from blockflow.core.errors import BlockFlowError
from blockflow.core.inplace import exported_may_keep, exported_may_write
from blockflow.engine.archive import refuse_code
from blockflow.engine.copies import RunCopies
from blockflow.engine.lean import forget, lean, writer
from blockflow.engine.mixed import fit, widened
from blockflow.engine.program import read_program
from blockflow.engine.replay import compiled, graphed
from blockflow.engine.sharing import share
from blockflow.engine.targets import UnknownProgram
from blockflow.engine.torch_engine import Forward, Into, TorchEngine

_LOG = logging.getLogger("blockflow.engine")

COMPILED_FOR = (1, 2, 32)
"""Rows for which torch.compile makes code of its own, though told that rows vary: one row is a
case apart, and what it makes for two is bounded by sizes that a guard has seen (16 rows of a small
convolution, say). Each takes tens of seconds on a device, which no request should wait for."""


class ExportedEngine(TorchEngine):
    """The default engine.

    Artifacts are read as data (:mod:`blockflow.engine.program`). What that reader does not know
    goes to ``torch.export.load``, with everything refused before that it would unpickle, import or
    evaluate and that an export does not hold (:mod:`blockflow.engine.archive`).
    """

    _pure = False
    """A run is a function of its input."""

    def _load_module(self, artifact: Path) -> nn.Module:
        # a file object: the verified artifact's path need not end in .pt2
        with artifact.open("rb") as f:
            if self.options.device == "cpu":
                with suppress(UnknownProgram):
                    return lean(read_program(f))
                f.seek(0)
            return self._load_by_torch(f)

    def _load_by_torch(self, file: BinaryIO) -> nn.Module:
        refuse_code(file)
        file.seek(0)
        # Not before: importing it, and what its first call imports, takes seconds.
        from torch import export

        program = export.load(file)
        if self.options.device != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, self.options.device)
        # the contract is checked on every run already: no guards
        return lean(program.module(check_guards=False))

    def _exact(self, module: nn.Module) -> Collection[int]:
        return widened(module) if isinstance(module, fx.GraphModule) else ()

    def _functions(self, module: nn.Module) -> tuple[Forward, Into | None]:
        use = self.options.extra
        self._share(module)
        if self._cast is not None and isinstance(module, fx.GraphModule):
            self._fit(module, self._cast)
        # what this version exports copies by itself and is not found here
        writes = isinstance(module, fx.GraphModule) and exported_may_write(module)
        self._pure = (
            not writes and isinstance(module, fx.GraphModule) and not exported_may_keep(module)
        )
        if use.get("cuda_graph") or use.get("compile"):
            if not self.options.device.startswith("cuda"):
                raise ValueError("cuda_graph and compile need a CUDA device")
            forward: Forward = compiled(module) if use.get("compile") else module
            forward = self._apart(forward) if writes else forward
            return graphed(forward, self.copied) if use.get("cuda_graph") else forward, None
        if writes:
            forget(module)
            return self._apart(module), None
        into = writer(module)
        for made in (module, into):
            forget(made)
        return module, into

    def twin(self) -> ExportedEngine | None:
        # What writes into its state would find what another run has left there.
        if not (self._pure and self.concurrent):
            return None
        made = copy(self)
        made.copied = RunCopies()
        return made

    def _fit(self, module: fx.GraphModule, dtype: torch.dtype) -> None:
        try:
            changed = fit(module, self._lower(self._zeros(1)), dtype)
        except Exception as e:
            raise self._unfit(e) from e
        if changed:
            _LOG.info("%d operators of %r get their arguments converted", changed, self.block.name)

    def _share(self, module: nn.Module) -> None:
        options, block = self.options, self.block
        store = options.weights
        if store is None or options.device != "cpu" or options.extra.get(WEIGHTS) == OWN_WEIGHTS:
            return
        layout = options.extra.get("memory_format", "contiguous")
        nbytes = share(module, store, f"{block.digest}-{options.precision}-{layout}")
        if nbytes:
            _LOG.info("%d bytes of weights of %r lie in shared memory", nbytes, block.name)

    def warm_up(self, rows: int = 1) -> None:
        super().warm_up(rows)
        compiles = bool(self.options.extra.get("compile"))
        for more in (n for n in COMPILED_FOR if compiles and n != rows):
            try:
                super().warm_up(more)
            except BlockFlowError as exc:  # so many may be too many for the device
                _LOG.warning("compile: %d rows were not tried before serving: %s", more, exc)

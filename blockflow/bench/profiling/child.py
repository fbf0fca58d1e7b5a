"""The process that measures: one candidate, loaded and run as a worker would.

It is a fresh process with the workers' allocator settings and its own cores. It obeys one question
at a time, a JSON object per line over a Unix socket, and knows nothing of tables or confidence.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blockflow.bench.flight import places
from blockflow.bench.profiling.plan import Cell, binding_of, is_warm
from blockflow.core.errors import BlockError, BlockFlowError
from blockflow.core.launchspec import StageSpec
from blockflow.repository.differences import Scale, difference
from blockflow.repository.probe import example_input
from blockflow.repository.repository import BlockRepository
from blockflow.worker.engines import make_engines
from blockflow.worker.failpoints import FailPoints
from blockflow.worker.runner import Runner
from blockflow.worker.stage import Stage

_MOST_WARM_RUNS = 30


class Bench:
    """Loaded blocks in a row, and the runs that are asked for.

    Args:
        stages: the chain, in order; one for a single block.
        int_below: bounds the integers of its inputs; None: nobody has said.
    """

    def __init__(self, stages: Sequence[Stage], int_below: int | None = None) -> None:
        self._stages = stages
        self._int_below = int_below
        self._held: tuple[Cell, torch.Tensor, list[torch.Tensor | None]] | None = None

    def measure(self, cell: Cell, runs: int, limit_s: float, *, first: bool) -> list[list[float]]:
        """Milliseconds of each block in each of ``runs`` forwards, fewer if ``limit_s`` is over.

        Before them one unmeasured forward wakes the core; on the ``first`` visit to a cell as many
        as it takes to be warm.
        """
        x, outs = self._inputs(cell)
        begin = time.monotonic()
        warm: list[float] = []
        while len(warm) < (_MOST_WARM_RUNS if first else 1) and not is_warm(warm):
            warm.append(sum(self._forward(x, outs)[0]))
            if time.monotonic() - begin > limit_s:
                break
        times: list[list[float]] = []
        begin = time.monotonic()
        while len(times) < runs:
            times.append(self._forward(x, outs)[0])
            if time.monotonic() - begin > limit_s:
                break
        return times

    def output(self, cell: Cell) -> torch.Tensor:
        """The result for the seeded input of a cell."""
        x, _ = self._inputs(cell)
        return self._forward(x, [None] * len(self._stages))[1]

    def _forward(
        self, x: torch.Tensor, outs: Sequence[torch.Tensor | None]
    ) -> tuple[list[float], torch.Tensor]:
        times = []
        with torch.inference_mode():
            for stage, out in zip(self._stages, outs, strict=True):
                start = time.monotonic_ns()
                x = stage.engine.run(x, out)
                times.append((time.monotonic_ns() - start) / 1e6)
        return times, x

    def _inputs(self, cell: Cell) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Seeded input and, for engines that write there, the output's place, as in a worker."""
        if self._held is None or self._held[0] != cell:
            spec = self._stages[0].contract.input
            binding = binding_of(spec, cell)
            x = example_input(spec, binding, int_below=self._int_below, seed=cell.rows)
            outs, _ = places([stage.engine for stage in self._stages], tuple(x.shape), "cpu")
            self._held = (cell, x, outs)
        return self._held[1:]


def answer(bench: Bench, question: Mapping[str, Any]) -> dict[str, Any]:
    """Obey one question; errors of the block become ``{"error": ...}``."""
    try:
        if question["op"] == "measure":
            cell = Cell(*question["cell"])
            runs, limit_s = int(question["runs"]), float(question["limit_s"])
            return {"times": bench.measure(cell, runs, limit_s, first=question["first"])}
        return {"errors": _compare(bench, question)}
    except BlockFlowError as e:
        return {"error": e.to_dict()}
    except Exception as e:  # a framework's own: it is this candidate's failure, not ours
        return {"error": BlockError("BLOCK_FAILED", f"{type(e).__name__}: {e}"[:500]).to_dict()}


def _compare(bench: Bench, question: Mapping[str, Any]) -> list[float | None]:
    """The error against the stored outputs of each cell; None: not finite.

    ``reference`` stores them instead.
    """
    cells = [Cell(*values) for values in question["cells"]]
    paths = [Path(question["folder"]) / f"reference-{i}.npy" for i in range(len(cells))]
    ys = [bench.output(cell) for cell in cells]
    if question["op"] == "reference":
        for y, path in zip(ys, paths, strict=True):
            np.save(path, y.double().numpy())
    references = [torch.from_numpy(np.load(path, allow_pickle=False)) for path in paths]
    return errors_of(ys, references)


def errors_of(ys: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> list[float | None]:
    """The difference of each; None where it is not finite (JSON knows no infinity)."""
    scale = Scale.exact(references)
    errors = [difference(y, r, scale) for y, r in zip(ys, references, strict=True)]
    return [error if isfinite(error) else None for error in errors]


def load(spec: Mapping[str, Any]) -> Bench:
    """The blocks of ``spec``, loaded by a worker's own code.

    Raises:
        BlockFlowError: why a block cannot be loaded.
    """
    specs = [StageSpec.from_dict(s) for s in spec["stages"]]
    stages = make_engines(specs, "cpu", int(spec["threads"]))
    points = FailPoints.from_environment(Path(spec["run_dir"]), specs)
    repository = BlockRepository(spec["repository"])
    loaded = Runner(stages, points).load(repository)
    if loaded.error is not None:
        raise loaded.error
    first = specs[0].block
    below = repository.manifest(first.name, digest=first.digest).int_below
    return Bench([stages[s.stage] for s in specs], below)


def main(spec: Mapping[str, Any]) -> int:
    """Entry: connect, load, say so, obey until the other side closes."""
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(spec["socket"])
        with s.makefile("rw", encoding="utf-8") as stream:

            def say(message: Mapping[str, Any]) -> None:
                stream.write(json.dumps(message) + "\n")
                stream.flush()

            try:
                bench = load(spec)
            except BlockFlowError as e:
                say({"error": e.to_dict()})
                return 0
            say({"ready": True})
            for line in stream:
                say(answer(bench, json.loads(line)))
    return 0

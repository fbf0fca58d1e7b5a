"""Measurer: asks a process of its own for the times of one candidate."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from blockflow.bench.profiling.candidates import Candidate
from blockflow.bench.profiling.plan import Cell
from blockflow.core.errors import BlockError, BlockFlowError, from_dict
from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo
from blockflow.launch.base import Child
from blockflow.launch.fresh import SubprocessLauncher
from blockflow.launch.process import describe_exit
from blockflow.tensormq.janitor import RunDir, sweep_stale

ENTRY = "blockflow.bench.profiling.child:main"
LOAD_S = 300.0
_GRACE_S = 120.0
"""A forward that is already running is waited for; then its process counts as stuck."""
_MAX_LINE = 16 * 1024 * 1024


class Workshop:
    """Opens measurers; a context manager that leaves no process and no file behind.

    Args:
        infos: the block, or the chain's blocks.
        repository: folder of the block repository.
    """

    def __init__(self, infos: Sequence[BlockInfo], repository: Path) -> None:
        self._infos = infos
        self._repository = repository.absolute()
        sweep_stale()  # what a killed one has left
        self._launcher = SubprocessLauncher()
        self._run_dir = RunDir.create()

    def open(self, candidate: Candidate, threads: int) -> Measurer:
        """Start a process with ``threads`` cores of its own and load the blocks in it.

        Raises:
            BlockFlowError: why they cannot be loaded.
        """
        stages = [
            StageSpec(i + 1, info, s.engine, s.precision, options=dict(s.options))
            for i, (info, s) in enumerate(zip(self._infos, candidate.selections, strict=True))
        ]
        return Measurer(self._launcher, self._run_dir.path, stages, self._repository, threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._launcher.close()
        self._run_dir.remove()


class Measurer:
    """One candidate, loaded on some number of threads in a process of its own."""

    def __init__(
        self,
        launcher: SubprocessLauncher,
        run_dir: Path,
        stages: Sequence[StageSpec],
        repository: Path,
        threads: int,
    ) -> None:
        self._name = "+".join(s.block.name for s in stages)
        self._folder = run_dir
        path = run_dir / f"{secrets.token_hex(4)}.sock"
        self._log = path.with_suffix(".log")
        # the last cores: what the kernel does for devices gathers on the first
        cores = sorted(os.sched_getaffinity(0))[-threads:]
        spec = {
            "socket": str(path),
            "repository": str(repository),
            "run_dir": str(run_dir),
            "stages": [s.to_dict() for s in stages],
            "threads": threads,
            "cores": cores,
            "log_path": str(self._log),
        }
        self._socket: socket.socket | None = None
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            self._child: Child = launcher.launch(ENTRY, spec, f"profile-{threads}")
            try:
                self._socket = self._accept(listener)
                self._lines = self._socket.makefile("rb")
                self._hear(LOAD_S)
            except BaseException:
                self.close()
                raise
            finally:
                with suppress(FileNotFoundError):
                    path.unlink()

    def measure(self, cell: Cell, runs: int, limit_s: float, *, first: bool) -> list[list[float]]:
        """Milliseconds of each block (inner) in each forward (outer): at least one forward, at most
        ``runs``, none begun after ``limit_s``. On the ``first`` visit it warms up before.

        Raises:
            BlockFlowError: the block failed, or its process ended or is stuck.
        """
        question = {
            "op": "measure",
            "cell": list(cell),
            "runs": runs,
            "limit_s": limit_s,
            "first": first,
        }
        times: list[list[float]] = self._ask(question, 2 * limit_s + _GRACE_S)["times"]
        return times

    def errors(self, cells: Sequence[Cell], *, store: bool = False) -> list[float]:
        """Largest difference to the stored outputs per cell, as a share of their largest value;
        infinite where a value is not finite. With ``store`` its own outputs are stored instead.

        Raises: as :meth:`measure`.
        """
        question = {
            "op": "reference" if store else "compare",
            "cells": [list(c) for c in cells],
            "folder": str(self._folder),
        }
        found = self._ask(question, _GRACE_S * len(cells))["errors"]
        return [float("inf") if e is None else float(e) for e in found]

    def close(self) -> None:
        """End it. Idempotent."""
        if self._socket is not None:
            self._lines.close()
            self._socket.close()
            self._socket = None
        # it has nothing to tidy up, and it may be in the middle of a long forward
        self._child.kill()
        self._child.wait(5.0)
        self._child.close()

    def _accept(self, listener: socket.socket) -> socket.socket:
        """The child's connection; a child that dies before it is an error at once."""
        end = time.monotonic() + LOAD_S
        listener.settimeout(0.2)
        while time.monotonic() < end:
            try:
                return listener.accept()[0]
            except TimeoutError:
                if self._child.poll() is not None:
                    raise self._ended() from None
        raise self._stuck(LOAD_S)

    def _ask(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        if self._socket is None:
            raise self._ended()
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall((json.dumps(question) + "\n").encode())
        except OSError:
            raise self._ended() from None
        return self._hear(timeout_s)

    def _hear(self, timeout_s: float) -> dict[str, Any]:
        if self._socket is None:
            raise self._ended()
        self._socket.settimeout(timeout_s)
        try:
            line = self._lines.readline(_MAX_LINE)
        except TimeoutError:
            raise self._stuck(timeout_s) from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise self._ended()
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise from_dict(message["error"])
        return message

    def _ended(self) -> BlockFlowError:
        status = self._child.wait(2.0)
        how = "its process does not answer" if status is None else describe_exit(status)
        return BlockError(
            "BLOCK_FAILED",
            f"the measuring process ended: {how}{self._last_words()}",
            where=self._name,
            hint="killed by SIGKILL often means that memory ran out",
        )

    def _stuck(self, seconds: float) -> BlockFlowError:
        return BlockError(
            "BLOCK_FAILED", f"no answer from the block within {seconds:.0f} s", where=self._name
        )

    def _last_words(self) -> str:
        with suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return f": {lines[-1][:300]}" if lines else ""
        return ""

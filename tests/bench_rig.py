"""A benchmark run from end to end."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blockflow.bench import calibration, legs
from blockflow.bench.batching import run as batching
from blockflow.bench.calibration import calibrate
from blockflow.bench.profiling import measurer
from blockflow.bench.reliability import clients
from blockflow.bench.results import Figure, ResultFile
from blockflow.control import system
from blockflow.launch.base import Child, Launcher
from blockflow.launch.preload import LOADER_MODULES, modules_of

ROOT = Path(__file__).resolve().parents[1]


class Forks:
    """Processes of the session's template, in place of a launcher of fresh ones."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def launch(self, entry: str, spec: Mapping[str, Any], name: str) -> Child:
        modules = [*modules_of(LOADER_MODULES)]
        return self._launcher.launch(entry, {**spec, "modules": modules}, name)

    def close(self) -> None: ...


class Here:
    """Runs a benchmark as ``python -m`` does, but in this process, and its systems without
    templates of their own: torch is imported once for all."""

    def __init__(
        self, launcher: Launcher, patch: pytest.MonkeyPatch, streams: pytest.CaptureFixture[str]
    ) -> None:
        self._patch = patch
        self._streams = streams
        shared = partial(system.System, launcher=launcher)
        for module in (system, legs, clients, batching):
            patch.setattr(module, "System", shared)
        # How steady the machine is is no matter of the tests: the least of the fixed work.
        for module in (calibration, batching):
            patch.setattr(module, "calibrate", lambda: calibrate(0.0))
        patch.setattr(measurer, "SubprocessLauncher", lambda: Forks(launcher))

    def run(self, name: str, *arguments: str, target: Path) -> list[Figure]:
        module = f"blockflow.bench.{name}"
        self._patch.delitem(sys.modules, module, raising=False)  # it is begun anew
        self._patch.setattr(sys, "argv", [name, *arguments, "--json", str(target)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        said = self._streams.readouterr().out
        assert ended.value.code == 0, said
        assert "fixed work" in said
        return [Figure.from_dict(line) for line in ResultFile(target, name).read()]

"""The benchmarks run from end to end in their quick form, and leave whole result files."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from blockflow.bench import legs
from blockflow.bench.hop_figures import HOP
from blockflow.bench.kpi_reader import COPIES, COPIES_IN
from blockflow.bench.pipeline_aims import AIM
from blockflow.bench.pipeline_figures import LATENCY, NOT_RUN, THROUGHPUT
from blockflow.bench.reliability import clients
from blockflow.bench.reliability import figures as reliability
from blockflow.bench.results import Figure, ResultFile
from blockflow.bench.statistics import Verdict
from blockflow.control import system
from blockflow.engine.frameworks import openvino_lacks
from blockflow.launch.base import Launcher

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]


class Here:
    """Runs a benchmark as ``python -m`` does, but in this process, and its systems without
    templates of their own: torch is imported once for all."""

    def __init__(
        self, launcher: Launcher, patch: pytest.MonkeyPatch, streams: pytest.CaptureFixture[str]
    ) -> None:
        self._patch = patch
        self._streams = streams
        shared = partial(system.System, launcher=launcher)
        for module in (system, legs, clients):
            patch.setattr(module, "System", shared)

    def run(self, name: str, *arguments: str, target: Path) -> list[Figure]:
        module = f"blockflow.bench.{name}"
        self._patch.delitem(sys.modules, module, raising=False)  # it is begun anew
        self._patch.setattr(sys, "argv", [name, "--quick", *arguments, "--json", str(target)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        said = self._streams.readouterr().out
        assert ended.value.code == 0, said
        assert "fixed work" in said
        return figures_in(target, name)


@pytest.fixture
def here(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Here:
    return Here(launcher, monkeypatch, capsys)


def figures_in(target: Path, benchmark: str) -> list[Figure]:
    return [Figure.from_dict(line) for line in ResultFile(target, benchmark).read()]


def run_apart(module: str, *arguments: str, target: Path) -> list[Figure]:
    command = [sys.executable, "-m", f"blockflow.bench.{module}", "--quick", *arguments]
    done = subprocess.run(
        [*command, "--json", str(target)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "fixed work" in done.stdout
    return figures_in(target, module)


def test_hops(tmp_path: Path, here: Here) -> None:
    found = here.run("hops", target=tmp_path / "hops.jsonl")
    hops = {(f.mode, f.labels["bytes"]): f for f in found if f.name == HOP}
    assert {size for _, size in hops} == {0, 1024, 2**20}
    assert all(f.value > 0 for f in hops.values())
    for name in (COPIES_IN, COPIES):
        copies = {(f.mode, f.labels["bytes"]): f.value for f in found if f.name == name}
        assert copies["handle, ipc", 2**20] == 0
    sent = {(f.mode, f.labels["bytes"]): f.value for f in found if f.name == "bytes per hop"}
    assert sent["handle, ipc", 2**20] == 2**20
    assert sent["co-located", 2**20] == 0


def test_pipeline(tmp_path: Path) -> None:
    # Not every CPU computes in bf16; the benchmark then says why there is nothing to see.
    engine = "openvino" if openvino_lacks("bf16") else "openvino-bf16"
    found = run_apart("pipeline", "--engines", engine, target=tmp_path / "bench.jsonl")
    ways = {(f.mode, f.batch) for f in found if f.name == LATENCY}
    assert {way for way, _ in ways} >= {"in-process", "apart", "tensormq", "zeromq", "one-worker"}
    assert {batch for _, batch in ways} == {1, 8}
    assert {f.mode for f in found if f.name == THROUGHPUT} >= {"bound", "tensormq"}
    aims = {(f.mode, f.batch): f for f in found if f.name == AIM}
    assert {"ready beside load, ms", "private memory, MB"} < {mode for mode, _ in aims}
    assert aims["zeromq/tensormq: hop", 8].value > 0
    assert all(f.labels["verdict"] in set(Verdict) for f in aims.values())
    for missing in (f for f in found if f.name == NOT_RUN):
        assert missing.labels["reason"]


def test_reliability(tmp_path: Path, here: Here) -> None:
    """Counts, not times: what a busy machine cannot change."""
    found = here.run("reliability.run", "--only", "deaths,clients", target=tmp_path / "r.jsonl")
    counts = {f.mode: (f.value, f.n) for f in found if f.name == reliability.COUNT}
    assert counts[reliability.AGAIN] == (1, 1)
    assert counts[reliability.PROBED] == (2, 2)
    assert counts[reliability.POISONED] == (1, 1)
    assert counts[reliability.MATES] == (7, 7)
    assert counts[reliability.DIED_OF_IT] == (2, 1)
    assert counts[reliability.NO_REPLY] == (0, 10)
    assert counts[f"{reliability.CUT_OFF} {reliability.BY_BYTES}"] == (1, 1)
    timed = {(f.name, f.mode) for f in found if f.unit == "ms"}
    assert (reliability.NOTICED, reliability.KILLED) in timed
    assert (reliability.BEYOND_LOAD, reliability.STUCK) in timed
    assert (reliability.CUT_OFF, reliability.BY_TIME) in timed
    assert any(f.name == reliability.OTHERS for f in found)


def test_what_computes_in_other_processes_imports_no_torch() -> None:
    """Its import takes seconds; blocks are made apart as well."""
    modules = "blockflow.bench.pipeline, blockflow.bench.batching.run"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)

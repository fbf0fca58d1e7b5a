"""The benchmarks run from end to end in their quick form, and leave whole result files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blockflow.bench.hop_figures import HOP
from blockflow.bench.kpi_reader import COPIES, COPIES_IN
from blockflow.bench.pipeline_aims import AIM
from blockflow.bench.pipeline_figures import LATENCY, NOT_RUN, THROUGHPUT
from blockflow.bench.reliability import figures as reliability
from blockflow.bench.results import Figure, ResultFile
from blockflow.bench.statistics import Verdict
from blockflow.engine.frameworks import openvino_lacks

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]


def run(module: str, *arguments: str, target: Path) -> list[Figure]:
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
    return [Figure.from_dict(line) for line in ResultFile(target, module).read()]


def test_hops(tmp_path: Path) -> None:
    found = run("hops", target=tmp_path / "hops.jsonl")
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
    found = run("pipeline", "--engines", engine, target=tmp_path / "bench.jsonl")
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


def test_reliability(tmp_path: Path) -> None:
    """Counts, not times: what a busy machine cannot change."""
    found = run("reliability.run", "--only", "deaths,clients", target=tmp_path / "r.jsonl")
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

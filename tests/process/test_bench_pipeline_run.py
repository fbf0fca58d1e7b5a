"""``make bench`` runs from end to end in its quick form, and leaves a whole result file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from blockflow.bench.pipeline_aims import AIM
from blockflow.bench.pipeline_figures import LATENCY, NOT_RUN, THROUGHPUT
from blockflow.bench.statistics import Verdict
from blockflow.engine.frameworks import openvino_lacks
from tests.bench_rig import ROOT, Here

pytestmark = pytest.mark.timeout(300)


def test_pipeline(tmp_path: Path, forking: Here) -> None:
    # Not every CPU computes in bf16; the benchmark then says why there is nothing to see.
    engine = "openvino" if openvino_lacks("bf16") else "openvino-bf16"
    found = forking.run("pipeline", "--quick", "--engines", engine, target=tmp_path / "b.jsonl")
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


def test_what_computes_in_other_processes_imports_no_torch() -> None:
    """Its import takes seconds; blocks are made apart as well."""
    modules = "blockflow.bench.pipeline, blockflow.bench.batching.run"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)

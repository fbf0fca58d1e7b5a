"""The batching benchmark runs from end to end with small models, and leaves a whole result file."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockflow.bench.batching import figures as f
from blockflow.bench.batching import lbci
from blockflow.bench.batching.plan import BATCHSIZE, LBCI, LBCI_ARM, LBCI_LOADS, SERIAL, SIZES
from tests.bench_rig import Here


def test_lbci_and_its_rivals_meet_the_same_queries(
    tmp_path: Path, forking: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are exported and profiled, a system serves them under every policy in turn, here at
    two of the loads, of which the paper tells more of one, and with two of the sizes."""
    loads = {load: LBCI_LOADS[load] for load in ("1", f.LBCI_PAPER_OVER[0])}
    sizes = {size: SIZES[size] for size in ("small", "big")}
    monkeypatch.setattr(lbci, "LBCI_LOADS", loads)
    monkeypatch.setattr(lbci, "SIZES", sizes)
    cache = str(tmp_path / "blocks")
    arguments = ("--tiny", "--only", LBCI, "--cache", cache)
    found = forking.run("batching", *arguments, target=tmp_path / "batching.jsonl")
    by = {(g.name, g.mode, g.labels.get("load")): g for g in found}
    for load in loads:
        over = [by[f.OVER, arm, load] for arm in (SERIAL, BATCHSIZE, LBCI_ARM)]
        assert len({g.n for g in over}) == 1  # the same queries
        assert over[0].n % 10 == 0
        for arm in (SERIAL, BATCHSIZE, LBCI_ARM):
            assert "failed" not in by[f.OVER, arm, load].labels
            assert by[f.TIME, arm, load].n == over[0].n  # all answered
            assert by[f.SIMULATED, arm, load].value > 0
        # Ten must come before a batch starts: nine of them wait, whatever the machine does.
        assert by[f.TIME, BATCHSIZE, load].value > by[f.SIMULATED, SERIAL, load].value
    assert {g.labels["load"] for g in found if g.name == f.TEST_RATIO} == set(sizes)

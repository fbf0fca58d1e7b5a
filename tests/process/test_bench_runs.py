"""Benchmarks run from end to end in their quick form, and leave whole result files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

from blockflow.bench.hop_figures import HOP
from blockflow.bench.kpi_reader import COPIES, COPIES_IN
from blockflow.bench.reliability import figures as reliability
from blockflow.launch.base import Launcher
from tests.bench_rig import Here
from tests.warm_rig import Warm

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def here(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Here:
    return Here(launcher, monkeypatch, capsys)


def test_hops(tmp_path: Path, here: Here, warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    executed = util.spawnv_passfds

    def spawn(path: bytes, words: list[Any], fds: Iterable[int]) -> int:
        """The other end of torch's queue: it would import torch for seconds."""
        if "--multiprocessing-fork" not in words:
            return executed(path, words, fds)
        process = warm.popen([os.fsdecode(word) for word in words], pass_fds=fds)
        process.returncode = 0  # who asked for it waits for it
        return process.pid

    monkeypatch.setattr(util, "spawnv_passfds", spawn)
    found = here.run("hops", "--quick", "--rounds", "1", target=tmp_path / "hops.jsonl")
    hops = {(f.mode, f.labels["bytes"]): f for f in found if f.name == HOP}
    assert {size for _, size in hops} == {0, 1024, 2**20}
    assert all(f.value > 0 for f in hops.values())
    for name in (COPIES_IN, COPIES):
        copies = {(f.mode, f.labels["bytes"]): f.value for f in found if f.name == name}
        assert copies["handle, ipc", 2**20] == 0
    sent = {(f.mode, f.labels["bytes"]): f.value for f in found if f.name == "bytes per hop"}
    assert sent["handle, ipc", 2**20] == 2**20
    assert sent["co-located", 2**20] == 0


def test_reliability(tmp_path: Path, here: Here, warm: Warm) -> None:
    """Counts, not times: what a busy machine cannot change."""
    only = ("--quick", "--only", "deaths,clients")
    with warm.spawning():  # whose workers die of failpoints have a template of their own
        found = here.run("reliability.run", *only, target=tmp_path / "r.jsonl")
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

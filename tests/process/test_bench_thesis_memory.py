"""The memory of worker processes is measured, one kind of process at a time."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from blockflow.bench.contenders import Contender, Model
from blockflow.bench.thesis import memory_measure
from blockflow.bench.thesis.memory_measure import KINDS, measure, occupancy
from blockflow.bench.thesis.memory_model import PROCESSES
from blockflow.control.system import System
from blockflow.core.model import TensorSpec
from blockflow.launch.base import Launcher
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

MODEL = Model("resnet18")  # of four blocks; echo blocks stand for them: nothing to export


def test_every_kind_of_process_is_measured_in_every_round(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_measure, "System", partial(System, launcher=launcher))
    seen = []
    asked = memory_measure.topology

    def spied(chain: object, names: list[str]) -> object:
        seen.append(len(names))
        return asked(chain, names)  # type: ignore[arg-type]

    monkeypatch.setattr(memory_measure, "topology", spied)
    done: list[None] = []
    chain = MODEL.chain(Contender("echo", "auto"), tmp_path / "blocks")
    for name in chain.blocks:
        save_echo(BlockRepository(chain.repository), name, TensorSpec("float32", ("rows", 8)))
    found = measure(chain, 1, tmp_path / "state", lambda: done.append(None))
    assert list(found) == list(KINDS)
    assert len(done) == len(KINDS)
    assert sorted(seen) == [1, 1, 1, 1, 1, 2, 2, 4]
    # A process of its own, without the pages of libraries that it shares with the template.
    assert all(0 < mib < 500 for samples in found.values() for mib in samples)
    mean = occupancy(MODEL, found)
    assert set(mean.processes) == set(PROCESSES)
    assert mean.context == found[()][0]

"""``make bench-replicas``, small: both ways are served, measured and compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from blockflow.bench import replicas
from blockflow.bench.contenders import Contender, Model
from blockflow.bench.replicas import ONCE, OWN, QUICK, figures, grid, measure
from blockflow.bench.results import ResultFile
from blockflow.core.model import TensorSpec
from blockflow.launch.base import Launcher
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel

WIDTH = 600
"""Of matrices that are just worth sharing."""


def prepared(model: Model, contender: Contender, root: Path) -> None:
    """Something small by the names of the model's blocks."""
    blocks = model.chain(contender, root).blocks
    parts = [nn.Linear(WIDTH, WIDTH) for _ in blocks]
    spec = TensorSpec("float32", ("rows", WIDTH))
    loaded = LoadedModel(nn.Sequential(*parts).eval(), "test", spec)
    cuts = [str(n) for n in range(1, len(blocks))]
    export_model(loaded, BlockRepository(root), names=blocks, cuts=cuts)


def test_weights_held_once_take_less_memory(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "prepare_apart", prepared)
    steps: list[None] = []
    plan = replace(QUICK, seconds=0.1)
    found = measure(plan, tmp_path, lambda: steps.append(None), launcher)
    assert len(steps) == len(plan.rows) * (plan.rounds + 1) + plan.loads
    (one,) = found.values()
    assert one.memory[OWN] - one.memory[ONCE] > one.state / 2  # the processes differ, too
    assert {rows: {w: len(r) for w, r in ways.items()} for rows, ways in one.rates.items()} == {
        1: {ONCE: plan.rounds, OWN: plan.rounds}
    }
    assert {w: len(times) for w, times in one.loads.items()} == {ONCE: 2, OWN: 2}
    made = figures(found, plan.seats)
    file = ResultFile(tmp_path / "replicas.jsonl", "replicas", "make bench-replicas")
    file.write(made)
    (run,) = file.runs()
    table = grid(run.figures)
    assert [(row[0], row[3], row[6]) for row in table.rows] == [
        ("resnet18", ONCE, "1"),
        ("resnet18", OWN, "1"),
    ]
    assert len(table.heads) == len(table.rows[0])
    assert [row[-1] == "1" for row in table.rows] == [False, True]


def test_a_shorter_run_does_not_take_the_place_of_a_whole_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[str] = []
    monkeypatch.setattr(replicas, "measure", lambda *_: {})
    monkeypatch.setattr(
        replicas.ResultFile, "write", lambda self, _: written.append(self.path.name)
    )
    for arguments in ([], ["--quick"], ["--rounds", "3"]):
        assert replicas.main(arguments) == 0
    assert written == ["replicas.jsonl", "replicas-quick.jsonl", "replicas-part.jsonl"]

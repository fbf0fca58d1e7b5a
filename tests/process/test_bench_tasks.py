"""``make bench-tasks``, small: every number of tasks is served, looked at and left again."""

from __future__ import annotations

from pathlib import Path

from blockflow.bench.results import ResultFile
from blockflow.bench.tasks import QUICK, TIMES, figures, grid, measure
from blockflow.launch.base import Launcher
from tests.system_rig import idle_system


def test_every_number_of_tasks_has_every_figure(tmp_path: Path, launcher: Launcher) -> None:
    system = idle_system(tmp_path / "blocks", tmp_path / "state", launcher)
    steps: list[None] = []
    found = measure(QUICK, tmp_path, lambda: steps.append(None), system)
    assert len(steps) == QUICK.rounds * len(QUICK.sizes)
    assert list(found) == list(QUICK.sizes)
    for size, one in found.items():
        samples = {name: [len(burst) for burst in bursts] for name, bursts in one.times.items()}
        assert samples == {
            name: [n] * QUICK.rounds
            for name, n in zip(TIMES, (1, size, QUICK.requests, QUICK.refusals, 1), strict=True)
        }
        assert all(ms > 0 for bursts in one.times.values() for burst in bursts for ms in burst)
        assert all(used >= 0 for rests in one.rests.values() for used in rests)
    made = figures(found)
    file = ResultFile(tmp_path / "tasks.jsonl", "tasks", "make bench-tasks")
    file.write(made)
    (run,) = file.runs()
    table = grid(run.figures)
    assert [row[0] for row in table.rows] == ["2", "40"] and len(table.heads) == len(table.rows[0])
    assert [row[5] == "1" for row in table.rows] == [True, False]

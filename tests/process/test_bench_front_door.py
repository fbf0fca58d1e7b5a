"""``make bench-front-door``, small: every size with every number outstanding has every figure."""

from __future__ import annotations

from pathlib import Path

from blockflow.bench.front_door import PROCESSES, QUICK, figures, grid, measure
from blockflow.bench.results import ResultFile
from blockflow.launch.base import Launcher
from tests.system_rig import idle_system


def test_every_case_has_every_figure(tmp_path: Path, launcher: Launcher) -> None:
    system = idle_system(tmp_path / "blocks", tmp_path / "state", launcher)
    steps: list[None] = []
    found = measure(QUICK, tmp_path, lambda: steps.append(None), system)
    assert len(steps) == QUICK.rounds * len(QUICK.cases)
    assert list(found) == QUICK.cases
    for one in found.values():
        assert len(one.rates) == QUICK.rounds and min(one.rates) > 0
        assert all(len(used) == QUICK.rounds and min(used) >= 0 for used in one.cpu_us.values())
    for name in PROCESSES:  # the kernel counts in hundredths of a second
        assert sum(sum(one.cpu_us[name]) for one in found.values()) > 0
    file = ResultFile(tmp_path / "front_door.jsonl", "front_door", "make bench-front-door")
    file.write(figures(found))
    (run,) = file.runs()
    table = grid(run.figures)
    assert [row[:2] for row in table.rows] == [
        ("1 KiB", "1"),
        ("1 KiB", "4"),
        ("588 KiB", "1"),
        ("588 KiB", "4"),
    ]
    assert len(table.heads) == len(table.rows[0]) == 3 + len(PROCESSES)

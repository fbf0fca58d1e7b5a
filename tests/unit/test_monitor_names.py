"""Many names on a screen, and long ones: which is which can be read."""

from __future__ import annotations

from typing import Any

from blockflow.monitor.grids import Grid, block_grid, process_grid, task_grid
from blockflow.monitor.view import update_lines


def column(grid: Grid, name: str) -> list[str]:
    index = [c.name for c in grid.columns].index(name)
    return [row[index] for row in grid.rows]


def test_names_that_differ_in_their_last_letters_are_told_apart() -> None:
    """As twenty replicas of a block with a long name, and tasks that part behind a long trunk."""
    family = "resnet50-imagenet-quantised-stage"
    processes = [{"name": f"{family}#{n}", "state": "ready", "role": "active"} for n in range(20)]
    path = [f"{family}{n}" for n in range(4)]
    blocks = [{"name": family, "tasks": [f"task{n}" for n in range(30)]}]
    tasks = [{"name": f"t{n}", "path": [*path, f"head{n}"]} for n in range(3)]
    status: dict[str, Any] = {"workers": processes, "blocks": blocks, "tasks": tasks}
    shown = column(process_grid(status).fitted(60), "process")
    assert len(set(shown)) == len(shown)
    assert [s.rpartition("#")[2] for s in shown if "…" in s][-20:] == [str(n) for n in range(20)]
    for n, (name, way) in enumerate(r[:2] for r in task_grid(status).fitted(80).rows):
        assert name == f"t{n}" and way.startswith("resnet50-") and way.endswith(f"> head{n}")
    assert column(block_grid(status).fitted(60), "tasks")[0].startswith("task0, task1")


def test_of_many_names_an_update_tells_the_first() -> None:
    plan = {
        "start": [{"replica": f"a#{n}"} for n in range(9)],
        "keep": [f"b{n}#0" for n in range(8)],
        "tasks": {"add": [f"t{n}" for n in range(3000)]},
    }
    assert update_lines({"epoch": 2, "update": {"id": 1, "state": "done", "plan": plan}}) == [
        "update 1: done",
        "  start  a#0, a#1, a#2, a#3, a#4, a#5, a#6, a#7, and 1 more",
        "  keep   b0#0, b1#0, b2#0, b3#0, b4#0, b5#0, b6#0, b7#0",
        "  tasks  add t0, t1, t2, t3, t4, t5, t6, t7, and 2992 more",
        "epoch 2",
    ]

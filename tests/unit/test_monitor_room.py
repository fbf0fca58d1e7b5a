"""Lists that are longer than a screen: what is shown of them, and in which order."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from blockflow.monitor.grids import Column, Grid, process_grid
from blockflow.monitor.room import busiest, shares
from blockflow.monitor.screen import render, show, status_screen, top_screen

RECORDED = Path(__file__).parent.parent / "data" / "status.json"
MANY = 200


@pytest.fixture
def crowded() -> dict[str, Any]:
    """Two hundred tasks, as busy as their number says; the eighth one cannot run."""
    status: dict[str, Any] = json.loads(RECORDED.read_text())
    task = status["tasks"][0]
    status["tasks"] = [copy.deepcopy(task) | {"name": f"task{i}"} for i in range(MANY)]
    for i, one in enumerate(status["tasks"]):
        one["kpi"]["per_s"] = float(i)
    status["tasks"][7]["missing"] = ["trunk1"]
    return status


def printed(renderable: Any, width: int = 100) -> list[str]:
    out = io.StringIO()
    show(renderable, Console(file=out, width=width, highlight=False))
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("wanted", "room", "given"),
    [
        ([3, 4, 5], 12, [3, 4, 5]),
        ([3, 4, 5], 100, [3, 4, 5]),
        ([100, 4, 100], 24, [10, 4, 10]),
        ([5, 8, 200], 30, [5, 8, 17]),
        ([200, 200, 200], 10, [3, 3, 4]),
        ([0, 0, 9], 4, [0, 0, 4]),
        ([9, 9, 9], 0, [1, 1, 1]),
        ([9, 9, 9], -5, [1, 1, 1]),
        ([], 5, []),
    ],
)
def test_short_lists_are_shown_whole_and_long_ones_share_the_rest(
    wanted: list[int], room: int, given: list[int]
) -> None:
    assert shares(wanted, room) == given


@pytest.mark.parametrize("height", [30, 40, 60, 100])
def test_a_screen_is_filled_and_not_exceeded(crowded: dict[str, Any], height: int) -> None:
    assert len(printed(top_screen(crowded, None, 100, "cannot be reached", height))) == height
    assert len(printed(top_screen(crowded, None, 100))) > MANY


def test_what_is_in_trouble_comes_first_then_the_busiest(crowded: dict[str, Any]) -> None:
    lines = printed(top_screen(crowded, None, 100, height=40))
    title = next(i for i, line in enumerate(lines) if line.startswith("Tasks"))
    shown = [line.split()[0] for line in lines[title + 2 :]]
    assert lines[title] == f"Tasks (the busiest {len(shown)} of {MANY})"
    assert shown == ["task7", *(f"task{MANY - 1 - i}" for i in range(len(shown) - 1))]
    # What fits is as it is without a height: nothing moves about.
    assert lines[:title] == printed(top_screen(crowded, None, 100))[:title]


def test_the_rows_of_canaries_have_their_room_too(crowded: dict[str, Any]) -> None:
    for task in crowded["tasks"]:
        task["canary"] = {"share": 0.1, "path": task["path"]}
    lines = printed(top_screen(crowded, None, 100, height=40))
    assert len(lines) == 40
    crowded["tasks"] = crowded["tasks"][:2]
    assert len(printed(top_screen(crowded, None, 100, height=40))) <= 40
    assert [len(g.rows) for g in busiest(crowded, None, 60)][2] == 6


def test_processes_and_blocks_are_ordered_too(crowded: dict[str, Any]) -> None:
    for i, worker in enumerate(crowded["workers"]):
        worker["process"]["cpu_percent"] = float(i)
    crowded["workers"][0]["state"] = "failed"
    crowded["blocks"][2]["kpi"]["rho"] = 0.9
    crowded["dispatcher"]["process"]["cpu_percent"] = 99.0
    blocks, processes, _ = busiest(crowded, None, 15)
    assert blocks.rows[0][0] == crowded["blocks"][2]["name"]
    assert [row[0] for row in processes.rows[:2]] == [crowded["workers"][0]["name"], "dispatcher"]
    assert len(processes.rows) < len(process_grid(crowded).rows)
    blocks = busiest(crowded, None, None)[0]  # those that fit stay where they are
    assert [row[0] for row in blocks.rows] == [b["name"] for b in crowded["blocks"]]
    assert "busiest" not in blocks.title


def test_figures_that_are_missing_are_not_busy(crowded: dict[str, Any]) -> None:
    for task in crowded["tasks"]:
        task["kpi"] = None
    crowded["tasks"][9]["kpi"] = {"per_s": 0.5}
    tasks = busiest(crowded, None, 30)[2]
    assert [row[0] for row in tasks.rows[:3]] == ["task7", "task9", "task0"]
    assert [len(grid.rows) for grid in busiest({}, None, 1)] == [0, 0, 0]


def test_a_grid_is_shown_in_columns() -> None:
    columns = (Column("name", right=False), Column("n"), Column("state", right=False))
    rows = (("a", "1", "ready"), ("日本", "1000", "odd"))
    text = render(Grid("Things", columns, rows), 40)
    assert printed(text) == [
        "Things",
        "name     n  state",
        "a        1  ready",
        "日本  1000  odd",
    ]
    styled = {text.plain[s.start : s.end]: s.style for s in text.spans}
    assert styled["ready"] == "green"
    assert styled["odd"] == "yellow"
    assert printed(render(Grid("Things", columns, ()), 40)) == [
        "Things",
        "name  n  state",
        "none",
    ]


def test_thousands_of_tasks_are_all_told_by_status(crowded: dict[str, Any]) -> None:
    crowded["tasks"] = crowded["tasks"] * 20
    lines = printed(status_screen(crowded, 100))
    assert sum(line.startswith("task") and " > " in line for line in lines) == 20 * MANY

"""What of long lists few lines show: the busiest, and first of all what is in trouble."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blockflow.monitor.grids import Grid, load_grid, process_grid, task_grid
from blockflow.monitor.text import is_number
from blockflow.monitor.view import Doc, listing, part, processes

_FRAME = 3
"""Lines of a grid besides its rows: an empty one, title, header."""

_WELL = frozenset({"ready", "running", "warm"})


def busiest(status: Doc, before: Doc | None, room: int | None) -> list[Grid]:
    """Blocks, processes and tasks of ``blockflow top`` in ``room`` lines (None: as many as it
    takes). Each list keeps a row at least, whatever the room."""
    whole = [load_grid(status, before), process_grid(status), task_grid(status)]
    if room is None:
        return whole
    rows = [len(grid.rows) for grid in whole]
    limits = shares(rows, room - _FRAME * len(whole))
    return [
        grid if n >= len(grid.rows) else _first(ordered(), n)
        for grid, n, ordered in zip(whole, limits, _orders(status, before), strict=True)
    ]


def shares(wanted: Sequence[int], room: int) -> list[int]:
    """How many rows each list gets out of ``room``: short ones all they want, long ones alike, and
    none of them nothing."""
    out = [0] * len(wanted)
    for done, i in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        out[i] = min(wanted[i], max(room // (len(wanted) - done), 1))
        room -= out[i]
    return out


def _orders(status: Doc, before: Doc | None) -> tuple[Callable[[], Grid], ...]:
    """The same grids with the busiest at the top."""

    def blocks() -> Grid:
        found = sorted(listing(status, "blocks"), key=lambda b: _rank(b, part(b, "kpi").get("rho")))
        return load_grid({**status, "blocks": found}, before)

    def those_that_run() -> Grid:
        return process_grid(status, sorted(processes(status), key=_process_rank))

    def tasks() -> Grid:
        found = sorted(listing(status, "tasks"), key=_task_rank)
        return task_grid({**status, "tasks": found})

    return blocks, those_that_run, tasks


def _first(grid: Grid, rows: int) -> Grid:
    title = f"{grid.title} (the busiest {rows} of {len(grid.rows)})"
    return Grid(title, grid.columns, grid.rows[:rows])


def _rank(thing: Doc, load: Any) -> tuple[bool, float]:
    return thing.get("state") in _WELL, -load if is_number(load) else 0.0


def _process_rank(process: Doc) -> tuple[bool, float]:
    return _rank(process, part(process, "process").get("cpu_percent"))


def _task_rank(task: Doc) -> tuple[bool, float]:
    per_s = part(task, "kpi").get("per_s")
    return not task.get("missing"), -per_s if is_number(per_s) else 0.0

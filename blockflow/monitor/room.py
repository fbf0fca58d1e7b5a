"""What of long lists few lines show: the busiest, and first of all what is in trouble."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockflow.monitor.grids import Grid, load_grid, process_grid, task_grid
from blockflow.monitor.text import is_number
from blockflow.monitor.view import Doc, listing, part, processes

_FRAME = 3
"""Lines of a grid besides its rows: an empty one, title, header."""

_WELL = frozenset({"ready", "running", "warm"})


def busiest(status: Doc, before: Doc | None, room: int | None) -> list[Grid]:
    """Blocks, processes and tasks of ``blockflow top`` in ``room`` lines (None: as many as it
    takes). Each list keeps a row at least, whatever the room; no row is made to be left out."""
    lists = [listing(status, "blocks"), processes(status), listing(status, "tasks")]
    counts = (len(lists[0]), len(lists[1]), sum(map(_task_rows, lists[2])))
    rows = [max(n, 1) for n in counts]  # that there are none is a line too
    limits = rows if room is None else shares(rows, room - _FRAME * len(lists))
    shown = [
        found if n >= wanted else sorted(found, key=rank)[:n]
        for found, wanted, n, rank in zip(lists, rows, limits, _RANKS, strict=True)
    ]
    grids = (
        load_grid({**status, "blocks": shown[0]}, before),
        process_grid(status, shown[1]),
        task_grid({**status, "tasks": shown[2]}),
    )
    return [
        grid if found is kept else _first(grid, n, len(found))
        for grid, found, kept, n in zip(grids, lists, shown, limits, strict=True)
    ]


def shares(wanted: Sequence[int], room: int) -> list[int]:
    """How many rows each list gets out of ``room``: short ones all they want, long ones alike, and
    none of them nothing."""
    out = [0] * len(wanted)
    for done, i in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        out[i] = min(wanted[i], max(room // (len(wanted) - done), 1))
        room -= out[i]
    return out


def _first(grid: Grid, rows: int, of: int) -> Grid:
    return Grid(f"{grid.title} (the busiest {rows} of {of})", grid.columns, grid.rows[:rows])


def _rank(thing: Doc, load: Any) -> tuple[bool, float]:
    return thing.get("state") in _WELL, -load if is_number(load) else 0.0


def _block_rank(block: Doc) -> tuple[bool, float]:
    return _rank(block, part(block, "kpi").get("rho"))


def _process_rank(process: Doc) -> tuple[bool, float]:
    return _rank(process, part(process, "process").get("cpu_percent"))


def _task_rank(task: Doc) -> tuple[bool, float]:
    per_s = part(task, "kpi").get("per_s")
    return not task.get("missing"), -per_s if is_number(per_s) else 0.0


def _task_rows(task: Doc) -> int:
    """A canary and what it is compared with have rows of their own."""
    return 3 if part(task, "canary") else 1


_RANKS = (_block_rank, _process_rank, _task_rank)

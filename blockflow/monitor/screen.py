"""Views on a terminal, by rich. The width decides what is shown: nothing wraps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.text import Text

from blockflow.core.text import visible
from blockflow.monitor.grids import (
    GAP,
    Grid,
    block_grid,
    process_grid,
    task_grid,
)
from blockflow.monitor.room import busiest
from blockflow.monitor.text import percent, rate, size
from blockflow.monitor.view import Doc, endpoints, headline, legs, notices, part, reruns, slices

_STATES = {
    "ready": "green",
    "running": "green",
    "warm": "green",
    "failed": "red",
    "degraded": "red",
    "missing": "red",
}


def render(grid: Grid, width: int) -> Text:
    """A grid as lines of at most ``width`` characters (:meth:`Grid.fitted`).

    One text, and no table of rich's: that measures and wraps each cell anew, which takes seconds
    for some thousand tasks, and here every cell is one line whose width is known.
    """
    quoted = tuple(tuple(map(visible, row)) for row in grid.rows)
    shown = replace(grid, rows=quoted).fitted(width)
    names = tuple(c.name for c in shown.columns)
    rows = (names, *shown.rows)
    extents = [max(cell_len(row[i]) for row in rows) for i in range(len(names))]
    out = Text(no_wrap=True, overflow="crop")
    out.append(grid.title, "bold")
    for row in rows:
        out.append("\n")
        for i, (column, text) in enumerate(zip(shown.columns, row, strict=True)):
            blank = " " * (extents[i] - cell_len(text))
            style = _STATES.get(text, "yellow") if column.name == "state" else ""
            out.append(" " * GAP if i else "").append(blank if column.right else "")
            out.append(text, "dim" if row is names else style)
            out.append("" if column.right or i + 1 == len(names) else blank)
    return out if shown.rows else out.append("\nnone", "dim")


def status_screen(status: Doc, width: int) -> Group:
    """What ``blockflow status`` shows."""
    lines = [*endpoints(status), *legs(status), *reruns(status), *slices(status)]
    parts: list[Any] = [_head(status), *(Text(visible(line), style="dim") for line in lines)]
    grids = (block_grid(status), task_grid(status), process_grid(status))
    return Group(*parts, *_notices(status), *_spaced(grids, width))


def top_screen(
    status: Doc, before: Doc | None, width: int, note: str = "", height: int | None = None
) -> Group:
    """What ``blockflow top`` shows: ``before`` is the document shown before.

    With a ``height`` in lines, what does not fit is left out, the least busy first.
    """
    totals = part(status, "totals")
    inflight = part(part(status, "dispatcher"), "kpi").get("inflight")
    whole = 100 * (status.get("cores_at_once") or 0)
    line = f"pss {size(totals.get('pss'))}   monitor {rate(status.get('monitor_hz'))} Hz"
    if status.get("monitor_hz") != 0:
        at_work = f"in flight {inflight if inflight is not None else '-'}"
        line = f"{at_work}   cpu {percent(totals.get('cpu_percent'))} of {whole}%   {line}"
    parts = [_head(status), Text(line, style="dim"), *_notices(status)]
    if note:
        parts.append(Text(visible(note), style="red"))
    console = Console(width=width)
    above = sum(max(len(p.wrap(console, width)), 1) for p in parts)
    room = None if height is None else height - above
    return Group(*parts, *_spaced(busiest(status, before, room), width))


def show(renderable: Any, console: Console | None = None) -> None:
    """Print once."""
    (console or Console(highlight=False)).print(renderable)


def show_grid(grid: Grid) -> None:
    """Print it as wide as the terminal is."""
    console = Console(highlight=False)
    show(render(grid, console.width), console)


def _head(status: Doc) -> Text:
    style = f"bold {_STATES.get(str(status.get('state')), 'yellow')}"
    return Text(visible(headline(status)), style=style)


def _notices(status: Doc) -> list[Text]:
    return [Text(visible(line), style="yellow") for line in notices(status)]


def _spaced(grids: Sequence[Grid], width: int) -> list[Any]:
    out: list[Any] = []
    for grid in grids:
        out += [Text(""), render(grid, width)]
    return out

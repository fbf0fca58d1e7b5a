"""Views on a terminal, by rich. The width decides what is shown: nothing wraps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from blockflow.core.text import visible
from blockflow.monitor.grids import (
    GAP,
    Grid,
    block_grid,
    load_grid,
    process_grid,
    task_grid,
)
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


def render(grid: Grid, width: int) -> Table:
    """A grid as a table of at most ``width`` characters."""
    shown = grid.fitted(width)
    table = Table(
        title=grid.title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, GAP, 0, 0),
    )
    for c in shown.columns:
        justify: Any = "right" if c.right else "left"
        table.add_column(c.name, justify=justify, no_wrap=True, header_style="dim")
    for row in shown.rows:
        table.add_row(*(_cell(c.name, text) for c, text in zip(shown.columns, row, strict=True)))
    if not shown.rows:
        table.add_row(*("none", *[""] * (len(shown.columns) - 1)), style="dim")
    return table


def status_screen(status: Doc, width: int) -> Group:
    """What ``blockflow status`` shows."""
    lines = [*endpoints(status), *legs(status), *reruns(status), *slices(status)]
    parts: list[Any] = [_head(status), *(Text(line, style="dim") for line in lines)]
    grids = (block_grid(status), task_grid(status), process_grid(status))
    return Group(*parts, *_notices(status), *_spaced(grids, width))


def top_screen(status: Doc, before: Doc | None, width: int, note: str = "") -> Group:
    """What ``blockflow top`` shows: ``before`` is the document shown before."""
    totals = part(status, "totals")
    inflight = part(part(status, "dispatcher"), "kpi").get("inflight")
    line = (
        f"in flight {inflight if inflight is not None else '-'}"
        f"   cpu {percent(totals.get('cpu_percent'))} of {100 * len(status.get('cores') or [])}%"
        f"   pss {size(totals.get('pss'))}   monitor {rate(status.get('monitor_hz'))} Hz"
    )
    grids = (load_grid(status, before), process_grid(status), task_grid(status))
    parts: list[Any] = [_head(status), Text(line, style="dim"), *_notices(status)]
    if note:
        parts.append(Text(note, style="red"))
    return Group(*parts, *_spaced(grids, width))


def show(renderable: Any, console: Console | None = None) -> None:
    """Print once."""
    (console or Console(highlight=False)).print(renderable)


def _head(status: Doc) -> Text:
    return Text(headline(status), style=f"bold {_STATES.get(str(status.get('state')), 'yellow')}")


def _notices(status: Doc) -> list[Text]:
    return [Text(visible(line), style="yellow") for line in notices(status)]


def _spaced(grids: Sequence[Grid], width: int) -> list[Any]:
    out: list[Any] = []
    for grid in grids:
        out += [Text(""), render(grid, width)]
    return out


def _cell(column: str, text: str) -> Text:
    style = _STATES.get(text, "yellow") if column == "state" else ""
    return Text(text, style=style)

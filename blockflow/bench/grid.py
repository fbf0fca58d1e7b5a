"""Grid: a table of figures once, shown by rich on a terminal and as Markdown in a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor, log10
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

BREAK: tuple[str, ...] = ()
"""A row that parts sections on a terminal; a document shows none."""

_WIDEST = 10_000


class Rows(list[tuple[str, ...]]):
    """Of a grid, one after the other."""

    _section: Any = None

    def row(self, *cells: str) -> None:
        self.append(cells)

    def section(self, of: Any) -> None:
        """What comes now is of this: a break, where what came before was of something else."""
        if self and of != self._section:
            self.append(BREAK)
        self._section = of


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of texts.

    Attributes:
        title: one line.
        heads: of the columns; those in ``left`` are aligned left, numbers right.
        rows: as long as ``heads``, or ``BREAK``.
        left: heads of the columns that hold text.
        keys: so many columns at the left say what a row is about; 0: the texts there, or one.
    """

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: frozenset[str] = field(default_factory=frozenset)
    keys: int = 0

    def split(self, head: str) -> list[Grid]:
        """A grid per value of a column, which goes into the title: narrower, for terminals."""
        at = self.heads.index(head)
        parts: dict[str, list[tuple[str, ...]]] = {}
        value = ""
        for row in self.rows:
            value = row[at] if row else value
            parts.setdefault(value, []).append(row[:at] + row[at + 1 :])
        heads = self.heads[:at] + self.heads[at + 1 :]
        keys = self.keys - (at < self.keys)
        return [
            Grid(
                f"{self.title}: {value}",
                heads,
                rows[:-1] if not rows[-1] else rows,
                self.left,
                keys,
            )
            for value, rows in parts.items()
        ]

    def rich(self) -> Table:
        """For a console. Where it is too narrow texts and heads are broken, numbers never: what
        does not fit beside the others then comes in a further table, with the keys again."""
        table = _Narrowing(
            title=escape(self.title),
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=0,
        )
        table.source = self
        for i, head in enumerate(self.heads):
            justify: Literal["left", "right"] = "left" if head in self.left else "right"
            least = self._least(i)
            table.add_column(Text(head), justify=justify, min_width=least, overflow="fold")
        for row in self.rows:
            if row:
                table.add_row(*map(Text, row))  # a text may have brackets, which are no markup
            else:
                table.add_section()
        return table

    def narrowed(self, width: int) -> list[Grid]:
        """By columns: tables that fit into ``width`` without breaking numbers, as far as may be."""
        texts = next((i for i, h in enumerate(self.heads) if h not in self.left), len(self.heads))
        keys = min(self.keys or texts or 1, len(self.heads) - 1)
        parts: list[list[int]] = []
        for i in range(keys, len(self.heads)):
            grown = [*(parts[-1] if parts else range(keys)), i]
            if parts and sum(map(self._least, grown)) + len(grown) + 1 > width:
                parts.append([*range(keys), i])
            else:
                parts[-1:] = [grown]
        return [
            Grid(
                "" if n else self.title,
                tuple(self.heads[i] for i in part),
                [tuple(row[i] for i in part) if row else BREAK for row in self.rows],
                self.left,
                keys,
            )
            for n, part in enumerate(parts)
        ]

    def _least(self, column: int) -> int:
        """The width that a column needs: its numbers whole, of texts the head's longest word."""
        head = self.heads[column]
        rows = () if head in self.left else (row[column] for row in self.rows if row)
        lines = [line for cell in rows for line in cell.split("\n")]
        return max(map(cell_len, [*lines, *head.split()]), default=1)

    def markdown(self) -> str:
        """For a document; without the title."""
        rule = ["---" if head in self.left else "--:" for head in self.heads]
        # A bar would begin another cell, and a line's end another row.
        cells = ([" ".join(c.split()).replace("|", "\\|") for c in row] for row in self.rows if row)
        rows = [list(self.heads), rule, *cells]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


class _Narrowing(Table):
    """Where it is wider than the console, numbers get their least width, and texts what is left. If
    that is not enough for whole words either, it is shown in parts; what is too wide for a part is
    folded: nothing is cut off."""

    source: Grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        natural = self.__rich_measure__(console, options.update(width=_WIDEST)).maximum
        least = sum(c.min_width or 0 for c in self.columns) + len(self.columns) + 1
        if natural > options.max_width < least:
            parts = self.source.narrowed(options.max_width)
            if len(parts) > 1:
                yield from (part.rich() for part in parts)
                return
        for column in self.columns if natural > options.max_width else ():
            if least > options.max_width:
                column.min_width = None
            elif column.justify == "right":
                column.width = column.min_width
        yield from super().__rich_console__(console, options)


def ms(value: float | None) -> str:
    """Milliseconds with three digits that mean something; '' for None."""
    return "" if value is None else digits(value)


def digits(value: float) -> str:
    """Three significant digits, two of what is below a tenth, without an exponent."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:.0f}"
    places = 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.01 else 1 - floor(log10(size))
    return f"{value:.{places}f}"


def bounds(low: float | None, high: float | None) -> str:
    """An interval, as ``0.98-1.04``; ``-0.2 to 0.1`` below nothing."""
    if low is None or high is None:
        return ""
    return f"{digits(low)}{'-' if low >= 0 else ' to '}{digits(high)}"


def with_bounds(value: float, low: float | None, high: float | None, places: int = 3) -> str:
    """A number with its interval: ``1.021 (0.98-1.04)``."""
    text, interval = f"{value:.{places}f}", bounds(low, high)
    return f"{text} ({interval})" if interval else text


def size_text(count: int) -> str:
    """Bytes as a person names them: ``16 KiB``, ``100 MiB``."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"

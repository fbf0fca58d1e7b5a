"""BatchTable: DVABatch's record of the batches under way: new, stretch, split.

Cui et al., "DVABatch" (USENIX ATC 2022), "Enabling Multi-entry Multi-exit Scheme". A row is a
batch: its size, when it was made, how many rows have finished each stage. It lies in one or several
parts (the paper's queue items id, start, num), each before some stage. A part goes on only when the
whole batch has finished the stage before it; where parts meet they become one.
"""

from __future__ import annotations

from collections.abc import Iterator

from blockflow.batching.convoy import Convoy


class Part(Convoy):
    """Queries of one batch at one boundary.

    Attributes:
        row: its batch.
        level: the stage that it waits for or runs, counted from 0 in the worker's row of stages.
        at: where it rests in the pipeline of buffers: ``level``, or a stage that it will skip.
        pair: the buffer pair that it travels on; None while it is not in the pipeline.
        began_ns: when the batch that it runs, or ran last, began.
    """

    __slots__ = ("at", "began_ns", "level", "pair", "row")

    def __init__(self, row: Row, level: int) -> None:
        super().__init__()
        self.row = row
        self.level = level
        self.at = level
        self.pair: int | None = None
        self.began_ns = 0


class Row:
    """One batch.

    Attributes:
        id: counts up.
        origin: id of the batch that it was split from, its own otherwise.
        created_ns: when its oldest queries became a batch.
        closed: it comes from a split, or was split: nobody may join any more.
        serial: it runs only when no earlier batch of its origin is under way.
        parts: foremost first.
    """

    __slots__ = ("closed", "created_ns", "id", "origin", "parts", "serial")

    def __init__(self, number: int, created_ns: int) -> None:
        self.id = number
        self.origin = number
        self.created_ns = created_ns
        self.closed = False
        self.serial = False
        self.parts: list[Part] = []

    @property
    def size(self) -> int:
        """Rows of the batch, wherever they are."""
        return sum([part.rows for part in self.parts])

    def finished(self, level: int) -> int:
        """Rows that have finished the stage at ``level``: the paper's status map."""
        return sum(part.rows for part in self.parts if part.level > level)

    def complete_before(self, part: Part) -> bool:
        """Whether the whole batch has come to where ``part`` waits."""
        return len(self.parts) == 1 or self.finished(part.level - 1) == self.size


class BatchTable:
    """Batches in the order in which they go on, oldest first; children of a split in the place of
    their parent. Who travels in a part is kept by :class:`~blockflow.batching.convoy.Convoys`."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._newest: Row | None = None
        self._next = 0

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def size(self) -> int:
        """Rows of all batches."""
        return sum([part.rows for row in self._rows for part in row.parts])

    @property
    def newest(self) -> Row | None:
        """The batch made last, if it is still under way and was never split."""
        row = self._newest
        return row if row is not None and row.parts and not row.closed else None

    def new(self, level: int, now: int) -> Part:
        """``new``: queued queries become a batch."""
        row = self._newest = self._add(len(self._rows), now)
        return self._part(row, level)

    def stretch(self, row: Row, level: int) -> Part:
        """``stretch``: newcomers belong to ``row`` from now on and catch up from ``level``."""
        return self._part(row, level)

    def split(self, part: Part, level: int, *, serial: bool = False) -> Part:
        """``split``: some of ``part`` become a batch of their own, right behind it.

        Args:
            level: where they wait.
            serial: they start only when the rest has left.
        """
        parent = part.row
        child = self._add(self._rows.index(parent) + 1, parent.created_ns)
        child.origin, child.serial = parent.origin, serial
        child.closed = parent.closed = True
        return self._part(child, level)

    def remove(self, part: Part) -> None:
        """Nothing is left of ``part``: it has left, or has merged with the one before."""
        part.row.parts.remove(part)
        if not part.row.parts:
            self._rows.remove(part.row)

    def first_of_origin(self, row: Row) -> bool:
        """Whether no batch of the same origin is before ``row``."""
        return next(r for r in self._rows if r.origin == row.origin) is row

    def resting_with(self, part: Part) -> list[Part]:
        """Batches behind that of ``part`` all of which wait for the same stage and could go on;
        none if not all of its own does."""
        if len(part.row.parts) > 1:
            return []
        return [
            other
            for row in self._rows[self._rows.index(part.row) + 1 :]
            for other in row.parts
            if other.level == part.level
            and other.waiting
            and not other.running
            and len(row.parts) == 1
            and (not row.serial or self.first_of_origin(row))
        ]

    def before(self, part: Part) -> Iterator[Part]:
        """Whom ``part`` has to let go on first: the rest of its batch, what it was split from, and
        those ahead on its pair (without one, all whose places it could take)."""
        for row in self._rows:
            same = row is part.row
            for other in row.parts:
                ahead = other.pair is not None and part.pair in (None, other.pair)
                if (
                    (same and other.level < part.level)
                    or (part.row.serial and row.origin == part.row.origin and not same)
                    or (ahead and other.at >= part.at)
                ):
                    yield other

    def _add(self, index: int, created_ns: int) -> Row:
        row = Row(self._next, created_ns)
        self._next += 1
        self._rows.insert(index, row)
        return row

    def _part(self, row: Row, level: int) -> Part:
        part = Part(row, level)
        row.parts.append(part)
        return part

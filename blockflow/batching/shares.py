"""TaskShare: how much of a shared block a task may claim, and before whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blockflow.batching.options import Integer, Kind, Number, option_problems
from blockflow.core import limits
from blockflow.core.errors import Problem

MAX_PRIORITY = 9
_KINDS: Mapping[str, Kind] = {
    "weight": Number(0.001, 1000),
    "priority": Integer(0, MAX_PRIORITY),
    "max_batch_rows": Integer(0, limits.MAX_ROWS),
}


@dataclass(frozen=True, slots=True)
class TaskShare:
    """One task at the blocks that it shares with others.

    Attributes:
        weight: while several tasks of one priority wait, their rows run in this proportion.
        priority: higher ones run first, whatever the weights.
        max_batch_rows: most rows of this task in one batch, 0 = no limit. A larger request runs
            all the same, with nothing else of its task.
    """

    weight: float = 1.0
    priority: int = 0
    max_batch_rows: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TaskShare:
        """Inverse of :meth:`to_dict`; missing fields have their defaults.

        Raises:
            ValueError: a field is unknown or out of range.
        """
        problems = share_problems(data, "$")
        if problems:
            raise ValueError("; ".join(f"{p.path}: {p.message}" for p in problems))
        return cls(**data)


def read_shares(table: Sequence[Mapping[str, Any]]) -> list[TaskShare]:
    """Each entry as a :class:`TaskShare`. One that stands there many times, as those of a route
    table's thousands of tasks do, is read once.

    Raises:
        ValueError: as :meth:`TaskShare.from_dict`.
    """
    entries = {id(entry): entry for entry in table}
    known = {key: TaskShare.from_dict(entry) for key, entry in entries.items()}
    return [known[id(entry)] for entry in table]


def share_problems(data: Mapping[str, Any], path: str) -> list[Problem]:
    """What is wrong with a share as a topology gives it; ``path`` is its JSON path."""
    return option_problems("a task's share", data, _KINDS, path)

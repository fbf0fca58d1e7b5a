"""ShareBook: which index stands for which task's share in headers. Pure.

An index takes one to three bytes of a header where a name would take sixty. Requests that were
admitted before an update carry the indices of their time, so a task keeps its index as long as it
is deployed, and one that becomes free by an update is given out again by the next at the earliest:
by then those requests have ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockflow.core.specs import TaskSpec


class ShareBook:
    """Indices by task name; 0 is nobody's: the default share."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._tasks: Mapping[str, TaskSpec] = {}

    def follow(self, tasks: Mapping[str, TaskSpec]) -> None:
        """``tasks`` are deployed from now on."""
        taken = set(self._known.values())
        known = {n: i for n, i in self._known.items() if n in tasks}
        free = (i for i in range(1, len(taken) + len(tasks) + 1) if i not in taken)
        for name in tasks:
            if name not in known:
                known[name] = next(free)
        self._known, self._tasks = known, tasks

    def indices(self) -> Mapping[str, int]:
        """All of them by name, for :meth:`recall`."""
        return dict(self._known)

    def recall(self, indices: Mapping[str, int]) -> None:
        """Go on with another book's indices: requests that carry them are in flight."""
        self._known = dict(indices)

    def index(self, task: str) -> int:
        return self._known.get(task, 0)

    def table(self) -> tuple[Mapping[str, Any], ...]:
        """The shares by index; what is nobody's is an empty entry: the default."""
        out: list[Mapping[str, Any]] = [{}] * (max(self._known.values(), default=0) + 1)
        for name, index in self._known.items():
            out[index] = self._tasks[name].share()
        return tuple(out)

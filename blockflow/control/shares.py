"""ShareBook: which index stands for which task's share in headers. Pure.

An index takes one to three bytes of a header where a name would take sixty. Requests that were
admitted before an update carry the indices of their time. So a task keeps its index as long as it
is deployed, and one that becomes free by an update is held until those requests have ended; it is
given out again by the next update at the earliest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from blockflow.core import limits
from blockflow.core.specs import TaskSpec


class ShareBook:
    """Indices by task name; 0 is nobody's: the default share."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._tasks: Mapping[str, TaskSpec] = {}
        self._held: dict[int, int] = {}

    def follow(self, tasks: Mapping[str, TaskSpec], version: int = 0, drained: int = 0) -> None:
        """``tasks`` are deployed from now on.

        Args:
            tasks: by name.
            version: of the routes that say so: requests of earlier ones may carry what goes.
            drained: no request of a version below this one is in flight.
        """
        self._held = {i: v for i, v in self._held.items() if v > drained}
        taken = {*self._known.values(), *self._held}
        known = {n: i for n, i in self._known.items() if n in tasks}
        self._held |= {i: version for n, i in self._known.items() if n not in tasks}
        free = (i for i in range(1, len(taken) + len(tasks) + 1) if i not in taken)
        for name in tasks:
            if name not in known:
                known[name] = next(free)
        self._known, self._tasks = known, tasks

    def indices(self) -> Mapping[str, int]:
        """All of them by name, for :meth:`recall`."""
        return dict(self._known)

    def held(self) -> tuple[int, ...]:
        """Those that nobody has and that may not be given out, for :meth:`recall`."""
        return tuple(self._held)

    def recall(
        self, indices: Mapping[str, int], held: Iterable[int] = (), version: int = 0
    ) -> None:
        """Go on with another book's indices, which gave them out under routes up to ``version``:
        requests that carry them are in flight."""
        self._known = dict(indices)
        self._held = dict.fromkeys(held, version + 1)

    @property
    def roomy(self) -> bool:
        """Another update finds indices enough, however many tasks it brings, though none of those
        that are held come free before it."""
        return len(self._known) + len(self._held) <= limits.MAX_SHARES - limits.MAX_TASKS

    def index(self, task: str) -> int:
        return self._known.get(task, 0)

    def table(self) -> tuple[Mapping[str, Any], ...]:
        """The shares by index; what is nobody's is an empty entry: the default."""
        out: list[Mapping[str, Any]] = [{}] * (max(self._known.values(), default=0) + 1)
        for name, index in self._known.items():
            out[index] = self._tasks[name].share()
        return tuple(out)

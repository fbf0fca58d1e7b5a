"""Canaries: which of a task's requests take the path that is being tried. Pure.

Neither chance nor a plain "every tenth": the n-th request goes there if n/phi modulo 1 is below the
share (phi: the golden ratio; Weyl's sequence). Any run of requests gets its share to within a few
of them, and there is no period that a client's own rhythm could fall in with. A request that goes
there at one share goes there at every larger one.
"""

from __future__ import annotations

from collections.abc import Collection

from blockflow.core.routing import TaskRoute

_STEP = 0x9E3779B97F4A7C15
"""2**64 / phi, rounded to an odd number: multiples visit every value before one comes again."""

_WHOLE = 1 << 64


class CanaryTurns:
    """Counts the requests of every task that has a canary."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}

    def turn(self, task: TaskRoute) -> bool:
        """Whether the next request of ``task`` takes its canary's path."""
        canary = task.canary
        if canary is None:
            return False
        n = self._count[task.name] = self._count.get(task.name, 0) + 1
        return n * _STEP % _WHOLE < int(canary.share * _WHOLE)

    def keep(self, tasks: Collection[str]) -> None:
        """Forget what is not one of ``tasks``."""
        self._count = {t: n for t, n in self._count.items() if t in tasks}

"""Cores: forwards that run at once share the machine's cores evenly (processor sharing).

While the threads of all running forwards fit on the cores, each runs at full speed; beyond that
all are slowed down alike, to ``cores / threads``. Because the speed is the same for all, one number
tells the whole story: the work that a forward which ran all the time would have had done.
"""

from __future__ import annotations

import heapq
from typing import Any


class Cores:
    """The running forwards."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads = 0
        self._running: list[tuple[float, int, int, Any]] = []
        self._order = 0
        self._done = 0.0  # the shared clock of work, in nanoseconds at full speed
        self._at = 0
        self._speed = 1.0

    def start(self, now: int, work_ns: int, threads: int, job: Any) -> None:
        """``job`` needs ``work_ns`` at full speed on ``threads`` cores."""
        self._advance(now)
        self._order += 1
        heapq.heappush(self._running, (self._done + work_ns, self._order, threads, job))
        self._turn(threads)

    def next_end(self) -> int | None:
        """When the first of the running forwards will end, if none is added."""
        if not self._running:
            return None
        left = self._running[0][0] - self._done
        return self._at + max(0, round(left / self._speed))

    def finish(self, now: int) -> Any:
        """Take away the forward whose end has come."""
        self._advance(now)
        end, _, threads, job = heapq.heappop(self._running)
        self._done = max(self._done, end)  # what rounding to nanoseconds has left over
        self._turn(-threads)
        return job

    def _advance(self, now: int) -> None:
        self._done += (now - self._at) * self._speed
        self._at = now

    def _turn(self, threads: int) -> None:
        self._threads += threads
        self._speed = min(1.0, self._count / self._threads) if self._threads else 1.0

"""EventLoop: virtual time. One heap of what will happen; the clock jumps from one to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from blockflow.bench.simulation.cores import Cores

Call = Callable[[int, Any], None]
"""What happens: called with the time and the argument that it was planned with."""


_LAST = 1 << 62


class EventLoop:
    """Plans and runs events; what is planned for one instant runs in the order of planning.

    Args:
        cores: that forwards share.
        threads: that could compute at once. Where each has a core, nobody is slowed down.
    """

    def __init__(self, cores: int, threads: int) -> None:
        self.now = 0
        self.events = 0
        self._cores = Cores(cores) if threads > cores else None
        self._heap: list[tuple[int, int, Call, Any]] = []
        self._planned = 0
        self._end_at: int | None = None  # the end of a forward that an event is planned for
        self._end_turn = 0  # which plan of that is the one in force

    def plan(self, at: int, call: Call, arg: Any = None) -> None:
        """``call(at, arg)`` at ``at``."""
        self._planned += 1
        heapq.heappush(self._heap, (at, self._planned, call, arg))

    def plan_last(self, call: Call) -> None:
        """``call(now, None)`` after everything else that happens at this instant."""
        self._planned += 1
        heapq.heappush(self._heap, (self.now, _LAST + self._planned, call, None))

    def compute(
        self, now: int, work_ns: int, threads: int, after_ns: int, call: Call, arg: Any
    ) -> None:
        """``call(end + after_ns, arg)``, where ``end`` is when the cores have done ``work_ns``."""
        if self._cores is None:
            self.plan(now + work_ns + after_ns, call, arg)
            return
        self._cores.start(now, work_ns, threads, (after_ns, call, arg))
        self._plan_end(self._cores)

    def run(self) -> None:
        """Until nothing is planned any more."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            at, _, call, arg = pop(heap)
            self.now = at
            self.events += 1
            call(at, arg)

    def _plan_end(self, cores: Cores) -> None:
        at = cores.next_end()
        if at is not None and at != self._end_at:
            self._end_turn += 1
            self._end_at = at
            self.plan(at, self._ended, self._end_turn)

    def _ended(self, now: int, turn: int) -> None:
        cores = self._cores
        if turn != self._end_turn or cores is None:
            return  # the end has moved since this was planned
        self._end_at = None
        after_ns, call, arg = cores.finish(now)
        self._plan_end(cores)
        if after_ns:
            self.plan(now + after_ns, call, arg)
        else:
            call(now, arg)

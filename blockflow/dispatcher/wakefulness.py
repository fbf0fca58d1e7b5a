"""Wakefulness: how long an idle core may take to wake, by what is under way. Pure.

Each hop wakes threads, mostly on cores that have had nothing to do during the forward before it. A
core that sleeps takes a few microseconds to wake from a shallow state, hundreds from a deep one,
and in a virtual machine it has left the processor altogether. The kernel keeps idle cores as awake
as somebody asks for (CPU latency quality of service, ``Documentation/power/pm_qos_interface``). At
0 they poll, in the idle loop, which no thread that wants to run ever waits for: the spinning before
blocking that only ever takes cores that are free. It costs energy, so tasks ask for it, and for
what waits until a worker is back, while nobody computes, nothing is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from blockflow.core.routing import TaskRoute

LINGER_NS = 20_000_000
"""Longer than a client takes that sends its next request when it has the answer: its message, too,
finds the cores awake, and they are not sent to sleep and woken for each request."""


class Wakefulness:
    """What the requests under way, and those that have just ended, ask for."""

    def __init__(self) -> None:
        self._asked: dict[bytes, int] = {}
        self._under_way: Counter[int] = Counter()
        self._until: dict[int, int] = {}  # of what was asked by requests that have all ended

    def enter(self, ticket: bytes, tasks: Iterable[TaskRoute]) -> None:
        """A request for ``tasks`` is sent on its way. Idempotent."""
        asked = [t.cpu_latency_us for t in tasks if t.cpu_latency_us is not None]
        if asked and ticket not in self._asked:
            latency = self._asked[ticket] = min(asked)
            self._under_way[latency] += 1
            self._until.pop(latency, None)

    def leave(self, ticket: bytes, now_ns: int) -> None:
        """It has ended, or left that way; it may be sent on another one."""
        latency = self._asked.pop(ticket, None)
        if latency is None:
            return
        self._under_way[latency] -= 1
        if not self._under_way[latency]:
            del self._under_way[latency]
            self._until[latency] = now_ns + LINGER_NS

    def wanted_us(self, now_ns: int) -> int | None:
        """The least that is asked for now; None: nothing is."""
        if not self._under_way and not self._until:
            return None
        self._until = {us: end for us, end in self._until.items() if end > now_ns}
        return min((*self._under_way, *self._until), default=None)

    def next_due(self) -> int | None:
        """When :meth:`wanted_us` changes though nothing happens; None: never."""
        return min(self._until.values(), default=None)

"""Ledger: what clients sent and what became of it, kept by the clients. Pure: times are arguments.

The system's own counters cannot show what the system has lost; this can: a request that was sent
and never ended is found here and nowhere else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

OK = "OK"
WRONG = "wrong value"
"""An answer that is not what the blocks compute."""
NO_REPLY = "no reply"
"""The client itself ended it: nobody had answered by the deadline and its grace."""
POISON = "POISON"

ALLOWED = frozenset(
    {
        OK,
        "BLOCK_UNAVAILABLE",
        "CONNECTION_LOST",
        "DEADLINE_EXCEEDED",
        "NOT_READY",
        "NOT_RUNNING",
        "OVERLOADED",
        "WORKER_LOST",
    }
)
"""How a good request may end while faults are injected: answered, or refused for a reason that says
that it may be sent again. POISON and no reply at all need faults that explain them; anything else
(INTERNAL, a wrong value) is a defect."""
_TIED = frozenset({NO_REPLY, POISON})


LINGERS_S = 10.0
"""A stopped process goes on after five seconds; a killed one is noticed and replaced in less."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request's end. Times are seconds of the run; ``due_s`` is its deadline."""

    task: str
    sent_s: float
    done_s: float
    due_s: float
    outcome: str

    @property
    def ok(self) -> bool:
        return self.outcome == OK


@dataclass(slots=True)
class Ledger:
    """Every request of all clients.

    Attributes:
        ended: in order of their ends.
        doubled: ends of requests that had ended before, or had never been sent.
    """

    ended: list[Ended] = field(default_factory=list)
    doubled: int = 0
    _open: dict[int, tuple[str, float, float]] = field(default_factory=dict)

    def sent(self, number: int, task: str, now_s: float, deadline_s: float) -> None:
        """Request ``number`` leaves; its answer is due ``deadline_s`` later."""
        self._open[number] = (task, now_s, now_s + deadline_s)

    def done(self, number: int, outcome: str, now_s: float) -> None:
        """It ended: with OK, an error's code, or WRONG."""
        found = self._open.pop(number, None)
        if found is None:
            self.doubled += 1
            return
        task, sent_s, due_s = found
        self.ended.append(Ended(task, sent_s, now_s, due_s, outcome))

    @property
    def sent_count(self) -> int:
        return len(self._open) + len(self.ended)

    @property
    def missing(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def outcomes(self) -> Counter[str]:
        return Counter(e.outcome for e in self.ended)

    def late(self, grace_s: float) -> int:
        """Requests that ended more than ``grace_s`` after their deadline."""
        return sum(e.done_s > e.due_s + grace_s for e in self.ended)

    def unexplained(self) -> Counter[str]:
        """Outcomes that no fault excuses."""
        known = ALLOWED | _TIED
        return Counter({o: n for o, n in self.outcomes().items() if o not in known})

    def untimely(self, outcome: str, faults: Sequence[tuple[float, str]], least: int) -> int:
        """Requests that ended with ``outcome``, and with fewer than ``least`` of the ``faults``
        (second, task) on their way; a fault may take :data:`LINGERS_S` to show."""
        return sum(
            e.outcome == outcome
            and sum(
                e.sent_s - LINGERS_S <= at <= e.done_s and task == e.task for at, task in faults
            )
            < least
            for e in self.ended
        )

    def worst_s(self) -> float | None:
        """How long after its deadline the latest request ended; None when all were in time."""
        late = [e.done_s - e.due_s for e in self.ended if e.done_s > e.due_s]
        return max(late) if late else None

    def recoveries(self) -> Callable[[str, float], float | None]:
        """For many questions at once: how long after a moment a request of a task that was sent
        after it was answered first; None: none was."""
        tasks: dict[str, tuple[list[float], list[float]]] = {}
        for task in {e.task for e in self.ended}:
            mine = sorted((e.sent_s, e.done_s) for e in self.ended if e.ok and e.task == task)
            # The earliest end of all that were sent then or later.
            ends = list(accumulate((done for _, done in reversed(mine)), min))[::-1]
            tasks[task] = [sent for sent, _ in mine], ends

        def recovery_s(task: str, at_s: float) -> float | None:
            sent, ends = tasks.get(task, ([], []))
            i = bisect_left(sent, at_s)
            return ends[i] - at_s if i < len(ends) else None

        return recovery_s

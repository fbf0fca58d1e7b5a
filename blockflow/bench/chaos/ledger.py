"""Ledger: what clients sent and what became of it, kept by the clients. Pure: times are arguments.

The system's own counters cannot show what the system has lost; this can: a request that was sent
and never answered is found here and nowhere else. It has two sources. The handle of a request says
what its sender was told; but the SDK gives every handle one end, whatever comes. So replies are
counted where they come off the wire, by the id of their request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from blockflow.bench.chaos.lag import LagBook
from blockflow.client.core import GRACE_NS

OK = "OK"
WRONG = "wrong value"
"""An answer that is not what the blocks compute."""
NO_REPLY = "no reply"
"""The client itself ended it: nobody had answered by the deadline and its grace."""
LATE = "late reply"
"""The client had ended it so, and then the reply came: it is judged by when."""
POISON = "POISON"
CANCELLED = "CANCELLED"
PLAIN = frozenset({OK})
"""What a good request shall come to."""
UNHARMED = "OK, and should not be"
"""A request that cannot be answered was."""

ALLOWED = frozenset(
    {
        OK,
        "BLOCK_UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        LATE,
        "NOT_READY",
        "OVERLOADED",
        "WORKER_LOST",
    }
)
"""How a good request may end while faults are injected: answered, or refused for a reason that says
that it may be sent again. What is in :data:`ALONE` and POISON need faults that explain them;
anything else (INTERNAL, a wrong value) is a defect."""
ALONE = frozenset({NO_REPLY, "CONNECTION_LOST", "NOT_RUNNING"})
"""Ends that the client made up by itself, because there was no reply."""

Span = tuple[float, float]
"""Begin and end, in seconds of the run."""
Death = tuple[Span, str]
"""In which time a worker may have died, and a task that led through it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request's end. Times are seconds of the run; ``due_s`` is its deadline.

    ``wanted`` is how it should end where nothing comes in between; ``far``: its client's connection
    is one that faults of the network hit.
    """

    task: str
    sent_s: float
    done_s: float
    due_s: float
    outcome: str
    wanted: frozenset[str] = PLAIN
    far: bool = False

    @property
    def plain(self) -> bool:
        """It is a good request, and its client stays with it."""
        return self.wanted == PLAIN

    @property
    def ok(self) -> bool:
        return self.outcome == OK


@dataclass(slots=True)
class _OnWire:
    """Sendings of a request, and replies to it, on the ``connection`` that it was last sent on;
    ``breaks`` is how often an end of that had been noticed before."""

    connection: int
    sendings: int = 0
    replies: int = 0
    breaks: int = 0


@dataclass(slots=True)
class Ledger:
    """Every request of all clients, by its id.

    Attributes:
        ended: in order of their ends.
        doubled: replies too many: to requests that had one for each time they were sent, or that
            were not sent on that connection at all; and handles that ended again.
        garbled: messages that made no sense.
    """

    ended: list[Ended] = field(default_factory=list)
    doubled: int = 0
    garbled: int = 0
    _open: dict[bytes, Ended] = field(default_factory=dict)
    _wire: dict[bytes, _OnWire] = field(default_factory=dict)
    _silent: dict[bytes, int] = field(default_factory=dict)
    _cancelled: set[bytes] = field(default_factory=set)
    _breaks: Counter[int] = field(default_factory=Counter)

    def sent(
        self,
        request_id: bytes,
        task: str,
        now_s: float,
        deadline_s: float,
        wanted: frozenset[str] = PLAIN,
        *,
        far: bool = False,
    ) -> None:
        """It is handed to the SDK; its answer is due ``deadline_s`` later."""
        due_s = now_s + deadline_s
        self._open[request_id] = Ended(task, now_s, due_s, due_s, "", wanted, far)

    def done(self, request_id: bytes, outcome: str, now_s: float) -> None:
        """Its handle ended: with OK, an error's code, WRONG, or NO_REPLY."""
        found = self._open.pop(request_id, None)
        if found is None:
            self.doubled += 1
            return
        if outcome == NO_REPLY:
            self._silent[request_id] = len(self.ended)
        known = self._wire.get(request_id)
        if outcome == CANCELLED and known is not None and known.replies < known.sendings:
            self._cancelled.add(request_id)  # its client was told at once: the reply comes later
        self.ended.append(replace(found, done_s=now_s, outcome=outcome))

    def carried(self, request_id: bytes, connection: int) -> None:
        """It went out, the first time or again: the same connection may bring it again where a
        slot was lost, another one after the first broke."""
        known = self._wire.get(request_id)
        if known is None or known.connection != connection:
            known = self._wire[request_id] = _OnWire(connection)
        known.sendings += 1
        known.breaks = self._breaks[connection]

    def replied(self, request_id: bytes, connection: int, now_s: float) -> None:
        """A reply to it came off the wire."""
        known = self._wire.get(request_id)
        if known is None or known.connection != connection or known.replies >= known.sendings:
            self.doubled += 1
            return
        known.replies += 1
        self._cancelled.discard(request_id)
        if (index := self._silent.pop(request_id, None)) is not None:
            self.ended[index] = replace(self.ended[index], done_s=now_s, outcome=LATE)

    def broke(self, connection: int) -> None:
        """It ended: what was sent on it until now will not be answered on it."""
        self._breaks[connection] += 1

    @property
    def unanswered(self) -> int:
        """Requests that were cancelled, and got no reply on a connection that stayed."""
        sent = [self._wire[r] for r in self._cancelled]
        return sum(w.breaks == self._breaks[w.connection] for w in sent)

    @property
    def sent_count(self) -> int:
        return len(self._open) + len(self.ended)

    @property
    def missing(self) -> int:
        """Requests whose handles have not ended."""
        return len(self._open)

    @property
    def silent(self) -> int:
        """Requests whose clients have given up, and that nobody has answered since."""
        return len(self._silent)

    @property
    def answered(self) -> float:
        """The share of the good requests that were answered with their result."""
        good = [e.ok for e in self.ended if e.plain]
        asked = len(good) + sum(e.plain for e in self._open.values())
        return sum(good) / asked if asked else 0.0

    def outcomes(self) -> Counter[str]:
        return Counter(e.outcome for e in self.ended)

    def odd(self) -> Counter[str]:
        """Of the requests that were not plain ones: what they wanted -> how many got just that."""
        return Counter(
            "/".join(sorted(e.wanted)) for e in self.ended if not e.plain and e.outcome in e.wanted
        )

    def late(
        self, grace_s: float, lag: LagBook | None = None, cuts: Sequence[Span] = ()
    ) -> list[Ended]:
        """Requests that ended more than ``grace_s`` after their deadline, more than that and the
        machine's ``lag`` around it, and not because the network was cut then. Where nobody has
        answered (:meth:`alone` judges that) it counts from when the client may end it itself."""

        def due_s(e: Ended) -> float:
            return e.due_s + grace_s + (GRACE_NS / 1e9 if e.outcome == NO_REPLY else 0.0)

        late = [e for e in self.ended if e.done_s > due_s(e)]
        return [
            e
            for e in late
            if (lag is None or e.done_s > due_s(e) + lag.allowance(e.due_s, e.done_s))
            and not (e.far and _within(e.due_s, e.done_s, cuts))
        ]

    def unexplained(self) -> Counter[str]:
        """Outcomes that no fault excuses, and results where there should be none."""
        known = ALLOWED | ALONE | {POISON}
        out: Counter[str] = Counter()
        for e in self.ended:
            if e.ok and e.outcome not in e.wanted:
                out[UNHARMED] += 1
            elif e.outcome not in known | e.wanted:
                out[e.outcome] += 1
        return out

    def alone(self, outages: Sequence[Span], cuts: Sequence[Span] = ()) -> int:
        """Requests that their clients ended by themselves while there was somebody to answer them:
        outside all of these outages, and for those behind the network also of its ``cuts``. A
        client sends what was in flight again, so that only those whose time ended in an outage had
        no chance."""
        return sum(
            e.outcome in ALONE
            and not _within(e.done_s, e.done_s, outages)
            and not (e.far and _within(e.done_s, e.done_s, cuts))
            for e in self.ended
        )

    def blamed(self, deaths: Sequence[Death]) -> int:
        """Requests that ended as POISON although they were not under way in two ``deaths`` of
        workers on their way."""
        return sum(
            e.outcome == POISON
            and POISON not in e.wanted
            and sum(task == e.task and _within(e.sent_s, e.done_s, [d]) for d, task in deaths) < 2
            for e in self.ended
        )

    def served(self, span: Span) -> tuple[int, int]:
        """Of the requests that were sent in the first half of ``span``: how many were answered with
        their result before its end, and how many there were."""
        begin, end = span
        mine = [e for e in self.ended if e.plain and begin <= e.sent_s <= (begin + end) / 2]
        return sum(e.ok and e.done_s <= end for e in mine), len(mine)

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


def _within(begin_s: float, end_s: float, spans: Sequence[Span]) -> bool:
    """Whether one of them has a part of this time."""
    return any(begin <= end_s and begin_s <= end for begin, end in spans)

"""A request in flight, and what the table instructs about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from blockflow.core.errors import BlockFlowError
from blockflow.core.records import record
from blockflow.dispatcher.plan import Plan
from blockflow.wire.data import HopTiming, Item


@record
class Answer:
    """A task's result as it came back: ``payload`` is whatever the server replies with.

    ``sent_ns`` is the last block's stamp: what follows is the Dispatcher's egress.
    """

    payload: Any
    timings: tuple[HopTiming, ...]
    sent_ns: int


Outcome = Answer | BlockFlowError


class TaskEnd(NamedTuple):
    """How one task ended: on which plan, at which node of it, after which ``Entry.ingress_ns``."""

    task: str
    plan: Plan
    node: int
    outcome: Outcome
    ingress_ns: int


@dataclass(slots=True, eq=False)
class Entry:
    """One request in flight.

    Attributes:
        client, request_id: who asked, and under which name: together unique.
        ticket: its name towards the workers. Two clients may choose the same id, and what an
            earlier Dispatcher had sent out must not answer for this one's requests.
        tasks: names in the order asked.
        plan: the way of the present attempt; while ``waits_for`` is not empty that of the one
            before, or an outline when there was none.
        rows: of the input.
        deadline_ns, received_ns: of the monotonic clock.
        retained: the input as the server keeps it, for a re-run.
        charged: bytes that it occupies.
        digest: of tasks and input, where the client may send the request again; else empty.
        again: the client has sent it before, and what became of that is not known.
        attempt: which run of the path this is.
        ingress_ns: from the receipt until the input was on its way (the last time).
        open: the tasks of the present attempt; ``plan.ends`` are their end nodes.
        outcomes: end node of ``plan`` -> result or failure.
        kept: tasks that ended in an earlier attempt.
        lost: end nodes that cannot end in this attempt any more and shall be run again.
        waits_for: a worker of a block, :data:`QUARANTINE` or :data:`EDGE`; '' = it is under way.
        deaths: workers that died while they executed it.
    """

    client: bytes
    request_id: bytes
    ticket: bytes
    tasks: tuple[str, ...]
    plan: Plan
    rows: int
    deadline_ns: int
    received_ns: int
    retained: Any
    charged: int
    digest: bytes = b""
    again: bool = False
    attempt: int = 1
    ingress_ns: int = 0
    open: tuple[str, ...] = ()
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    kept: dict[str, TaskEnd] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    waits_for: str = ""
    deaths: int = 0

    def __post_init__(self) -> None:
        self.open = self.open or self.tasks

    def item(self, now_ns: int) -> Item:
        """What goes to the first stage, sent at ``now_ns``."""
        plan = self.plan
        left = max(0, (self.deadline_ns - now_ns) // 1_000_000)
        return Item(
            self.ticket,
            self.attempt,
            plan.epoch,
            plan.tree,
            0,
            self.rows,
            left,
            task=plan.share,
            alone=self.deaths > 0,
        )

    def open_ends(self) -> list[int]:
        """End nodes of the present attempt without an outcome."""
        return [e for e in dict.fromkeys(self.plan.ends) if e not in self.outcomes]

    def results(self) -> list[TaskEnd]:
        """How each task ended, in the order asked; complete when a Reply was instructed."""
        ended = self.ended()
        return [ended[task] for task in self.tasks] if self.kept else list(ended.values())

    def ended(self) -> dict[str, TaskEnd]:
        """The tasks that have an outcome by now."""
        found = dict(self.kept)
        for task, end in zip(self.open, self.plan.ends, strict=False):
            outcome = self.outcomes.get(end)
            if outcome is not None:
                found[task] = TaskEnd(task, self.plan, end, outcome, self.ingress_ns)
        return found

    def leave_plan(self) -> None:
        """End the present attempt: what has an outcome keeps it, the rest is for the next one."""
        self.kept = self.ended()
        self.open = tuple(t for t in self.open if t not in self.kept)
        self.outcomes = {}
        self.lost = set()

    def end(self, task: str, error: BlockFlowError) -> None:
        """An open task gets ``error``; the present attempt has been left."""
        self.kept[task] = TaskEnd(task, self.plan, -1, error, self.ingress_ns)
        self.open = tuple(t for t in self.open if t != task)

    def end_all(self, error: BlockFlowError) -> None:
        """Every task without an outcome gets ``error``; the present attempt has been left."""
        for task in self.open:
            self.end(task, error)


QUARANTINE = "another request under suspicion"
"""What an :class:`Entry` waits for that may have killed a worker: such are run one at a time."""

EDGE = "a slot of a worker on an opposed path"
"""What an :class:`Entry` waits for whose way goes back (:class:`EdgeBook`)."""

UNTIL_OTHERS_END = frozenset({QUARANTINE, EDGE})
"""These are given free by requests that end or leave an attempt."""


@record
class Reply:
    """Send the terminal reply: every task of ``entry`` has an outcome."""

    entry: Entry


@record
class SetOut:
    """Send the input of ``entry``, which has just been let in, on its way."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class SendAgain:
    """Send the retained input on the way of ``entry``'s new attempt."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Supersede:
    """An attempt was left: what is still queued of it anywhere is computed for nobody.

    ``ends`` are the end nodes of its ``plan`` that had no outcome.
    """

    ticket: bytes
    attempt: int
    plan: Plan
    ends: tuple[int, ...]


@record
class ReleaseInput:
    """The retained input of ``entry`` is not needed any more; its credit is free."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Drop:
    """Do nothing with what came; ``reason`` is a key of the table's ``dropped``."""

    reason: str


Instruction = Reply | SetOut | SendAgain | Supersede | ReleaseInput | Drop

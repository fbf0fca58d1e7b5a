"""InFlightTable: every admitted request until its one terminal reply. Pure.

Events go in, instructions come out; sockets, slots and the clock are the server's. What is late,
double, forged or from another life changes nothing and is counted.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.dispatcher.entry import (
    UNTIL_OTHERS_END,
    Answer,
    Drop,
    Entry,
    Instruction,
    ReleaseInput,
    Reply,
    SendAgain,
    Supersede,
)
from blockflow.dispatcher.plan import Planner
from blockflow.dispatcher.recovery import (
    DEADLY,
    Death,
    after,
    begun_once,
    lost,
    not_again,
    poisoned,
    starved,
    why_not_again,
)
from blockflow.dispatcher.register import Register
from blockflow.dispatcher.retry import RetryBudget

_DOUBT_NS = 5_000_000_000
"""A worker says that another one is gone; the proof of it comes within this long, or never."""


class _Doubt(NamedTuple):
    """A worker's word that ``ends`` are lost."""

    due_ns: int
    ticket: bytes
    attempt: int
    ends: frozenset[int]
    error: BlockFlowError
    not_begun: frozenset[int]


class InFlightTable(Register):
    """Who waits for what.

    Args:
        incarnation: of the Dispatcher; part of every ticket.
        planner: makes the plans of re-runs, and is told which requests are under way.
        budget: of re-runs.

    Attributes:
        dropped: what changed nothing, by reason.
        recovered: what became of requests whose worker died: ``rerun`` (attempts beyond the first),
            ``parked`` (how many of these had to wait), ``poisoned``, ``budget_denied``,
            ``attempts_spent`` (or no time left), ``not_replayable``.
    """

    def __init__(self, incarnation: int, planner: Planner, budget: RetryBudget) -> None:
        super().__init__(incarnation, planner)
        self._budget = budget
        self._doubts: deque[_Doubt] = deque()
        self._starved: set[bytes] = set()  # tickets at work when a worker died for want of memory
        self.dropped: Counter[str] = Counter()
        self.recovered: Counter[str] = Counter()

    def gauges(self) -> dict[str, int]:
        """Re-runs: what has happened, and what holds now."""
        names = ("rerun", "parked", "poisoned", "budget_denied", "attempts_spent", "not_replayable")
        return {
            **{name: self.recovered[name] for name in names},
            "parked_new": self._room.parked_new,
            "waiting": self.waiting,
            "suspects": self._room.suspects,
            "budget": self._budget.left(),
        }

    def next_deadline(self) -> int | None:
        """When :meth:`tick` has work next."""
        due = self.soonest_deadline()
        if self._doubts and (due is None or self._doubts[0].due_ns < due):
            return self._doubts[0].due_ns
        return due

    # --- events

    def expecting(self, ticket: bytes, attempt: int, hop: int, sender: int) -> Entry | Drop:
        """Is a result of node ``hop`` from incarnation ``sender`` wanted? Ask before copying it."""
        entry = self._current(ticket, attempt, hop)
        if isinstance(entry, Drop):
            return entry
        if hop not in entry.plan.ends:
            return self._drop("not_an_end")
        if entry.plan.incarnations[hop] != sender:
            return self._drop("wrong_sender")
        if hop in entry.outcomes:
            return self._drop("answered")
        return entry

    def outcome(
        self, ticket: bytes, attempt: int, hop: int, sender: int, answer: Answer
    ) -> list[Instruction]:
        """An end node's result has come."""
        entry = self.expecting(ticket, attempt, hop, sender)
        return [entry] if isinstance(entry, Drop) else self.answered(entry, hop, answer)

    def answered(self, entry: Entry, hop: int, answer: Answer) -> list[Instruction]:
        """The result is that of a request which :meth:`expecting` has just named."""
        entry.outcomes[hop] = answer
        return self._settle(entry)

    def failure(
        self,
        ticket: bytes,
        attempt: int,
        hop: int,
        sender: int,
        error: BlockFlowError,
        now_ns: int,
    ) -> list[Instruction]:
        """Node ``hop`` failed: so have all tasks below it that have no outcome yet.

        That another worker is lost is a rumour until it is proven dead, which decides; only if that
        proof does not come, the rumour does.
        """
        entry = self._current(ticket, attempt, hop)
        if isinstance(entry, Drop):
            return [entry]
        if sender not in entry.plan.lost_with:
            # The worker before may speak for a node that it could not reach; nobody else may.
            return [self._drop("wrong_sender")]
        ends = entry.plan.below[hop]
        not_begun = after(entry.plan.tree, hop)
        if sender != entry.plan.incarnations[hop]:
            not_begun.add(hop)
        if error.code == "WORKER_LOST":
            due = now_ns + _DOUBT_NS
            self._doubts.append(_Doubt(due, ticket, attempt, ends, error, frozenset(not_begun)))
            return []
        return self._fail(entry, ends, error, not_begun)

    def fail(self, entry: Entry, error: BlockFlowError) -> list[Instruction]:
        """The server could not send the input on its way: everything open fails."""
        if entry.ticket not in self._by_ticket:
            return []
        return self._fail(entry, entry.plan.ends, error, range(len(entry.plan.blocks)))

    def tick(self, now_ns: int) -> list[Instruction]:
        """Time has passed: what is due gets DEADLINE_EXCEEDED for its open tasks."""
        out: list[Instruction] = []
        while self._doubts and self._doubts[0].due_ns <= now_ns:
            doubt = self._doubts.popleft()
            entry = self._by_ticket.get(doubt.ticket)
            if entry is not None and entry.attempt == doubt.attempt:
                ends = doubt.ends - entry.lost
                out += self._fail(entry, ends, doubt.error, doubt.not_begun)
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            entry = self._by_ticket.get(heapq.heappop(self._deadlines)[1])
            if entry is None:  # it has ended
                continue
            budget = (entry.deadline_ns - entry.received_ns) // 1_000_000
            text = f"no result within {budget} ms"
            if entry.waits_for:
                died = "" if entry.plan.absent else "its worker died, and "
                text += f": {died}attempt {entry.attempt} waited for {entry.waits_for}"
            error = RequestError(
                "DEADLINE_EXCEEDED",
                text,
                where=entry.request_id.hex(),
                hint="allow more time, or send less at once",
            )
            out += self._fail(entry, entry.plan.ends, error)
        return out

    def cancel(self, client: bytes, request_id: bytes) -> list[Instruction]:
        """The client wants no answer any more; it still gets its one reply."""
        entry = self.named(client, request_id)
        if entry is None:
            return [self._drop("cancel_unknown")]
        error = RequestError("CANCELLED", "cancelled by the client", where=request_id.hex())
        return self._fail(entry, entry.plan.ends, error)

    def at_work(self, death: Death) -> list[Entry]:
        """The requests that a dead worker was executing, of those that are in flight."""
        return [e for t in death.at_work if (e := self._by_ticket.get(t)) is not None]

    def peer_gone(self, death: Death, now_ns: int) -> list[Instruction]:
        """A worker is dead: open tasks whose way leads through it are lost with it.

        Which of them it had done already is not known, so all count as lost: they are run again,
        or they end. What it was executing may be the cause.
        """
        self._planner.peer_gone(death.incarnation)
        blamed = self.at_work(death)
        for entry in blamed:
            entry.deaths += 1
        if death.starved:
            self._starved.update(e.ticket for e in blamed)
        out: list[Instruction] = []
        if len(death.at_work) == 1 and blamed and blamed[0].deaths >= DEADLY:
            innocent = blamed[0].ticket in self._starved
            self.recovered["attempts_spent" if innocent else "poisoned"] += 1
            error = (starved if innocent else poisoned)(blamed[0])
            out += self._fail(blamed[0], blamed[0].plan.ends, error)
        for entry in list(self._by_ticket.values()):
            if entry.waits_for or entry.ticket not in self._by_ticket:
                continue
            ends = entry.plan.lost_with.get(death.incarnation, frozenset())
            # What was lost before waits for its next attempt, which this death does not touch.
            open_ends = sorted(ends.difference(entry.outcomes, entry.lost))
            if open_ends:
                out += self._lost(entry, open_ends, death, now_ns)
        return out + self._advance(UNTIL_OTHERS_END)

    def published(self) -> list[Instruction]:
        """The planner has new routes: what waits for them goes on."""
        return self._advance()

    def client_gone(self, client: bytes) -> list[Instruction]:
        """Nobody waits for this client's requests any more: forget them, reply to none.

        Those that it may send again go on without a client, for their result to be remembered.
        """
        if not self._of_client.get(client):
            return []
        out: list[Instruction] = []
        for entry in [e for e in self._by_ticket.values() if e.client == client]:
            if entry.digest:
                self._detach(entry)
                entry.client = b""
            else:
                self._remove(entry)
                out.append(ReleaseInput(entry))
        return out + self._advance(UNTIL_OTHERS_END)

    def abort_all(self, error: BlockFlowError) -> list[Instruction]:
        """The Dispatcher ends: every request gets its reply now."""
        out: list[Instruction] = []
        for entry in list(self._by_ticket.values()):
            if entry.ticket in self._by_ticket:
                out += self._fail(entry, entry.plan.ends, error)
        return [i for i in out if not isinstance(i, SendAgain | Supersede)]

    # --- decisions

    def _lost(self, entry: Entry, ends: list[int], death: Death, now_ns: int) -> list[Instruction]:
        """What becomes of a request whose worker died: the one place that decides on a re-run."""
        refusal = why_not_again(entry, death, now_ns)
        not_begun = death.not_begun(entry)
        if refusal is not None:
            self.recovered["attempts_spent"] += 1
            return self._fail(entry, ends, refusal, not_begun)
        out: list[Instruction] = []
        once = {end: block for end in ends if (block := begun_once(entry, end, not_begun))}
        if once:
            self.recovered["not_replayable"] += 1
            text = f"block {next(iter(once.values()))!r} must not run twice, and may have begun"
            out += self._fail(entry, once, lost(entry, death.incarnation, text), not_begun)
            ends = [e for e in ends if e not in once]
        if not ends:
            return out
        if not entry.lost and not self._budget.take(self._count, now_ns):
            self.recovered["budget_denied"] += 1
            text = "too many requests are being run again"
            return out + self._fail(entry, ends, lost(entry, death.incarnation, text), not_begun)
        entry.lost.update(ends)
        return out + self._run_again(entry)

    def _run_again(self, entry: Entry) -> list[Instruction]:
        """Begin the next attempt, for all tasks that have no outcome.

        It waits for those that go on in this one, if they visit a block that must not run twice.
        """
        plan = entry.plan
        if plan.once:
            rest = [e for e in entry.open_ends() if e not in entry.lost]
            if any(not plan.once.isdisjoint(plan.lineage[e]) for e in rest):
                return []
        left = Supersede(entry.ticket, entry.attempt, plan, tuple(entry.open_ends()))
        self._arrived(plan)
        entry.leave_plan()
        entry.attempt += 1
        self.recovered["rerun"] += 1
        self._room.enter(entry)
        return [left, *self._proceed(entry)]

    def _proceed(self, entry: Entry) -> list[Instruction]:
        """Start the attempt of a request in the waiting room, if it can be."""
        waited = entry.waits_for
        for task, error in self._room.hopeless(entry).items():
            entry.end(task, error)
        if not entry.open:
            return self._finish(entry)
        found = self._room.next_plan(entry)
        if found is None:
            self.recovered["parked"] += not waited
            return []
        if isinstance(found, BlockFlowError):
            entry.end_all(found)
            return self._finish(entry)
        self._room.start(entry)
        entry.plan = found
        self._set_out(found)
        return [SendAgain(entry)]

    def _advance(self, waits_for: Collection[str] = ()) -> list[Instruction]:
        """Start what can be started of what waits (for one of these in particular)."""
        out: list[Instruction] = []
        for entry in list(self._room.waiting.values()):
            if not waits_for or entry.waits_for in waits_for:
                out += self._proceed(entry)
        return out

    def _fail(
        self,
        entry: Entry,
        ends: Iterable[int],
        error: BlockFlowError,
        not_begun: Collection[int] = (),
    ) -> list[Instruction]:
        """These tasks end with ``error``; ``not_begun`` are nodes that certainly have not."""
        if entry.waits_for:  # it is on no plan: everything open fails
            entry.end_all(error)
            return self._finish(entry)
        open_ends = [e for e in ends if e not in entry.outcomes]
        if not open_ends:
            return [self._drop("answered")]
        for end in open_ends:
            # What was lost and waits to be run again has not begun such a block.
            once = "" if end in entry.lost else begun_once(entry, end, not_begun)
            entry.outcomes[end] = not_again(error, once) if once and error.retryable else error
        return self._settle(entry)

    def _settle(self, entry: Entry) -> list[Instruction]:
        outcomes = entry.outcomes
        for end in entry.plan.ends:
            if end not in outcomes:
                if entry.lost and entry.lost.issuperset(entry.open_ends()):
                    return self._run_again(entry) + self._advance(UNTIL_OTHERS_END)
                return []
        return self._finish(entry)

    def _finish(self, entry: Entry) -> list[Instruction]:
        out: list[Instruction] = [Reply(entry), ReleaseInput(entry)]
        return out + self._advance(UNTIL_OTHERS_END) if self._remove(entry) else out

    def _current(self, ticket: bytes, attempt: int, hop: int) -> Entry | Drop:
        entry = self._by_ticket.get(ticket)
        if entry is None:
            return self._drop("unknown")
        if entry.attempt != attempt:
            return self._drop("old_attempt")
        if entry.waits_for:
            return self._drop("not_under_way")
        if not 0 <= hop < len(entry.plan.blocks):
            return self._drop("off_path")
        return entry

    def _remove(self, entry: Entry) -> bool:
        """It has ended. True when what waits may go on by this."""
        self._starved.discard(entry.ticket)
        self._strike_out(entry, under_way=entry.ticket not in self._room.waiting)
        return self._room.leave(entry)

    def _drop(self, reason: str) -> Drop:
        self.dropped[reason] += 1
        return Drop(reason)

"""InFlightTable: every admitted request until its one terminal reply. Pure.

Events go in, instructions come out; sockets, slots and the clock are the server's. What is late,
double, forged or from another life changes nothing and is counted.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.dispatcher.plan import Plan
from blockflow.wire.data import REQUEST_ID_BYTES, HopTiming, Item

_HEAP_SLACK = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """A task's result as it came back: ``payload`` is whatever the server replies with.

    ``sent_ns`` is the last block's stamp: what follows is the Dispatcher's egress.
    """

    payload: Any
    timings: tuple[HopTiming, ...]
    sent_ns: int


Outcome = Answer | BlockFlowError


@dataclass(slots=True, eq=False)
class Entry:
    """One request in flight.

    Attributes:
        client, request_id: who asked, and under which name: together unique.
        ticket: its name towards the workers. Two clients may choose the same id, and what an
            earlier Dispatcher had sent out must not answer for this one's requests.
        tasks: names in the order asked; ``plan.ends`` are their end nodes.
        rows: of the input.
        deadline_ns, received_ns: of the monotonic clock.
        retained: the input as the server keeps it, for a re-run.
        charged: bytes that it occupies.
        attempt: which run of the path this is.
        ingress_ns: from the receipt until the input was on its way.
        outcomes: end node -> result or failure.
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
    attempt: int = 1
    ingress_ns: int = 0
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def item(self, now_ns: int) -> Item:
        """What goes to the first stage, sent at ``now_ns``."""
        plan = self.plan
        left = max(0, (self.deadline_ns - now_ns) // 1_000_000)
        return Item(
            self.ticket, self.attempt, plan.epoch, plan.tree, 0, self.rows, left, task=plan.share
        )

    def results(self) -> list[tuple[str, int, Outcome]]:
        """(task, end node, outcome) in the order asked; complete when a Reply was instructed."""
        ends = zip(self.tasks, self.plan.ends, strict=True)
        return [(task, end, self.outcomes[end]) for task, end in ends]


@dataclass(frozen=True, slots=True)
class Reply:
    """Send the terminal reply: every task of ``entry`` has an outcome."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class ReleaseInput:
    """The retained input of ``entry`` is not needed any more; its credit is free."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Drop:
    """Do nothing with what came; ``reason`` is a key of :attr:`InFlightTable.dropped`."""

    reason: str


Instruction = Reply | ReleaseInput | Drop


class InFlightTable:
    """Who waits for what.

    Args:
        incarnation: of the Dispatcher; part of every ticket.
    """

    def __init__(self, incarnation: int) -> None:
        self._prefix = incarnation.to_bytes(REQUEST_ID_BYTES // 2, "big")
        self._count = 0
        self._by_ticket: dict[bytes, Entry] = {}
        self._by_id: dict[tuple[bytes, bytes], Entry] = {}
        self._of_client: Counter[bytes] = Counter()
        self._rows: Counter[str] = Counter()
        self._versions: Counter[int] = Counter()
        self._deadlines: list[tuple[int, bytes]] = []
        self.charged = 0
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_ticket)

    def rows_of(self, task: str) -> int:
        """Rows of one task in flight."""
        return self._rows[task]

    def of_client(self, client: bytes) -> int:
        """Requests that this client has in flight."""
        return self._of_client.get(client, 0)

    def check_new(self, client: bytes, request_id: bytes) -> None:
        """Raises RequestError DUPLICATE_REQUEST when this client has the id in flight."""
        if (client, request_id) in self._by_id:
            raise RequestError(
                "DUPLICATE_REQUEST",
                f"request {request_id.hex()} is in flight",
                where=request_id.hex(),
                hint="the running one is not touched; choose another id",
            )

    def oldest_version(self) -> int | None:
        """Lowest route version of a request in flight; None when there is none."""
        return min(self._versions) if self._versions else None

    def next_deadline(self) -> int | None:
        """When :meth:`tick` has work next."""
        heap = self._deadlines
        while heap and heap[0][1] not in self._by_ticket:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    # --- events

    def admit(
        self,
        client: bytes,
        request_id: bytes,
        tasks: tuple[str, ...],
        plan: Plan,
        *,
        rows: int,
        deadline_ns: int,
        received_ns: int,
        retained: Any,
        charged: int,
    ) -> Entry:
        """A request enters; from here on it gets exactly one reply.

        Raises:
            RequestError: DUPLICATE_REQUEST.
        """
        self.check_new(client, request_id)
        self._count += 1
        ticket = self._prefix + self._count.to_bytes(REQUEST_ID_BYTES - len(self._prefix), "big")
        entry = Entry(
            client,
            request_id,
            ticket,
            tasks,
            plan,
            rows,
            deadline_ns,
            received_ns,
            retained,
            charged,
        )
        self._by_ticket[ticket] = entry
        self._by_id[client, request_id] = entry
        self._of_client[client] += 1
        for task in tasks:
            self._rows[task] += rows
        self._versions[plan.version] += 1
        self.charged += charged
        heapq.heappush(self._deadlines, (deadline_ns, ticket))
        if len(self._deadlines) > 2 * len(self._by_ticket) + _HEAP_SLACK:
            # Most requests end long before their deadline: their places must not pile up.
            self._deadlines = [d for d in self._deadlines if d[1] in self._by_ticket]
            heapq.heapify(self._deadlines)
        return entry

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
        if isinstance(entry, Drop):
            return [entry]
        entry.outcomes[hop] = answer
        return self._settle(entry)

    def failure(
        self, ticket: bytes, attempt: int, hop: int, sender: int, error: BlockFlowError
    ) -> list[Instruction]:
        """Node ``hop`` failed: so have all tasks below it that have no outcome yet."""
        entry = self._current(ticket, attempt, hop)
        if isinstance(entry, Drop):
            return [entry]
        if sender not in entry.plan.lost_with:
            # The worker before may speak for a node that it could not reach; nobody else may.
            return [self._drop("wrong_sender")]
        return self._fail(entry, entry.plan.below[hop], error)

    def fail(self, entry: Entry, error: BlockFlowError) -> list[Instruction]:
        """The server could not send the input on its way: everything open fails."""
        if entry.ticket not in self._by_ticket:
            return []
        return self._fail(entry, entry.plan.ends, error)

    def tick(self, now_ns: int) -> list[Instruction]:
        """Time has passed: what is due gets DEADLINE_EXCEEDED for its open tasks."""
        out: list[Instruction] = []
        while (due := self.next_deadline()) is not None and due <= now_ns:
            entry = self._by_ticket[heapq.heappop(self._deadlines)[1]]
            budget = (entry.deadline_ns - entry.received_ns) // 1_000_000
            error = RequestError(
                "DEADLINE_EXCEEDED",
                f"no result within {budget} ms",
                where=entry.request_id.hex(),
                hint="allow more time, or send less at once",
            )
            out += self._fail(entry, entry.plan.ends, error)
        return out

    def cancel(self, client: bytes, request_id: bytes) -> list[Instruction]:
        """The client wants no answer any more; it still gets its one reply."""
        entry = self._by_id.get((client, request_id))
        if entry is None:
            return [self._drop("cancel_unknown")]
        error = RequestError("CANCELLED", "cancelled by the client", where=request_id.hex())
        return self._fail(entry, entry.plan.ends, error)

    def peer_gone(self, incarnation: int) -> list[Instruction]:
        """A worker is dead: open tasks whose way leads through it are lost with it.

        Which of them it had done already is not known, so all count as lost.
        """
        out: list[Instruction] = []
        for entry in list(self._by_ticket.values()):
            lost = entry.plan.lost_with.get(incarnation)
            if lost is not None and not lost.issubset(entry.outcomes):
                out += self._lost(entry, lost, incarnation)
        return out

    def client_gone(self, client: bytes) -> list[Instruction]:
        """Nobody waits for this client's requests any more: forget them, reply to none."""
        if not self._of_client.get(client):
            return []
        mine = [e for e in self._by_ticket.values() if e.client == client]
        for entry in mine:
            self._remove(entry)
        return [ReleaseInput(e) for e in mine]

    def abort_all(self, error: BlockFlowError) -> list[Instruction]:
        """The Dispatcher ends: every request gets its reply now."""
        out: list[Instruction] = []
        for entry in list(self._by_ticket.values()):
            out += self._fail(entry, entry.plan.ends, error)
        return out

    # --- decisions

    def _lost(self, entry: Entry, ends: Iterable[int], incarnation: int) -> list[Instruction]:
        """What becomes of a request whose worker died: the one place that decides on a re-run."""
        workers = {
            block
            for block, inc in zip(entry.plan.blocks, entry.plan.incarnations, strict=True)
            if inc == incarnation
        }
        error = RequestError(
            "WORKER_LOST",
            f"the worker of {', '.join(sorted(workers))} died with the request",
            where=entry.request_id.hex(),
            hint="send it again",
        )
        return self._fail(entry, ends, error)

    def _fail(self, entry: Entry, ends: Iterable[int], error: BlockFlowError) -> list[Instruction]:
        open_ends = [e for e in ends if e not in entry.outcomes]
        if not open_ends:
            return [self._drop("answered")]
        for end in open_ends:
            entry.outcomes[end] = error
        return self._settle(entry)

    def _settle(self, entry: Entry) -> list[Instruction]:
        outcomes = entry.outcomes
        for end in entry.plan.ends:
            if end not in outcomes:
                return []
        self._remove(entry)
        return [Reply(entry), ReleaseInput(entry)]

    def _current(self, ticket: bytes, attempt: int, hop: int) -> Entry | Drop:
        entry = self._by_ticket.get(ticket)
        if entry is None:
            return self._drop("unknown")
        if entry.attempt != attempt:
            return self._drop("old_attempt")
        if not 0 <= hop < len(entry.plan.blocks):
            return self._drop("off_path")
        return entry

    def _remove(self, entry: Entry) -> None:
        del self._by_ticket[entry.ticket]
        del self._by_id[entry.client, entry.request_id]
        self.charged -= entry.charged
        _count_down(self._of_client, entry.client)
        for task in entry.tasks:
            _count_down(self._rows, task, entry.rows)
        _count_down(self._versions, entry.plan.version)

    def _drop(self, reason: str) -> Drop:
        self.dropped[reason] += 1
        return Drop(reason)


def _count_down(counter: Counter[Any], key: Any, by: int = 1) -> None:
    left = counter[key] - by
    if left:
        counter[key] = left
    else:
        del counter[key]

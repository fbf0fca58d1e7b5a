"""Scheduler: the worker's waiting tickets and the policies that choose among them. Pure.

Events come in with ``now``; batches to run and tickets that have expired come out. All stages of a
worker share its lanes, so the scheduler asks its policies in turn. It knows which stages run a
batch at the moment, whichever policy has asked for it, and gives out no other one for them; of the
:class:`Trunk`, where engine and policy are made for it, as many as there are lanes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence, Set
from typing import Any

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import ELSEWHERE, Policy, Query, Run, WaitUntil
from blockflow.batching.registry import alike, create_policy
from blockflow.batching.rules import broken_rule
from blockflow.batching.shares import TaskShare
from blockflow.core.routing import PathTree
from blockflow.wire.data import Item
from blockflow.worker.ticket import Batch, Ticket
from blockflow.worker.trunk import Trunk

_PATHS_KEPT = 4096
_HEAP_SLACK = 256
_WORDS = "policies decide and do not raise"

_Place = tuple[tuple[int, ...], bool, tuple[tuple[int, ...], ...]]
"""About a node of a path: the stages that follow it under the same policy, in the worker's order;
whether the one before is this policy's, too; and the :meth:`~PathTree.ways` from there on."""


class PolicyDefect(RuntimeError):
    """A policy does what no policy may: nothing that it says can be relied on any more.

    ``rule`` is the one that it breaks.
    """

    def __init__(self, policy: Policy, rule: str, what: str) -> None:
        name = getattr(policy, "NAME", type(policy).__name__)  # a defect may be that it has none
        super().__init__(f"policy {name!r} {what}")
        self.rule = rule


def _raised(policy: Policy, exc: Exception) -> PolicyDefect:
    return PolicyDefect(policy, _WORDS, f"raised {type(exc).__name__}: {exc}"[:500])


class Scheduler:
    """Stages that have the same policy share one instance of it, which may then look across them.

    Args:
        policies: stage -> policy with options, in the order of the worker's blocks.
        facts: what the policies may know of the stages (limits, profiles).
        shares: of the tasks, by the index that tickets carry.
        lanes: as of the attribute.
        widths: stage -> batches that its engines can compute at once; 1 by default.

    Attributes:
        lanes: how many batches the worker computes at once, which policies may want to know.
        all_rows: that wait at all stages together.

    Raises:
        TopologyError: an unknown policy or bad options.
    """

    def __init__(
        self,
        policies: Mapping[int, Mapping[str, Any]],
        facts: Mapping[int, StageFacts] | None = None,
        shares: Sequence[TaskShare] = (),
        lanes: int = 1,
        widths: Callable[[int], int] = lambda _: 1,
    ) -> None:
        self.lanes = lanes
        self._widths = widths
        self._facts = dict(facts or {})
        self._shares = tuple(shares)
        self._places: dict[tuple[bytes, int], _Place] = {}
        self._specs: dict[int, dict[str, Any]] = {s: dict(p) for s, p in policies.items()}
        self._by_stage: dict[int, Policy] = {}
        self._policies: list[Policy] = []
        self._turn = 0
        self._spent: list[int] = []
        self._reached = 0
        self._running: dict[int, int] = {}  # stage -> batches
        self._trunk = Trunk(policies)
        self._alone: dict[int, int] = {}  # key -> stage, in order of arrival
        self._lone: set[int] = set()  # stages that run one of them
        self._tickets: dict[int, Ticket] = {}
        self._deadlines: list[tuple[int, int]] = []
        self._queued: dict[int, int] = dict.fromkeys(policies, 0)
        self._rows: dict[int, int] = dict.fromkeys(policies, 0)
        self.all_rows = 0
        self._regroup(self._specs, self._facts)

    def __len__(self) -> int:
        """Waiting tickets."""
        return len(self._tickets)

    @property
    def facts(self) -> Mapping[int, StageFacts]:
        """What the policies may know of the stages."""
        return self._facts

    @property
    def busy(self) -> Set[int]:
        """Stages with as many batches that were given out and are not done as may be."""
        return self._lone.union(s for s, n in self._running.items() if n >= self.width(s))

    def width(self, stage: int) -> int:
        """How many batches of ``stage`` may run at once."""
        if self.lanes == 1 or stage not in self._trunk:
            return 1
        if not self._by_stage[stage].SIDE_BY_SIDE:
            return 1
        return min(self.lanes, self._widths(stage))

    def queued(self, stage: int) -> int:
        return self._queued[stage]

    def queued_rows(self, stage: int) -> int:
        """Rows that wait at one stage."""
        return self._rows[stage]

    def waiting(self) -> Iterable[Ticket]:
        """All waiting tickets, the last to arrive first."""
        return reversed(self._tickets.values())

    def arrive(self, ticket: Ticket, now: int) -> None:
        """``ticket`` waits at its stage; ``ticket.ready_ns`` has been set."""
        self._tickets[ticket.key] = ticket
        heapq.heappush(self._deadlines, (ticket.deadline_ns, ticket.key))
        spare = len(self._deadlines) - _HEAP_SLACK
        if spare > 0 and spare > 2 * len(self._tickets):
            # What has run would keep its place until its deadline.
            self._deadlines = sorted((t.deadline_ns, k) for k, t in self._tickets.items())
        self._count(ticket, 1)
        if ticket.arrival_ns == ticket.received_ns:
            self._trunk.note(ticket.item.path, ticket.item.hop)
        self._tell_policy(ticket, now)

    def _tell_policy(self, ticket: Ticket, now: int) -> None:
        """A policy batches: it hears nothing of tickets that are to run alone."""
        if ticket.apart or ticket.item.alone:
            self._alone[ticket.key] = ticket.stage
        else:
            policy = self._by_stage[ticket.stage]
            if len(self._policies) > 1 and sum([self._queued[s] for s in policy.stages]) == 1:
                at = self._policies.index(policy)  # who was away has saved nothing up
                self._spent[at] = max(self._spent[at], self._reached)
            try:
                policy.arrive(self._query(ticket), now)
            except Exception as exc:
                raise _raised(policy, exc) from exc

    def expire(self, now: int) -> list[Ticket]:
        """Take away every ticket whose deadline has passed."""
        gone: list[Ticket] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            # A key is there once for each stage at which it has waited, with one deadline.
            ticket = self._tickets.get(heapq.heappop(self._deadlines)[1])
            if ticket is not None:
                gone.append(self._take_out(ticket, now))
        return gone

    def withdraw(self, withdrawn: Container[Item], now: int) -> list[Ticket]:
        """Take away every ticket whose item is ``withdrawn``."""
        gone = [t for t in self._tickets.values() if t.item in withdrawn]
        return [self._take_out(t, now) for t in gone]

    def _take_out(self, ticket: Ticket, now: int) -> Ticket:
        """It waits no more, and will not run."""
        self._remove(ticket)
        if not (ticket.apart or ticket.item.alone):
            policy = self._by_stage[ticket.stage]
            try:
                policy.drop(ticket.key, now)
            except Exception as exc:
                raise _raised(policy, exc) from exc
        return ticket

    def next_deadline(self) -> int | None:
        """When :meth:`expire` will have something to do at the earliest."""
        heap = self._deadlines
        while heap and heap[0][1] not in self._tickets:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def decide(self, now: int) -> Batch | WaitUntil | None:
        """The next batch, or when to ask again at the latest (None: once something happened).

        Its stage computes it until :meth:`done`.
        """
        full: Collection[int] = ()
        running: Collection[int] = ()
        if self._alone:
            for key, stage in self._alone.items():
                if stage not in self._running:
                    batch = self._take(Run(stage, (key,)))
                    batch.alone = True
                    self._lone.add(stage)
                    return batch
        if self._running:
            # Where somebody waits to run alone nothing more starts beside what runs: with several
            # lanes there is always something, and his turn would never come.
            full = self.busy | set(self._alone.values())
            running = [stage for stage, count in self._running.items() for _ in range(count)]
        soonest: int | None = None
        for i in self._order() if len(self._policies) > 1 else (0,):
            policy = self._policies[i]
            policy.lanes = self.lanes
            busy = full if policy.SIDE_BY_SIDE else running
            try:
                decision: object = policy.decide(now, busy)
            except Exception as exc:
                raise _raised(policy, exc) from exc
            if decision is None:
                continue
            if isinstance(decision, Run):
                self._turn = (i + 1) % len(self._policies)
                if self._spent[i] > self._reached:
                    self._reached = self._spent[i]
                # What a policy asks for must be its own to give.
                broken = broken_rule(policy, decision, busy, self._tickets, self._alone)
                if broken is not None:
                    raise PolicyDefect(policy, *broken)
                return self._take(decision)
            if not isinstance(decision, WaitUntil):
                kind = type(decision).__name__
                raise PolicyDefect(policy, _WORDS, f"decides {kind}, not Run, WaitUntil or None")
            if soonest is None or decision.at_ns < soonest:
                soonest = decision.at_ns
        return None if soonest is None else WaitUntil(soonest)

    def _order(self) -> Sequence[int]:
        """The policies by the time that their batches have had, as fair as between tasks."""
        count = len(self._policies)
        return sorted(range(count), key=lambda i: (self._spent[i], (i - self._turn) % count))

    def done(self, batch: Batch, now: int) -> None:
        """``batch`` has run (or was given up). Local successors arrive after this."""
        others = self._running.pop(batch.stage, 1) - 1
        if others:
            self._running[batch.stage] = others
        if batch.alone:
            self._lone.discard(batch.stage)
            return
        policy = self._by_stage[batch.stage]
        if batch.started_ns and batch.tickets:
            took = now - batch.started_ns
            policy.costs_of_rows.measured(batch.stage, batch.rows, took)
            self._spent[self._policies.index(policy)] += took
        try:
            policy.done(batch.stage, batch.keys, now)
        except Exception as exc:
            raise _raised(policy, exc) from exc

    def take_all(self) -> list[Ticket]:
        """Take away every waiting ticket (termination)."""
        tickets = list(self._tickets.values())
        for ticket in tickets:
            self._remove(ticket)
        self._regroup(self._specs, self._facts)
        return tickets

    def policy(self, stage: int) -> Mapping[str, Any]:
        """The policy in force at ``stage``, with its options."""
        return self._specs[stage]

    def set_policy(
        self, stage: int, spec: Mapping[str, Any], now: int, facts: StageFacts | None = None
    ) -> None:
        """Give ``stage`` another policy; what waits is handed over, nothing is lost.

        Args:
            stage: of this worker.
            spec: the policy with its options.
            now: the time.
            facts: what it may know of the stage from now on; None = what it knew before.

        Raises:
            TopologyError: the policy or its options are invalid, or cannot work with these facts;
                policy and facts stay as they were.
            PolicyDefect: it does not take what waits; the same.
        """
        known = self._facts if facts is None else {**self._facts, stage: facts}
        if self._specs[stage] == spec and known == self._facts:
            return  # a new instance would have forgotten what the old one has learned
        before = self._specs, self._facts, self._policies, self._by_stage
        turns = self._spent, self._reached, self._turn
        self._regroup({**self._specs, stage: dict(spec)}, known)
        try:
            self._hand_over(now)
        except PolicyDefect:
            # Those before still have in their books what waits. The new one may have half of it.
            self._specs, self._facts, self._policies, self._by_stage = before
            self._spent, self._reached, self._turn = turns
            self._places.clear()
            raise

    def _hand_over(self, now: int) -> None:
        for ticket in sorted(self._tickets.values(), key=lambda t: (t.arrival_ns, t.key)):
            self._tell_policy(ticket, now)

    def set_shares(self, shares: Sequence[TaskShare], now: int) -> None:
        """The tasks have changed, perhaps, and this is what they may claim from now on; what waits
        is handed over, nothing is lost."""
        self._trunk.forget()  # other tasks may have the same shares
        if tuple(shares) == self._shares:
            return
        self._shares = tuple(shares)
        self._regroup(self._specs, self._facts)
        self._hand_over(now)

    # --- books -----------------------------------------------------------------------------------

    def _regroup(
        self, specs: Mapping[int, dict[str, Any]], facts: Mapping[int, StageFacts]
    ) -> None:
        policies = [
            create_policy(spec, members, facts, self._shares)
            for members, spec in alike(specs.items())
        ]
        self._specs, self._facts = dict(specs), dict(facts)
        self._policies = policies
        self._by_stage = {stage: p for p in policies for stage in p.stages}
        self._places.clear()
        self._turn = self._reached = 0
        self._spent = [0] * len(policies)

    def _take(self, run: Run) -> Batch:
        tickets = []
        for key in run.keys:
            ticket = self._tickets[key]
            self._remove(ticket)
            tickets.append(ticket)
        self._running[run.stage] = self._running.get(run.stage, 0) + 1
        if len(tickets) > 1:
            # Rows that go the same way next lie side by side in the output: one message for them.
            # So do those of one length in a padded batch, and those that go the same way later: the
            # blocks up to there need not put them together.
            ways = {t.key: self._known(t)[2] for t in tickets}
            tickets.sort(key=lambda t: (ways[t.key][:1], t.shape, ways[t.key]))
        return Batch(run.stage, tuple(tickets), pad_to=run.pad_to, keys=run.keys)

    def _remove(self, ticket: Ticket) -> None:
        del self._tickets[ticket.key]
        if self._alone:
            self._alone.pop(ticket.key, None)
        self._count(ticket, -1)

    def _count(self, ticket: Ticket, sign: int) -> None:
        stage, rows = ticket.stage, sign * ticket.item.rows
        self._queued[stage] += sign
        self._rows[stage] += rows
        self.all_rows += rows

    def _query(self, ticket: Ticket) -> Query:
        item = ticket.item
        ahead, continues, _ = self._known(ticket)
        return Query(
            ticket.key,
            ticket.stage,
            item.rows,
            ticket.arrival_ns,
            ticket.ready_ns,
            ticket.deadline_ns,
            ticket.shape,
            ticket.arrival_ns == ticket.received_ns,
            ticket.task,
            ahead,
            ticket.origin if continues else ELSEWHERE,
        )

    def _known(self, ticket: Ticket) -> _Place:
        path, hop = ticket.item.path, ticket.item.hop
        return self._places.get((path.wire, hop)) or self._place(path, hop)

    def _place(self, path: PathTree, hop: int) -> _Place:
        policy = self._by_stage[path.nodes[hop].stage]
        below: set[int] = set()
        todo = [hop]
        while todo:
            for child in path.children(todo.pop()):
                stage = path.nodes[child].stage
                if self._by_stage.get(stage) is policy:
                    below.add(stage)
                    todo.append(child)
        parent = path.nodes[hop].parent
        continues = parent >= 0 and self._by_stage.get(path.nodes[parent].stage) is policy
        if len(self._places) >= _PATHS_KEPT:
            self._places.clear()
        place = tuple(s for s in policy.stages if s in below), continues, path.ways(hop)
        self._places[path.wire, hop] = place
        return place

"""SimWorker: a worker process under virtual time, around the real Scheduler and its policies.

It does what :class:`blockflow.worker.executor.Executor` does, in the same order: as many forwards
at once as it has lanes, a slot for every output that leaves, a stall without one, expiry before
every decision. Where nothing ends, what comes at one instant is taken in before the next decision.
Parting an output by next hop is the worker's own code.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from blockflow.batching.facts import length_of
from blockflow.batching.policy import WaitUntil
from blockflow.bench.simulation.loop import EventLoop
from blockflow.bench.simulation.request import Request
from blockflow.bench.simulation.service import Service
from blockflow.bench.simulation.slots import Hold, Lease
from blockflow.bench.simulation.system import WorkerModel
from blockflow.bench.simulation.watch import InvariantBroken
from blockflow.core.routing import PathTree
from blockflow.wire.data import REQUEST_ID_BYTES, Item
from blockflow.worker.executor import INBOX_ROWS
from blockflow.worker.parting import plan_parts
from blockflow.worker.scheduler import PolicyDefect, Scheduler
from blockflow.worker.ticket import Batch, Source, Ticket

if TYPE_CHECKING:
    from blockflow.bench.simulation.simulator import Simulator
    from blockflow.bench.simulation.watch import Watch

STALL_NS = 1_000_000
"""Releases wake nobody: a stalled worker looks for a slot this often."""


Message = tuple[Sequence[tuple[Request, int]], Lease | None]
"""Queries with the path node that receives each, and the slot that their rows lie in."""


class SimWorker:
    """One replica of a worker.

    Args:
        numbers: stage numbers, in the order of the model's stages.
        services: forward times, per stage number.
        loop: the clock.
        watch: is told everything; None = nobody looks.

    Attributes:
        batches: rows of a batch -> how many, per stage number.
        lanes: how many forwards it computes at once.
        readers: stages elsewhere that outputs have gone to.
        busy_ns: time with a forward under way, the sum over all lanes.
        last_end_ns: when the last forward so far has ended.
        stalls: batches that had to wait for a slot.
        most_slots: most slots out at once.
        wait_until: when the policies want to be asked again; None = when something happens.
    """

    def __init__(
        self,
        name: str,
        model: WorkerModel,
        numbers: Sequence[int],
        services: Mapping[int, Service],
        simulator: Simulator,
        loop: EventLoop,
        watch: Watch | None,
    ) -> None:
        self.name = name
        self.model = model
        self.stages = dict(zip(numbers, model.stages, strict=True))
        self.scheduler = Scheduler(
            {n: dict(s.policy) for n, s in self.stages.items()},
            {n: s.facts(model.threads) for n, s in self.stages.items()},
            simulator.shares,
            model.lanes,
            lambda n: model.lanes if self.stages[n].side_by_side else 1,
        )
        self.slots_out = 0
        self.most_slots = 0
        self.stalls = 0
        self.busy_ns = 0
        self.last_end_ns = 0
        self.batches: dict[int, Counter[int]] = {n: Counter() for n in numbers}
        self.requests: dict[int, Request] = {}
        self.lanes = model.lanes
        self.running: list[Batch] = []
        self.readers: set[int] = set()
        self.stalled: Batch | None = None
        self._stalled_at = 0
        self._backlog: deque[Message] = deque()
        self._local = frozenset(numbers)
        self._variable = frozenset(n for n, s in self.stages.items() if s.lengths(model.threads))
        self._items: dict[tuple[int, int, int], Item] = {}
        self._leaving: set[int] = set()  # ids of those whose output leaves this worker
        self._holds: dict[Hold, None] = {}
        self._borrowed: dict[SimWorker, dict[Hold, None]] = {}
        self._services = services
        self._simulator = simulator
        self._loop = loop
        self._watch = watch
        self._turn_ns = simulator.turn_ns
        self._stepping = False
        self._armed: int | None = None
        self.wait_until: int | None = None

    # --- what happens to it ----------------------------------------------------------------------

    def receive(self, now: int, message: Message) -> None:
        """A message has come. A full inbox leaves it in the socket."""
        if self._backlog or self.scheduler.all_rows >= INBOX_ROWS:
            self._backlog.append(message)
            return
        self._take(now, message)
        if len(self.running) >= self.lanes:
            self._arm_for_what_is_due()
        elif not self._stepping:
            self._stepping = True
            self._loop.plan_last(self._step)

    def goes_on(self, ticket: Ticket) -> bool:
        """The ticket's path goes on in this worker after the stage that it is at."""
        path, hop = ticket.item.path, ticket.item.hop
        return any(path.nodes[c].stage in self._local for c in path.children(hop))

    def slot_freed(self) -> None:
        """A slot is free again; noticed at the next look if one is missing."""
        self.slots_out -= 1
        now = self._loop.now
        if self._watch is not None:
            self._watch.slots(self, now)
        if self.stalled is not None:
            looks = max(1, -(-(now - self._stalled_at) // STALL_NS))
            self._arm(self._stalled_at + looks * STALL_NS)

    def _step(self, now: int, _: object = None) -> None:
        """Expire what is too late, start what can be started."""
        self._stepping = False
        while True:
            for ticket in self.scheduler.expire(now):
                self._expired(ticket, now)
            self.wait_until = None
            if self.stalled is not None and len(self.running) < self.lanes:
                self._start(self.stalled, now)
            while self.stalled is None and len(self.running) < self.lanes:
                if not self._decide(now):
                    break
            if not self._backlog or self.scheduler.all_rows >= INBOX_ROWS:
                break
            self._take(now, self._backlog.popleft())
        if self._watch is not None:
            self._watch.rested(self, now)
        self._arm_for_what_is_due()

    # --- steps -----------------------------------------------------------------------------------

    def _take(self, now: int, message: Message) -> None:
        members, lease = message
        taken = []
        for request, hop in members:
            if (plan := request.plan) is None:
                raise InvariantBroken("way", now, f"{request} travels without a plan")
            taken.append((request, plan.tree, hop, self._length(request, plan.tree, hop)))
        owner = None if lease is None else lease.owner
        hold = None if lease is None or owner is None else self._borrow(lease, owner)
        sources = _sources([length for *_, length in taken], hold or lease)
        if hold is not None:
            hold.sources = tuple(sources.values())
        for request, tree, hop, length in taken:
            self.requests[request.number] = request
            item = self._item(tree, hop, request.rows)
            deadline, task = request.deadline_ns, self._simulator.task_index[request.task]
            ticket = _ticket(request.number, item, sources[length], task, now, now, deadline)
            self._queue(ticket, now)
        if owner is not None:
            self._share(owner)

    def _borrow(self, lease: Lease, owner: SimWorker) -> Hold:
        borrowed = self._borrowed.setdefault(owner, {})
        hold = Hold(lease, borrowed.pop)
        borrowed[hold] = None
        return hold

    def _share(self, owner: SimWorker) -> None:
        """As :meth:`blockflow.worker.backlog.Backlog.share`, with memory for all copies."""
        borrowed = self._borrowed[owner]
        if len(owner.readers) < 2 or owner.slots_out + len(borrowed) <= owner.model.slots:
            return
        read = self._read(() if self.stalled is None else (self.stalled,))
        for hold in reversed(list(borrowed)):
            if owner.slots_out + len(borrowed) <= owner.model.slots:
                return
            if read.isdisjoint(map(id, hold.sources)):
                hold.release()

    def _read(self, more: Sequence[Batch] = ()) -> set[int]:
        """Ids of the sources that are being computed, and of those of ``more``."""
        return {id(t.source) for b in (*self.running, *more) for t in b.tickets}

    def _length(self, request: Request, tree: PathTree, hop: int) -> int | None:
        """The length of what a query brings to a stage; None where the stage's dims are fixed, be
        it behind one whose are not."""
        if request.length is None or tree.nodes[hop].stage not in self._variable:
            return None
        block = self.stages[tree.nodes[hop].stage].block
        return length_of(self._simulator.taken[request.task, block], request.length)

    def _queue(self, ticket: Ticket, now: int) -> None:
        if self._watch is not None:
            self._watch.queued(self, ticket, now)
        self.scheduler.arrive(ticket, now)

    def _decide(self, now: int) -> bool:
        """Ask the policies once; True when they have named a batch."""
        try:
            decision = self.scheduler.decide(now)
        except PolicyDefect as exc:
            raise InvariantBroken(exc.rule, now, f"{self.name}: {exc}") from exc
        if isinstance(decision, Batch):
            if self._watch is not None:
                self._watch.chosen(self, decision, now)
            self._start(decision, now)
            return True
        if isinstance(decision, WaitUntil):
            if decision.at_ns <= now:
                raise InvariantBroken(
                    "waits end later", now, f"{self.name}: told to wait until {decision.at_ns}"
                )
            self.wait_until = decision.at_ns
        return False

    def _start(self, batch: Batch, now: int) -> None:
        was_stalled, self.stalled = self.stalled is batch, None
        late = [t for t in batch.tickets if t.deadline_ns <= now]
        if late:
            for ticket in late:
                self._expired(ticket, now)
            batch.keep(tuple(t for t in batch.tickets if t.deadline_ns > now))
            if not batch.tickets:
                self.scheduler.done(batch, now)
                return
        leaving = self._leaving
        leaves = any(id(t.item) in leaving for t in batch.tickets)
        if leaves and self.slots_out >= self.model.slots:
            self.stalled = batch
            if not was_stalled:
                self._stalled_at = now
                self.stalls += 1
            self._detach()
            return
        if leaves:
            self.slots_out += 1
            self.most_slots = max(self.most_slots, self.slots_out)
        batch.started_ns = now
        self.running.append(batch)
        rows = batch.rows
        self.batches[batch.stage][rows] += 1
        if self._watch is not None:
            self._watch.started(self, batch, now)
            self._watch.slots(self, now)
        shape = batch.pad_to or batch.tickets[0].source.shape
        work = self._services[batch.stage].draw(rows, shape[0] if shape else None)
        self._loop.compute(now, work, self.model.threads, self._turn_ns, self._deliver, batch)

    def _detach(self) -> None:
        """What waits here may itself hold the slots, and would wait for ever: it is copied. What is
        being computed is read in another lane, and lets go by itself."""
        read = self._read()
        for hold in [h for h in self._holds if read.isdisjoint(map(id, h.sources))]:
            hold.release()

    def _item(self, tree: PathTree, hop: int, rows: int) -> Item:
        """Items differ in nothing that a policy sees but these, so equal ones are shared."""
        item = self._items.get((id(tree), hop, rows))
        if item is None:
            item = Item(bytes(REQUEST_ID_BYTES), 1, 1, tree, hop, rows, 0)
            self._items[(id(tree), hop, rows)] = item
            nexts = [tree.nodes[c].stage for c in tree.children(hop)]
            if tree.nodes[hop].terminal or not self._local.issuperset(nexts):
                self._leaving.add(id(item))
        return item

    def _deliver(self, now: int, batch: Batch) -> None:
        self.running.remove(batch)
        batch.compute_to_ns = now - self._turn_ns
        compute = batch.compute_to_ns - batch.started_ns
        self.busy_ns += compute
        self.last_end_ns = batch.compute_to_ns
        requests = self.requests
        for ticket in batch.tickets:
            request = requests[ticket.key]
            request.wait_ns += batch.started_ns - ticket.ready_ns
            request.compute_ns += compute
            ticket.source.release()
        if self._watch is not None:
            self._watch.ended(self, batch, now)
        self.scheduler.done(batch, now)
        parts, stays = plan_parts(batch, self._local)
        lengths = [self._length(requests[t.key], t.item.path, hop) for t, hop, _ in stays]
        lease = Lease(len(parts) + bool(stays), self.slot_freed, self) if parts else None
        self.readers.update([part.stage for part in parts])
        for part in parts:
            members = [(requests.pop(t.key), hop) for t, hop in part.members]
            self._simulator.send(part.stage, members, lease, now)
        if stays:
            sources = self._hold(lengths, lease)
            for (ticket, hop, _), length in zip(stays, lengths, strict=True):
                item = self._item(ticket.item.path, hop, ticket.item.rows)
                came, deadline = ticket.arrival_ns, ticket.deadline_ns
                self._queue(
                    _ticket(ticket.key, item, sources[length], ticket.task, came, now, deadline),
                    now,
                )
        self._step(now)

    def _hold(self, lengths: Sequence[int | None], lease: Lease | None) -> dict[int | None, Source]:
        if lease is None:
            return _sources(lengths, None)
        hold = Hold(lease, self._holds.pop)
        sources = _sources(lengths, hold)
        hold.sources = tuple(sources.values())
        self._holds[hold] = None
        return sources

    def _expired(self, ticket: Ticket, now: int) -> None:
        ticket.source.release()
        if self._watch is not None:
            self._watch.expired(self, ticket, now)
        self._simulator.expired(self.requests.pop(ticket.key), now)

    def _arm_for_what_is_due(self) -> None:
        for at in (self.scheduler.next_deadline(), self.wait_until):
            if at is not None:
                self._arm(max(at, self._loop.now))  # it may have come too late already

    def _arm(self, at: int) -> None:
        """Be called at ``at``, if no earlier call is planned."""
        if self._armed is None or at < self._armed:
            self._armed = at
            self._loop.plan(at, self._wake)

    def _wake(self, now: int, _: object) -> None:
        if self._armed == now:
            self._armed = None
        self._step(now)


def _sources(lengths: Sequence[int | None], lease: Lease | Hold | None) -> dict[int | None, Source]:
    """The rows of a tensor by their length (those of a padded batch are cut back to their own)."""
    on_release = None if lease is None else lease.release
    first = lengths[0]
    if lengths.count(first) == len(lengths):  # nearly always
        shape = () if first is None else (first,)
        return {first: Source("float32", shape, len(lengths), on_release=on_release)}
    counts = Counter(lengths)
    if on_release is not None:
        on_release = Lease(len(counts), on_release).release
    return {
        n: Source("float32", () if n is None else (n,), users, on_release=on_release)
        for n, users in counts.items()
    }


def _ticket(
    key: int, item: Item, source: Source, task: int, came_ns: int, now: int, deadline_ns: int
) -> Ticket:
    return Ticket(
        key=key,
        item=item,
        stage=item.path.nodes[item.hop].stage,
        source=source,
        start=0,
        arrival_ns=came_ns,
        received_ns=now,
        ready_ns=now,
        deadline_ns=deadline_ns,
        transit_ns=0,
        task=task,
    )

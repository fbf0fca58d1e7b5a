"""Executor: carries out what the scheduler decides: receive, queue, start, send.

It computes nothing itself: it names the batch to compute next and is told when that is done. With
several lanes it names as many, of different stages, before the first is done. It belongs to whoever
holds the worker's lock, reads no socket and sleeps nowhere: every call brings ``now``, and
:meth:`Executor.next_wake_ns` says when it wants to be called again at the latest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from blockflow.batching.policy import WaitUntil
from blockflow.core.errors import BlockError, BlockFlowError, RequestError, SystemError_
from blockflow.core.model import tensor_bytes
from blockflow.tensormq.channel import OutBuffer, Producer
from blockflow.worker.accounts import Accounts
from blockflow.worker.backlog import Backlog
from blockflow.worker.delivery import Delivery
from blockflow.worker.failpoints import FailPoints
from blockflow.worker.intake import Intake
from blockflow.worker.parting import next_item
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.stage import Stage
from blockflow.worker.ticket import Batch, Source, Ticket
from blockflow.worker.withdrawn import WithdrawnRequests

INBOX_ROWS = 4096
"""Rows that may wait; beyond it the data socket is not read, and the senders' queues fill up."""

_NEVER_NS = 1 << 63
_STALL_NS = 1_000_000
"""Releases are marks in shared memory and wake nobody: while a slot is missing, look this often."""


class Executor:
    """The worker's work.

    Args:
        stages: by number.
        scheduler: over the same stages.
        intake: makes tickets of messages.
        delivery: the sending side.
        failpoints: of this process.
        lanes: how many batches may be computed at once.

    Attributes:
        lanes: may be changed between two calls; what runs is not touched.
        withdrawn: tickets that were dropped because nobody waits for them any more.
        backlog: of what waits in slots.
        accounts: to be settled by whoever goes to sleep, or looks at the meters.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        scheduler: Scheduler,
        intake: Intake,
        delivery: Delivery,
        failpoints: FailPoints,
        lanes: int = 1,
    ) -> None:
        self.lanes = lanes
        self._stages = stages
        self._scheduler = scheduler
        self._intake = intake
        self._delivery = delivery
        self._failpoints = failpoints
        self._running: dict[Batch, Producer | None] = {}  # where each output must lie
        self._landing: dict[Batch, Producer | None] = {}
        self._stalled: Batch | None = None
        self.backlog = Backlog(delivery.own_copy)
        self.accounts = Accounts()
        self._wait_until_ns: int | None = None
        self._given_up = WithdrawnRequests()
        self.withdrawn = 0

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.busy and self._stalled is None and not len(self._scheduler)

    @property
    def busy(self) -> bool:
        """Some batch is being computed, or has not landed yet."""
        return bool(self._running or self._landing)

    @property
    def full(self) -> bool:
        """The inbox takes no more: leave what comes in the socket."""
        return self._scheduler.all_rows >= INBOX_ROWS

    def next_wake_ns(self) -> int | None:
        """When :meth:`step` has something to do even if nothing happens; None = never."""
        soonest = self.next_late_ns()
        if len(self._running) >= self.lanes:
            return soonest  # nothing can start before something is done
        if (at := self._wait_until_ns) is not None and (soonest is None or at < soonest):
            soonest = at
        if self._stalled is not None:
            return min(soonest or _NEVER_NS, time.monotonic_ns() + _STALL_NS)
        return soonest

    def next_late_ns(self) -> int | None:
        """The same where nobody could compute what :meth:`step` starts: when something that waits
        or runs takes too long."""
        soonest = self.next_overdue_ns()
        at = self._scheduler.next_deadline()
        return at if soonest is None or (at is not None and at < soonest) else soonest

    def next_overdue_ns(self) -> int | None:
        """When :meth:`give_up_overdue` has something to do; None = never."""
        soonest: int | None = None
        for batch in self._under_way() if self._landing else self._running:
            at = batch.overdue_ns
            if at is not None and (soonest is None or at < soonest):
                soonest = at
        return soonest

    def _under_way(self) -> Iterable[Batch]:
        return *self._running, *self._landing

    def receive(self, header: bytes, frame: Any | None, now: int) -> None:
        """One message from the data socket, received at ``now``."""
        arrival = self._intake.take(header, frame, now)
        for item, error in arrival.refused:
            self._delivery.fail([item], error)
        if arrival.withdrawn:
            self._withdraw(arrival.withdrawn, now)
        for ticket in arrival.tickets:
            self._queue(ticket)
        if arrival.tickets and (source := arrival.tickets[0].source).excess:
            self.backlog.share(source, self._scheduler.waiting(), self._read())

    def ordered(self, batch: Batch) -> None:
        """A device is at ``batch``, and its output comes to the host: :meth:`computed` ends it. The
        lane is free for the next one, unless this batch has more to do here when it has landed:
        policies are told of its end and of its successors at once."""
        if batch not in self._running or self._delivery.stays(batch):
            return
        self._landing[batch] = self._running.pop(batch)
        for ticket in batch.tickets:
            ticket.source.release()
        self._scheduler.done(batch, time.monotonic_ns())

    def computed(self, batch: Batch) -> None:
        """``batch`` is done: release its inputs, send its output."""
        landed = batch in self._landing
        if not landed and batch not in self._running:
            return  # given up meanwhile: it was answered for
        producer = (self._landing if landed else self._running).pop(batch)
        nbytes = 0 if batch.out is None else batch.out.nbytes
        # First: whoever gets the result may send the next input at once, and counts on this room.
        if not landed:
            for ticket in batch.tickets:
                ticket.source.release()
        # The next hop waits for this; everything below can wait for us.
        stays = self._delivery.deliver(batch, producer)
        now = time.monotonic_ns()
        if landed:
            for other in self._under_way():  # the device comes to them now, and their time begins
                other.forward_ns = now
        else:
            self._scheduler.done(batch, now)
        stage = self._stages[batch.stage]
        if not batch.probe:
            self.accounts.owe(stage.meter.account, batch, now, nbytes)
        for ticket in batch.tickets if batch.errors else ():
            if ticket.key in batch.errors:
                self._delivery.fail([ticket.item], batch.errors[ticket.key])
        if stays:
            self._hand_over(stays, batch, producer, now)
        batch.out = batch.result = None  # figures are all that is still asked of it
        if self._failpoints.armed and not batch.probe:
            self._failpoints.hit("after_output", stage.name)

    def expire(self, now: int) -> None:
        """Answer for what waits and is too late."""
        for ticket in self._scheduler.expire(now):
            self._expired(ticket)

    def step(self, now: int) -> Batch | None:
        """Expire what is too late and start what can be started.

        Returns:
            The batch to compute now; :meth:`computed` ends it. None with nothing to run, and while
            as many batches are under way as there are lanes.
        """
        self.expire(now)
        if len(self._running) >= self.lanes:
            return None
        if self._stalled is not None:
            started = self._start_late(self._stalled, now)
            if started is not None or self._stalled is not None:
                return started
        self._wait_until_ns = None
        self._scheduler.lanes = self.lanes
        while True:
            decision = self._scheduler.decide(now)
            if isinstance(decision, WaitUntil):
                self._wait_until_ns = decision.at_ns
                return None
            if decision is None:
                return None
            started = self._start(decision, now)
            if started is not None or self._stalled is not None:
                return started

    def give_up_overdue(self, now: int) -> bool:
        """True when a running forward has exceeded its block's time-out; its items are failed.

        A thread that computes cannot be interrupted: the process has to end after this, once the
        batches in the other lanes are done.
        """
        due = self.next_overdue_ns()
        if due is None or now < due:
            return False
        late = [b for b in self._under_way() if b.overdue_ns is not None and b.overdue_ns <= now]
        for batch in late:
            if batch.waits:  # for a device; it is looked at again when its time could be over
                batch.forward_ns = now
        late = [b for b in late if not b.waits]
        for batch in late:
            self._running.pop(batch, None)
            self._landing.pop(batch, None)
            stage = self._stages[batch.stage]
            stage.meter.failures += len(batch.tickets)
            what = f"no result within {stage.spec.timeout_ms} ms"
            error = BlockError("BLOCK_FAILED", what, where=stage.name)
            self._delivery.fail([t.item for t in batch.tickets], error)
        return bool(late)

    def refuse_all(self, error: BlockFlowError) -> None:
        """Fail everything that waits (termination)."""
        tickets = self._scheduler.take_all()
        if self._stalled is not None:
            tickets += self._stalled.tickets
            self._stalled = None
        for ticket in tickets:
            self._fail(ticket, error)

    def abandon(self) -> None:
        """Nobody waits any more for what is being computed: it is not sent when it is done."""
        self._running.clear()
        self._landing.clear()

    # --- steps -----------------------------------------------------------------------------------

    def _withdraw(self, requests: Sequence[tuple[bytes, int]], now: int) -> None:
        """Drop what waits of these requests; what is being computed is dropped by the next hop."""
        given_up = self._given_up
        given_up.add(requests, now)
        gone = self._scheduler.withdraw(given_up, now)
        if (batch := self._stalled) is not None:
            gone += [t for t in batch.tickets if t.item in given_up]
            batch.keep(tuple([t for t in batch.tickets if t.item not in given_up]))
            if not batch.tickets:
                self._stalled = None
                self._scheduler.done(batch, now)
        for ticket in gone:
            self._drop(ticket)

    def _drop(self, ticket: Ticket) -> None:
        """Nobody waits for it, so nobody is told."""
        ticket.source.release()
        self.withdrawn += 1

    def _queue(self, ticket: Ticket) -> None:
        if self._given_up.known and ticket.item in self._given_up:
            self._drop(ticket)
            return
        now = ticket.ready_ns = time.monotonic_ns()
        if not ticket.probe:
            self.accounts.owe(self._stages[ticket.stage].meter.arrived.add, ticket.item.rows, now)
        self._scheduler.arrive(ticket, now)

    def _start_late(self, batch: Batch, now: int) -> Batch | None:
        """:meth:`_start` what has waited for a slot, but for those who have waited too long."""
        late = [t for t in batch.tickets if t.deadline_ns <= now]
        for ticket in late:
            self._expired(ticket)
        batch.keep(tuple(t for t in batch.tickets if t not in late))
        if not batch.tickets:
            self._stalled = None
            self._scheduler.done(batch, now)
            return None
        return self._start(batch, now)

    def _start(self, batch: Batch, now: int) -> Batch | None:
        """Reserve the output and make ready what can be; None: no slot is free, or all failed."""
        self._stalled = None
        stage = self._stages[batch.stage]
        try:
            batch.cuts = stage.cuts(batch)
            producer = self._delivery.producer_for(batch)
            out = None if producer is None else self._reserve(batch, producer)
            if producer is not None and out is None:
                self.backlog.free_own(self._read(), stage.name)
                self._stalled = batch
                return None
        except BlockFlowError as exc:
            self._scheduler.done(batch, now)
            # Policies bound rows, an output is bounded by its bytes: each may fit by itself.
            apart = exc.code in ("TOO_LARGE", "NO_SPACE") and len(batch.tickets) > 1
            for ticket in batch.tickets:
                if apart:
                    ticket.apart = True
                    self._scheduler.arrive(ticket, now)
                else:
                    self._fail(ticket, exc)
            return None
        batch.out = out
        batch.started_ns = batch.forward_ns = now
        batch.limit_ns = stage.timeout_ns
        batch.replayable = self._delivery.replayable(batch.stage)
        if producer is not None:
            self._delivery.prepare(batch, producer)
        self._running[batch] = producer
        return batch

    def _read(self) -> set[int]:
        """Ids of the sources that are being computed."""
        return {id(t.source) for b in self._running for t in b.tickets}

    def _reserve(self, batch: Batch, producer: Producer) -> OutBuffer | None:
        stage = self._stages[batch.stage]
        dims = stage.output_dims(batch.tickets[0].source.dtype, (batch.rows, *batch.shape))
        dtype = stage.contract.output.dtype
        known = (self._delivery.consumers_of(batch),) if producer.by_consumer else ()
        try:
            return producer.reserve(dtype, dims, *known)
        except SystemError_ as exc:
            if exc.code != "NO_SPACE":
                raise
            # Clients learn nothing of arenas and paths.
            raise SystemError_(
                "NO_SPACE",
                f"no memory for an output of {tensor_bytes(dtype, dims)} bytes",
                where=stage.name,
                hint="try again later, or send less at once; `blockflow doctor` shows what is "
                "short",
            ) from exc

    def _hand_over(
        self,
        stays: Sequence[tuple[Ticket, int, int]],
        batch: Batch,
        producer: Producer | None,
        now: int,
    ) -> None:
        """The output's local successors: the tensor is passed on as it is."""
        result, out = batch.result, batch.out
        source = Source(result.dtype, tuple(result.shape[1:]), len(stays), tensor=result)
        if out is not None and producer is not None:
            source.on_release = partial(self._let_go, source, producer, out)
            self.backlog.holds(source, self._stages[batch.stage])
        before: Ticket | None = None
        for ticket, hop, start in stays:
            item = next_item(ticket, batch, hop, now)
            # The first branch is the query's continuation; further ones are queries of their own.
            branches, before = ticket is before, ticket
            follower = Ticket(
                self._intake.new_key() if branches else ticket.key,
                item,
                item.path.nodes[hop].stage,
                source,
                start,
                ticket.arrival_ns,
                now,
                now,
                ticket.deadline_ns,
                0,
                ticket.task,
                batch.cuts.get(ticket.key) if batch.cuts else None,
                origin=ticket.key if branches else None,
            )
            self._queue(follower)

    def _let_go(self, source: Source, producer: Producer, out: OutBuffer) -> None:
        """Nobody here goes on with ``source`` any more, which lies in ``out``."""
        self.backlog.gone(source)
        producer.unhold(out)

    def _expired(self, ticket: Ticket) -> None:
        self._stages[ticket.stage].meter.expired += 1
        name = self._stages[ticket.stage].name
        self._fail(ticket, RequestError("DEADLINE_EXCEEDED", f"expired in the queue of {name!r}"))

    def _fail(self, ticket: Ticket, error: BlockFlowError) -> None:
        ticket.source.release()
        self._stages[ticket.stage].meter.failures += 1
        self._delivery.fail([ticket.item], error)

"""SimWorker: the real Scheduler, policies and parting, between a socket and an arena.

What :class:`~blockflow.worker.executor.Executor` does, without its clock and threads: one block,
one forward at a time. What a tensor went through can be read off it
(:mod:`blockflow.bench.faultsim.rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import WaitUntil
from blockflow.batching.shares import TaskShare
from blockflow.bench.faultsim.arena import Arena, SlotConsumer, SlotProducer
from blockflow.bench.faultsim.plant import BLOCKS
from blockflow.bench.faultsim.process import Links, Message, SimProcess
from blockflow.bench.faultsim.rows import COLUMNS, ROW, version_of, with_version
from blockflow.bench.simulation.example import made_up
from blockflow.control.events import Launch
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.core.launchspec import StageSpec
from blockflow.core.routing import DISPATCHER_STAGE, RouteTable, StageRoute
from blockflow.tensormq.atwork import Work, record
from blockflow.tensormq.channel import Payload
from blockflow.tensormq.push import Unsent
from blockflow.wire.control import (
    ControlMessage,
    PeerGone,
    Ready,
    Routes,
    RoutesApplied,
    SetPolicy,
    StartFailed,
    Stop,
)
from blockflow.wire.data import (
    Data,
    Failure,
    Item,
    Withdraw,
    encode_data,
    encode_failure,
)
from blockflow.worker.intake import deadline_of
from blockflow.worker.parting import Part, next_item, plan_parts
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.ticket import Batch, Source, Ticket
from blockflow.worker.withdrawn import WithdrawnRequests

if TYPE_CHECKING:
    from blockflow.bench.faultsim.world import World

_STALL_NS = 1_000_000
_LOAD_NS = (50_000_000, 900_000_000)
_FORWARD_NS = (500_000, 12_000_000)
_PROFILE = made_up("any", lambda rows: 4.0 + 0.25 * rows)
"""What policies predict of a forward; what it takes is left to chance."""


@dataclass(slots=True)
class _Forward:
    """A batch that is being computed."""

    batch: Batch
    rows: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class _Letter:
    """What to answer for when a message never leaves."""

    payload: Payload
    items: tuple[Item, ...]


class SimWorker(SimProcess):
    """One replica's life.

    Attributes:
        block: that it runs. stage: its number. stuck: the present forward will not end.
    """

    def __init__(self, world: World, order: Launch) -> None:
        super().__init__(world, order)
        (stage,) = order.spec["stages"]
        self.stage = int(stage["stage"])
        self.block = str(stage["block"]["name"])
        self.version = version_of(stage["block"]["digest"])
        self.slots = int(order.spec["slots"])
        self.arena = Arena(self.incarnation, self.slots)
        self.stuck = False
        self._place = BLOCKS.index(self.block)
        self._producer = SlotProducer(self.arena)
        self._consumer = SlotConsumer(world.arenas)
        self._links = Links(world, self.incarnation)
        facts = replace(StageFacts.of(StageSpec.from_dict(stage)), profile=_PROFILE)
        self._scheduler = Scheduler({self.stage: dict(stage["policy"])}, {self.stage: facts})
        self._withdrawn = WithdrawnRequests()
        self._gone: set[int] = set()
        self._routes = RouteTable(0, 0)
        self._keys = 0
        self._forward: _Forward | None = None
        self._stalled: Batch | None = None
        self._wake: int | None = None
        self._armed: int | None = None

    # --- its life

    def load(self, now: int, _: object = None) -> None:
        """From Hello to Ready."""
        if not self.when_well(now, self.load, None):
            return
        self.hello()
        self.world.loop.plan(now + self.world.rng.randint(*_LOAD_NS), self._loaded)

    def _loaded(self, now: int, _: object) -> None:
        if not self.when_well(now, self._loaded, None):
            return
        error = self.world.load_error(self)
        if error is not None:
            self.tell(StartFailed(self.incarnation, error.to_dict()))
            self.die(1)
            return
        self.ready = True
        self.world.arenas[self.incarnation] = self.arena
        self.tell(Ready(self.incarnation, self.endpoint))

    def obey(self, now: int, message: ControlMessage) -> None:
        if isinstance(message, Routes):
            table = RouteTable.from_dict(message.table)
            if table.version >= self._routes.version:
                self._gone &= {r.incarnation for r in table.stages.values()}
                table = self._routes = table.without(self._gone)
                shares = [TaskShare(**s) for s in table.shares]
                self._scheduler.set_shares(shares, now)
                self._unsent(self._links.retain({r.endpoint for r in table.stages.values()}), now)
                self.tell(RoutesApplied(self.incarnation, table.version))
        elif isinstance(message, PeerGone):
            self._producer.peer_gone(message.incarnation)
            self._consumer.peer_gone(message.incarnation)
            for route in self._routes.stages.values():
                if route.incarnation == message.incarnation:
                    self._unsent(self._links.drop(route.endpoint), now)
            self._gone.add(message.incarnation)
            self._routes = self._routes.without(self._gone)
        elif isinstance(message, SetPolicy):
            self._scheduler.set_policy(message.stage, message.policy, now)
        elif isinstance(message, Stop):
            self._refuse_all(now)
            self.die(0)
            return
        self._step(now)  # another policy may start what the one before has let wait

    def _refuse_all(self, now: int) -> None:
        error = RequestError("BLOCK_UNAVAILABLE", "the worker stops")
        left = self._scheduler.take_all()
        if self._stalled is not None:
            left += self._stalled.tickets
        if left:
            self._fail([t.item for t in left], error, now)

    def eager(self) -> bool:
        return self._forward is not None and not self.stuck

    def work(self) -> tuple[Work, ...]:
        forward = self._forward
        if forward is None:
            return ()
        batch = forward.batch
        records = tuple(record(t.item) for t in batch.tickets)
        return (Work(batch.stage, batch.started_ns, len(records), records),)

    # --- data

    def receive(self, now: int, parcel: tuple[Message, Sequence[bytes]]) -> None:
        """One message from the data socket."""
        if not self.when_well(now, self.receive, parcel):
            return
        message, frames = parcel
        if isinstance(message, Withdraw):
            self._withdrawn.add(message.requests, now)
            for ticket in self._scheduler.withdraw(self._withdrawn, now):
                ticket.source.release()
        elif isinstance(message, Data):
            self._take(message, frames[1] if len(frames) > 1 else None, now)
        self._step(now)

    def _take(self, message: Data, frame: bytes | None, now: int) -> None:
        try:
            buffer = self._consumer.open(message.tensor, frame)
        except BlockFlowError as exc:
            error = exc if isinstance(exc, RequestError) else RequestError("INTERNAL", exc.message)
            self._fail(message.items, error, now)
            return
        dims = message.tensor.dims[1:]
        source = Source(message.tensor.dtype, dims, len(message.items), buffer=buffer)
        row = 0
        for item in message.items:
            self.world.judge.visits(item, self.block, now)
            if self._withdrawn and item in self._withdrawn:
                source.release()
            else:
                self._keys += 1
                number = item.path.nodes[item.hop].stage
                deadline = deadline_of(item, message.sent_ns, now)
                # The row is read now: a source has no way to its memory but by torch.
                content = ROW.unpack_from(buffer.memory, row * ROW.size)
                ticket = _SimTicket(
                    self._keys, item, number, source, row, now, now, now, deadline, 0, item.task
                )
                ticket.content = content
                self._scheduler.arrive(ticket, now)
            row += item.rows

    def _ring(self, now: int, _: object) -> None:
        """A time for which this worker had planned something; it may have thought better of it."""
        if self._armed is not None and self._armed <= now:
            self._armed = None
        if self._wake is None or not self.when_well(now, self._ring, None):
            return
        if self._wake <= now:
            self._step(now)
        else:
            self._arm(self._wake)

    def _step(self, now: int) -> None:
        """Expire what is too late, start what can be started."""
        wake: int | None = None
        late = self._scheduler.expire(now)
        for ticket in late:
            ticket.source.release()
        if late:
            error = RequestError("DEADLINE_EXCEEDED", f"expired in the queue of {self.block!r}")
            self._fail([t.item for t in late], error, now)
        while self._forward is None:
            batch = self._stalled
            if batch is None:
                decision = self._scheduler.decide(now)
                if isinstance(decision, WaitUntil):
                    wake = decision.at_ns
                if not isinstance(decision, Batch):
                    break
                batch = decision
            if not self._start(batch, now):
                wake = now + _STALL_NS
                break
        due = self._scheduler.next_deadline()
        if due is not None and (wake is None or due < wake):
            wake = due
        self._wake = wake
        if wake is not None:
            self._arm(wake)

    def _start(self, batch: Batch, now: int) -> bool:
        """Reserve a slot and begin; False: there is none now."""
        if self._stalled is batch:
            late = [t for t in batch.tickets if t.deadline_ns <= now]
            batch.keep(tuple(t for t in batch.tickets if t.deadline_ns > now))
            for ticket in late:
                ticket.source.release()
            if late:
                error = RequestError("DEADLINE_EXCEEDED", f"expired at {self.block!r}")
                self._fail([t.item for t in late], error, now)
        self._stalled = None
        if not batch.tickets:
            self._scheduler.done(batch, now)
            return True
        batch.out = self._producer.reserve("int64", (batch.rows, len(COLUMNS)))
        if batch.out is None:
            self._stalled = batch
            return False
        batch.started_ns = batch.compute_from_ns = now
        rows = [t.content[:3] for t in batch.tickets if isinstance(t, _SimTicket)]
        self._forward = forward = _Forward(batch, rows)
        took = self.world.rng.randint(*_FORWARD_NS)
        self.world.judge.starts(self, batch, now)
        if any(self.world.is_poison(number, self.block) for number, _, _ in rows):
            self.world.loop.plan(now + took // 2, self._poisoned, forward)
        self.world.loop.plan(now + took, self._computed, forward)
        return True

    def _poisoned(self, now: int, forward: _Forward) -> None:
        """The input kills the process in the middle of the forward."""
        if self._forward is not forward or self.stuck:
            return
        if self.when_well(now, self._poisoned, forward):
            self.world.judge.poison_kills(self, forward.batch, now)
            self.die(-11)

    def _computed(self, now: int, forward: _Forward) -> None:
        if self.stuck or not self.when_well(now, self._computed, forward):
            return
        self._forward = None
        batch, out = forward.batch, forward.batch.out
        if out is None:
            return
        batch.compute_to_ns = now
        at = 0
        for ticket, (number, _, versions) in zip(batch.tickets, forward.rows, strict=True):
            versions = with_version(versions, self._place, self.version)
            row = ROW.pack(number, ticket.item.attempt, versions, self.incarnation)
            out.memory[at : at + ROW.size * ticket.rows] = row * ticket.rows
            at += ROW.size * ticket.rows
            ticket.source.release()
        self._deliver(batch, now)
        self._scheduler.done(batch, now)
        if self.world.faults.after_output(self):
            self.die(-9)
            return
        self._step(now)

    def _deliver(self, batch: Batch, now: int) -> None:
        parts, _ = plan_parts(batch, ())
        routes: Mapping[int, StageRoute] = self._routes.stages
        ways = [(part, routes[part.stage]) for part in parts if part.stage in routes]
        for part in parts:
            if part.stage not in routes:
                error = RequestError("WORKER_LOST", f"no route to stage {part.stage} any more")
                self._fail(_items(part, batch, now), error, now)
        if batch.out is None:
            return
        if not ways:
            self._producer.discard(batch.out)
            return
        payloads = self._producer.publish(batch.out, [route.incarnation for _, route in ways])
        for (part, route), whole in zip(ways, payloads, strict=True):
            payload = part.of(whole)
            items = _items(part, batch, now)
            header = encode_data(Data(self.incarnation, now, payload.desc, items))
            letter = _Letter(payload, items)
            if not self._links.send(route.endpoint, [header], tag=letter):
                full = RequestError("BLOCK_UNAVAILABLE", "the next hop takes no messages")
                self._give_up(letter, full, now)

    def _unsent(self, messages: Sequence[Unsent], now: int) -> None:
        for message in messages:
            if isinstance(message.tag, _Letter):
                gone = RequestError("WORKER_LOST", "the next hop's worker is gone")
                self._give_up(message.tag, gone, now)

    def _give_up(self, letter: _Letter, error: BlockFlowError, now: int) -> None:
        self._producer.revoke(letter.payload)
        self._fail(letter.items, error, now)

    def _fail(self, items: Sequence[Item], error: BlockFlowError, now: int) -> None:
        route = self._routes.stages.get(DISPATCHER_STAGE)
        if route is not None:
            for item in items:  # one each: headers stay small whatever the errors say
                header = encode_failure(Failure(self.incarnation, now, error, (item,)))
                self._links.send(route.endpoint, [header])

    def _arm(self, at: int) -> None:
        if self._armed is None or at < self._armed:
            self._armed = at
            self.world.loop.plan(at, self._ring)


@dataclass(slots=True, eq=False)
class _SimTicket(Ticket):
    """A ticket with what its row says."""

    content: tuple[Any, ...] = ()


def _items(part: Part, batch: Batch, now: int) -> tuple[Item, ...]:
    return tuple([next_item(t, batch, hop, now) for t, hop in part.members])

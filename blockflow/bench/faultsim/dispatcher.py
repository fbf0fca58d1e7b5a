"""SimDispatcher: the real Exchange with everything behind it, between clients and workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import zmq

from blockflow.bench.faultsim.arena import Arena, SlotConsumer, SlotProducer
from blockflow.bench.faultsim.process import Hang, Links, Message, SimProcess
from blockflow.control.events import Launch
from blockflow.core.routing import RouteTable
from blockflow.dispatcher.admission import Admission
from blockflow.dispatcher.clients import ClientPort, Sent
from blockflow.dispatcher.exchange import Exchange
from blockflow.dispatcher.grants import GrantDesk
from blockflow.dispatcher.repeats import ResultMemory
from blockflow.dispatcher.tensors import TensorDesk
from blockflow.tensormq.push import PushCache
from blockflow.wire.control import (
    ControlMessage,
    Drained,
    PeerGone,
    Ready,
    Routes,
    RoutesApplied,
    Stop,
)

if TYPE_CHECKING:
    from blockflow.bench.faultsim.world import World

_START_NS = (20_000_000, 200_000_000)


class _Port:
    """Where replies leave; as :class:`~blockflow.dispatcher.clients.ClientPort`."""

    def __init__(self, dispatcher: SimDispatcher) -> None:
        self._dispatcher = dispatcher

    def send(self, client: bytes, frames: Sequence[Any], now_ns: int) -> Sent:
        if client in self._dispatcher.left:
            return Sent.GONE
        self._dispatcher.world.reply(self._dispatcher, client, [bytes(f) for f in frames])
        return Sent.YES

    present = ()
    """Clients here keep no deadlines of tasks, and need not be told of them."""

    def forget(self, client: bytes) -> None:
        """Nothing is kept per client."""

    def waiting(self) -> int:
        return 0


class _NoGrants:
    """Clients have no memory of their own here; as GrantDesk without any."""

    def place(self, client: bytes, part: memoryview) -> None:
        return None

    def client_gone(self, client: bytes) -> None:
        """Nothing was granted."""


class SimDispatcher(SimProcess):
    """One life of the Dispatcher.

    Attributes:
        exchange: the real one.
        arena: retained inputs.
        left: clients whose connection is gone.
    """

    def __init__(self, world: World, order: Launch) -> None:
        super().__init__(world, order)
        spec = order.spec
        self.arena = Arena(self.incarnation, int(spec["slots"]))
        self.left: set[bytes] = set()
        grants = cast(GrantDesk, _NoGrants())
        self._links = Links(world, self.incarnation)
        self.exchange = Exchange(
            self.incarnation,
            Admission(
                int(spec["max_inflight"]),
                int(spec["max_inflight_per_client"]),
                int(spec["arena_bytes"]),
                bool(spec["adaptive_limit"]),
            ),
            TensorDesk(SlotProducer(self.arena), SlotConsumer(world.arenas), grants),
            grants,
            cast(ClientPort, _Port(self)),
            cast(PushCache, self._links),
            ResultMemory(int(spec["result_memory_bytes"])),
            lambda: world.now,
        )
        self._hosts: dict[int, str] = {}
        self._drained_due: int | None = None
        self._armed: int | None = None

    def load(self, now: int, _: object = None) -> None:
        """From Hello to Ready."""
        if self.when_well(now, self.load, None):
            self.hello()
            self.world.loop.plan(now + self.world.rng.randint(*_START_NS), self._loaded)

    def _loaded(self, now: int, _: object) -> None:
        if self.when_well(now, self._loaded, None):
            self.ready = True
            self.world.arenas[self.incarnation] = self.arena
            self.tell(Ready(self.incarnation, self.endpoint, ["tcp://127.0.0.1:5755"]))

    # --- as DispatcherServer does

    def obey(self, now: int, message: ControlMessage) -> None:
        if isinstance(message, Routes):
            table = RouteTable.from_dict(message.table)
            if table.version >= self.exchange.planner.version:
                self.exchange.publish(table)
                self._hosts.update((r.incarnation, r.endpoint) for r in table.stages.values())
                self.tell(RoutesApplied(self.incarnation, table.version))
                self._drained_due = table.version
        elif isinstance(message, PeerGone):
            self.world.judge.proven_dead(self.incarnation, message, now)
            endpoint = self._hosts.pop(message.incarnation, None)
            unsent = [] if endpoint is None else self._links.drop(endpoint)
            self.exchange.peer_gone(message.incarnation, message.at_work, unsent)
        elif isinstance(message, Stop):
            self.die(0)
            return
        self._after(now)

    def receive(self, now: int, parcel: tuple[Message, Sequence[bytes]]) -> None:
        """A worker's message."""
        if self.when_well(now, self.receive, parcel):
            message, frames = parcel
            self.world.judge.returned(self.incarnation, message)
            self.exchange.on_return([zmq.Frame(f) for f in frames])
            self._after(now)

    def ask(self, now: int, message: tuple[bytes, bytes, Sequence[bytes]]) -> None:
        """A client's message: whose it is, which request it is about, and its frames."""
        if self.when_well(now, self.ask, message):
            client, request_id, frames = message
            self.exchange.on_client(client, [zmq.Frame(f) for f in frames])
            entry = self.exchange.table.named(client, request_id)
            if entry is not None:
                self.world.judge.accepted(int.from_bytes(request_id, "big"), entry.ticket, now)
            self._after(now)

    def client_left(self, now: int, client: bytes) -> None:
        """A client's connection is gone: its requests are forgotten, or go on without it."""
        if self.when_well(now, self.client_left, client):
            self.left.add(client)
            self.exchange.carry_out(self.exchange.table.client_gone(client))
            self._after(now)

    def _tick(self, now: int, _: object) -> None:
        if self._armed is not None and self._armed <= now:
            self._armed = None
        if self.when_well(now, self._tick, None):
            self.exchange.tick(now)
            self._after(now)

    def _after(self, now: int) -> None:
        table = self.exchange.table
        if self._drained_due is not None:
            oldest = table.oldest_version()
            if oldest is None or oldest >= self._drained_due:
                self.tell(Drained(self.incarnation, self._drained_due))
                self._drained_due = None
                self._forget_retired()
        due = table.next_deadline()
        if due is not None and (self._armed is None or due < self._armed):
            self._armed = due
            self.world.loop.plan(max(due, now), self._tick)
        self.world.judge.looks(self, now)

    def _forget_retired(self) -> None:
        routes = self.exchange.planner.table
        current = {r.incarnation for r in routes.stages.values()} if routes else set()
        self._hosts = {i: e for i, e in self._hosts.items() if i in current}
        self.exchange.on_unsent(self._links.retain(set(self._hosts.values())))

    @property
    def well(self) -> bool:
        """It serves."""
        return self.alive and self.ready and self.hang is Hang.NO

    def defects(self) -> dict[str, int]:
        """What it has counted that never should be."""
        events = self.exchange.stats.events
        return {
            k: events[k] for k in ("defects", "malformed_data", "malformed_client") if events[k]
        }

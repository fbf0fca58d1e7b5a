"""Clients: they ask, cancel, leave, lose their connections and send again, and keep the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blockflow.bench.faultsim.rows import COLUMNS, ROW
from blockflow.wire import client as wire
from blockflow.wire.tensor import TensorDesc

if TYPE_CHECKING:
    from blockflow.bench.faultsim.dispatcher import SimDispatcher
    from blockflow.bench.faultsim.world import World

MOST_TRIES = 4
RETRY_NS = 100_000_000


@dataclass(slots=True, eq=False)
class Asked:
    """One request as its client sees it.

    Attributes:
        number: names it in the whole run; its input's rows hold it.
        tasks, rows, deadline_ms: what is asked.
        tries: 0 = it is never sent again; else the how manyth time this is.
        until_ns: when the client gives up sending it again.
        outcome: how it ended: ``ok``, an error's code, ``gone`` with its client; '' = it waits.
        poison: it kills workers of this block; '' = none.
        must: only a result will do.
    """

    number: int
    tasks: tuple[str, ...]
    rows: int
    deadline_ms: int
    tries: int
    until_ns: int = 0
    outcome: str = ""
    poison: str = ""
    must: bool = False

    @property
    def request_id(self) -> bytes:
        return self.number.to_bytes(16, "big")


@dataclass(slots=True, eq=False)
class Client:
    """A connection of somebody: it changes its identity when it is made anew."""

    name: int
    connection: int = 1
    waiting: dict[bytes, Asked] = field(default_factory=dict)

    @property
    def identity(self) -> bytes:
        return self.name.to_bytes(4, "big") + self.connection.to_bytes(4, "big")


class Clients:
    """All of them."""

    def __init__(self, world: World, count: int) -> None:
        self._world = world
        self._clients = [Client(i + 1) for i in range(count)]
        self._by_identity = {c.identity: c for c in self._clients}
        self._next_name = count + 1
        self._count = 0
        self.outcomes: Counter[str] = Counter()
        self.requests: dict[int, Asked] = {}

    @property
    def asked(self) -> int:
        """Requests so far."""
        return self._count

    @property
    def waiting(self) -> list[Asked]:
        """Requests without an outcome."""
        return [a for c in self._clients for a in c.waiting.values()]

    def ask(
        self, tasks: tuple[str, ...], now: int, *, poison: str = "", must: bool = False
    ) -> None:
        """Somebody sends a request."""
        rng = self._world.rng
        self._count += 1
        asked = Asked(
            self._count,
            tasks,
            rng.choice((1, 1, 2, 4)),
            rng.choice((400, 2000, 5000)) if not must else 5000,
            rng.choice((0, 1)),
            poison=poison,
            must=must,
        )
        asked.until_ns = now + asked.deadline_ms * 1_000_000
        self.requests[asked.number] = asked
        client = rng.choice(self._clients)
        client.waiting[asked.request_id] = asked
        self._send(now, (client, asked, asked.tries))
        if rng.random() < 0.03 and not must:
            self._world.loop.plan(now + rng.randint(1, 60_000_000), self._cancel, (client, asked))

    def _send(self, now: int, what: tuple[Client, Asked, int]) -> None:
        client, asked, tries = what
        if asked.outcome or asked.tries != tries:
            return
        dispatcher = self._world.dispatcher
        if dispatcher is None or not dispatcher.ready:
            if now > asked.until_ns + 30_000_000_000:
                self._end(client, asked, "CONNECTION_LOST")
            else:  # the SDK connects when it can
                self._world.loop.plan(now + RETRY_NS, self._send, what)
            return
        desc = TensorDesc("int64", (asked.rows, len(COLUMNS)))
        request = wire.Request(
            asked.request_id, asked.tasks, asked.deadline_ms, desc, None, asked.tries
        )
        frames = [wire.encode_to_dispatcher(request), ROW.pack(asked.number, 0, 0, 0) * asked.rows]
        self._to(dispatcher, client, asked, frames)

    def _to(
        self, dispatcher: SimDispatcher, client: Client, asked: Asked, frames: Sequence[bytes]
    ) -> None:
        message = client.identity, asked.request_id, frames
        self._world.network.send(client.identity, dispatcher.incarnation, dispatcher.ask, message)

    def _cancel(self, now: int, what: tuple[Client, Asked]) -> None:
        client, asked = what
        dispatcher = self._world.dispatcher
        if not asked.outcome and dispatcher is not None:
            header = wire.encode_to_dispatcher(wire.Cancel(asked.request_id))
            self._to(dispatcher, client, asked, [header])

    # --- what comes back

    def answered(self, now: int, what: tuple[bytes, wire.Reply]) -> None:
        """A reply has come by a connection; one that is gone carries nothing."""
        identity, reply = what
        client = self._by_identity.get(identity)
        if client is None:
            return
        number = int.from_bytes(reply.request_id, "big")
        asked = client.waiting.get(reply.request_id)
        self._world.judge.answered(number, asked, reply, now)
        if asked is not None:
            codes = [r.error.code for r in reply.results if r.error is not None]
            self._end(client, asked, codes[0] if codes else "ok")

    def _end(self, client: Client, asked: Asked, how: str) -> None:
        asked.outcome = how
        self.outcomes[how] += 1
        client.waiting.pop(asked.request_id, None)

    # --- what happens to them

    def some(self) -> Client:
        """One of them, by chance."""
        return self._world.rng.choice(self._clients)

    def leave(self, client: Client, now: int) -> None:
        """It ends without a word; another one takes its place."""
        self._break(client, now)
        for asked in list(client.waiting.values()):
            self._end(client, asked, "gone")
        client.name, client.connection = self._next_name, 1
        self._next_name += 1
        self._by_identity[client.identity] = client

    def reset(self, client: Client, now: int) -> None:
        """Its connection breaks; what may be sent again is, by a new one."""
        self._break(client, now)
        client.connection += 1
        self._by_identity[client.identity] = client
        self._send_again(client, now)

    def dispatcher_died(self, now: int) -> None:
        """All connections break."""
        for client in self._clients:
            self._by_identity.pop(client.identity)
            client.connection += 1
            self._by_identity[client.identity] = client
            self._send_again(client, now)

    def _send_again(self, client: Client, now: int) -> None:
        for asked in list(client.waiting.values()):
            if not 0 < asked.tries < MOST_TRIES or now >= asked.until_ns:
                self._end(client, asked, "CONNECTION_LOST")
            else:
                asked.tries += 1
                self._world.loop.plan(now + RETRY_NS, self._send, (client, asked, asked.tries))

    def _break(self, client: Client, now: int) -> None:
        del self._by_identity[client.identity]
        dispatcher = self._world.dispatcher
        if dispatcher is not None:
            self._world.network.send(
                client.identity, dispatcher.incarnation, dispatcher.client_left, client.identity
            )

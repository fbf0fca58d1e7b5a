"""Every order of a few events between two clients and a Dispatcher that grants them one slot each
way: an input is read as it was written, and so is a result; nobody names a slot that is not his; in
the end every slot is free for him who has it, and none for who has gone.

The clients' protocol and the book are the real ones. Sockets are queues here, a request's content
is its number, and its block gives it back. The side connection and its answers take one step: they
may come before or after anything else.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from blockflow.client.core import ClientCore
from blockflow.client.request import Upload
from blockflow.client.sharing import RETRY_NS, Sharing, Slot
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.tensormq.grants import MIN_TENSOR_BYTES, Grant, GrantBook
from blockflow.wire.client import (
    Cancel,
    Invitation,
    Place,
    Reply,
    Request,
    TaskResult,
    decode_to_dispatcher,
    encode_to_client,
)
from blockflow.wire.grants import Direction, Granted
from blockflow.wire.tensor import TensorDesc

DESC = TensorDesc("uint8", (1, MIN_TENSOR_BYTES))
BODY = bytes(MIN_TENSOR_BYTES)
REQUESTS = 5
"""Of each client: by the first two it gets its slots, and has used them."""
EVENTS = 5
"""So many in a row are tried in every order; then all comes to its end."""


@dataclass
class Memory:
    """A segment: what lies in its slots, and the marks."""

    slots: list[int]
    marks: list[int]


@dataclass
class Client:
    """One of them, with what is on its way to it and from it.

    Attributes:
        here, there: the segments that it has, and that the Dispatcher has for it.
        name: of its connection, for the Dispatcher.
        attached: its side connection, as it knows, and as the Dispatcher does.
        in_flight: requests that the Dispatcher has let in.
        views: results that the caller looks at.
    """

    number: int
    core: ClientCore
    name: bytes = b""
    up: deque[tuple[bytes, Slot | None]] = field(default_factory=deque)
    down: deque[list[bytes]] = field(default_factory=deque)
    here: dict[int, Memory] = field(default_factory=dict)
    there: dict[int, Memory] = field(default_factory=dict)
    attached: bool = False
    in_flight: dict[bytes, int] = field(default_factory=dict)
    views: list[tuple[Memory, Place, int]] = field(default_factory=list)
    asked: int = 0
    lives: int = 0

    @property
    def half_open(self) -> bool:
        """The Dispatcher has ended its side connection, and it has not noticed that yet."""
        return self.core.sharing.state == "attached" and not self.attached


class Host:
    """The Dispatcher, and its clients."""

    def __init__(self) -> None:
        self.book = GrantBook()
        self.now = 0
        self.breaks = 1
        self.clients = [Client(n, new_core()) for n in (1, 2)]
        for client in self.clients:
            self.connect(client)

    # --- what may happen -------------------------------------------------------------------------

    def events(self) -> Iterator[tuple[str, int]]:
        """The first client's one by one; of the other one a request at a time, from end to end."""
        client, other = self.clients
        up, core = client.core.link.up, client.core
        waits = up and (core._outbox or core._urgent or core.sharing.invites)
        possible = {
            "submit": client.asked < REQUESTS,
            "send": waits,
            "write": waits,  # and the socket takes no more
            "cancel": core._pending,
            "handle": client.up,
            "answer": client.in_flight,
            "read": client.down,
            "drop": client.views,
            "break": self.breaks and up,
            "restart": self.breaks and up,
            "side ends": self.breaks and client.attached,
            "notice": client.half_open,
            "connect": not up,
        }
        yield from ((event, 0) for event, can_be in possible.items() if can_be)
        if other.asked < REQUESTS:
            yield "one request", 1

    def happens(self, event: str, n: int) -> None:
        client = self.clients[n]
        if event == "submit":
            client.asked += 1
            rid = bytes([client.number, client.asked]) + bytes(14)
            client.core.submit(rid, ("t",), DESC, BODY, 60_000, self.now)
        elif event == "one request":
            self.happens("submit", n)
            self.settle(n)
        elif event == "send":
            self.send(client)
        elif event == "write":
            self.write(client)
        elif event == "cancel":
            client.core.cancel(next(iter(client.core._pending)))
        elif event == "handle":
            self.handle(client, client.up.popleft()[0])
        elif event == "answer":
            rid, content = client.in_flight.popitem()
            self.answer(client, rid, content)
        elif event == "read":
            self.read(client, client.down.popleft())
        elif event == "drop":
            memory, place, _ = client.views.pop(0)
            memory.marks[place.slot] = place.generation
        elif event == "break":
            self.breaks -= 1
            self.lose(client)
        elif event == "side ends":
            self.breaks -= 1
            self.book.detach(client.name)
            client.there, client.attached = {}, False
        elif event == "notice":
            client.core.sharing.lost("it has ended", self.now)
            self.now += RETRY_NS
        elif event == "restart":
            self.breaks -= 1
            for each in self.clients:
                self.lose(each)
            self.book = GrantBook()
        else:
            self.connect(client)
        for client in self.clients:
            self.look(client)

    def look(self, client: Client) -> None:
        """No slot is free twice, or free and in use."""
        sharing = client.core.sharing
        for number, uploads in sharing._uploads.items():
            taken = [s.index for _, _, s in sharing._under_way if s.grant == number]
            waits = [p.upload for p in client.core._pending.values() if not p.sent and p.upload]
            taken += [u.slot.index for u in waits if u.slot.grant == number]
            assert sorted(uploads.free + taken) == [0], "one slot, in one place"
            unread = [by.index for _, by in client.up if by is not None and by.grant == number]
            assert not set(unread).intersection(uploads.free), "free before it is read"
        for memory, place, content in client.views:
            assert memory.slots[place.slot] == content, "written while it is looked at"

    # --- the client ------------------------------------------------------------------------------

    def connect(self, client: Client) -> None:
        client.lives += 1
        client.name = bytes([client.number, client.lives])
        client.core.on_connected()

    def lose(self, client: Client) -> None:
        """The connection, and the side connection with it."""
        self.book.detach(client.name)
        client.core.on_disconnected(self.now)
        client.up.clear()
        client.down.clear()
        client.in_flight.clear()
        client.here, client.there, client.attached = {}, {}, False

    def write(self, client: Client) -> tuple[bytes, Any, bytes | None] | None:
        """What the socket does not take lies in its slot already."""
        message = client.core.next_message(self.now)
        if message is not None and isinstance(upload := message[1], Upload) and not upload.written:
            memory = client.here[upload.slot.grant]
            memory.slots[upload.slot.index] = content_of(message[2] or b"")
            upload.written = True
        return message

    def send(self, client: Client) -> None:
        message = self.write(client)
        if message is not None:
            by = message[1].slot if isinstance(message[1], Upload) else None
            client.up.append((message[0], by))
            client.core.sent(message[2])
            self.ask(client)

    def read(self, client: Client, frames: list[bytes]) -> None:
        for outcome in client.core.on_message(frames, self.now):
            for place in getattr(outcome, "frames", ()):
                if isinstance(place, Place):
                    content = content_of(outcome.request_id)
                    client.views.append((client.here[place.grant], place, content))
        while client.core.unclaimed:
            place = client.core.unclaimed.popleft()
            client.here[place.grant].marks[place.slot] = place.generation
        if client.core.sharing.way is not None:
            assert self.book.attach(client.name)
            client.attached = True
            client.core.sharing.on_attached()
        self.ask(client)

    def ask(self, client: Client) -> None:
        sharing = client.core.sharing
        while sharing.packets:
            packet = sharing.packets.popleft()
            if not client.attached:
                continue  # nobody reads it, as will be noticed
            grant = self.book.ask(client.name, packet.direction, packet.nbytes)
            assert isinstance(grant, Grant), "asked for twice"
            client.here[grant.number] = client.there[grant.number] = Memory([0], [0])
            offer = Granted(grant.number, grant.direction, grant.slot_bytes, grant.slots)
            sharing.on_packet(offer, self.now)

    # --- the Dispatcher --------------------------------------------------------------------------

    def handle(self, client: Client, header: bytes) -> None:
        message = decode_to_dispatcher(header)
        if isinstance(message, Request):
            content = content_of(message.request_id)
            if message.upload is not None and client.name not in self.book:
                with pytest.raises(BlockFlowError, match="CONNECTION_LOST") as gone:
                    self.book.check_upload(client.name, *message.upload, DESC.nbytes)
                self.reply(client, message.request_id, TaskResult("t", None, gone.value))
                return
            if message.upload is not None:
                self.book.check_upload(client.name, *message.upload, DESC.nbytes)
                grant, slot = message.upload
                assert client.there[grant].slots[slot] == content, "another one's input"
            client.in_flight[message.request_id] = content
        elif isinstance(message, Cancel):
            if client.in_flight.pop(message.request_id, None) is not None:
                error = RequestError("CANCELLED", "by the client")
                self.reply(client, message.request_id, TaskResult("t", None, error))
        else:
            invitation = Invitation(message.request_id, "/side", bytes(16), "")
            client.down.append([encode_to_client(invitation)])

    def answer(self, client: Client, rid: bytes, content: int) -> None:
        place = self.book.reserve(client.name, DESC.nbytes, lambda n: client.there[n].marks)
        if place is not None:
            client.there[place.grant].slots[place.slot] = content
        self.reply(client, rid, TaskResult("t", DESC, None, place=place))

    def reply(self, client: Client, rid: bytes, result: TaskResult) -> None:
        frame = [BODY] if result.error is None and result.place is None else []
        client.down.append([encode_to_client(Reply(rid, 1, (result,))), *frame])

    # --- the end ---------------------------------------------------------------------------------

    def settle(self, n: int) -> None:
        """All that is under way comes to its end."""
        client = self.clients[n]
        if not client.core.link.up:
            self.happens("connect", n)
        while True:
            while client.core.next_message(self.now):
                self.happens("send", n)
            ways = {"handle": client.up, "answer": client.in_flight, "read": client.down}
            todo = [event for event, what in {**ways, "drop": client.views}.items() if what]
            if not todo:
                return
            self.happens(todo[0], n)

    def ends(self) -> None:
        """All that is under way comes to its end; then the clients go."""
        for n, client in enumerate(self.clients):
            self.settle(n)
            sharing = client.core.sharing
            if client.half_open:
                self.happens("notice", n)
            assert all(u.free == [0] for u in sharing._uploads.values()), "kept for ever"
            for grant in self.book._clients.get(client.name, {}).values():
                marks = client.there[grant.number].marks
                assert grant.direction is Direction.UPLOAD or marks == grant.generations
            self.lose(client)
        assert self.book.nbytes == 0 and self.book.clients == 0


def content_of(rid: bytes) -> int:
    return int.from_bytes(rid[:2], "big")


def new_core() -> ClientCore:
    wish = Sharing("auto")
    return ClientCore(
        "tcp://t:1", connect_timeout_ns=1 << 60, max_pending=9, now_ns=0, sharing=wish
    )


def state(host: Host) -> str:
    """All that the future depends on."""
    seen: list[object] = [host.breaks]
    for c in host.clients:
        core, sharing = c.core, c.core.sharing
        seen += [
            sharing.state,
            sharing._uploads,
            sharing._under_way,
            sharing._asked,
            sharing._wanted,
        ]
        seen += [(p.request_id[1], p.sent, p.number, p.upload) for p in core._pending.values()]
        seen += [core._outbox, core._urgent, core._owed, core.link.up, c.up, c.here, c.there]
        seen += [[frames[0] for frames in c.down]]
        seen += [c.attached, c.in_flight, c.views, c.asked, c.name]
    seen += [host.book._clients, host.now]
    return repr(seen)


def test_no_order_of_events_gives_a_slot_to_two_or_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_GRANT_SLOTS", 1)
    first = Host()
    for n, client in enumerate(first.clients):  # of the other one a request is left
        for _ in range(2 + 2 * n):
            first.happens("submit", n)
            first.settle(n)
        assert client.core.counters.slot_uploads and client.core.counters.slot_results
    for _ in range(2):
        first.happens("submit", 0)
        first.happens("send", 0)
    for step in ("handle", "answer", "read"):
        first.happens(step, 0)
    seen: set[str] = set()
    latest = [first]
    alike = [x for c in first.clients for x in (c.core.counters, c.core._catalog, c.core._timers)]
    for _ in range(EVENTS):
        found: list[Host] = []
        for host in latest:
            for event in host.events():
                after = copy.deepcopy(host, {id(x): x for x in alike})
                after.happens(*event)
                if (now := state(after)) not in seen:
                    seen.add(now)
                    found.append(after)
        latest = found
    for host in latest:
        host.ends()
    assert len(seen) > 400

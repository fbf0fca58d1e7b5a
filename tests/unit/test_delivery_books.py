"""What a worker sends: to whom, how much time is left, and that every slot comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from blockflow.bench.faultsim.arena import Arena, SlotProducer
from blockflow.core import limits
from blockflow.core.errors import BlockError
from blockflow.core.routing import DISPATCHER_STAGE, RouteTable, StageRoute, merge_paths
from blockflow.tensormq.channel import OutBuffer, Payload
from blockflow.tensormq.inline import InlineProducer
from blockflow.tensormq.leases import NEVER_NS
from blockflow.tensormq.push import PushCache, Unsent
from blockflow.tensormq.views import as_torch
from blockflow.wire.data import (
    Data,
    Failure,
    HopTiming,
    Item,
    decode_data_plane,
    pack_timings,
)
from blockflow.worker.delivery import Delivery
from blockflow.worker.parting import next_item
from blockflow.worker.ticket import Batch, Source, Ticket

ME, SECOND, THIRD, DISPATCHER = 7, 12, 13, 1
MS = 1_000_000


class Push:
    """Sockets that take messages at once, keep them (``slow``) or refuse them (``full``)."""

    def __init__(self) -> None:
        self.full: set[str] = set()
        self.slow: set[str] = set()
        self.sent: list[tuple[str, Data | Failure, bytes]] = []
        self.waiting: list[Unsent] = []

    def send(self, endpoint: str, frames: Sequence[Any], tag: Any = None) -> bool:
        if endpoint in self.full:
            return False
        if endpoint in self.slow:
            self.waiting.append(Unsent(endpoint, frames, tag))
            return True
        message = decode_data_plane(bytes(frames[0]))
        assert isinstance(message, Data | Failure)
        assert len(frames[0]) <= limits.MAX_HEADER_BYTES
        self.sent.append((endpoint, message, bytes(frames[1]) if len(frames) > 1 else b""))
        return True

    def _take(self, gone: Collection[str]) -> list[Unsent]:
        taken = [m for m in self.waiting if m.endpoint in gone]
        self.waiting = [m for m in self.waiting if m.endpoint not in gone]
        return taken

    def drop(self, endpoint: str) -> list[Unsent]:
        return self._take({endpoint})

    def retain(self, endpoints: Collection[str]) -> list[Unsent]:
        return self._take({m.endpoint for m in self.waiting} - set(endpoints))


class Slots(SlotProducer):
    """What is published may be read, released and written anew before the call returns."""

    until: int | None = None

    def publish(
        self, buffer: OutBuffer, consumers: Sequence[int], until_ns: int = NEVER_NS
    ) -> list[Payload]:
        self.until = until_ns
        payloads = super().publish(buffer, consumers, until_ns)
        if self.overwrite:
            buffer.memory[:] = bytes(len(buffer.memory))
        return payloads

    overwrite = False


def table(version: int = 1, second: int = SECOND, **modes: str) -> RouteTable:
    """Stage 2 and 3 are elsewhere, 1 and 4 here."""
    found = {DISPATCHER_STAGE: DISPATCHER, 2: second, 3: THIRD}
    return RouteTable(
        1,
        version,
        {
            s: StageRoute(s, f"b{s}", f"b{s}#0", i, f"ipc://{i}", modes.get(f"b{s}", "tensormq"))
            for s, i in found.items()
        },
    )


class Rig:
    def __init__(self) -> None:
        self.push = Push()
        self.arena = Arena(ME, 4)
        self.slots = Slots(self.arena)
        self.delivery = Delivery(
            ME,
            "tensormq",
            {1, 4},
            cast(PushCache, self.push),
            self.slots,
            InlineProducer(),
        )
        self.delivery.set_routes(table())

    def batch(self, *paths: Sequence[Sequence[int]], left_ms: Sequence[int] = ()) -> Batch:
        """A ticket of a row for each tree of paths, computed: row n is full of n + 1."""
        now = time.monotonic_ns()
        tickets = []
        for n, way in enumerate(paths):
            item = Item(os.urandom(16), 1, 1, merge_paths(way)[0], 0, 1, 60_000)
            source = Source("float32", (2,), 1, tensor=torch.zeros(1, 2))
            deadline = now + (left_ms[n] if left_ms else 60_000) * MS
            tickets.append(Ticket(n, item, 1, source, 0, now, now, now, deadline, 0))
        batch = Batch(1, tuple(tickets), started_ns=now, compute_from_ns=now, compute_to_ns=now)
        batch.out = out = self.slots.reserve("float32", (len(paths), 2))
        assert out is not None
        batch.result = as_torch(out.memory, "float32", (len(paths), 2))
        batch.result[:] = torch.arange(1.0, len(paths) + 1).unsqueeze(1)
        return batch

    def send(self, batch: Batch, prepared: bool = True) -> list[tuple[Ticket, int, int]]:
        if prepared:
            self.delivery.prepare(batch, self.slots)
        return self.delivery.deliver(batch, self.slots)

    def data(self) -> list[tuple[str, Data]]:
        return [(e, m) for e, m, _ in self.push.sent if isinstance(m, Data)]

    def failures(self) -> dict[bytes, str]:
        """By request: its error's code."""
        found: dict[bytes, str] = {}
        for endpoint, message, _ in self.push.sent:
            if isinstance(message, Failure):
                assert endpoint == f"ipc://{DISPATCHER}"
                for item in message.items:
                    assert item.request_id not in found, "told twice"
                    found[item.request_id] = message.error.code
        return found

    def read_all(self) -> None:
        """Every consumer releases what it got."""
        for _, message in self.data():
            handle = message.tensor.handle
            if handle is not None:
                self.arena.leases.release(handle.slot, handle.lane, handle.generation)
        assert self.slots.outstanding() == 0
        assert self.arena.leases.stale == 0


@pytest.fixture
def rig() -> Rig:
    return Rig()


BOTH = pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "at the end"])


@BOTH
def test_an_output_goes_to_the_next_hop_and_its_slot_comes_back(rig: Rig, prepared: bool) -> None:
    batch = rig.batch([[1, 2]], [[1, 2]], left_ms=(30, 500))
    assert rig.send(batch, prepared) == []
    ((endpoint, message),) = rig.data()
    assert endpoint == f"ipc://{SECOND}" and message.tensor.dims == (2, 2)
    short, long = (i.remaining_ms for i in message.items)
    assert short <= 30 and 400 < long <= 500
    assert rig.slots.until == batch.until_ns
    assert rig.slots.outstanding() == 1
    rig.read_all()


@BOTH
def test_what_goes_on_here_keeps_the_slot_whatever_others_do(rig: Rig, prepared: bool) -> None:
    batch = rig.batch([[1, 2], [1, 4]])
    ((ticket, hop, start),) = rig.send(batch, prepared)
    assert (ticket.item.path.nodes[hop].stage, start) == (4, 0)
    handle = rig.data()[0][1].tensor.handle
    assert handle is not None and batch.out is not None
    rig.arena.leases.release(handle.slot, handle.lane, handle.generation)
    assert rig.slots.outstanding() == 1, "it is read here"
    rig.slots.unhold(batch.out)
    assert rig.slots.outstanding() == 0


@BOTH
def test_what_is_not_taken_fails_and_its_slot_comes_back(rig: Rig, prepared: bool) -> None:
    rig.push.full = {f"ipc://{SECOND}"}
    batch = rig.batch([[1, 2]], [[1, 3]])
    rig.send(batch, prepared)
    first, second = (t.item.request_id for t in batch.tickets)
    assert rig.failures() == {first: "BLOCK_UNAVAILABLE"}
    assert [m.items[0].request_id for _, m in rig.data()] == [second]
    rig.read_all()


def test_a_result_that_the_dispatcher_does_not_take_leaves_nothing(rig: Rig) -> None:
    rig.push.full = {f"ipc://{DISPATCHER}"}
    rig.send(rig.batch([[1]]))
    assert rig.push.sent == [] and rig.delivery.undeliverable == 1
    assert rig.slots.outstanding() == 0


def test_a_prepared_message_goes_by_the_routes_of_the_end(rig: Rig) -> None:
    batch = rig.batch([[1, 2]])
    rig.delivery.prepare(batch, rig.slots)
    rig.delivery.set_routes(table(2, second=99))
    rig.delivery.deliver(batch, rig.slots)
    ((endpoint, _),) = rig.data()
    assert endpoint == "ipc://99"
    rig.read_all()


@BOTH
def test_who_has_failed_is_sent_to_nobody(rig: Rig, prepared: bool) -> None:
    other = rig.slots.reserve("float32", (1, 2))  # the output does not begin where the arena does
    assert other is not None
    batch = rig.batch([[1, 2]], [[1, 2]], [[1, 3]])
    if prepared:
        rig.delivery.prepare(batch, rig.slots)
    batch.errors[0] = BlockError("BLOCK_FAILED", "no")
    rig.delivery.deliver(batch, rig.slots)
    sent = {i.request_id for _, m in rig.data() for i in m.items}
    assert sent == {t.item.request_id for t in batch.tickets[1:]}
    # Its row is the second of the output.
    handle = rig.data()[0][1].tensor.handle
    assert handle is not None
    assert bytes(rig.arena.memory(handle.offset, 4)) == torch.tensor([2.0]).numpy().tobytes()
    rig.slots.discard(other)
    rig.read_all()


@BOTH
def test_of_a_batch_that_fails_as_a_whole_nothing_is_left(rig: Rig, prepared: bool) -> None:
    batch = rig.batch([[1, 2]], [[1, 3]])
    if prepared:
        rig.delivery.prepare(batch, rig.slots)
    batch.errors |= {t.key: BlockError("BLOCK_FAILED", "no") for t in batch.tickets}
    assert rig.delivery.deliver(batch, rig.slots) == []
    assert rig.push.sent == [] and rig.slots.outstanding() == 0


def test_what_waits_for_the_dead_fails_and_nothing_more_is_sent_there(rig: Rig) -> None:
    rig.push.slow = {f"ipc://{SECOND}"}
    waits = rig.batch([[1, 2]])
    rig.send(waits)
    assert rig.slots.outstanding() == 1
    rig.delivery.peer_gone(SECOND)
    assert rig.slots.outstanding() == 0
    assert rig.failures() == {waits.tickets[0].item.request_id: "WORKER_LOST"}
    rig.delivery.set_routes(table(2))  # made before its author knew
    after = rig.batch([[1, 2]])
    rig.send(after)
    assert rig.failures()[after.tickets[0].item.request_id] == "WORKER_LOST"
    assert rig.data() == [] and rig.slots.outstanding() == 0


def test_a_dead_dispatcher_is_not_told_that_it_is_dead(rig: Rig) -> None:
    """The failure would wait, and a drain or an end with it, for routes that do not name it."""
    rig.push.slow = {f"ipc://{DISPATCHER}"}
    rig.send(rig.batch([[1]]))
    rig.delivery.peer_gone(DISPATCHER)
    assert rig.push.waiting == [] and rig.slots.outstanding() == 0
    assert rig.delivery.undeliverable == 1


def test_what_waits_for_a_way_that_is_no_more_fails(rig: Rig) -> None:
    rig.push.slow = {f"ipc://{SECOND}"}
    waits = rig.batch([[1, 2]])
    rig.send(waits)
    rig.delivery.set_routes(table(2, second=99))
    assert rig.failures() == {waits.tickets[0].item.request_id: "WORKER_LOST"}
    assert rig.slots.outstanding() == 0


def test_who_takes_no_handles_gets_the_elements_as_they_were(rig: Rig) -> None:
    rig.delivery.set_routes(table(2, b3="zeromq"))
    rig.slots.overwrite = True
    batch = rig.batch([[1, 2]], [[1, 3]])
    rig.send(batch)
    frames = {m.items[0].request_id: frame for _, m, frame in rig.push.sent}
    first, second = (t.item.request_id for t in batch.tickets)
    assert frames == {first: b"", second: torch.full((2,), 2.0).numpy().tobytes()}
    assert batch.copies == 1
    rig.read_all()


@BOTH
def test_where_nobody_takes_handles_any_more_all_get_the_elements(rig: Rig, prepared: bool) -> None:
    """Its slot was reserved by the routes before."""
    batch = rig.batch([[1, 2]], [[1, 3]])
    if prepared:
        rig.delivery.prepare(batch, rig.slots)
    rig.delivery.set_routes(table(2, b2="zeromq", b3="zeromq"))
    assert rig.delivery.deliver(batch, rig.slots) == []
    rows = [torch.full((2,), float(n)).numpy().tobytes() for n in (1, 2)]
    assert [frame for _, _, frame in rig.push.sent] == rows
    assert (batch.copies, batch.out, rig.slots.outstanding()) == (2, None, 0)


def test_who_does_not_reach_the_output_gets_the_elements(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.slots, "reaches", lambda out, consumer: consumer != THIRD)
    batch = rig.batch([[1, 2]], [[1, 3]])
    rig.delivery.prepare(batch, rig.slots)
    assert batch.shipment is None
    rig.send(batch, prepared=False)
    frames = {m.items[0].request_id: frame for _, m, frame in rig.push.sent}
    first, second = (t.item.request_id for t in batch.tickets)
    assert frames == {first: b"", second: torch.full((2,), 2.0).numpy().tobytes()}
    rig.read_all()


def test_failures_of_many_are_told_in_messages_that_fit(rig: Rig) -> None:
    tree, _ = merge_paths([[1, 2]])
    done = pack_timings([HopTiming(n, 1, 1, 1, 1) for n in range(10)])
    count = 2 * limits.MAX_HEADER_BYTES // len(done)
    items = [Item(os.urandom(16), 1, 1, tree, 0, 1, 1000, done) for _ in range(count)]
    rig.delivery.fail(items, BlockError("BLOCK_FAILED", "no"))
    assert set(rig.failures()) == {i.request_id for i in items}
    assert 1 < len(rig.push.sent) < count and rig.delivery.undeliverable == 0
    told = len(rig.push.sent)
    rig.delivery.fail([], BlockError("BLOCK_FAILED", "no"))
    assert len(rig.push.sent) == told


def test_why_it_failed_is_told_whole_where_it_fits(rig: Rig) -> None:
    text = "x" * 500
    error = BlockError("BLOCK_FAILED", text, where=text, hint=text)
    for nodes, told in ((1, 500), (limits.MAX_PATH_NODES, 200)):
        tree, _ = merge_paths([range(1, nodes + 1)])
        done = pack_timings([HopTiming(n, 1, 1, 1, 1) for n in range(nodes)])
        rig.delivery.fail([Item(os.urandom(16), 1, 1, tree, 0, 1, 1000, done)], error)
        message = rig.push.sent[-1][1]
        assert isinstance(message, Failure) and message.error.message == text[:told]


def test_a_stage_may_run_twice_unless_its_route_says_no(rig: Rig) -> None:
    once = StageRoute(1, "b1", "b1#0", ME, "ipc://7", "tensormq", replayable=False)
    rig.delivery.set_routes(RouteTable(1, 2, {1: once}))
    assert not rig.delivery.replayable(1) and rig.delivery.replayable(4)


def test_no_hop_gives_time_away_or_forgets_a_suspect(rig: Rig) -> None:
    batch = rig.batch([[1, 2]])
    (ticket,) = batch.tickets
    ticket.item = replace(ticket.item, alone=True)
    for left_ns, left_ms in ((2 * MS, 2), (2 * MS - 1, 1), (1, 0), (-1, 0)):
        item = next_item(ticket, batch, 1, ticket.deadline_ns - left_ns)
        assert item.remaining_ms == left_ms and item.alone

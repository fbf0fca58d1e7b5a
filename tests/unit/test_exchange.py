"""The request path between sockets and memory that do as a test says: what is kept, how long."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import zmq

from blockflow.bench.faultsim.arena import Arena, SlotConsumer, SlotProducer
from blockflow.core import limits
from blockflow.core.errors import make_error
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import RouteTable, StageRoute, TaskRoute
from blockflow.dispatcher import exchange
from blockflow.dispatcher.admission import Admission
from blockflow.dispatcher.clients import Sent
from blockflow.dispatcher.exchange import Exchange
from blockflow.dispatcher.repeats import ResultMemory
from blockflow.dispatcher.returns import Returns
from blockflow.dispatcher.tensors import TensorDesk
from blockflow.tensormq.push import Unsent
from blockflow.wire import client as wire
from blockflow.wire.codec import encode
from blockflow.wire.data import Data, Item, decode_data_plane, encode_data
from blockflow.wire.tensor import TensorDesc

SPEC = TensorSpec("float32", ("rows", 4))
OWN, CLIENT = 7, b"client"


class Door:
    """Clients, and sockets to the workers: ``takes`` says whether a message is taken at all."""

    def __init__(self) -> None:
        self.takes = True
        self.sent: list[Unsent] = []
        self.replies: list[tuple[wire.Reply, list[bytes]]] = []

    def to_client(self, client: bytes, frames: Sequence[Any], now_ns: int) -> Sent:
        reply = wire.decode_to_client(frames[0])
        assert isinstance(reply, wire.Reply)
        self.replies.append((reply, [bytes(f) for f in frames[1:]]))
        return Sent.YES

    def to_worker(self, endpoint: str, frames: Sequence[Any], tag: Any = None) -> bool:
        if self.takes:
            self.sent.append(Unsent(endpoint, frames, tag))
        return self.takes


class Scene:
    """A Dispatcher with one task of one block ``a``, whose workers have arenas of their own."""

    def __init__(
        self,
        mode: str = "tensormq",
        replayable: bool = True,
        place: wire.Place | None = None,
        take_back: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.door = Door()
        self.now = 0
        self.arenas = {n: Arena(n, 8) for n in (OWN, 11, 12)}
        producer, consumer = SlotProducer(self.arenas[OWN]), SlotConsumer(self.arenas)
        grants = cast(Any, SimpleNamespace(place=lambda *_: place, take_back=take_back))
        self.desk = TensorDesk(producer, consumer, grants)
        clients = SimpleNamespace(send=self.door.to_client, present=())
        self.exchange = Exchange(
            OWN,
            Admission(8, 8, 1 << 20),
            self.desk,
            grants,
            cast(Any, clients),
            cast(Any, SimpleNamespace(send=self.door.to_worker)),
            ResultMemory(1 << 20),
            lambda: self.now,
        )
        self.version = 0
        self.route = StageRoute(1, "a", "a#0", 11, "to 11", mode, replayable=replayable)
        self.publish(11)

    def publish(self, *incarnations: int, tasks: str = "tu") -> None:
        self.version += 1
        stages = {n: replace(self.route, stage=n, incarnation=n) for n in incarnations}
        routes = {t: TaskRoute(t, ("a",), Contract(SPEC, SPEC)) for t in tasks}
        self.exchange.publish(RouteTable(1, self.version, stages, routes))

    def ask(
        self, number: int, values: Sequence[float] = (0.0,), tries: int = 0, task: str = "t"
    ) -> None:
        """A request of one row per value."""
        x = np.repeat(np.array(values, np.float32), 4)
        desc = TensorDesc("float32", (len(values), 4))
        request = wire.Request(number.to_bytes(16, "big"), (task,), 1000, desc, None, tries)
        header = wire.encode_to_dispatcher(request)
        self.exchange.on_client(CLIENT, [zmq.Frame(header), zmq.Frame(x.tobytes())])

    def items(self) -> list[Item]:
        """What the workers have been sent."""
        found = [decode_data_plane(memoryview(m.frames[0])) for m in self.door.sent if m.tag]
        return [item for data in found if isinstance(data, Data) for item in data.items]

    def answer(
        self, sender: int, items: Sequence[Item], values: Sequence[float], sent_ns: int = 0
    ) -> None:
        """One message with the results of a batch, in a slot of the sender."""
        slots = SlotProducer(self.arenas[sender])
        slot = slots.reserve("float32", (len(values), 4))
        assert slot is not None
        slot.memory[:] = np.repeat(np.array(values, np.float32), 4).tobytes()
        (payload,) = slots.publish(slot, (OWN,))
        message = encode_data(Data(sender, sent_ns, payload.desc, tuple(items)))
        self.exchange.on_return([zmq.Frame(message)])

    def ends(self) -> list[str]:
        """The codes of all replies; '' for a result."""
        results = [r for reply, _ in self.door.replies for r in reply.results]
        return [r.error.code if r.error else "" for r in results]

    def out(self) -> tuple[int, int, int]:
        """Credits, slots for inputs and bytes of frames that are not free."""
        slots = self.arenas[OWN].leases.outstanding
        return self.exchange.admission.inflight, slots, self.desk.frames.nbytes


@pytest.mark.parametrize("mode", ["tensormq", "zeromq"])
def test_what_no_worker_takes_is_answered_and_keeps_nothing(mode: str) -> None:
    s = Scene(mode)
    s.door.takes = False
    s.ask(1)
    assert s.ends() == ["BLOCK_UNAVAILABLE"]
    assert s.out() == (0, 0, 0)


def test_while_it_is_closed_nothing_new_enters() -> None:
    s = Scene()
    s.ask(1)
    s.exchange.closed_because = "the system is draining"
    s.ask(2)
    assert s.ends() == ["NOT_READY"]
    s.exchange.closed_because = ""
    s.ask(3)
    assert len(s.items()) == 2


@pytest.mark.parametrize("strict", ["", "t", "u", "tu"])
def test_one_task_that_asks_for_finite_values_is_enough(strict: str) -> None:
    s = Scene()
    table = s.exchange.planner.table
    assert table is not None
    tasks = {n: replace(t, check_finite=n in strict) for n, t in table.tasks.items()}
    s.exchange.publish(replace(table, version=9, tasks=tasks))
    request = wire.Request(bytes(16), ("t", "u"), 1000, TensorDesc("float32", (1, 4)))
    x = np.array([0, np.nan, 0, 0], np.float32)
    header = wire.encode_to_dispatcher(request)
    s.exchange.on_client(CLIENT, [zmq.Frame(header), zmq.Frame(x.tobytes())])
    assert s.ends() == (["NON_FINITE_INPUT"] * 2 if strict else [])
    assert len(s.items()) == (0 if strict else 1)


def test_a_frame_counts_until_its_request_has_ended() -> None:
    s = Scene("zeromq")
    s.ask(1)
    items = s.items()
    s.door.sent.clear()
    assert s.out() == (1, 0, 16)
    s.answer(11, items, [1.0])
    assert (s.ends(), s.out()) == ([""], (0, 0, 0))


def test_a_frame_counts_until_it_has_left_for_its_worker() -> None:
    """Its memory is in use for as long, though nobody waits for the request."""
    s = Scene("zeromq")
    s.ask(1)
    s.exchange.carry_out(s.exchange.table.cancel(CLIENT, (1).to_bytes(16, "big")))
    assert s.out() == (0, 0, 16)
    s.exchange.admission.max_bytes = 31  # there is no room for another one
    s.ask(2)
    s.door.sent.clear()
    assert s.out() == (0, 0, 0)
    s.ask(3)
    assert (s.ends(), s.out()) == (["CANCELLED", "OVERLOADED"], (1, 0, 16))


def test_an_attempt_that_never_left_is_not_the_present_one() -> None:
    """Its message comes back late: that says nothing of the attempt that has begun meanwhile."""
    s = Scene(replayable=False)
    s.ask(1)
    (message,) = s.door.sent
    s.exchange.peer_gone(11, unsent=[message])
    s.publish(12)
    assert [i.attempt for i in s.items()] == [1, 2]
    s.exchange.on_unsent([message])
    assert s.ends() == []
    s.exchange.peer_gone(12, unsent=[message])
    assert s.ends() == ["WORKER_LOST"]  # its block may have begun, and must not a second time
    assert s.out() == (0, 0, 0)


def test_a_refused_input_is_free_at_once() -> None:
    """And not when garbage is collected: large ones are refused where memory is short already."""
    s = Scene()
    s.exchange.admission.max_inflight = 1
    s.ask(1)
    x = zmq.Frame(bytes(16))
    request = wire.Request((2).to_bytes(16, "big"), ("t",), 1000, TensorDesc("float32", (1, 4)))
    there = weakref.ref(x)
    gc.disable()
    try:
        s.exchange.on_client(CLIENT, [zmq.Frame(wire.encode_to_dispatcher(request)), x])
        del x
        assert s.ends() == ["OVERLOADED"] and there() is None
    finally:
        gc.enable()


def test_each_result_of_a_batch_is_its_own_requests_though_another_has_ended() -> None:
    s = Scene()
    s.ask(1, [1.0, 2.0])
    s.ask(2, [3.0])
    items = s.items()
    cancel = wire.encode_to_dispatcher(wire.Cancel((1).to_bytes(16, "big")))
    s.exchange.on_client(CLIENT, [zmq.Frame(cancel)])
    s.answer(11, items, [10.0, 20.0, 30.0])
    assert s.ends() == ["CANCELLED", ""]
    _, (rows,) = s.door.replies[1]
    assert np.frombuffer(rows, np.float32).tolist() == [30.0] * 4


@pytest.mark.parametrize("rows", [1, 3])
def test_a_result_of_other_rows_is_no_answer(rows: int) -> None:
    s = Scene("zeromq")
    s.ask(1, [1.0, 2.0])
    (item,) = s.items()
    s.door.sent.clear()
    s.answer(11, [replace(item, rows=rows)], [0.0] * rows)
    assert (s.ends(), s.out()) == (["OUTPUT_MISMATCH"], (0, 0, 0))


@pytest.mark.parametrize(
    ("met", "code"),
    [
        (make_error("TIMEOUT", "x"), "TIMEOUT"),
        (MemoryError(), "NO_SPACE"),
        (RuntimeError("can't start new thread"), "NO_SPACE"),
        (ValueError("x"), "INTERNAL"),
    ],
)
def test_a_result_that_cannot_be_cut_out_fails_its_own_request(
    monkeypatch: pytest.MonkeyPatch, met: Exception, code: str
) -> None:
    s = Scene("zeromq")

    def fail(*_: Any) -> None:
        raise met

    monkeypatch.setattr(TensorDesk, "cut", fail)
    s.ask(1)
    items = s.items()
    s.door.sent.clear()
    s.answer(11, items, [1.0])
    assert (s.ends(), s.out()) == ([code], (0, 0, 0))


def test_what_may_be_asked_for_again_is_in_no_clients_slot() -> None:
    s = Scene(place=wire.Place(1, 2, 3))
    for number, tries in ((1, 0), (2, 1)):
        s.ask(number, tries=tries)
        s.answer(11, s.items()[-1:], [5.0])
    (placed, no_frames), (kept, frames) = s.door.replies
    assert (placed.results[0].place, no_frames) == (wire.Place(1, 2, 3), [])
    assert (kept.results[0].place, len(frames)) == (None, 1)
    s.ask(2, tries=2)
    assert s.door.replies[2] == (kept, frames)


def test_the_way_back_begins_when_the_last_block_has_sent() -> None:
    s = Scene()
    s.ask(1)
    s.now = 50
    s.answer(11, s.items(), [1.0], sent_ns=40)
    ((reply, _),) = s.door.replies
    assert (reply.results[0].egress_ns, reply.results[0].total_ns) == (10, 50)


def test_a_defect_at_a_workers_message_keeps_no_slot_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Scene()
    s.ask(1)

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Returns, "take", fail)
    with pytest.raises(RuntimeError, match="planted"):
        s.answer(11, s.items(), [1.0])
    assert s.arenas[11].leases.outstanding == 0


@pytest.mark.parametrize("rest", [[["t" * 5000]], [[[[[[[["deep"]]]]]]]], [b"\xff"]])
def test_a_header_that_is_none_is_answered_where_its_id_can_be_read(rest: list[Any]) -> None:
    """However long it is: its client would wait for its deadline."""
    s = Scene()
    for cut in (0, 1):
        header = encode([limits.PROTOCOL_VERSION, wire.KIND_REQUEST, bytes(15) + b"\1", *rest])
        s.exchange.on_client(CLIENT, [zmq.Frame(header[: len(header) - cut])])
    assert s.ends() == ["MALFORMED_MESSAGE"] * 2
    assert {reply.request_id for reply, _ in s.door.replies} == {bytes(15) + b"\1"}


def test_a_request_that_cannot_be_sent_on_its_way_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, and not at its deadline: there are no threads left for a large frame, say."""
    s = Scene("zeromq")

    def scarce(*_: Any, **__: Any) -> bool:
        raise MemoryError

    monkeypatch.setattr(s.exchange._push, "send", scarce)
    caplog.set_level(logging.CRITICAL, "blockflow.dispatcher")  # a record would keep the frame
    s.ask(1)
    assert (s.ends(), s.out()) == (["NO_SPACE"], (0, 0, 0))


@pytest.mark.parametrize(("met", "code"), [(MemoryError(), "NO_SPACE"), (KeyError(), "INTERNAL")])
def test_a_reply_that_cannot_be_made_is_an_answer_all_the_same(
    monkeypatch: pytest.MonkeyPatch, met: Exception, code: str
) -> None:
    """At once, and not at the client's deadline. A slot of the client's that it will not be told of
    is free again."""
    place, back = wire.Place(3, 1, 7), list[tuple[bytes, wire.Place]]()
    s = Scene(place=place, take_back=lambda *told: back.append(told))

    def fail(*_: Any) -> None:
        raise met

    monkeypatch.setattr(exchange, "make_reply", fail)
    s.ask(1)
    s.answer(11, s.items(), [1.0])
    assert (s.ends(), s.exchange.stats.events["defects"]) == ([code], 1)
    assert s.out()[0] == 0 and back == [(CLIENT, place)]


def test_nothing_is_sent_on_its_way_for_who_has_gone() -> None:
    """That comes to light as another request of its is answered, between decision and deed."""
    s = Scene()
    s.publish()
    s.ask(1, task="u")
    s.ask(2)
    s.exchange._clients = cast(
        Any, SimpleNamespace(send=lambda *_: Sent.GONE, present=(), forget=lambda _: None)
    )
    s.exchange._grants = cast(Any, SimpleNamespace(client_gone=lambda _: None))
    s.publish(11, tasks="t")
    assert (s.items(), s.out()) == ([], (0, 0, 0))


@pytest.mark.parametrize(("looks_us", "looks"), [(0, 1000), (1000, 10), (9000, 2)])
def test_to_look_at_debts_takes_no_more_than_a_part_of_the_time(looks_us: int, looks: int) -> None:
    """A look takes the longer the more clients read slowly, and comes after every message."""
    s, seen = Scene(), []

    def flush(now_ns: int) -> list[Any]:
        seen.append(now_ns)
        s.now += looks_us * 1000
        return []

    s.exchange._clients = cast(Any, SimpleNamespace(waiting=lambda: 1, flush=flush))
    for _ in range(1000):
        s.exchange.tick(s.now)
        s.now += 100_000
    assert len(seen) == looks

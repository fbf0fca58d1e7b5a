"""What must not end the Dispatcher, nor fill its log: defects, and data that cannot be read."""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dispatcher_rig
import numpy as np
import pytest
import zmq
from dispatcher_rig import Rig, X, task, wait_until

from blockflow.dispatcher.clients import ClientPort
from blockflow.dispatcher.exchange import Exchange
from blockflow.dispatcher.grants import GrantDesk
from blockflow.dispatcher.tensors import TensorDesk
from blockflow.tensormq.sockets import connect_push
from blockflow.wire.client import UNASKED
from blockflow.wire.control import PeerGone
from blockflow.wire.data import Data, Item, encode_data
from blockflow.wire.tensor import TensorDesc

make = dispatcher_rig.make
Make = Callable[..., Rig]

PARTS = ("receive", "on_departures", "look", "exchange.tick", "exchange.on_client", "grants.tick")


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, part: str) -> Iterator[None]:
    """A defect in that part of the Dispatcher's round."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("planted")

    owner, _, name = part.rpartition(".")
    found = {"": ClientPort, "exchange": Exchange, "grants": GrantDesk}[owner]
    with monkeypatch.context() as patch:
        patch.setattr(found, name, fail)
        yield


@pytest.mark.parametrize("part", PARTS)
def test_a_defect_is_counted_and_the_others_are_served(
    make: Make, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    r = make()
    r.worker(11, {1: "e"})
    r.publish(task("t", ["e"]))
    client = r.client(1)
    client.infer("t", X)
    events = r.exchange.stats.events
    with failing(monkeypatch, part):
        # Each time another one: connections are to come as well as requests.
        wait_until(lambda: r.client(1).ask("t", X) and events["defects"] > 8)
    np.testing.assert_array_equal(r.client(1).infer("t", X)[0], X + 1)
    told = [x for x in caplog.records if "could not be handled" in x.message]
    assert 4 <= len(told) <= events["defects"].bit_length()
    assert all(x.exc_info for x in told)


def test_a_message_that_cannot_leave_yet_for_want_of_memory_ends_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = make()
    r.worker(11, {1: "e"})
    r.publish(task("t", ["e"]))
    events = r.exchange.stats.events

    def fail() -> int:
        raise zmq.ZMQError(errno.ENOMEM)

    with monkeypatch.context() as patch:
        patch.setattr(r.server._push, "flush", fail)
        wait_until(lambda: r.client(1).ask("t", X) and events["defects"] > 8)
    np.testing.assert_array_equal(r.client(1).infer("t", X)[0], X + 1)


def test_results_that_cannot_be_read_are_few_lines(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    r = make()
    r.worker(11, {1: "e"})
    table = r.publish(task("t", ["e"]))
    tree = r.exchange.planner.plan([table.tasks["t"]]).tree
    item = Item(bytes(16), 1, 1, tree, 0, 2, 1000)
    message = encode_data(Data(999, 0, TensorDesc("float32", (2, 4)), (item,)))
    with (
        caplog.at_level(logging.WARNING, "blockflow.dispatcher"),
        connect_push(r.context, r.server.endpoint) as push,
    ):
        for _ in range(100):
            assert push.poll(5000, zmq.POLLOUT)
            push.send(message)
        wait_until(lambda: r.exchange.stats.events["unreadable_data"] == 100)
    told = [x.message for x in caplog.records if "incarnation 999" in x.message]
    assert len(told) == 7 and "unreadable_data: 64 so far" in told[-1]
    np.testing.assert_array_equal(r.client().infer("t", X)[0], X + 1)


def at_work(r: Rig, count: int) -> tuple[Any, Any, list[bytes]]:
    """A worker that keeps so many requests, their client, and their ids."""
    worker = r.worker(11, {1: "e"})
    worker.behave["e"] = dispatcher_rig.swallow
    r.publish(task("t", ["e"]))
    client = r.client()
    asked = [client.ask("t", X) for _ in range(count)]
    wait_until(lambda: len(worker.seen) == count)
    return worker, client, asked


@pytest.mark.parametrize(
    ("planted", "code"), [(MemoryError("planted"), "NO_SPACE"), (OSError("planted"), "INTERNAL")]
)
def test_a_defect_at_one_result_of_a_batch_costs_no_other(
    make: Make, planted: Exception, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = make()
    worker, client, asked = at_work(r, 3)
    items = tuple(item for _, item in worker.seen)
    cut, called = TensorDesk.cut, itertools.count(1)

    def fails_at_the_second(*args: Any) -> Any:
        if next(called) == 2:
            raise planted
        return cut(*args)

    monkeypatch.setattr(TensorDesk, "cut", fails_at_the_second)
    batch = np.ones((3 * len(X), 4), np.float32)
    header = encode_data(Data(11, 0, TensorDesc("float32", batch.shape), items))
    with connect_push(r.context, r.server.endpoint) as push:
        assert push.poll(5000, zmq.POLLOUT)
        push.send_multipart([header, batch.tobytes()])
        replies = [client.answer()[0] for _ in asked]
    errors = {reply.request_id: reply.results[0].error for reply in replies}
    told = [error and error.code for error in (errors[rid] for rid in asked)]
    assert told == [None, code, None]
    wait_until(r.idle)
    assert r.exchange.admission.inflight == 0


@pytest.mark.parametrize("what", ["_reply", "_desk.release"])
def test_a_defect_at_one_instruction_keeps_nothing(
    make: Make, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its own credit and slot, nor those of the requests that end with it."""
    r = make()
    at_work(r, 3)
    table = r.exchange.table
    r.mailbox.put(PeerGone(11))
    wait_until(lambda: table.waiting == 3)
    owner, _, name = what.rpartition(".")
    patched: Any = r.exchange._desk if owner else r.exchange
    real, called = getattr(patched, name), itertools.count(1)

    def fails_at_first(*args: Any) -> Any:
        first = next(called) == 1
        if first and not owner:
            raise OSError("planted")
        real(*args)
        if first:
            raise OSError("planted")

    monkeypatch.setattr(patched, name, fails_at_first)
    r.publish(task("t", ["e"]), workers=[], down={"e": "given up"})
    assert (len(table), r.exchange.stats.events["defects"]) == (0, 1)
    wait_until(r.idle)
    assert r.exchange.admission.inflight == 0


def test_an_attempt_that_cannot_begin_is_answered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("planted")

    r = make()
    _, client, _ = at_work(r, 1)
    second = r.worker(12, {2: "e"})
    r.publish(task("t", ["e"]), workers=[second])
    with monkeypatch.context() as patch:
        patch.setattr(TensorDesk, "prepare_again", fail)
        r.mailbox.put(PeerGone(11))
        reply, _ = client.answer()
        while reply.request_id == UNASKED:
            reply, _ = client.answer()
    assert reply.results[0].error.code == "NO_SPACE"
    wait_until(r.idle)
    np.testing.assert_array_equal(r.client().infer("t", X)[0], X + 1)


def test_a_defect_at_a_note_of_the_controller_does_not_end_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = make()
    r.worker(11, {1: "e"})
    r.publish(task("t", ["e"]))

    def fail(*_: Any) -> None:
        raise OSError("planted")

    monkeypatch.setattr(Exchange, "peer_gone", fail)
    r.mailbox.put(PeerGone(99))
    wait_until(lambda: r.exchange.stats.events["defects"] == 1)
    np.testing.assert_array_equal(r.client().infer("t", X)[0], X + 1)

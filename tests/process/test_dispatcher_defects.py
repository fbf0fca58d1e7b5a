"""What must not end the Dispatcher, nor fill its log: defects, and data that cannot be read."""

from __future__ import annotations

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
from blockflow.tensormq.sockets import connect_push
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

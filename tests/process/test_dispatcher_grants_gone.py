"""What a client was granted is given back when it is gone, whatever became of its requests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import dispatcher_rig
import grants_rig
import numpy as np
import pytest
from dispatcher_rig import PATIENCE_S, Rig, task, wait_until
from grants_rig import DOWN, UP, Side, attached, granted

from blockflow.wire import client as wire
from blockflow.wire.tensor import TensorDesc

X = np.ones((4096, 4), np.float32)

make, up, sides = dispatcher_rig.make, dispatcher_rig.up, grants_rig.sides


@pytest.mark.parametrize(
    ("tasks", "tries"),
    [
        ((), 0),
        (("later",), 0),
        (("now", "later"), 0),
        (("later",), 1),
        (("nowhere",), 0),
    ],
    ids=["nothing asked", "under way", "one result in its slot", "remembered", "waiting"],
)
def test_who_is_gone_keeps_no_granted_memory(
    up: Rig, sides: list[Side], tasks: Sequence[str], tries: int
) -> None:
    """Its side connection stands, as that of a process that was stopped, and cut off for it."""
    go = threading.Event()

    def held(a: np.ndarray) -> np.ndarray:
        go.wait(PATIENCE_S)
        return a

    up.workers[1].behave["a"] = held
    paths = {"now": ["trunk"], "later": ["trunk", "a"], "nowhere": ["none"]}
    up.publish(*(task(name, path, max_rows=len(X)) for name, path in paths.items()))
    client = up.client()
    side = attached(sides, client)
    mine = granted(side, UP)
    granted(side, DOWN)
    if tasks:
        desc, where = TensorDesc("float32", X.shape), (mine.grant, 0)
        asked = wire.Request(client.new_id(), tuple(tasks), 10_000, desc, where, tries)
        client.send(wire.encode_to_dispatcher(asked))
        wait_until(lambda: len(up.exchange.table) == 1)
        wait_until(lambda: up.server._gauges()["legs"]["out"]["slot"] == ("now" in tasks))
    assert up.server._gauges()["grants"]["segments"] == 2
    client.close()
    assert side.closed()
    wait_until(lambda: up.server._gauges()["grants"]["segments"] == 0)
    left = up.server._gauges()["grants"]
    assert (left["clients"], left["bytes"]) == (0, 0)
    wait_until(lambda: len(up.exchange.table) == tries)  # what may be asked for again goes on
    go.set()
    wait_until(up.idle)

"""What waits in a worker's socket while its engine thread computes: read as soon as there is room.

The worker is stopped meanwhile, so that all of it is there at once when it goes on. Nobody sends it
a heartbeat, which would make it look.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
from dispatcher_rig import wait_until

from blockflow.wire.control import Stop
from blockflow.worker.executor import INBOX_ROWS
from tests import worker_rig
from tests.worker_rig import WAIT_S, Rig, at_work, echo

ROW_MS, LONG = 100, 1000
"""A forward of so many rows takes longer than any test waits; it ends with the process."""

rig = worker_rig.rig


@contextmanager
def stopped(rig: Rig) -> Iterator[None]:
    pid = rig.children[11].pid
    os.kill(pid, signal.SIGSTOP)
    process = psutil.Process(pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, WAIT_S)
    yield
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("mode", "count", "rows"),
    [("tensormq", 8, INBOX_ROWS // 4), ("zeromq", 200, 1)],
    ids=["more rows", "more messages"],
)
def test_a_further_lane_gets_what_waits_in_the_socket(
    rig: Rig, mode: str, count: int, rows: int
) -> None:
    """More than the inbox takes, and more than is read in one go, of a block that is free."""
    busy, free = echo(rig, "busy", row_ms=ROW_MS), echo(rig, "free", delay_ms=10)
    rig.start(11, {1: busy, 2: free}, lanes=2, mode=mode)
    rig.publish()
    rig.send(np.zeros((LONG, 4), np.float32), [1])
    at_work(rig, 1)
    rig.send(np.zeros((1, 4), np.float32), [2])
    rig.result()  # connections stand, which would wake it as well
    with stopped(rig):
        sent = [
            rig.send(np.full((rows, 4), n, np.float32), [2], remaining_ms=60_000)[0]
            for n in range(count)
        ]
    left = set(sent)
    while left:
        message, value = rig.result()
        for item in message.items:
            left.remove(item.request_id)
            assert (value == sent.index(item.request_id)).all()


def test_who_stops_answers_for_what_its_full_inbox_has_left_in_the_socket(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "brief", row_ms=ROW_MS)})
    rig.publish()
    rig.send(np.zeros((10, 4), np.float32), [1])
    at_work(rig, 1)
    x = np.zeros((INBOX_ROWS // 4, 4), np.float32)
    left = {rig.send(x, [1], remaining_ms=60_000)[0] for _ in range(8)}
    rig.tell(11, Stop())
    rig.result()
    while left:
        failure = rig.failure()
        assert failure.error.code == "WORKER_LOST"
        left -= {item.request_id for item in failure.items}


def test_who_expires_leaves_room_for_what_comes_later(rig: Rig) -> None:
    """The inbox was full, so that nobody listened any more; a lane is free."""
    busy, free = echo(rig, "long", row_ms=ROW_MS), echo(rig, "idle")
    rig.start(11, {1: busy, 2: free}, lanes=2)
    rig.publish()
    rig.send(np.zeros((1, 4), np.float32), [2])
    rig.result()  # connections stand
    rig.send(np.zeros((LONG, 4), np.float32), [1], remaining_ms=60_000)
    at_work(rig, 1)
    x = np.zeros((INBOX_ROWS // 4, 4), np.float32)
    left = {rig.send(x, [1], remaining_ms=1000)[0] for _ in range(4)}
    while left:
        left -= {item.request_id for item in rig.failure().items}
    sent = rig.send(np.zeros((1, 4), np.float32), [2])
    assert [i.request_id for i in rig.result()[0].items] == sent

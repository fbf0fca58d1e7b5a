"""Workers with several lanes: forwards of different blocks at once in one process.

What is under way is read from the worker's own at-work file. A forward takes some time per row;
those that shall overlap have rows for longer than any test waits, and end with the process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest

from blockflow.core.launchspec import StageSpec
from blockflow.tensormq.atwork import AtWorkReader
from blockflow.wire.control import (
    Drain,
    Drained,
    Monitor,
    Ping,
    Pong,
    SetPolicy,
    SetThreads,
    Stats,
    Stop,
)
from blockflow.wire.data import Data, Failure
from tests import worker_rig
from tests.worker_rig import WAIT_S, Rig, answers, at_work, echo

ROW_MS = 100
LONG = 1000
"""Rows; nobody waits for the end."""
BAD = 13.0


rig = worker_rig.rig


def rows_of(value: float, rows: int = 1) -> np.ndarray[Any, Any]:
    return np.full((rows, 4), value, np.float32)


def start(
    rig: Rig,
    slow: Sequence[int],
    quick: Sequence[int] = (),
    lanes: int = 2,
    policy: str = "none",
) -> None:
    """One worker with an echo block per stage number."""
    blocks = {n: echo(rig, f"b{n}", row_ms=ROW_MS) for n in slow}
    blocks |= {n: echo(rig, f"b{n}") for n in quick}
    rig.start(11, blocks, lanes=lanes, stage={"policy": {"policy": policy}})
    rig.publish()


def queued(rig: Rig, stage: int, rows: int) -> None:
    """Wait until so many rows wait at ``stage``, by the worker's own figures."""
    rig.tell(11, Monitor(100.0))
    while True:
        kpis = {k["stage"]: k for k in rig.expect(Stats, 11).stages}
        if kpis[stage]["queue_rows"] == rows:
            break
    rig.tell(11, Monitor(0.0))


def shares(rig: Rig, threads: int, lanes: int) -> None:
    """Wait until the worker computes with so many threads in so many lanes."""
    rig.tell(11, Monitor(100.0))
    while True:
        extra = rig.expect(Stats, 11).extra
        if (extra["threads"], extra["lanes"]) == (threads, lanes):
            break
    rig.tell(11, Monitor(0.0))


def outcomes(rig: Rig, sent: dict[bytes, float]) -> None:
    """Each request's own result comes once, but of those whose value is :data:`BAD` a failure."""
    while sent:
        message, frame, _ = rig.receive_full()
        if isinstance(message, Failure):
            assert message.error.code == "BLOCK_FAILED"
            assert {sent.pop(i.request_id) for i in message.items} == {BAD}
            continue
        value = rig.read(message.tensor, frame)
        row = 0
        for item in message.items:
            assert (value[row : row + item.rows] == sent.pop(item.request_id)).all()
            row += item.rows


def test_two_blocks_compute_at_once(rig: Rig) -> None:
    start(rig, slow=(1, 2, 3))
    for stage in (1, 2):
        rig.send(rows_of(stage, LONG), [stage])
    at_work(rig, 1, 2)
    # The third waits for a lane, and its deadline is seen to meanwhile.
    (late,) = rig.send(rows_of(3), [3], remaining_ms=30)
    failure = rig.failure()
    assert (failure.items[0].request_id, failure.error.code) == (late, "DEADLINE_EXCEEDED")
    rig.tell(11, Ping(7))
    assert rig.expect(Pong, 11).seq == 7


@pytest.mark.parametrize("policy", ["none", "window"])
def test_one_block_computes_in_two_lanes_at_once(rig: Rig, policy: str) -> None:
    start(rig, slow=(1, 2), policy=policy)
    for value in (1, 2):
        rig.send(rows_of(value, LONG), [1])
        at_work(rig, *[1] * value)
    rig.send(rows_of(3), [1])
    queued(rig, 1, 1)


def test_results_of_batches_side_by_side_are_their_own(rig: Rig) -> None:
    """One block in three lanes under load, bad items among them, while the lanes change."""
    blocks = {n: echo(rig, f"b{n}", delay_ms=2, fail_on_value=BAD) for n in (1, 2, 3)}
    rig.start(11, blocks, lanes=3, stage={"policy": {"policy": "window", "max_rows": 4}})
    rig.publish()
    for wave, lanes in enumerate((3, 1, 2, 3)):
        sent: dict[bytes, float] = {}
        for k in range(20):
            value = BAD if k % 10 == 3 else 100.0 * wave + k
            sent[rig.send(rows_of(value, 1 + k % 3), [1, 2 + k % 2])[0]] = value
            if k == 7:
                rig.tell(11, SetThreads(1, lanes))
        outcomes(rig, sent)


@pytest.mark.parametrize(
    ("lanes", "second", "policy"),
    [(1, 2, "none"), (2, 1, "dvabatch"), (2, 1, "none")],
    ids=["one lane", "not made for it", "not everybody's"],
)
def test_what_may_not_overlap_waits(rig: Rig, lanes: int, second: int, policy: str) -> None:
    """With one lane another block waits; under a policy that counts on it the same block does, and
    so does one that others do not visit: they must find a lane."""
    start(rig, slow=(1, 2), quick=[3], lanes=lanes, policy=policy)
    if policy == "none" and lanes == 2:
        rig.send(rows_of(0), [3])
        rig.result()
    rig.send(rows_of(1, LONG), [1])
    at_work(rig, 1)
    rig.send(rows_of(2), [second])
    queued(rig, second, 1)
    at_work(rig, 1)


def test_the_other_lane_goes_on_during_a_long_forward(rig: Rig) -> None:
    """A chain of two blocks goes through the lane that the long forward leaves, batch by batch."""
    start(rig, slow=[1], quick=(2, 3))
    rig.send(rows_of(0, LONG), [1])
    at_work(rig, 1)
    sent = {rig.send(rows_of(k), [2, 3])[0]: float(k) for k in range(1, 31)}
    answers(rig, sent)
    at_work(rig, 1)


def test_results_are_right_whatever_changes_meanwhile(rig: Rig) -> None:
    """Three blocks in two lanes under load: policies, lanes and bad items in between."""
    blocks = {n: echo(rig, f"b{n}", delay_ms=1, fail_on_value=BAD) for n in (1, 2, 3)}
    rig.start(11, blocks, lanes=2, slots=3, stage={"policy": {"policy": "dvabatch"}})
    rig.publish()
    waves = [(1, 1, "window"), (2, 2, "none"), (1, 3, "dvabatch"), (1, 2, "window")]
    for wave, (threads, lanes, policy) in enumerate(waves):
        sent: dict[bytes, float] = {}
        for k in range(20):
            value = BAD if k % 10 == 3 else 100.0 * wave + k
            sent[rig.send(rows_of(value, 1 + k % 3), [1, 2, 3])[0]] = value
            if k == 7:
                rig.tell(11, SetThreads(threads, lanes))
            if k == 13:
                for stage in blocks:
                    rig.tell(11, SetPolicy(stage, {"policy": policy}))
        outcomes(rig, sent)
    shares(rig, 1, 2)
    assert rig.stop(11) == 0
    assert rig.leavings(11) == []


def test_lanes_come_and_go_in_the_running_process(rig: Rig) -> None:
    start(rig, slow=(1, 2, 3), lanes=1)
    rig.tell(11, SetThreads(1, 2))
    shares(rig, 1, 2)
    for stage in (1, 2):
        rig.send(rows_of(stage, LONG), [stage])
    at_work(rig, 1, 2)
    rig.send(rows_of(3), [3])
    queued(rig, 3, 1)
    # The engine thread is busy for long, and only it sets threads: no further lane before that.
    for lanes in (1, 3):
        rig.tell(11, SetThreads(1, lanes))
    shares(rig, 1, 1)
    at_work(rig, 1, 2)


@pytest.mark.parametrize("engine_thread", ["computes", "rests"])
def test_a_missing_slot_is_looked_for_whoever_computes(rig: Rig, engine_thread: str) -> None:
    """The further lane has found no slot; it rests, and somebody else has to look again."""
    blocks = {1: echo(rig, "b1", row_ms=ROW_MS), 2: echo(rig, "b2", row_ms=ROW_MS)}
    rig.start(11, blocks, lanes=2, slots=3)
    rig.publish()
    rig.send(rows_of(0, LONG if engine_thread == "computes" else 2), [1])
    at_work(rig, 1)
    sent = [rig.send(rows_of(k, 3 - k), [2])[0] for k in range(3)]
    held = []
    for _ in range(2 if engine_thread == "computes" else 3):
        message, frame, _ = rig.receive_full()
        assert isinstance(message, Data)
        held.append(rig.consumer.open(message.tensor, frame))
    time.sleep(0.05)  # it has found that out by now, most likely; it is right either way
    for buffer in held:
        buffer.release()
    assert rig.result()[0].items[0].request_id == sent[2]


def test_stop_lets_both_lanes_finish(rig: Rig) -> None:
    start(rig, slow=(1, 2))
    sent = {rig.send(rows_of(n, 4), [n])[0]: float(n) for n in (1, 2)}
    at_work(rig, 1, 2)
    rig.tell(11, Stop())
    answers(rig, sent)
    assert rig.children[11].wait(WAIT_S) == 0
    assert rig.leavings(11) == []


def test_a_drain_ends_when_both_lanes_have(rig: Rig) -> None:
    start(rig, slow=(1, 2))
    sent = {rig.send(rows_of(n, 3 * n), [n])[0]: float(n) for n in (1, 2)}
    at_work(rig, 1, 2)
    rig.tell(11, Drain())
    answers(rig, sent)
    rig.expect(Drained, 11)
    assert rig.stop(11) == 0


@pytest.mark.parametrize("stuck", [1, 2], ids=["engine-thread", "further-lane"])
def test_a_forward_that_takes_too_long_ends_the_process(rig: Rig, stuck: int) -> None:
    """Whichever lane it is in; the other one finishes first."""
    blocks = {n: echo(rig, f"b{n}", row_ms=ROW_MS) for n in (1, 2)}
    stages = tuple(
        StageSpec(n, info, timeout_ms=200 if n == stuck else 0) for n, info in blocks.items()
    )
    rig.start(11, blocks, lanes=2, stages=stages)
    rig.publish()
    rows = {n: LONG if n == stuck else 5 for n in blocks}
    rig.send(rows_of(1, rows[1]), [1])
    at_work(rig, 1)
    rig.send(rows_of(2, rows[2]), [2])
    while not isinstance(message := rig.receive(), Failure):
        continue  # the other result, where it was quicker than the time-out
    (item,) = message.items
    assert message.error.code == "BLOCK_FAILED" and item.path.nodes[item.hop].stage == stuck
    assert rig.children[11].wait(WAIT_S) == 3
    assert rig.leavings(11) == []


@pytest.mark.parametrize("lanes", [1, 2])
def test_who_stops_is_busy_with_nothing_but_what_it_finishes(rig: Rig, lanes: int) -> None:
    """What comes meanwhile is not read, and what a policy waits for is not started: neither may
    keep a thread spinning beside the forward that is waited for."""
    window = {"policy": "window", "max_rows": 2, "max_delay_ms": 500}
    blocks = {1: echo(rig, "waits"), 2: echo(rig, "long", row_ms=1000)}
    if lanes == 2:
        blocks[3] = echo(rig, "short", row_ms=100)
    rig.start(11, blocks, lanes=lanes, stage={"policy": window})
    rig.publish()
    if lanes == 2:  # it takes the engine thread, which rests then while the lane computes
        rig.send(rows_of(1.0, 2), [3])
        at_work(rig, 3)
    rig.send(rows_of(1.0, 2), [2])
    at_work(rig, 2)
    rig.send(rows_of(1.0), [1])
    queued(rig, 1, 1)
    worker = psutil.Process(rig.children[11].pid)
    rig.tell(11, Stop())
    rig.tell(11, Ping(1))
    rig.expect(Pong, 11)
    rig.send(rows_of(1.0), [1])
    at_work_file = AtWorkReader.open(rig.folder, 11)
    assert at_work_file is not None
    spent = [sum(worker.cpu_times()[:2])]
    while at_work_file.read() and rig.children[11].poll() is None:
        with suppress(psutil.Error):
            spent.append(sum(worker.cpu_times()[:2]))
        time.sleep(0.02)
    assert rig.children[11].wait(WAIT_S) == 0
    # Not the last: it may count what ends the process, which is busy then.
    assert max(spent[:-1] or spent) - spent[0] < 0.2

"""Workers as processes: startup, what the Controller asks and is told, termination."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from blockflow.core.metrics import StageKpi
from blockflow.core.routing import DISPATCHER_STAGE
from blockflow.launch.process_kpi import private_and_shared
from blockflow.wire.control import (
    Drain,
    Drained,
    Hello,
    Monitor,
    PeerGone,
    Ping,
    PolicyRefused,
    Pong,
    Ready,
    Routes,
    SetPolicy,
    SetThreads,
    StartFailed,
    Stats,
    Stop,
    Undrain,
)
from blockflow.wire.data import Data
from tests import worker_rig
from tests.worker_rig import WAIT_S, Rig, echo, some

rig = worker_rig.rig


# --- startup and termination -------------------------------------------------------------------


def test_life_of_a_worker(rig: Rig) -> None:
    child = rig.launch(11, {1: echo(rig, "e1")})
    hello = rig.expect(Hello, 11)
    assert (hello.role, hello.name, hello.pid) == ("worker", "w11", child.pid)
    ready = rig.expect(Ready, 11)
    assert ready.endpoint.startswith("ipc://") and ready.load_ms > 0
    assert rig.leavings(11) == ["arena-11", "d11.sock", "marks-11", "work-11"]
    assert rig.stop(11) == 0
    assert rig.leavings(11) == []


def test_a_further_worker_is_small(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1")})
    private, _ = private_and_shared(rig.children[11].pid)
    assert 0 < private < 20 << 20


def test_sigterm_is_stop(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1")})
    rig.children[11].kill(signal.SIGTERM)
    assert rig.children[11].wait(WAIT_S) == 0
    assert rig.leavings(11) == []


def test_load_failure_is_told(rig: Rig) -> None:
    rig.launch(11, {1: echo(rig, "bad", fail_on_load=1)})
    failed = rig.expect(StartFailed, 11)
    assert failed.error["code"] == "LOAD_FAILED" and failed.error["where"] == "bad"
    assert rig.children[11].wait(WAIT_S) == 2
    assert rig.leavings(11) == []


def test_another_artifact_than_was_ordered_is_not_loaded(rig: Rig) -> None:
    info = echo(rig, "e1")
    echo(rig, "e1", delay_ms=1)  # another digest under the same name
    rig.launch(11, {1: info})
    assert rig.expect(StartFailed, 11).error["code"] == "ARTIFACT_MISSING"
    assert rig.children[11].wait(WAIT_S) == 2


def test_unknown_policy_is_told(rig: Rig) -> None:
    rig.launch(11, {1: echo(rig, "e1")}, stage={"policy": {"policy": "nope"}})
    assert rig.expect(StartFailed, 11).error["code"] == "INVALID_TOPOLOGY"
    assert rig.children[11].wait(WAIT_S) == 2
    assert rig.leavings(11) == []


# --- control -------------------------------------------------------------------------------------


def test_a_ping_is_answered_while_it_computes(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "slow", delay_ms=1500)})
    rig.publish()
    rig.send(some(), [1])
    begin = time.monotonic()
    for seq in range(3):
        rig.tell(11, Ping(seq))
        assert rig.expect(Pong, 11).state == "ready"
    assert time.monotonic() - begin < 1.0
    rig.result()


def test_drain(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "slow", delay_ms=100)})
    rig.publish()
    for _ in range(3):
        rig.send(some(), [1])
    rig.tell(11, Ping(1))
    rig.expect(Pong, 11)
    rig.result()  # it has received by now; two are queued or under way
    rig.tell(11, Drain())
    rig.tell(11, Ping(2))
    drained = rig.expect(Drained, 11)
    assert drained.version == rig.version
    rig.result()
    rig.result()
    rig.tell(11, Ping(3))
    while (pong := rig.expect(Pong, 11)).seq != 3:
        pass
    assert pong.state == "draining"
    rig.tell(11, Undrain())
    rig.send(some(), [1])
    rig.result()


def test_stop_answers_what_is_queued(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "slow", delay_ms=300)})
    rig.publish()
    ids = [rig.send(some(), [1])[0] for _ in range(12)]
    rig.result()
    rig.tell(11, Stop())
    done: list[bytes] = []  # what is at work when Stop comes is finished; on a busy machine, more
    failed: list[bytes] = []
    while len(done) + len(failed) < len(ids) - 1:
        message = rig.receive()
        if isinstance(message, Data):
            rig.read(message.tensor, None)
            done += [item.request_id for item in message.items]
        else:
            assert message.error.code == "WORKER_LOST"
            failed += [item.request_id for item in message.items]
    assert done + failed == ids[1:]
    assert failed
    assert rig.children[11].wait(WAIT_S) == 0
    assert rig.leavings(11) == []


def test_kpis(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1", delay_ms=2), 2: echo(rig, "e2")}, monitor_hz=20.0)
    rig.publish()
    for _ in range(5):
        rig.send(some(3), [1, 2])
        rig.result()
    rig.send(some(3, 9), [1])
    rig.failure()
    while True:
        stats = rig.expect(Stats, 11)
        # those with news come first
        one, two = sorted((StageKpi(**s) for s in stats.stages), key=lambda kpi: kpi.block)
        if two.requests == 5:
            break
    assert (one.block, one.requests, one.rows, one.batches) == ("e1", 5, 15, 5)
    assert one.mean_batch_rows == 3.0 and one.compute["count"] == 5
    assert one.compute["p50_ms"] >= 2.0 and one.lam > 0 and one.mu > 0 and one.rho > 0
    assert one.bytes_out == 0  # stayed in this worker
    assert two.bytes_out == 5 * 3 * 4 * 4 and two.copies_out == 5
    # each came alone, and is read where it lies
    assert (one.copies_in, one.bytes_copied_in, two.copies_in) == (0, 0, 0)
    process = stats.process
    assert process["pid"] == rig.children[11].pid and process["slots"] == 16
    assert process["threads"] >= 4 and process["uss"] > 0
    rig.tell(11, Monitor(0.0))
    rig.tell(11, Ping(1))
    rig.expect(Pong, 11)
    rig.inbox.clear()
    with suppress(AssertionError):  # one may have been under way
        rig.expect(Stats, 11, timeout_s=0.2)
    with pytest.raises(AssertionError):
        rig.expect(Stats, 11, timeout_s=0.3)
    rig.tell(11, Monitor(50.0))
    rig.expect(Stats, 11)


def test_bad_control_messages_change_nothing(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1")})
    rig.publish()
    rig.tell(11, Routes({"version": 99, "epoch": "x"}))
    rig.tell(11, Routes({"version": 0, "epoch": 1, "stages": [], "tasks": []}))  # an old one
    rig.tell(11, SetPolicy(1, {"policy": "nope"}, epoch=5))
    refused = rig.expect(PolicyRefused, 11)
    assert (refused.stage, refused.epoch) == (1, 5)
    assert refused.kept == {"policy": "none"}
    assert "unknown policy 'nope'" in str(refused.error)
    rig.tell(11, SetPolicy(1, {"policy": "lbci", "t_opt_ms": 9}, 2))
    refused = rig.expect(PolicyRefused, 11)
    assert "(2 threads)" in str(refused.error)
    rig.tell(11, SetPolicy(1, {"policy": "window"}, 1, {"points": 3}))
    assert rig.expect(PolicyRefused, 11).error["code"] == "INTERNAL"
    rig.tell(11, SetPolicy(77, {"policy": "none"}))
    rig.tell(11, SetThreads(0))
    rig.tell(11, Pong(3, 1, ""))
    rig.tell(11, PeerGone(4711))
    rig.tell(11, SetPolicy(1, {"policy": "none"}))
    rig.send(some(), [1])
    rig.result()


def test_peer_gone_gives_slots_back(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1")}, slots=1, arena_bytes=1 << 16)
    rig.publish()
    rig.send(some(), [1])
    rig.receive()  # and never released
    # Its successor, at the same socket:
    rig.routes[DISPATCHER_STAGE] = replace(rig.routes[DISPATCHER_STAGE], incarnation=2)
    rig.publish()
    rig.send(some(1, first=5), [1])
    with pytest.raises(AssertionError):
        rig.receive(timeout_s=0.05)
    rig.tell(11, PeerGone(1))  # the receiver is declared dead: its lease is over
    message, y = rig.result()
    assert y[0, 0] == 5.0 and isinstance(message, Data)


def test_nothing_is_sent_to_the_dead(rig: Rig) -> None:
    """Workers that retire stay in the table; what went to a dead one would wait with its slot."""
    rig.start(11, {1: echo(rig, "e1")}, slots=1, arena_bytes=1 << 16)
    rig.start(12, {2: echo(rig, "e2")})
    rig.publish()
    rig.send(some(), [1, 2])
    rig.result()
    rig.stop(12)
    rig.tell(11, PeerGone(12))
    for publish_again in (False, False, True, False):
        if publish_again:
            rig.publish()  # a table that still names it
        rig.send(some(), [1, 2])
        failure = rig.failure()
        assert failure.error.code == "WORKER_LOST"
    rig.send(some(), [1])  # the only slot is free
    rig.result()

"""Workers that die or are lied to: killed at named points, orphaned, fed with nonsense."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockflow.core.errors import RequestError
from blockflow.core.routing import DISPATCHER_STAGE, merge_paths
from blockflow.tensormq.agent import ORPHAN_STATUS
from blockflow.tensormq.atwork import AtWorkReader
from blockflow.tensormq.janitor import remove_leavings
from blockflow.wire.control import Hello, PeerGone, Ping, Pong, StartFailed, Stats
from blockflow.wire.data import Data, Failure, Item, encode_data, encode_failure
from blockflow.wire.tensor import Handle, TensorDesc
from tests.dispatcher_rig import wait_until
from tests.warm_rig import Warm
from tests.worker_rig import (
    DISPATCHER,
    WAIT_S,
    Rig,
    echo,
    private_folder,
    rig_in,
    rigs_of,
)

MakeRig = Callable[[], AbstractContextManager[Rig]]


@pytest.fixture(scope="module")
def make_rig(warm: Warm) -> Iterator[MakeRig]:
    armed = warm.own_template(BLOCKFLOW_FAILPOINTS="options")
    with armed as launcher, rigs_of(launcher) as make:
        yield make


@pytest.fixture
def rig(make_rig: MakeRig) -> Iterator[Rig]:
    with make_rig() as one:
        yield one


def armed(points: str) -> dict[str, Any]:
    return {"stage": {"options": {"failpoints": points}}}


def some(rows: int = 2) -> np.ndarray[Any, Any]:
    return np.ones((rows, 4), np.float32)


@pytest.mark.parametrize("point", ["before_load", "after_load"])
def test_killed_while_loading(rig: Rig, point: str) -> None:
    child = rig.launch(11, {1: echo(rig, "e1")}, **armed(f"{point}=kill"))
    assert child.wait(WAIT_S) == -signal.SIGKILL
    remove_leavings(rig.folder, 11)
    assert rig.leavings(11) == []


@pytest.mark.parametrize("point", ["before_forward", "after_forward", "after_output"])
def test_killed_at_work(rig: Rig, point: str) -> None:
    """Its successor takes over; the dead one's slots and socket are no more."""
    info = echo(rig, "e1")
    rig.start(11, {1: info}, **armed(f"{point}=kill-once"))
    rig.publish()
    rig.send(some(), [1])
    assert rig.children[11].wait(WAIT_S) == -signal.SIGKILL
    if point == "after_output" and rig.pull.poll(100):  # or it died with the message unsent
        message, frame, _ = rig.receive_full()
        assert isinstance(message, Data)
        np.testing.assert_array_equal(rig.read(message.tensor, frame), some())
    rig.shm.peer_gone(11)
    rig.consumer.peer_gone(11)
    assert rig.shm.outstanding() == 0
    remove_leavings(rig.folder, 11)
    assert rig.leavings(11) == []
    rig.start(12, {1: info}, **armed(f"{point}=kill-once"))  # once per instance: this one lives
    rig.publish()
    rig.send(some(), [1])
    rig.result()


def test_next_hop_killed(rig: Rig) -> None:
    """The sender gets its slots back and says which requests have nowhere to go."""
    rig.start(11, {1: echo(rig, "e1")}, slots=2, arena_bytes=1 << 16)
    rig.start(12, {2: echo(rig, "e2")}, **armed("before_forward=kill"))
    rig.publish()
    rig.send(some(), [1, 2])
    assert rig.children[12].wait(WAIT_S) == -signal.SIGKILL
    rig.tell(11, PeerGone(12))
    del rig.routes[2]
    rig.publish()
    for _ in range(4):  # more than there are slots
        (rid,) = rig.send(some(), [1, 2])
        failure = rig.failure()
        assert failure.error.code == "WORKER_LOST"
        assert [(i.request_id, i.hop) for i in failure.items] == [(rid, 1)]
    rig.send(some(), [1])
    rig.result()


def test_previous_hop_killed(rig: Rig) -> None:
    """What has arrived is still computed: the dead one's memory stays mapped."""
    rig.start(11, {1: echo(rig, "e1")})
    rig.start(12, {2: echo(rig, "slow", delay_ms=700)}, monitor_hz=50.0)
    rig.publish()
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    rig.send(x, [1, 2])
    while not rig.expect(Stats, 12).stages[0]["lam"]:
        pass  # not arrived yet
    rig.children[11].kill()
    assert rig.children[11].wait(WAIT_S) == -signal.SIGKILL
    rig.tell(12, PeerGone(11))
    remove_leavings(rig.folder, 11)
    np.testing.assert_array_equal(rig.result()[1], x)


def test_a_failing_point_in_the_engine_is_typed(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1")}, **armed("before_forward=raise"))
    rig.publish()
    rig.send(some(), [1])
    assert rig.failure().error.code == "BLOCK_FAILED"


@pytest.mark.parametrize("point", ["before_forward", "after_output"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_thread_that_ends_takes_its_process_along(rig: Rig, point: str, lanes: int) -> None:
    """As of a SystemExit that a library raises: else nobody would compute, and nobody know."""
    blocks = {1: echo(rig, "e1"), 2: echo(rig, "e2")}
    rig.start(11, blocks, lanes=lanes, **armed(f"{point}=exit"))
    rig.publish()
    for stage in (1, 2):
        rig.send(some(), [stage])
    assert rig.children[11].wait(WAIT_S) == 1


def test_a_load_that_ends_its_thread_is_a_failed_start(rig: Rig) -> None:
    rig.launch(11, {1: echo(rig, "e1")}, **armed("after_load=exit"))
    assert "SystemExit: failpoint after_load" in rig.expect(StartFailed, 11).error["message"]
    assert rig.children[11].wait(WAIT_S) == 2


def test_unknown_failpoint_stops_the_start(rig: Rig) -> None:
    rig.launch(11, {1: echo(rig, "e1")}, **armed("nowhere=kill"))
    assert "nowhere" in rig.expect(StartFailed, 11).error["message"]
    assert rig.children[11].wait(WAIT_S) == 2


def test_a_defect_at_start_is_told(rig: Rig) -> None:
    rig.launch(11, {1: echo(rig, "e1")}, slots="many")
    error = rig.expect(StartFailed, 11).error
    assert error["code"] == "INTERNAL"
    assert "TypeError" in error["message"]
    assert rig.children[11].wait(WAIT_S) == 2
    assert rig.leavings(11) == []


def test_an_error_of_one_that_serves_is_no_failed_start(rig: Rig) -> None:
    """It dies at once, with its cause in the log, and waits for nobody who reads its outputs."""
    rig.start(11, {1: echo(rig, "e1")})
    rig.routes[DISPATCHER_STAGE] = replace(
        rig.routes[DISPATCHER_STAGE], endpoint="tcp://127.0.0.1:70000"
    )
    rig.publish()
    rig.send(some(), [1])
    assert rig.children[11].wait(WAIT_S) == 1
    with pytest.raises(AssertionError, match="no StartFailed"):
        rig.expect(StartFailed, 11, timeout_s=0.1)


@pytest.mark.parametrize("point", ["before_forward", "after_forward"])
def test_the_requests_at_work_are_known_after_a_death(rig: Rig, point: str) -> None:
    rig.start(11, {1: echo(rig, "e1")}, **armed(f"{point}=kill"))
    rig.publish()
    (rid,) = rig.send(some(), [1])
    assert rig.children[11].wait(WAIT_S) == -signal.SIGKILL
    reader = AtWorkReader.open(rig.folder, 11)
    assert reader is not None
    (work,) = reader.read()
    assert (work.stage, work.count, work.records) == (1, 1, (rid + b"\1\0",))
    assert work.started_ns < time.monotonic_ns()


def test_who_dies_after_the_work_was_not_at_work(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1")}, **armed("after_output=kill"))
    rig.publish()
    rig.send(some(), [1])
    assert rig.children[11].wait(WAIT_S) == -signal.SIGKILL
    reader = AtWorkReader.open(rig.folder, 11)
    assert reader is not None
    assert reader.read() == []


def await_stopped(pid: int) -> None:
    """Stopping takes effect thread by thread, each when it is next scheduled."""
    end = time.monotonic() + WAIT_S
    tasks = Path(f"/proc/{pid}/task")
    while any(
        (t / "stat").read_text().rpartition(")")[2].split()[0] != "T" for t in tasks.iterdir()
    ):
        assert time.monotonic() < end, "the process did not stop"


def test_killed_while_idle_and_stopped(rig: Rig) -> None:
    rig.start(11, {1: echo(rig, "e1")})
    rig.start(12, {2: echo(rig, "e2")})
    rig.publish()
    rig.children[11].kill()
    assert rig.children[11].wait(WAIT_S) == -signal.SIGKILL
    rig.children[12].kill(signal.SIGSTOP)
    await_stopped(rig.children[12].pid)
    rig.tell(12, Ping(1))
    assert not rig.router.poll(200), "a stopped process answers nothing"
    rig.children[12].kill(signal.SIGCONT)
    assert rig.expect(Pong, 12).seq == 1
    rig.send(some(), [2])
    rig.result()


@pytest.mark.parametrize("stuck", [False, True])
def test_orphan_ends_itself(warm: Warm, stuck: bool) -> None:
    """The manager's end of the lifeline goes: the worker cleans up, also in mid-computation."""
    folder, repository = private_folder("rig"), private_folder("repo")
    try:
        with (
            warm.fresh() as launcher,  # no template, which would help
            rig_in(folder, launcher, repository) as rig,
        ):
            # A warm-up of a minute keeps the engine thread busy.
            info = echo(rig, "e1", delay_ms=60_000 if stuck else 0)
            if stuck:
                rig.launch(11, {1: info})
                rig.expect(Hello, 11)
                wait_until(lambda: "d11.sock" in rig.leavings(11), WAIT_S)
            else:
                rig.start(11, {1: info})
            launcher._lifeline.cut()
            assert rig.children[11].wait(WAIT_S) == ORPHAN_STATUS
            assert rig.leavings(11) == []
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(repository, ignore_errors=True)


# --- nonsense on the data socket -----------------------------------------------------------------


def an_item(rig: Rig, rows: int = 2, stage: int = 1) -> Item:
    return Item(os.urandom(16), 1, 1, merge_paths([[stage]])[0], 0, rows, 10_000)


def test_malformed_frames(rig: Rig) -> None:
    ready = rig.start(11, {1: echo(rig, "e1")})
    rig.publish()
    seed = 20240611
    chance = random.Random(seed)
    good = encode_data(
        Data(DISPATCHER, time.monotonic_ns(), TensorDesc("float32", (2, 4)), (an_item(rig),))
    )
    rig.send(some(), [1])
    rig.result()
    for k in range(3000):
        kind = k % 4
        if kind == 0:
            frames = [chance.randbytes(chance.randrange(0, 300))]
        elif kind == 1:  # cut short
            frames = [good[: chance.randrange(len(good))], b"x" * 32]
        elif kind == 2:  # a byte altered; no elements with it
            at = chance.randrange(len(good))
            frames = [good[:at] + bytes([chance.randrange(256)]) + good[at + 1 :]]
        else:  # too many frames
            frames = [chance.randbytes(20) for _ in range(chance.randrange(3, 8))]
        rig.send_raw(ready.endpoint, frames)
    (rid,) = rig.send(some(), [1])
    for _ in range(3000):  # failures for those whose items could be read
        message = rig.receive()
        if isinstance(message, Data) and message.items[0].request_id == rid:
            break
        assert isinstance(message, Failure)
    else:
        pytest.fail(f"the good request got lost (seed {seed})")
    rig.tell(11, Ping(1))
    rig.expect(Pong, 11)


def test_a_tensor_that_cannot_be_opened_fails_its_items(rig: Rig) -> None:
    ready = rig.start(11, {1: echo(rig, "e1")})
    rig.publish()
    lies = [
        (TensorDesc("float32", (2, 4), Handle(DISPATCHER, 0, 0, 9, 0)), None),  # stale
        (TensorDesc("float32", (2, 4), Handle(DISPATCHER, 60_000, 0, 1, 0)), None),  # no such slot
        (TensorDesc("float32", (2, 4), Handle(4711, 0, 0, 1, 0)), None),  # no such arena
        (TensorDesc("float32", (2, 4)), b"too short"),
        (TensorDesc("float32", (2, 4)), None),
        (TensorDesc("float32", (2, 4), Handle(DISPATCHER, 0, 0, 1, 0)), b"x" * 32),  # both
    ]
    for desc, frame in lies:
        item = an_item(rig)
        header = encode_data(Data(DISPATCHER, time.monotonic_ns(), desc, (item,)))
        rig.send_raw(ready.endpoint, [header] if frame is None else [header, frame])
        failure = rig.failure()
        assert failure.items[0].request_id == item.request_id
        # Not a client's fault, whatever it was.
        assert failure.error.code in ("INTERNAL", "WORKER_LOST")
    header = encode_failure(Failure(1, 0, RequestError("CANCELLED", ""), (an_item(rig),)))
    rig.send_raw(ready.endpoint, [header])  # not for a worker: dropped and counted
    rig.send(some(), [1])
    rig.result()

"""Idle cores are kept awake while requests of tasks that ask for it are in flight."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import dispatcher_rig
import numpy as np
import pytest
from dispatcher_rig import Rig, X, swallow, task, wait_until
from latency_device import words

from blockflow.dispatcher.cpu_latency import DEVICE, CpuLatency
from blockflow.tensormq.janitor import run_root
from blockflow.wire.control import PeerGone

make = dispatcher_rig.make


def in_force() -> int:
    """What the kernel has been asked for, by all processes together."""
    with DEVICE.open("rb") as device:
        (latency,) = struct.unpack("=i", device.read(4))
    return int(latency)


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "latency"
    path.touch()
    return path


def test_it_is_held_from_a_request_to_a_while_after_its_answer(
    make: Callable[..., Rig], device: Path
) -> None:
    r = make(cpu_latency=CpuLatency(device))
    worker = r.worker(11, {1: "trunk"})
    seen: list[list[int]] = []
    held = threading.Event()

    def look(x: np.ndarray) -> np.ndarray:
        wait_until(lambda: words(device) == [5])
        seen.append(words(device))
        held.set()
        return x

    worker.behave["trunk"] = look
    r.publish(task("awake", ["trunk"], cpu_latency_us=5), task("usual", ["trunk"]))
    client = r.client()
    client.infer("awake", X)
    assert held.is_set()
    wait_until(lambda: words(device) == [5, -1])  # by itself: nothing else happens any more
    assert seen == [[5]]
    worker.behave["trunk"] = lambda x: x
    client.infer("usual", X)
    assert words(device) == [5, -1]


def test_whatever_ends_a_request_ends_it(make: Callable[..., Rig], device: Path) -> None:
    r = make(cpu_latency=CpuLatency(device))
    worker = r.worker(11, {1: "trunk"})
    worker.behave["trunk"] = swallow
    r.publish(task("t", ["trunk"], cpu_latency_us=0))
    client = r.client()
    client.ask("t", X, deadline_ms=50)
    reply, _ = client.answer()
    assert reply.results[0].error.code == "DEADLINE_EXCEEDED"
    wait_until(lambda: words(device) == [0, -1])
    client.ask("t", X)
    wait_until(lambda: words(device) == [0, -1, 0])
    client.close()  # it is gone
    wait_until(lambda: words(device) == [0, -1, 0, -1])


def test_who_waits_for_a_worker_keeps_no_core_awake(make: Callable[..., Rig], device: Path) -> None:
    r = make(cpu_latency=CpuLatency(device))
    dead = r.worker(11, {1: "trunk"})
    dead.behave["trunk"] = swallow
    routes = [task("t", ["trunk"], cpu_latency_us=0)]
    r.publish(*routes)
    client = r.client()
    client.ask("t", X)  # is run again
    wait_until(lambda: dead.seen and words(device) == [0])
    r.mailbox.put(PeerGone(11))
    wait_until(lambda: words(device) == [0, -1])
    client.ask("t", X)  # begins to wait when it comes
    wait_until(lambda: r.exchange.table.waiting == 2)
    successor = r.worker(13, {2: "trunk"})
    r.publish(*routes, workers=[successor])
    for _ in range(2):
        reply, _ = client.answer()
        assert reply.results[0].error is None
    wait_until(lambda: words(device) == [0, -1, 0, -1])


def test_without_leave_requests_are_served_all_the_same(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    r = make(cpu_latency=CpuLatency(tmp_path / "none"))
    r.worker(11, {1: "trunk"})
    r.publish(task("t", ["trunk"], cpu_latency_us=0))
    (out,) = r.client().infer("t", X)
    np.testing.assert_array_equal(out, X + 1)
    gauges = r.server._gauges()["cpu_latency"]
    assert (gauges["held_us"], "No such file" in gauges["trouble"]) == (None, True)


def test_leave_that_is_given_later_counts_from_the_next_publication(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    device = tmp_path / "late"
    r = make(cpu_latency=CpuLatency(device))
    worker = r.worker(11, {1: "trunk"})
    routes = [task("t", ["trunk"], cpu_latency_us=5)]
    r.publish(*routes)
    client = r.client()
    client.infer("t", X)
    device.touch()
    client.infer("t", X)
    assert words(device) == []
    r.publish(*routes, workers=[worker])
    client.infer("t", X)
    wait_until(lambda: words(device) == [5, -1])


def test_it_ends_with_the_dispatcher(device: Path) -> None:
    latency = CpuLatency(device)
    with dispatcher_rig.rig(run_root(), cpu_latency=latency) as r:
        r.worker(11, {1: "trunk"}).behave["trunk"] = swallow
        r.publish(task("t", ["trunk"], cpu_latency_us=0))
        r.client().ask("t", X)
        wait_until(lambda: words(device) == [0])
    assert (words(device), latency.held_us) == ([0], None)  # its end says so to the kernel


@pytest.mark.skipif(not os.access(DEVICE, os.R_OK | os.W_OK), reason="no leave to write there")
def test_the_kernel_does_it(make: Callable[..., Rig]) -> None:
    r = make()
    worker = r.worker(11, {1: "trunk"})

    def look(x: np.ndarray) -> np.ndarray:
        wait_until(lambda: in_force() == 0)
        return x

    worker.behave["trunk"] = look
    r.publish(task("t", ["trunk"], cpu_latency_us=0))
    (out,) = r.client().infer("t", X)
    np.testing.assert_array_equal(out, X)
    # Others may ask for it as well, so what is in force afterwards tells nothing.
    wait_until(lambda: r.server._gauges()["cpu_latency"]["held_us"] is None)

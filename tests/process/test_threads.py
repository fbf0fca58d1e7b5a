"""Threads as they are: pools in real processes, changes under load, the whole system's plan."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from blockflow.client.sync import Client
from blockflow.control.settings import ControlSettings
from blockflow.control.system import System
from blockflow.core.errors import TopologyError
from blockflow.core.model import BlockInfo, TensorSpec
from blockflow.engine.workshop import EngineWorkshop
from blockflow.launch.base import Launcher
from blockflow.repository.convert import convert_block
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.wire.control import Hello, Monitor, SetThreads, Stats
from tests.worker_rig import Rig, rigs_of

ROWS, WIDTH = 32, 2048
X = np.linspace(-1, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
"""Some milliseconds of compute: torch uses every thread it is given, and little else runs."""

PACE_S = 0.005

two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core has nothing to share out"
)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two blocks that compute, m1 and m2."""
    root = tmp_path_factory.mktemp("computing") / "blocks"
    torch.manual_seed(1)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)]
    spec = TensorSpec("float32", ("rows", WIDTH))
    source = LoadedModel(nn.Sequential(*parts).eval(), "test", spec)
    export_model(source, BlockRepository(root), names=["m1", "m2"], cuts=["1"])
    return root


def infos(root: Path) -> list[BlockInfo]:
    repository = BlockRepository(root)
    return [repository.info(name) for name in sorted(repository.names())]


@pytest.fixture(scope="module")
def rigs(launcher: Launcher) -> Iterator[Callable[[], AbstractContextManager[Rig]]]:
    with rigs_of(launcher) as make:
        yield make


@pytest.fixture
def rig(rigs: Callable[[], AbstractContextManager[Rig]], blocks: Path) -> Iterator[Rig]:
    with rigs() as one:
        one.repository = blocks
        yield one


def run_ns(pid: int) -> dict[str, int]:
    """Thread -> time on a core so far."""
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError):  # it has ended meanwhile
            text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text()
            found[thread] = int(text.split()[0])
    return found


def computing(pid: int, work: Callable[[], None]) -> int:
    """How many threads of a process compute while ``work`` is done.

    Those are meant that ran for a fifth of the busiest one's time: reading messages and sampling
    is less.
    """
    before = run_ns(pid)
    work()
    spent = [ns - before.get(thread, 0) for thread, ns in run_ns(pid).items()]
    return sum(5 * ns >= max(spent) for ns in spent)


def reaches(pid: int, work: Callable[[], None], threads: int) -> bool:
    """Whether as many threads compute as were given, and never more.

    A pool hands out its work as its threads wake up: on a machine with other things to do one of
    them may find that nothing is left, so reaching the number may take some tries.
    """
    end = time.monotonic() + 30
    while (found := computing(pid, work)) < threads and time.monotonic() < end:
        pass
    assert found <= threads
    return found == threads


def batches(rig: Rig, times: int = 10) -> Callable[[], None]:
    def work() -> None:
        for _ in range(times):
            rig.send(X, [1])
            assert rig.result()[1].shape == X.shape

    return work


def in_use(rig: Rig, incarnation: int) -> Any:
    asked_ns = time.monotonic_ns()
    rig.tell(incarnation, Monitor(50.0))
    stats = rig.expect(Stats, incarnation)
    while stats.time_ns < asked_ns:  # left over from the last time
        stats = rig.expect(Stats, incarnation)
    rig.tell(incarnation, Monitor(0.0))
    return stats.extra["threads"]


@two_cores
def test_a_worker_computes_with_the_threads_it_was_given(rig: Rig) -> None:
    info = infos(rig.repository)[0]
    for incarnation, threads in ((11, 1), (12, 2)):
        rig.start(incarnation, {1: info}, threads=threads)
        rig.publish()
        batches(rig, 3)()
        assert in_use(rig, incarnation) == threads
        assert reaches(rig.children[incarnation].pid, batches(rig), threads)
        assert rig.stop(incarnation) == 0


@two_cores
def test_threads_change_between_two_batches(rig: Rig) -> None:
    rig.start(11, {1: infos(rig.repository)[0]}, threads=1)
    rig.publish()
    for threads in (2, 1, 2):
        # Batches before and after it, and perhaps one in the middle: all of them are answered.
        sent = []
        for n in range(6):
            sent += rig.send(X, [1])
            if n == 3:
                rig.tell(11, SetThreads(threads))
        assert [rig.result()[0].items[0].request_id for _ in sent] == sent
        assert in_use(rig, 11) == threads
        assert reaches(rig.children[11].pid, batches(rig), threads)
    assert rig.stop(11) == 0


@two_cores
def test_every_lane_computes_with_threads_of_its_own(rig: Rig) -> None:
    """Two blocks at once, with the results that each gives alone; and one at a time after that."""
    one, two = infos(rig.repository)
    rig.start(11, {1: one, 2: two}, threads=1, lanes=2)
    rig.publish()
    alone = {}
    for stage in (1, 2):
        rig.send(X, [stage])
        alone[stage] = rig.result()[1]

    def work() -> None:
        for _ in range(10):
            sent = {rig.send(X, [stage])[0]: stage for stage in (1, 2)}
            for _ in range(2):
                message, value = rig.result()
                stage = sent.pop(message.items[0].request_id)
                np.testing.assert_array_equal(value, alone[stage])

    pid = rig.children[11].pid
    assert reaches(pid, work, 2)
    rig.tell(11, SetThreads(1, 1))
    assert in_use(rig, 11) == 1
    work()
    assert rig.stop(11) == 0


@two_cores
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_engines_with_pools_of_their_own_keep_to_it(rig: Rig, engine: str) -> None:
    pytest.importorskip(engine, reason=f"the extra {engine!r} is not installed")
    pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
    repository = BlockRepository(rig.repository)
    info = infos(rig.repository)[0]
    if "onnx" not in info.variants:
        convert_block(repository, info.name, "onnx", EngineWorkshop())
        info = repository.info(info.name)
    rig.start(11, {1: info}, threads=2, stage={"engine": engine})
    rig.publish()
    for threads in (2, 1, 2):
        rig.tell(11, SetThreads(threads))
        work = batches(rig, 3)
        work()
        while in_use(rig, 11) != threads:  # the order came by another socket than the requests
            work()
        assert reaches(rig.children[11].pid, batches(rig), threads)
    assert rig.stop(11) == 0


def test_what_a_worker_was_told_while_it_loaded_holds(rig: Rig) -> None:
    blocks = {1: infos(rig.repository)[0]}
    rig.launch(11, blocks, threads=1)
    rig.expect(Hello, 11)
    rig.tell(11, SetThreads(2))
    rig.await_ready(11, blocks)
    rig.publish()
    batches(rig, 1)()  # the thread that computes has begun
    assert in_use(rig, 11) == 2
    assert rig.stop(11) == 0


# --- a system ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def system(
    blocks: Path, tmp_path_factory: pytest.TempPathFactory, launcher: Launcher
) -> Iterator[System]:
    """Each test applies a topology of its own."""
    settings = ControlSettings(
        repository=blocks,
        state_dir=tmp_path_factory.mktemp("state"),
        rest_port=0,
        client_port=0,
        cores=tuple(sorted(os.sched_getaffinity(0)))[:2],
        monitor_hz=20.0,
    )
    with System(settings, launcher=launcher) as running:
        yield running


def threads_now(system: System, want: dict[str, int], what: str = "threads") -> None:
    """Wait until the workers' own figures are ``want``."""
    end = time.monotonic() + 20
    while True:
        workers = {w["name"]: w for w in system.commands.workers() if w["role"] == "active"}
        found = {n: w[f"{what}_now"] for n, w in workers.items()}
        if found == want:
            assert {n: w[what] for n, w in workers.items()} == want
            return
        assert time.monotonic() < end, found
        time.sleep(0.02)


class Load:
    """A client that goes on asking, and what it got. (Between two requests the cores are free for
    what happens to them.)"""

    def __init__(self, system: System) -> None:
        self._endpoint = system.client_endpoint
        self._stop = threading.Event()
        self.answers = 0

    def run(self) -> None:
        with Client(self._endpoint) as client:
            while not self._stop.is_set():
                result = client.infer("t", X, deadline_s=30)
                assert result.value.shape == X.shape
                self.answers += 1
                self._stop.wait(PACE_S)

    def stop(self) -> None:
        self._stop.set()


@two_cores
def test_threads_follow_updates_and_no_request_is_lost(system: System) -> None:
    alone = {"blocks": ["m1"], "tasks": {"t": ["m1"]}}
    both = {"blocks": ["m1", "m2"], "tasks": {"t": ["m1"], "u": ["m1", "m2"]}}
    system.apply(alone)
    threads_now(system, {"m1#0": 2})
    pid = system.commands.worker("m1#0")["pid"]
    loads = [Load(system) for _ in range(2)]
    with ThreadPoolExecutor(len(loads)) as clients:
        running = [clients.submit(load.run) for load in loads]
        for _ in range(2):
            plan = system.apply(both)["update"]["plan"]
            assert (plan["keep"], plan["threads"]) == (["m1#0"], {"m1": 1, "m2": 1})
            threads_now(system, {"m1#0": 1, "m2#0": 1})
            before = loads[0].answers
            system.apply(alone)
            threads_now(system, {"m1#0": 2})
            until(lambda before=before: loads[0].answers > before, "answers", running)
        for load in loads:
            load.stop()
        for future in running:
            future.result(30)
    assert system.commands.worker("m1#0")["pid"] == pid
    assert all(load.answers for load in loads)


@two_cores
def test_lanes_follow_updates_in_the_running_process(system: System) -> None:
    def post(lanes: int) -> Any:
        blocks = [{"name": n, "worker": "w", "lanes": lanes} for n in ("m1", "m2")]
        return system.apply({"blocks": blocks, "tasks": {"t": ["m1", "m2"]}})["update"]["plan"]

    with Client(system.client_endpoint) as client:
        results = []
        for lanes, threads in ((2, 1), (1, 2), (2, 1)):
            plan = post(lanes)
            assert (plan["lanes"], plan["threads"]) == ({"w": lanes}, {"w": threads})
            threads_now(system, {"w#0": lanes}, "lanes")
            threads_now(system, {"w#0": threads})
            results.append(client.infer("t", X, deadline_s=30).value)
    assert plan["keep"] == ["w#0"]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-4, atol=1e-6)


def until(test: Callable[[], bool], what: str, running: list[Any]) -> None:
    end = time.monotonic() + 20
    while not test():
        assert time.monotonic() < end, f"no {what}"
        assert not any(f.done() for f in running), [f.exception() for f in running if f.done()]
        time.sleep(0.01)


def test_processes_compute_with_one_thread_unless_it_was_planned(system: System) -> None:
    one = [{"name": name, "threads": 1} for name in ("m1", "m2")]
    system.apply({"blocks": one, "tasks": {"t": ["m1", "m2"]}})
    status = system.status()
    pids = [w["pid"] for w in status["workers"]]
    with Client(system.client_endpoint) as client:
        client.infer("t", X)

        def work() -> None:
            for _ in range(10):
                client.infer("t", X)

        # What else a process does (messages, sampling) counts where the machine is busy.
        for pid in pids:
            assert any(computing(pid, work) == 1 for _ in range(10))
    # The Dispatcher does no algebra; numpy would still open a pool as wide as the machine.
    for pid in (status["dispatcher"]["pid"], *pids):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert {b"OMP_NUM_THREADS=1", b"OPENBLAS_NUM_THREADS=1"} <= set(environment)


def test_more_threads_than_cores_are_refused_or_shown(system: System) -> None:
    many = [{"name": name, "threads": 2} for name in ("m1", "m2")]
    body = {"blocks": many, "tasks": {"t": ["m1", "m2"]}}
    with pytest.raises(TopologyError) as caught:
        system.apply(body)
    assert caught.value.problems[0].path == "$.blocks[0].threads"
    update = system.apply({**body, "oversubscribe": True})["update"]
    assert update["plan"]["threads"] == {"m1": 2, "m2": 2}
    assert system.status()["warnings"] == update["notes"]
    assert "4 threads may compute at once on 2 cores" in update["notes"][0]

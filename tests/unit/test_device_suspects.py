"""Who is at work while a device computes: it tells of an error late, and then to anybody.

With the double of the driver, whose streams work when a test opens their gates.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.routing import merge_paths
from blockflow.engine.base import Engine, EngineOptions
from blockflow.tensormq.atwork import AtWork, AtWorkReader, record
from blockflow.tensormq.cuda_api import CudaError
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.inline import InlineProducer
from blockflow.tensormq.memory import TensorMemory
from blockflow.tensormq.shm import ShmConsumer
from blockflow.wire.data import Item
from blockflow.worker.failpoints import FailPoints
from blockflow.worker.runner import Runner
from blockflow.worker.stage import Stage
from blockflow.worker.ticket import Batch, Source, Ticket
from tests.dispatcher_rig import wait_until

SPEC = TensorSpec("float32", ("rows", 2))
INFO = BlockInfo("b", "1", "0" * 64, "test", Contract(SPEC, SPEC), 0, 0)
ME = 7
WAIT_S = 10.0


class Ordering(Engine):
    """Orders a kernel that waits for the gate of its rows, and fails on 13 as a device does."""

    def load(self, artifact: Path) -> None: ...

    def run(self, x: Any, out: Any | None = None) -> Any:
        gate = threading.Event()
        self.gates.append(gate)
        self.saw()
        if bool((x == 17).any()):
            raise ValueError("17")  # before anything is ordered
        bad = bool((x == 13).any())

        def kernel() -> None:
            gate.wait(WAIT_S)
            if bad:
                raise CudaError("cuLaunchKernel", 710, "CUDA_ERROR_ASSERT")

        self.api.launch(self.stream, kernel)
        return x * 2

    def on(self, device: CudaDevice, api: FakeCuda) -> Ordering:
        self.api, self.stream = api, device.stream
        self.gates: list[threading.Event] = []
        self.saw: Callable[[], object] = lambda: None
        return self

    @property
    def copies_out(self) -> int:
        return 1

    def close(self) -> None: ...


class Worker:
    """A runner on a device, and the Manager's look at what it is at."""

    def __init__(self, folder: Path, lanes: int = 4) -> None:
        api = FakeCuda(folder, eager=False)
        self.told: list[str] = []
        self.device = CudaDevice(api, self.told.append)
        self.engine = Ordering(INFO, EngineOptions()).on(self.device, api)
        frames = InlineProducer()
        memory = TensorMemory(None, frames, ShmConsumer(folder), device=self.device)
        at_work = AtWork.create(folder, ME, 8, lanes)
        stages = {1: Stage(StageSpec(1, INFO), self.engine)}
        self.runner = Runner(stages, FailPoints("", folder), memory, at_work)
        look = AtWorkReader.open(folder, ME)
        assert look is not None
        self.look = look

    def compute(self, *values: float, alone: bool = False, limit_ns: int = 0) -> list[Item]:
        """One batch with a request per value."""
        path = merge_paths([[1]])[0]
        items = [Item(os.urandom(16), 1, 1, path, 0, 1, 1000, alone=alone) for _ in values]
        tickets = []
        for key, (item, value) in enumerate(zip(items, values, strict=True)):
            x = Source("float32", (2,), 1, tensor=torch.full((1, 2), value))
            tickets.append(Ticket(key, item, 1, x, 0, 0, 0, 0, 2**62, 0))
        self.batch = Batch(1, tuple(tickets), limit_ns=limit_ns)
        self.runner.compute(self.batch)
        return items

    def at_work(self) -> list[tuple[bytes, ...]]:
        return [work.records for work in self.look.read()]

    def end(self) -> None:
        for gate in self.engine.gates:
            gate.set()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    made.end()


def beside(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """An engine thread of its own, and what ends it."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def names(*batches: list[Item]) -> list[tuple[bytes, ...]]:
    return [tuple(record(item) for item in items) for items in batches]


def test_a_batch_is_at_work_until_the_device_is_past_it(worker: Worker) -> None:
    first, second = worker.compute(1, 2), worker.compute(3)
    assert worker.at_work() == names(first, second)
    worker.engine.gates[0].set()
    thread, _ = beside(lambda: worker.compute(4))  # waits for the first, and only for that
    thread.join(WAIT_S)
    # Crossed out by another thread.
    wait_until(lambda: names(first)[0] not in worker.at_work(), WAIT_S)
    now = worker.at_work()
    assert now[0] == names(second)[0] and len(now) == 2
    worker.end()
    assert worker.device.completions.wait_idle(WAIT_S)
    assert worker.at_work() == []


def test_a_batchs_time_begins_when_the_device_comes_to_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the batch before, and past what its input waits for: either may have taken as long as a
    forward may."""
    api, input_there = worker.device.api, threading.Event()

    def tensor(source: Source) -> torch.Tensor:
        api.launch(worker.device.stream, lambda: input_there.wait(WAIT_S) and None)
        return source._tensor

    worker.compute(1)
    monkeypatch.setattr(Source, "tensor", tensor)
    second, batch = worker.compute(3, limit_ns=1), worker.batch
    worker.runner.sent()
    worker.engine.gates[0].set()
    wait_until(lambda: worker.at_work() == names(second))
    assert batch.waits and worker.look.read()[0].started_ns > time.monotonic_ns()
    begins_ns = time.monotonic_ns()
    input_there.set()
    wait_until(lambda: worker.look.read()[0].started_ns <= time.monotonic_ns())
    assert not batch.waits and batch.forward_ns >= begins_ns


def test_its_time_on_the_device_begins_behind_what_its_input_waits_for(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a block's figure has the time of the block before it in."""
    log: list[Any] = []
    api, queue = worker.device.api, worker.device.queue
    real = api.event_record
    monkeypatch.setattr(api, "event_record", lambda event, s: (log.append(event), real(event, s)))
    monkeypatch.setattr(Source, "tensor", lambda source: (log.append("input"), source._tensor)[1])
    worker.engine.saw = lambda: log.append("forward")
    worker.compute(1)
    batch = queue._last
    assert batch is not None
    assert log == ["input", batch.start, "forward", batch.stop]
    with queue.batch(lambda ns: None):  # nothing could be computed
        pass
    assert queue._last is not None and log[-2:] == [queue._last.start, queue._last.stop]


def test_a_late_error_leaves_all_that_are_under_way_named(worker: Worker) -> None:
    """The kernel of the first fails while the second is ordered: the process ends by it, and what
    it was at can be read after that."""
    guilty, mate = worker.compute(1, 13), worker.compute(3)
    worker.end()
    assert worker.device.completions.wait_idle(WAIT_S)
    assert len(worker.told) == 1 and "ASSERT" in worker.told[0]
    with pytest.raises(CudaError, match="ASSERT"):
        worker.compute(5)
    assert worker.at_work() == names(guilty, mate), "and not who came when it was lost"


def test_who_is_run_alone_has_the_device_for_itself(worker: Worker) -> None:
    """So that a second death has one suspect."""
    before = worker.compute(1)
    suspects: list[list[Item]] = []
    thread, raised = beside(lambda: suspects.append(worker.compute(13, alone=True)))
    assert worker.at_work() == names(before) and len(worker.engine.gates) == 1
    worker.engine.gates[0].set()
    wait_until(lambda: len(worker.engine.gates) == 2, WAIT_S)
    (work,) = worker.at_work()
    assert len(work) == 1 and work != names(before)[0]
    worker.end()
    thread.join(WAIT_S)
    assert not suspects and isinstance(raised[0], CudaError), "it was waited for"
    assert worker.at_work() == [work]


def test_who_waits_to_have_the_device_for_itself_has_not_begun(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is before it may take as long as a forward may, each of two."""
    settle, waits = worker.device.queue.settle, []

    def seen() -> None:
        waits.append(worker.batch.waits)
        settle()

    monkeypatch.setattr(worker.device.queue, "settle", seen)
    worker.engine.saw = worker.end
    worker.compute(1, alone=True, limit_ns=1)
    assert waits[0] and not worker.batch.waits


def test_whoever_is_run_again_by_itself_has_the_time_of_a_forward(worker: Worker) -> None:
    """The device may still be at what was ordered before, so that all of the batch stay named."""
    seen = []
    worker.engine.saw = lambda: seen.extend(worker.look.read())
    items = worker.compute(1.0, 17.0, 2.0)
    assert [work.records for work in seen] == names(items) * 4
    starts = [work.started_ns for work in seen]
    assert starts == sorted(set(starts)), "each later than the one before"


def test_a_batch_that_the_file_has_no_room_for_waits(tmp_path: Path) -> None:
    """What is not named could not be blamed."""
    worker = Worker(tmp_path, lanes=1)
    first = worker.compute(1)
    second: list[list[Item]] = []
    thread, _ = beside(lambda: second.append(worker.compute(2)))
    assert worker.at_work() == names(first) and len(worker.engine.gates) == 1
    worker.engine.gates[0].set()
    thread.join(WAIT_S)
    assert worker.at_work() == names(*second)
    worker.end()
    assert worker.device.completions.wait_idle(WAIT_S)
    assert worker.at_work() == []
    assert worker.device.close()

"""Results that come from a device to the host: they land while the next batch is ordered."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lanes_rig import MS, Bench

from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.routing import merge_paths
from blockflow.engine.base import Engine, EngineOptions
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.cuda_api import CudaError
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.inline import InlineProducer
from blockflow.tensormq.memory import TensorMemory
from blockflow.tensormq.mixed import MixedProducer
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.wire.data import Item
from blockflow.worker.failpoints import FailPoints
from blockflow.worker.parting import spent
from blockflow.worker.runner import Runner
from blockflow.worker.stage import Stage
from blockflow.worker.ticket import Batch, Source, Ticket

SPEC = TensorSpec("float32", ("rows", 2))
INFO = BlockInfo("b", "1", "0" * 64, "test", Contract(SPEC, SPEC), 0, 0)
WAIT_S = 10.0
ME = 7


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch, stages=1, lanes=1, slots=4, timeout_ms=(20,))


def order(bench: Bench, batch: Batch) -> None:
    """What the runner does, and the engine thread then says."""
    batch.compute_from_ns = batch.compute_to_ns = bench.clock.now
    batch.result = torch.cat([t.source.tensor() for t in batch.tickets])
    bench.executor.ordered(batch)


def land(bench: Bench, batch: Batch) -> None:
    batch.compute_to_ns = bench.clock.now
    bench.executor.computed(batch)


def test_the_next_batch_starts_before_the_first_has_landed(bench: Bench) -> None:
    for key in (1, 2, 3):
        bench.arrive(key, 1)
    first = bench.expect(1)
    assert bench.start() is None, "there is one lane"
    order(bench, first)
    second = bench.expect(1)
    assert bench.sink.sent == [], "a message says that the tensor is there"
    order(bench, second)
    assert bench.executor.busy and not bench.executor.idle
    land(bench, first)
    land(bench, second)
    assert bench.sink.sent == [[1], [2]]
    bench.compute(bench.expect(1))
    assert bench.executor.idle and not bench.executor.busy
    assert bench.slots is not None and bench.slots.free == 4


def test_inputs_go_back_when_the_device_has_its_orders(bench: Bench) -> None:
    bench.arrive(1, 1)
    batch = bench.expect(1)
    (ticket,) = batch.tickets
    order(bench, batch)
    assert ticket.source.tensor() is None
    land(bench, batch)
    bench.executor.accounts.settle()
    assert bench.sink.sent == [[1]] and bench.stages[1].meter.requests == 1


def test_what_has_landed_before_it_was_told_to_be_ordered_ends_once(bench: Bench) -> None:
    bench.arrive(1, 1)
    batch = bench.expect(1)
    bench.compute(batch)
    bench.executor.ordered(batch)
    assert bench.sink.sent == [[1]] and bench.executor.idle


def test_what_goes_on_here_keeps_its_lane_until_it_has_landed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, stages=2, lanes=1)
    bench.arrive(1, 1, 2)
    bench.arrive(2, 1, 2)
    first = bench.expect(1)
    order(bench, first)
    assert bench.start() is None
    land(bench, first)
    bench.compute(bench.expect(2))
    assert bench.sink.sent == [[1]]


def test_who_never_lands_is_given_up_and_the_next_ones_time_begins_with_a_landing(
    bench: Bench,
) -> None:
    for key in (1, 2):
        bench.arrive(key, 1)
    first = bench.expect(1)
    order(bench, first)
    second = bench.expect(1)
    order(bench, second)
    bench.clock.now = 15 * MS
    land(bench, first)
    assert bench.executor.next_overdue_ns() == 35 * MS
    assert not bench.executor.give_up_overdue(35 * MS - 1)
    assert bench.executor.give_up_overdue(35 * MS)
    assert bench.sink.failed == {2: "BLOCK_FAILED"} and not bench.executor.busy
    land(bench, second)
    assert bench.sink.sent == [[1]], "too late: it was answered for"


def test_who_waits_for_the_device_is_not_given_up(bench: Bench) -> None:
    bench.arrive(1, 1)
    batch = bench.expect(1)
    order(bench, batch)
    batch.waits = True
    assert not bench.executor.give_up_overdue(20 * MS)
    assert bench.executor.next_overdue_ns() == 40 * MS, "it is looked at again"
    batch.waits = False
    assert bench.executor.give_up_overdue(40 * MS)


def test_nothing_lands_after_the_end(bench: Bench) -> None:
    bench.arrive(1, 1)
    batch = bench.expect(1)
    order(bench, batch)
    bench.executor.abandon()
    land(bench, batch)
    assert bench.sink.sent == [] and not bench.executor.busy


class Gated(Engine):
    """Orders kernels that wait for their gates."""

    copies_out = 0

    def load(self, artifact: Path) -> None: ...

    def on(self, device: CudaDevice, api: FakeCuda) -> Gated:
        self.api, self.stream, self.gates = api, device.stream, list[threading.Event]()
        return self

    def run(self, x: Any, out: Any | None = None) -> Any:
        gate = threading.Event()
        self.gates.append(gate)

        def kernel() -> None:
            gate.wait(WAIT_S)
            cast(torch.Tensor, out).copy_(x * 2)

        self.api.launch(self.stream, kernel)
        return out

    def close(self) -> None: ...


class Landing:
    """A runner whose results go to the host, into slots: what is not page-locked is waited for."""

    def __init__(self, folder: Path) -> None:
        api = FakeCuda(folder, eager=False)
        self.lost: list[str] = []
        self.device = CudaDevice(api, self.lost.append)
        self.api = api
        self.engine = Gated(INFO, EngineOptions()).on(self.device, api)
        self.host = ShmProducer(Arena.create(folder, ME, 1 << 20, 4))
        self.slots = MixedProducer(self.device, self.host, None, folder)
        frames, consumer = InlineProducer(), ShmConsumer(folder)
        self.memory = TensorMemory(self.slots, frames, consumer, device=self.device)
        stages = {1: Stage(StageSpec(1, INFO), self.engine)}
        self.runner = Runner(stages, FailPoints("", folder), self.memory)
        self.landed: list[Batch] = []
        self.some = threading.Condition()
        self.runner.landed = self._note

    def _note(self, batch: Batch) -> None:
        with self.some:
            self.landed.append(batch)
            self.some.notify_all()

    def await_landed(self, count: int) -> None:
        with self.some:
            assert self.some.wait_for(lambda: len(self.landed) == count, WAIT_S)

    def order(self, value: float) -> Batch:
        item = Item(os.urandom(16), 1, 1, merge_paths([[1]])[0], 0, 1, 1000)
        x = Source("float32", (2,), 1, tensor=torch.full((1, 2), value))
        now = time.monotonic_ns()
        batch = Batch(1, (Ticket(1, item, 1, x, 0, now, now, now, 2**62, 0),), started_ns=now)
        batch.out = self.slots.reserve("float32", (1, 2), (9,))
        with self.memory.engine_scope():
            self.runner.compute(batch)
        return batch

    def close(self) -> None:
        self.slots.close()
        assert self.device.close()


def test_a_runner_orders_the_next_batch_while_the_first_is_on_the_device(tmp_path: Path) -> None:
    worker = Landing(tmp_path)
    first, second = worker.order(1.0), worker.order(2.0)  # neither waits for a closed gate
    assert first.landing and second.landing and worker.landed == []
    for gate in worker.engine.gates:
        gate.set()
    worker.await_landed(2)
    assert worker.landed == [first, second]
    for batch, value in ((first, 2.0), (second, 4.0)):
        assert batch.out is not None
        assert torch.frombuffer(batch.out.memory, dtype=torch.float32).tolist() == [value, value]
    assert worker.device.copies.d2h_copies == 2
    worker.close()


def test_while_the_device_is_at_the_batch_before_a_batch_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Landing(tmp_path)
    # The double's copies take as long as its thread waits for a core, and this is not about that.
    monkeypatch.setattr(worker.api, "event_elapsed_ns", lambda start, stop: 0)
    first, second = worker.order(1.0), worker.order(2.0)
    ordered_ns = second.compute_from_ns
    for gate in worker.engine.gates:
        gate.set()
    worker.await_landed(2)
    assert second.compute_from_ns == first.compute_to_ns > ordered_ns
    for batch in (first, second):
        (ticket,) = batch.tickets
        sent = time.monotonic_ns()
        parts = spent(ticket, batch, sent)
        assert sum(parts) == sent - ticket.received_ns and min(parts) >= 0
    worker.close()


def test_who_copies_beside_the_engine_thread_does_it_in_its_stream(tmp_path: Path) -> None:
    """Else the device could copy before the tensor is there, or after it was overwritten."""
    worker = Landing(tmp_path)
    entered: list[int] = []

    @contextmanager
    def scope(stream: int) -> Iterator[None]:
        entered.append(stream)
        yield
        entered.append(-stream)

    worker.api.engine_scope = scope  # type: ignore[method-assign]

    class Tensor:
        def clone(self) -> list[int]:
            return list(entered)

    stream = worker.device.stream
    assert worker.memory.own_copy(Tensor()) == [stream]
    assert entered == [stream, -stream]
    worker.close()


def test_when_messages_have_left_the_devices_thread_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, told = Landing(tmp_path), list[str]()
    monkeypatch.setattr(worker.device.completions, "go_on", lambda: told.append("go on"))
    worker.runner.sent()
    assert told == ["go on"]
    Runner({}, FailPoints("", tmp_path)).sent()  # on a CPU nothing follows
    worker.close()


def test_nothing_lands_of_a_device_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Landing(tmp_path)

    def lost(event: int) -> None:
        raise CudaError("cuEventSynchronize", 719, "CUDA_ERROR_LAUNCH_FAILED")

    monkeypatch.setattr(worker.api, "event_synchronize", lost)
    assert worker.order(1.0).landing
    worker.engine.gates[0].set()
    assert worker.device.completions.wait_idle(WAIT_S)
    assert worker.lost and worker.landed == []

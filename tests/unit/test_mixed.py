"""Tensors of a worker on a device: which way they take, what is copied, and what comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blockflow.core.errors import RequestError
from blockflow.tensormq import memory as memory_module
from blockflow.tensormq.arena import DEVICE_BIT, Arena
from blockflow.tensormq.channel import OutBuffer
from blockflow.tensormq.cuda import CudaProducer
from blockflow.tensormq.cuda_api import CudaError
from blockflow.tensormq.cuda_book import make_book
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.leases import LeaseError
from blockflow.tensormq.memory import DOUBLE_ENV, TensorMemory, open_memory
from blockflow.tensormq.mixed import MixedConsumer, MixedOutBuffer, MixedProducer
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from tests import cuda_rig

MIB = 1 << 20
OWNER, NEAR, PEER, HOST = 11, 21, 22, 23
DIMS = (4, 8)


class Rig:
    """A worker on cuda:0, and consumers: on the same device, on a peer, and on the host."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        self.run_dir = run_dir
        self.double = cuda_rig.double_folder(run_dir)
        self.device = cuda_rig.fake_device(self.double, **options)
        self.host = ShmProducer(Arena.create(run_dir, OWNER, MIB, 4))
        self.cuda = CudaProducer(self.device, run_dir, OWNER, MIB, 4)
        self.producer = MixedProducer(self.device, self.host, self.cuda, run_dir)
        self.books = [make_book(run_dir, n, 1) for n in (NEAR, PEER)]
        self.producer.set_devices({NEAR: "cuda:0", PEER: "cuda:1", HOST: "cpu"})
        self.near = self.consumer(0)
        self.peer = self.consumer(1)
        self.far = ShmConsumer(run_dir)

    def consumer(self, ordinal: int) -> MixedConsumer:
        device = cuda_rig.far_device(self.double, ordinal)
        cuda = cuda_rig.SettledConsumer(device, self.run_dir)
        return MixedConsumer(device, ShmConsumer(self.run_dir), cuda)

    def computed(self, *consumers: int) -> MixedOutBuffer:
        """A buffer for these, as the engine leaves it."""
        buffer = self.producer.reserve("float32", DIMS, consumers)
        assert buffer is not None
        buffer.tensor().copy_(torch.arange(32.0).view(DIMS))
        return buffer

    def close(self) -> None:
        for consumer in (self.near, self.peer, self.far):
            consumer.close()
        for book in self.books:
            book.close()
        self.producer.close()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with RunDir.create() as made:
        yield made.path
        cuda_rig.close_devices()
        double = cuda_rig.double_folder(made.path)
        left = {p.name.split("-")[0] for p in double.iterdir()}
        assert left <= {"accesses"}, "memory, events or broken rules are left"
        (double / "accesses").unlink(missing_ok=True)
        double.rmdir()


@pytest.fixture
def rig(run_dir: Path) -> Iterator[Rig]:
    made = Rig(run_dir)
    yield made
    made.close()


def is_right(tensor: torch.Tensor) -> bool:
    return bool((tensor == torch.arange(32.0).view(DIMS)).all())


def test_between_devices_nothing_is_copied(rig: Rig) -> None:
    buffer = rig.computed(NEAR)
    assert (buffer.slot is not None, buffer.host) == (True, None)
    assert buffer.finish() == 0
    (payload,) = rig.producer.publish(buffer, [NEAR])
    handle = payload.desc.handle
    assert handle is not None and handle.incarnation == OWNER | DEVICE_BIT
    got = rig.near.open(payload.desc, None)
    assert is_right(got.tensor())
    got.release()
    assert rig.producer.sweep() == 1 and rig.producer.outstanding() == 0
    copies = rig.device.copies
    assert (copies.h2d_copies, copies.d2h_copies, copies.d2d_copies) == (0, 0, 0)


def test_to_a_peer_the_reader_copies_once(rig: Rig) -> None:
    buffer = rig.computed(PEER)
    buffer.finish()
    (payload,) = rig.producer.publish(buffer, [PEER])
    got = rig.peer.open(payload.desc, None)
    assert is_right(got.tensor())
    got.release()
    rig.producer.sweep()
    assert rig.producer.outstanding() == 0
    assert rig.device.copies.d2d_copies == 0
    assert rig.peer._device.copies.d2d_bytes == 128


def test_to_the_host_there_is_one_copy(rig: Rig) -> None:
    buffer = rig.computed(HOST)
    assert (buffer.slot, buffer.host is not None) == (None, True)
    buffer.finish()
    (payload,) = rig.producer.publish(buffer, [HOST])
    got = rig.far.open(payload.desc, None)
    assert is_right(got.tensor())
    got.release()
    rig.producer.sweep()
    assert rig.producer.outstanding() == 0
    assert rig.device.copies.d2h_bytes == 128
    assert rig.cuda.slab == 0, "a worker that sends to no device needs no slab"


def test_both_kinds_of_consumers_get_theirs(rig: Rig) -> None:
    buffer = rig.computed(NEAR, HOST, PEER)
    assert buffer.slot is not None and buffer.host is not None
    buffer.finish()
    payloads = rig.producer.publish(buffer, [HOST, NEAR, PEER, HOST])
    on_device = [bool(p.desc.handle and p.desc.handle.incarnation & DEVICE_BIT) for p in payloads]
    assert on_device == [False, True, True, False]
    ends = [rig.far, rig.near, rig.peer, rig.far]
    got = [end.open(p.desc, None) for end, p in zip(ends, payloads, strict=True)]
    assert all(is_right(g.tensor()) for g in got)
    for g in got:
        g.release()
    assert rig.producer.sweep() == 2 and rig.producer.outstanding() == 0
    assert rig.device.copies.d2h_copies == 1


def test_messages_may_be_made_before_the_result(rig: Rig) -> None:
    """A worker publishes, computes, and only then sends."""
    buffer = rig.producer.reserve("float32", DIMS, (NEAR, HOST))
    assert buffer is not None
    rig.producer.hold(buffer)
    payloads = rig.producer.publish(buffer, [NEAR, HOST])
    buffer.tensor().copy_(torch.arange(32.0).view(DIMS))
    buffer.finish()
    rig.producer.unhold(buffer)
    for end, payload in zip((rig.near, rig.far), payloads, strict=True):
        got = end.open(payload.desc, None)
        assert is_right(got.tensor())
        got.release()
    rig.producer.sweep()
    assert rig.producer.outstanding() == 0


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("consumer", [NEAR, HOST])
def test_the_half_that_nobody_was_given_is_free(rig: Rig, held: bool, consumer: int) -> None:
    buffer = rig.computed(NEAR, HOST)
    buffer.finish()
    if held:
        rig.producer.hold(buffer)
    (payload,) = rig.producer.publish(buffer, [consumer])
    assert rig.producer.outstanding() == 1 + held
    end = rig.near if consumer == NEAR else rig.far
    end.open(payload.desc, None).release()
    if held:
        assert is_right(buffer.tensor()), "a stage of this worker reads it still"
        rig.producer.unhold(buffer)
    rig.producer.sweep()
    assert rig.producer.outstanding() == 0


def test_what_is_revoked_is_published_anew_to_fewer(rig: Rig) -> None:
    buffer = rig.computed(NEAR, HOST)
    rig.producer.hold(buffer)
    for payload in rig.producer.publish(buffer, [NEAR, HOST]):
        rig.producer.revoke(payload)
    (payload,) = rig.producer.publish(buffer, [HOST])
    rig.producer.unhold(buffer)
    rig.far.open(payload.desc, None).release()
    rig.producer.sweep()
    assert rig.producer.outstanding() == 0


def test_a_buffer_that_was_not_needed_goes_back(rig: Rig) -> None:
    rig.producer.discard(rig.computed(NEAR, HOST))
    assert rig.producer.outstanding() == 0
    with pytest.raises(LeaseError):
        rig.producer.publish(rig.computed(NEAR), [])


def test_a_buffer_reaches_whom_it_was_reserved_for(rig: Rig) -> None:
    near, host = rig.computed(NEAR), rig.computed(HOST)
    reaches = rig.producer.reaches
    assert (reaches(near, NEAR), reaches(near, HOST)) == (True, False)
    assert (reaches(host, NEAR), reaches(host, HOST)) == (True, True)
    with pytest.raises(LeaseError, match="cannot open a slab"):
        rig.producer.publish(near, [HOST])
    near.finish()
    assert bytes(near.memory) == torch.arange(32.0).numpy().tobytes(), "a whole tensor instead"
    rig.producer.discard(near)
    rig.producer.discard(host)


@pytest.mark.parametrize("scarce", ["slab", "arena"])
def test_half_a_reservation_is_given_back(rig: Rig, scarce: str) -> None:
    full: OutBuffer | None
    kept = []
    if scarce == "slab":
        while (full := rig.cuda.reserve("uint8", (MIB // 4,))) is not None:
            kept.append(full)
    else:
        while (full := rig.host.reserve("uint8", (MIB // 4,))) is not None:
            kept.append(full)
    before = rig.producer.outstanding()
    assert rig.producer.reserve("float32", DIMS, (NEAR, HOST)) is None
    assert rig.producer.outstanding() == before


# --- fallbacks -----------------------------------------------------------------------------------


def chosen(producer: MixedProducer, consumer: int) -> str:
    buffer = producer.reserve("float32", DIMS, (consumer,))
    assert buffer is not None
    way = "host" if buffer.slot is None else "device"
    producer.discard(buffer)
    return way


def test_each_reason_to_take_the_host_is_told_once(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(run_dir, islands=[1])
    rig.producer.set_devices({NEAR: "cuda:0", PEER: "cuda:1", 99: "cuda:0", HOST: "cpu"})
    assert chosen(rig.producer, NEAR) == "device"
    assert chosen(rig.producer, PEER) == "host"
    assert chosen(rig.producer, 99) == "host", "no book: it cannot open device memory"
    assert "incarnation 99" in rig.producer.obstacle
    rig.producer.set_devices({PEER: "cuda:1"})
    assert caplog.text.count("cuda:0 and cuda:1 are no peers") == 1
    rig.close()


def test_without_memory_for_a_slab_tensors_go_over_the_host(run_dir: Path) -> None:
    rig = Rig(run_dir, total_bytes=1 << 20)
    assert chosen(rig.producer, NEAR) == "host"
    assert "no slab on cuda:0" in rig.producer.obstacle
    rig.producer.set_devices({NEAR: "cuda:0"})
    assert chosen(rig.producer, NEAR) == "host"
    assert rig.cuda.slab == 0
    rig.close()


def test_a_dead_consumer_gives_back_both_halves(rig: Rig) -> None:
    buffer = rig.computed(NEAR, HOST)
    buffer.finish()
    rig.producer.publish(buffer, [NEAR, HOST])
    assert rig.producer.peer_gone(NEAR) == 1
    assert rig.producer.peer_gone(HOST) == 1
    assert rig.producer.outstanding() == 0
    assert chosen(rig.producer, NEAR) == "host", "it is not known any more"


def test_a_dead_owners_tensors_are_lost_and_its_memory_is_let_go(rig: Rig) -> None:
    buffer = rig.computed(NEAR)
    buffer.finish()
    (payload,) = rig.producer.publish(buffer, [NEAR])
    got = rig.near.open(payload.desc, None)
    rig.near.peer_gone(OWNER)
    with pytest.raises(RequestError, match="died while its tensor waited"):
        got.tensor()
    assert rig.device.api.world.importers(rig.device.api.world.names("mem")[0])  # type: ignore[attr-defined]
    got.release()
    assert not rig.device.api.world.importers(rig.device.api.world.names("mem")[0])  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="is dead"):
        rig.near.open(payload.desc, None)


def test_an_owner_waits_for_its_importers_to_close(rig: Rig) -> None:
    buffer = rig.computed(NEAR)
    buffer.finish()
    (payload,) = rig.producer.publish(buffer, [NEAR])
    rig.near.open(payload.desc, None).release()
    rig.producer.close()  # the near consumer notices by itself; nothing is broken, nothing is left
    assert rig.device.api.world.names("mem") == []  # type: ignore[attr-defined]
    with pytest.raises(RequestError):
        rig.consumer(0).open(payload.desc, None)


def test_an_importer_that_does_not_close_is_not_freed_under(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = rig.computed(NEAR)
    buffer.finish()
    (payload,) = rig.producer.publish(buffer, [NEAR])
    got = rig.near.open(payload.desc, None)
    tensor = got.tensor()
    rig.producer.close()
    assert "the process's end frees it" in caplog.text
    assert is_right(tensor)
    rig.near.close()
    # What the process's end does on a real device:
    api = rig.device.api
    assert isinstance(api, FakeCuda)
    for name in api.world.names("mem") + api.world.names("event"):
        api.world.remove(name)


# --- real order of work --------------------------------------------------------------------------


def test_the_reader_waits_on_the_device_and_marks_when_done(run_dir: Path) -> None:
    """Threaded streams: the message overtakes the producer's kernel, the mark does not overtake the
    consumer's."""
    double = cuda_rig.double_folder(run_dir)
    owner = cuda_rig.fake_device(double, eager=False)
    reader = cuda_rig.far_device(double, eager=False)
    producer = CudaProducer(owner, run_dir, OWNER, MIB, 2)
    consumer = cuda_rig.CudaConsumer(reader, run_dir)
    mine, theirs = owner.api, reader.api
    assert isinstance(mine, FakeCuda) and isinstance(theirs, FakeCuda)
    buffer = producer.reserve("uint8", (64,))
    assert buffer is not None
    target, source = buffer.tensor(), buffer.pointer
    write, read = threading.Event(), threading.Event()

    def kernel() -> None:
        assert write.wait(10)
        target.fill_(9)

    mine.launch(owner.stream, kernel, writes=[(source, 64)])
    buffer.finish()
    (payload,) = producer.publish(buffer, [NEAR])
    got = consumer.open(payload.desc, None)
    tensor, seen = got.tensor(), []

    def reading() -> None:
        seen.append(int(tensor.sum()))
        assert read.wait(10)

    theirs.launch(reader.stream, reading, reads=[(tensor.data_ptr(), 64)])
    got.release()
    assert not seen and producer.sweep() == 0, "nothing was written yet, nothing read"
    write.set()
    owner.completions.wait_idle(10)
    assert producer.sweep() == 0, "the consumer's kernel runs still: no mark"
    read.set()
    assert reader.completions.wait_idle(10)
    assert seen == [9 * 64] and producer.sweep() == 1
    again = producer.reserve("uint8", (64,))
    assert again is not None and again.pointer == source
    mine.launch(owner.stream, lambda: None, writes=[(again.pointer, 64)])  # the double would object
    mine.stream_synchronize(owner.stream)
    producer.discard(again)
    consumer.close()
    producer.close()


# --- the composition -----------------------------------------------------------------------------


@pytest.fixture
def double(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = cuda_rig.double_folder(run_dir)
    monkeypatch.setenv(DOUBLE_ENV, str(folder))
    return folder


def opened(run_dir: Path, incarnation: int = OWNER, **options: Any) -> TensorMemory:
    return open_memory(run_dir, incarnation, arena_bytes=MIB, slots=4, **options)


def test_on_the_cpu_there_is_no_device(run_dir: Path) -> None:
    made = opened(run_dir)
    assert isinstance(made.slots, ShmProducer) and isinstance(made.consumer, ShmConsumer)
    assert (made.device, made.engine_device, made.fallback) == (None, "cpu", "")
    with made.engine_scope(), made.batch(1):
        pass
    assert (made.figures(), made.extra(), made.device_times) == ({}, {}, {})
    made.close()
    made.close()
    assert opened(run_dir, mode="zeromq").slots is None


def test_a_worker_on_a_device(run_dir: Path, double: Path) -> None:
    made = opened(run_dir, device="cuda:0")
    assert isinstance(made.slots, MixedProducer) and made.fallback == ""
    for _ in range(3):
        with made.engine_scope(), made.batch(7):
            pass
    device = made.device
    assert isinstance(device, CudaDevice) and device.completions.wait_idle(10)
    assert made.device_times[7].count == 3
    assert made.figures()["copies"]["d2h_copies"] == 0
    assert made.extra()["device_fallback"] == "" and made.extra()["slab_bytes"] == 0
    made.close()
    made.close()


def test_frames_of_a_worker_on_a_device(run_dir: Path, double: Path) -> None:
    made = opened(run_dir, device="cuda:0", mode="zeromq")
    assert made.slots is None and made.fallback == "the worker's mode is zeromq"
    buffer = made.frames.reserve("float32", DIMS)
    assert buffer is not None
    buffer.tensor().copy_(torch.arange(32.0).view(DIMS))
    buffer.finish()
    (payload,) = made.frames.publish(buffer, [NEAR])
    got = made.consumer.open(payload.desc, payload.frame)
    assert is_right(got.tensor())
    got.release()
    assert made.device is not None
    assert (made.device.copies.d2h_copies, made.device.copies.h2d_copies) == (1, 1)
    made.close()


def test_a_refusing_preflight_is_the_stated_fallback(
    run_dir: Path, double: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        memory_module, "open_device", lambda _: FakeCuda(double, lacks=["ipc_events"])
    )
    made = opened(run_dir, device="cuda:0")
    assert "interprocess events" in made.fallback == made.extra()["device_fallback"]
    assert isinstance(made.slots, MixedProducer)
    made.slots.set_devices({NEAR: "cuda:0"})
    assert chosen(made.slots, NEAR) == "host"
    made.close()


def test_what_cannot_be_had_leaves_nothing(run_dir: Path, double: Path) -> None:
    first = opened(run_dir, device="cuda:0")
    before = sorted(p.name for p in run_dir.iterdir())
    with pytest.raises(Exception, match="ALREADY_RUNNING"):
        opened(run_dir, device="cuda:0")
    assert sorted(p.name for p in run_dir.iterdir()) == before
    with pytest.raises(CudaError):
        opened(run_dir, 12, device="cuda:7")
    with pytest.raises(Exception, match="neither cpu nor cuda"):
        opened(run_dir, 12, device="tpu")
    assert sorted(p.name for p in run_dir.iterdir()) == before
    first.close()

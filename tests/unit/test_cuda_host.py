"""Host memory for copies: page-locked regions, and the ring for what cannot be page-locked."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blockflow.tensormq import cuda_host
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.cuda_api import CudaError
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.cuda_host import SMALL_BYTES
from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.mixed import MixedConsumer
from blockflow.tensormq.shm import ShmConsumer, ShmProducer

PAGE = mmap.PAGESIZE
CHUNK, CHUNKS = 64 << 10, 4
RING = CHUNK * CHUNKS
LARGE = SMALL_BYTES + 1


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(cuda_host, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(cuda_host, "CHUNKS", CHUNKS)
    return FakeCuda(tmp_path, eager=False)


@pytest.fixture
def device(api: FakeCuda) -> Iterator[CudaDevice]:
    made = CudaDevice(api)
    yield made
    assert made.close()
    assert api.world.broken_rules() == []
    assert api.counts() | {"memories": 0} == dict.fromkeys(api.counts(), 0), "nothing stays locked"


def some(nbytes: int) -> memoryview:
    return memoryview(np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)).cast("B")


def on_device(api: FakeCuda, device: CudaDevice, pointer: int, nbytes: int) -> bytes:
    api.stream_synchronize(device.stream)
    return api.tensor(pointer, nbytes).numpy().tobytes()


def test_a_regions_growth_is_page_locked_as_a_whole(device: CudaDevice, api: FakeCuda) -> None:
    whole = memoryview(mmap.mmap(-1, 4 * PAGE))
    pointer = api.mem_alloc(4 * PAGE)
    for pages in (1, 1, 3):
        assert device.pins.cover(whole[: pages * PAGE], False)
        device.upload(pointer, whole[: pages * PAGE])  # a partly locked region would be refused
    assert device.pins.hold(whole[PAGE : 3 * PAGE])
    assert not device.pins.hold(whole[PAGE:])
    device.pins.drop(whole[:PAGE])
    assert not device.pins.hold(whole[:PAGE])
    device.upload(pointer, whole)
    api.stream_synchronize(device.stream)


def test_what_is_refused_once_is_not_asked_for_again_and_stops_no_other_kind(
    device: CudaDevice, api: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    real = api.host_register

    def register(address: int, nbytes: int, read_only: bool) -> None:
        asked.append(read_only)
        if read_only:
            raise CudaError("cuMemHostRegister_v2", 801, "CUDA_ERROR_NOT_SUPPORTED")
        real(address, nbytes, read_only)

    monkeypatch.setattr(api, "host_register", register)
    for _ in range(2):
        assert not device.pins.cover(memoryview(mmap.mmap(-1, PAGE)), True)
    mapping = mmap.mmap(-1, PAGE)
    kept = weakref.ref(mapping)
    assert device.pins.cover(memoryview(mapping), False)
    assert asked == [True, False]
    del mapping
    assert kept() is not None, "it must not vanish while it is registered"


def test_what_has_grown_when_nothing_more_can_be_page_locked_is_let_go(
    device: CudaDevice, api: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (memoryview(mmap.mmap(-1, 2 * PAGE)) for _ in range(2))
    assert device.pins.cover(first[:PAGE], False)

    def full(address: int, nbytes: int, read_only: bool) -> None:
        raise CudaError("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(api, "host_register", full)
    assert not device.pins.cover(second, False)
    assert device.pins.cover(first[:PAGE], False), "that is locked still"
    assert not device.pins.cover(first, False)
    pointer = api.mem_alloc(PAGE)
    device.upload(pointer, first[PAGE // 2 :][:PAGE])  # a partly locked region would be refused
    api.stream_synchronize(device.stream)


def test_without_page_locking_copies_work_all_the_same(tmp_path: Path) -> None:
    device = CudaDevice(FakeCuda(tmp_path, lacks=["registering"]))
    region = memoryview(mmap.mmap(-1, LARGE))
    assert not device.pins.cover(region, False)
    assert not device.pins.cover(region, False), "and is not tried again"
    assert "cuMemHostRegister" in device.pins.failed[False] and True not in device.pins.failed
    pointer = device.api.mem_alloc(LARGE)
    for _ in range(2):
        assert not device.upload(pointer, region), "the driver may still read it"
    device.download(region, pointer)
    assert "cuMemHostRegister" in device.staging.failed
    assert (device.ways.h2d_pageable_copies, device.ways.h2d_staged_copies) == (2, 0)
    device.api.mem_free(pointer)
    assert device.close()
    assert device.api.world.names("event") == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("nbytes", [LARGE, CHUNK * 2, RING, RING + 1, 3 * RING + 12345])
def test_large_pageable_memory_goes_by_way_of_the_ring(
    device: CudaDevice, api: FakeCuda, nbytes: int
) -> None:
    pointer = api.mem_alloc(nbytes)
    for _ in range(2):  # the second time the ring has gone round
        source = some(nbytes)
        assert device.upload(pointer, source)
        assert on_device(api, device, pointer, nbytes) == bytes(source)
    ways = device.ways
    assert (ways.h2d_staged_copies, ways.h2d_staged_bytes) == (2, 2 * nbytes)
    assert ways.h2d_pageable_copies == 0
    assert device.copies.h2d_copies == 2, "one copy to the device each, in however many pieces"
    assert api.counts()["locked"] == 1, "one ring, whatever goes through it"


def test_the_host_goes_on_while_the_device_is_busy(device: CudaDevice, api: FakeCuda) -> None:
    """What the ring is for: the driver's own staging may wait for the stream first."""
    gate = threading.Event()
    pointer = api.mem_alloc(RING)
    api.launch(device.stream, lambda: gate.wait(10) and None)
    source = np.full(RING, 5, np.uint8)
    assert device.upload(pointer, source.data), "ordered, and nothing has run"
    source[:] = 9
    assert not api.tensor(pointer, RING).any()
    gate.set()
    assert set(on_device(api, device, pointer, RING)) == {5}, "it had been read by then"


def test_a_chunk_is_not_overwritten_before_it_is_on_the_device(
    device: CudaDevice, api: FakeCuda
) -> None:
    gate, done = threading.Event(), threading.Event()
    pointer = api.mem_alloc(2 * RING)
    source = some(2 * RING)
    api.launch(device.stream, lambda: gate.wait(10) and None)
    thread = threading.Thread(target=lambda: (device.upload(pointer, source), done.set()))
    thread.start()
    assert not done.wait(0.05), "the ring is full: it waits, and does not grow"
    gate.set()
    assert done.wait(10)
    thread.join()
    assert on_device(api, device, pointer, 2 * RING) == bytes(source)


def test_small_memory_is_left_to_the_driver(device: CudaDevice, api: FakeCuda) -> None:
    pointer = api.mem_alloc(SMALL_BYTES)
    assert not device.upload(pointer, some(SMALL_BYTES))
    assert device.upload(pointer, memoryview(b""))
    assert (device.ways.h2d_pageable_copies, device.ways.h2d_pageable_bytes) == (1, SMALL_BYTES)
    assert api.counts()["locked"] == 0, "no ring for that"
    api.stream_synchronize(device.stream)


@pytest.mark.parametrize("read_only_pins", [False, True])
def test_what_other_processes_wrote_comes_from_page_locked_memory(
    tmp_path: Path, read_only_pins: bool
) -> None:
    """By either way, and each is counted as what it is."""
    device = CudaDevice(FakeCuda(tmp_path, read_only_pins=read_only_pins))
    with RunDir.create() as run_dir:
        producer = ShmProducer(Arena.create(run_dir.path, 5, 1 << 20, 2))
        consumer = MixedConsumer(device, ShmConsumer(run_dir.path), None)
        buffer = producer.reserve("uint8", (LARGE,))
        assert buffer is not None
        buffer.memory[:] = some(LARGE)
        (payload,) = producer.publish(buffer, [9])
        got = consumer.open(payload.desc, None)
        with device.api.engine_scope(device.stream):
            assert got.tensor().numpy().tobytes() == bytes(some(LARGE))
        got.release()
        assert device.completions.wait_idle(10) and producer.sweep() == 1
        ways = device.ways
        assert ways.h2d_staged_copies == (0 if read_only_pins else 1)
        assert (ways.h2d_pageable_copies, device.copies.h2d_copies) == (0, 1)
        consumer.peer_gone(5)
        assert device.completions.wait_idle(10)
        consumer.close()
        producer.close()
    assert device.close()


def test_page_locked_memory_is_not_let_go_of_between_the_look_and_the_copy(
    device: CudaDevice, api: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner dies while the engine thread uploads a tensor of it."""
    region = memoryview(mmap.mmap(-1, PAGE))
    pointer = api.mem_alloc(PAGE)
    assert device.pins.cover(region, False)
    dropped = threading.Event()
    dropper = threading.Thread(target=lambda: (device.pins.drop(region), dropped.set()))
    real = api.copy_h2d

    def copy(*args: int) -> None:
        dropper.start()
        assert not dropped.wait(0.05)
        real(*args)

    monkeypatch.setattr(api, "copy_h2d", copy)
    device.upload(pointer, region)
    assert dropped.wait(10)
    dropper.join()
    api.stream_synchronize(device.stream)


def test_a_dead_owners_memory_does_not_stay_page_locked(tmp_path: Path) -> None:
    """A tensor of it that waited here is still used, and page-locks the arena once more."""
    api = FakeCuda(tmp_path, read_only_pins=True)
    device = CudaDevice(api)
    with RunDir.create() as run_dir:
        producer = ShmProducer(Arena.create(run_dir.path, 5, 1 << 20, 2))
        consumer = MixedConsumer(device, ShmConsumer(run_dir.path), None)
        waiting = []
        for _ in range(2):
            buffer = producer.reserve("uint8", (LARGE,))
            assert buffer is not None
            buffer.memory[:] = some(LARGE)
            (payload,) = producer.publish(buffer, [9])
            waiting.append(consumer.open(payload.desc, None))
        first, second = waiting
        with api.engine_scope(device.stream):
            first.tensor()
        first.release()
        assert api.counts()["locked"] == 1
        consumer.peer_gone(5)
        assert device.completions.wait_idle(10)
        assert api.counts()["locked"] == 0
        with api.engine_scope(device.stream):
            assert second.tensor().numpy().tobytes() == bytes(some(LARGE))
        second.release()
        assert device.completions.wait_idle(10)
        assert api.counts()["locked"] == 0
        consumer.close()
        producer.close()
    assert device.close()

"""Every way that a tensor travels, for the contract that all of them keep to.

To add one, write a :class:`Way` for it and name it in ``WAYS``. A suite takes them all by
``way = channel_rig.way``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockflow.tensormq.arena import Arena
from blockflow.tensormq.channel import Consumer, OutBuffer, Payload, Producer
from blockflow.tensormq.cuda import CudaProducer
from blockflow.tensormq.cuda_book import make_book
from blockflow.tensormq.cuda_verdict import VerdictBook
from blockflow.tensormq.inline import InlineProducer
from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.mixed import MixedConsumer, MixedProducer
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.wire.tensor import TensorDesc, desc_from_wire
from tests import cuda_rig

KIB, MIB = 1024, 1024 * 1024
OWNER = 11
CONSUMERS = (21, 22, 23)


class Way:
    """Makes producers and consumers of one kind; closes them all in the end."""

    def __init__(
        self,
        run_dir: Path,
        producer: Callable[[Path, int, int], Producer],
        consumer: Callable[[Path], Consumer],
    ) -> None:
        self.run_dir = run_dir
        self._producer, self._consumer = producer, consumer
        self._made: list[Producer | Consumer] = []

    def producer(self, capacity: int = 32 * MIB, slots: int = 8) -> Producer:
        made = self._producer(self.run_dir, capacity, slots)
        self._made.append(made)
        return made

    def consumer(self) -> Consumer:
        made = self._consumer(self.run_dir)
        self._made.append(made)
        return made

    def close(self) -> None:
        for made in reversed(self._made):  # consumers first: owners wait for them
            made.close()


def shm_producer(run_dir: Path, capacity: int, slots: int) -> Producer:
    return ShmProducer(Arena.create(run_dir, OWNER, capacity, slots, warm_bytes=64 * KIB))


def cuda_producer(run_dir: Path, capacity: int, slots: int) -> Producer:
    device = cuda_rig.fake_device(cuda_rig.double_folder(run_dir))
    return CudaProducer(device, run_dir, OWNER, capacity, slots)


def cuda_consumer(run_dir: Path, ordinal: int = 0) -> Consumer:
    device = cuda_rig.far_device(cuda_rig.double_folder(run_dir), ordinal)
    return cuda_rig.SettledConsumer(device, run_dir)


def mixed_producer(run_dir: Path, capacity: int, slots: int) -> Producer:
    device = cuda_rig.fake_device(cuda_rig.double_folder(run_dir))
    cuda = CudaProducer(device, run_dir, OWNER, capacity, slots)
    return MixedProducer(device, shm_producer(run_dir, capacity, slots), cuda, run_dir)


def device_first(run_dir: Path, capacity: int, slots: int) -> Producer:
    device = cuda_rig.fake_device(cuda_rig.double_folder(run_dir))
    cuda = CudaProducer(device, run_dir, OWNER, capacity, slots)
    host = shm_producer(run_dir, capacity, slots)
    made = cuda_rig.DeviceFirst(device, host, cuda, run_dir)
    with ExitStack() as books:
        for consumer in CONSUMERS:
            book = make_book(run_dir, consumer, 1)
            books.callback(book.close)
            VerdictBook(book).opened(OWNER)
        made.set_devices(dict.fromkeys(CONSUMERS, "cuda:0"))
    return made


def mixed_consumer(run_dir: Path, read_only_pins: bool = False) -> Consumer:
    folder = cuda_rig.double_folder(run_dir)
    device = cuda_rig.far_device(folder, read_only_pins=read_only_pins)
    cuda = cuda_rig.SettledConsumer(device, run_dir)
    return MixedConsumer(device, ShmConsumer(run_dir), cuda)


WAYS: dict[str, tuple[Callable[[Path, int, int], Producer], Callable[[Path], Consumer]]] = {
    "shm": (shm_producer, ShmConsumer),
    # Who takes handles takes whole tensors as well, whatever its own mode is.
    "inline": (lambda _, capacity, slots: InlineProducer(slots, capacity), ShmConsumer),
    # Device memory, on the double of the driver (cuda_fake): one device, two that are peers, and
    # the edges between host and device. tests/gpu has the same on a real one.
    "cuda": (cuda_producer, cuda_consumer),
    "cuda-peer": (cuda_producer, lambda run_dir: cuda_consumer(run_dir, 1)),
    "device-to-host": (mixed_producer, ShmConsumer),
    "host-to-device": (shm_producer, mixed_consumer),
    "host-to-device-locked": (shm_producer, lambda run_dir: mixed_consumer(run_dir, True)),
    "device-to-device": (device_first, mixed_consumer),
}


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    with RunDir.create() as run_dir:
        double = run_dir.path.parent / f"{run_dir.path.name}-double"
        made = Way(run_dir.path, *WAYS[request.param])
        yield made
        made.close()
        cuda_rig.close_devices()
        broken = double / "broken"
        assert not broken.exists(), broken.read_text()
        shutil.rmtree(double, ignore_errors=True)
        assert os.listdir(run_dir.path) == ["lock"], "something is left in the directory"


def reserved(producer: Producer, dims: Sequence[int] = (4,), dtype: str = "uint8") -> OutBuffer:
    buffer = producer.reserve(dtype, dims)
    assert buffer is not None
    return buffer


def carry(payload: Payload) -> tuple[TensorDesc, bytes | None]:
    """What a socket does to a payload."""
    desc = desc_from_wire(payload.desc.to_wire(), "test")
    return desc, None if payload.frame is None else bytes(payload.frame)


def send(producer: Producer, data: bytes, consumers: Sequence[int]) -> list[tuple[TensorDesc, Any]]:
    buffer = reserved(producer, (len(data),))
    buffer.memory[:] = data
    return [carry(p) for p in producer.publish(buffer, consumers)]


def fill(buffer: OutBuffer, seed: int) -> bytes:
    """Random bytes that are also valid elements (a bool is 0 or 1)."""
    raw = np.random.default_rng(seed).integers(0, 256, buffer.nbytes, np.uint8)
    if buffer.dtype == "bool":
        raw &= 1
    buffer.memory[:] = raw.data
    return raw.tobytes()

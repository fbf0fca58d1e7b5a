"""What tests of a worker's edges between device and host share: an owner, and consumers of every
kind, in one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blockflow.tensormq.arena import Arena
from blockflow.tensormq.channel import OutBuffer
from blockflow.tensormq.cuda import CudaProducer
from blockflow.tensormq.cuda_book import make_book
from blockflow.tensormq.cuda_consumer import CudaConsumer
from blockflow.tensormq.cuda_fake_world import World
from blockflow.tensormq.cuda_verdict import VerdictBook
from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.mixed import MixedConsumer, MixedOutBuffer, MixedProducer
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.wire.tensor import TensorDesc
from tests import cuda_rig

MIB = 1 << 20
OWNER, NEAR, PEER, HOST = 11, 21, 22, 23
DIMS = (4, 8)


class Rig:
    """A worker on cuda:0, and consumers: on the same device, on a peer, and on the host. Those on
    devices have found out whether they can open the worker's memory, as routes would make them.

    Args:
        options: of the owner's device. lacks: of the consumers' devices.
        eager: every device's work is done when it is ordered.
    """

    def __init__(
        self, run_dir: Path, lacks: Collection[str] = (), eager: bool = True, **options: Any
    ) -> None:
        self.run_dir = run_dir
        self.double = cuda_rig.double_folder(run_dir)
        self.eager = eager
        self.device = cuda_rig.fake_device(self.double, eager=eager, **options)
        self.world = World(self.double, os.getpid())
        self.host = ShmProducer(Arena.create(run_dir, OWNER, MIB, 4))
        self.cuda = CudaProducer(self.device, run_dir, OWNER, MIB, 4)
        self.producer = MixedProducer(self.device, self.host, self.cuda, run_dir)
        self.books: list[Arena] = []
        self.openers: dict[int, CudaConsumer] = {}
        self.near = self.consumer(0, NEAR, lacks)
        self.peer = self.consumer(1, PEER, lacks)
        self.far = ShmConsumer(run_dir)
        self.producer.set_devices({NEAR: "cuda:0", PEER: "cuda:1", HOST: "cpu"})

    def consumer(
        self, ordinal: int, incarnation: int, lacks: Collection[str] = ()
    ) -> MixedConsumer:
        device = cuda_rig.far_device(self.double, ordinal, lacks=lacks, eager=self.eager)
        book = make_book(self.run_dir, incarnation, 1)
        self.books.append(book)
        made = cuda_rig.SettledConsumer(device, self.run_dir, VerdictBook(book), incarnation)
        made.meet({OWNER, incarnation})
        self.openers[incarnation] = made
        return MixedConsumer(device, ShmConsumer(self.run_dir), made)

    def importers(self) -> list[int]:
        """Processes that have any of the owner's memory open."""
        return [pid for name in self.world.names("mem") for pid in self.world.importers(name)]

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


def finish(buffer: OutBuffer) -> bool:
    """The engine's last order, and whatever has to land has landed; whether anything had to."""
    there = threading.Event()
    landing = buffer.finish(lambda ns: there.set())
    assert not landing or there.wait(10)
    return landing


def is_right(tensor: torch.Tensor) -> bool:
    return bool((tensor == torch.arange(32.0).view(DIMS)).all())


def chosen(producer: MixedProducer, consumer: int) -> str:
    """Which way a tensor for this consumer would take."""
    buffer = producer.reserve("float32", DIMS, (consumer,))
    assert buffer is not None
    way = "host" if buffer.slot is None else "device"
    producer.discard(buffer)
    return way


def send(rig: Rig, consumer: int) -> TensorDesc:
    """A tensor on its way to this consumer."""
    buffer = rig.computed(consumer)
    finish(buffer)
    (payload,) = rig.producer.publish(buffer, [consumer])
    return payload.desc

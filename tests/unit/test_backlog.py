"""What waits in a worker gives back the slots that others need, and no more than that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scheduler_rig import ticket

from blockflow.core.errors import SystemError_
from blockflow.core.model import tensor_bytes
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.channel import Consumer, Payload
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.mixed import MixedConsumer
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.worker.backlog import Backlog
from blockflow.worker.ticket import Source, Ticket
from tests import sockets_rig

OWNER, READER, OTHER = 5, 6, 7
SLOTS = 8
DIMS = (1, 16 * 1024)  # 64 KiB: a page, or whole pages, on every machine

run_dir = sockets_rig.run_dir


class Trunk:
    """A worker with eight slots, and the inbox of one that reads from them."""

    def __init__(self, run_dir: Path, capacity: int) -> None:
        self.producer = ShmProducer(Arena.create(run_dir, OWNER, capacity, SLOTS))
        self.consumer: Consumer = ShmConsumer(run_dir)
        self.waiting: list[Ticket] = []

    def send(self, consumer: int = READER) -> Payload | None:
        """One more tensor, if a slot is free."""
        out = self.producer.reserve("float32", DIMS)
        if out is None:
            return None
        out.tensor().fill_(float(len(self.waiting)))
        return self.producer.publish(out, [consumer])[0]

    def arrive(self, backlog: Backlog, read: tuple[int, ...] = ()) -> bool:
        """One more tensor comes to the inbox; False where there is no slot for it."""
        payload = self.send()
        if payload is None:
            return False
        source = Source("float32", DIMS[1:], 1, buffer=self.consumer.open(payload.desc, None))
        one = ticket(len(self.waiting))
        one.source = source
        self.waiting.append(one)
        if source.excess:
            backlog.share(source, reversed(self.waiting), read)
        return True

    def in_slots(self) -> list[int]:
        return [t.key for t in self.waiting if t.source.lender == OWNER]


@pytest.fixture
def trunk(run_dir: Path) -> Iterator[Trunk]:
    made = Trunk(run_dir, 1 << 20)
    yield made
    made.consumer.close()
    made.producer.close()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def test_a_reader_that_is_behind_leaves_half_of_the_slots_to_others(trunk: Trunk) -> None:
    backlog = Backlog(copied)
    trunk.producer.tell_readers(2)
    for _ in range(50):
        assert trunk.arrive(backlog)
    stay = trunk.in_slots()
    assert stay[:3] == [0, 1, 2]  # the first to come are the next to be computed
    assert len(stay) <= SLOTS // 2
    assert backlog.copies == 50 - len(stay)
    assert [float(t.source.tensor()[0, 0]) for t in trunk.waiting] == [float(n) for n in range(50)]
    for one in trunk.waiting:
        one.source.release()
    trunk.producer.sweep()
    assert trunk.producer.outstanding() == 0


def test_who_is_alone_may_have_all_slots(trunk: Trunk) -> None:
    backlog = Backlog(copied)
    trunk.producer.tell_readers(1)
    assert [trunk.arrive(backlog) for _ in range(SLOTS + 1)] == [True] * SLOTS + [False]
    assert backlog.copies == 0


def test_what_was_taken_before_there_was_a_second_reader_counts(trunk: Trunk) -> None:
    backlog = Backlog(copied)
    trunk.producer.tell_readers(1)
    for _ in range(5):
        assert trunk.arrive(backlog)
    assert trunk.waiting[0].source.excess == 0
    trunk.producer.tell_readers(2)
    assert trunk.waiting[0].source.excess == 5 - (SLOTS - 5)


def test_several_that_are_behind_still_leave_some(trunk: Trunk) -> None:
    backlog = Backlog(copied)
    trunk.producer.tell_readers(3)
    others = [trunk.send(OTHER) for _ in range(4)]  # another one holds half already
    for _ in range(20):
        assert trunk.arrive(backlog)
    assert len(trunk.in_slots()) == 2  # of the four that were left
    assert all(others)


def test_what_is_being_computed_stays(trunk: Trunk) -> None:
    backlog = Backlog(copied)
    trunk.producer.tell_readers(2)
    for _ in range(4):
        trunk.arrive(backlog)
    read = tuple(id(t.source) for t in trunk.waiting)
    trunk.arrive(backlog, read)
    assert trunk.in_slots() == [0, 1, 2, 3]
    assert backlog.copies == 1


def test_what_is_being_computed_is_no_reason_to_keep_the_others(trunk: Trunk) -> None:
    backlog = Backlog(copied)
    trunk.producer.tell_readers(2)
    for _ in range(4):
        trunk.arrive(backlog)
    payload = trunk.send()
    assert payload is not None
    buffer = trunk.consumer.open(payload.desc, None)
    last = trunk.waiting[-1].source
    backlog.share(
        Source("float32", DIMS[1:], 1, buffer=buffer), reversed(trunk.waiting), [id(last)]
    )
    assert trunk.in_slots() == [0, 3]


def test_copies_have_a_bound_and_what_is_more_stays_in_its_slots(trunk: Trunk) -> None:
    nbytes = 4 * DIMS[1]
    backlog = Backlog(copied, most_bytes=2 * nbytes)
    trunk.producer.tell_readers(2)
    came = [trunk.arrive(backlog) for _ in range(20)]
    assert came.index(False) == SLOTS + 2
    assert backlog.copies == 2


def test_copies_that_nobody_needs_any_more_count_no_more(trunk: Trunk) -> None:
    backlog = Backlog(copied, most_bytes=2 * 4 * DIMS[1])
    trunk.producer.tell_readers(2)
    for _ in range(5):
        for _ in range(7):
            assert trunk.arrive(backlog)
        while trunk.waiting:
            trunk.waiting.pop().source.release()
        trunk.producer.sweep()
    assert backlog.copies == 10


def test_of_a_long_queue_only_the_last_are_looked_at(trunk: Trunk) -> None:
    """However many were copied before: each that comes would be looked at by all that wait."""
    backlog = Backlog(copied)
    trunk.producer.tell_readers(2)
    for _ in range(50):
        assert trunk.arrive(backlog)
    payload = trunk.send()
    assert payload is not None
    one = ticket(50)
    one.source = Source("float32", DIMS[1:], 1, buffer=trunk.consumer.open(payload.desc, None))
    trunk.waiting.append(one)
    assert one.source.excess
    left = reversed(trunk.waiting)
    backlog.share(one.source, left, ())
    assert one.source.lender is None and len(list(left)) >= 45


def test_without_memory_for_a_copy_it_stays_where_it_is(trunk: Trunk) -> None:
    def full(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    backlog = Backlog(full)
    trunk.producer.tell_readers(2)
    for _ in range(SLOTS):
        assert trunk.arrive(backlog)
    assert len(trunk.in_slots()) == SLOTS
    assert backlog.copies == 0


def test_where_bytes_run_out_before_slots_they_count(run_dir: Path) -> None:
    trunk = Trunk(run_dir, 8 * tensor_bytes("float32", DIMS))
    trunk.producer.tell_readers(2)
    for _ in range(2):
        payload = trunk.send()
        assert payload is not None
    buffer = trunk.consumer.open(payload.desc, None)
    # Of room for eight the last half may be gaps: with two in use, half of the slots are as good
    # as taken.
    assert buffer.spare() == SLOTS - 4 - 1
    buffer.release()
    assert buffer.spare() is None
    trunk.producer.close()


def test_a_worker_on_a_device_copies_on_the_host(run_dir: Path, tmp_path: Path) -> None:
    """What waits needs no device memory, and the device may be at something."""
    api = FakeCuda(tmp_path)
    device = CudaDevice(api)
    trunk = Trunk(run_dir, 1 << 20)
    trunk.consumer = MixedConsumer(device, trunk.consumer, None)
    trunk.producer.tell_readers(2)

    def on_the_device(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    backlog = Backlog(on_the_device)
    for _ in range(20):
        assert trunk.arrive(backlog)
    assert (len(trunk.in_slots()), backlog.copies) == (SLOTS // 2, 20 - SLOTS // 2)
    assert device.copies.h2d_copies == 0
    with api.engine_scope(device.stream):
        assert [float(t.source.tensor()[0, 0]) for t in trunk.waiting] == list(range(20))
    for one in trunk.waiting:
        one.source.release()
    assert device.completions.wait_idle(10)
    trunk.producer.sweep()
    assert trunk.producer.outstanding() == backlog._bytes == 0
    assert device.close()
    trunk.producer.close()


def test_own_slots_are_copied_free_but_for_what_is_read() -> None:
    here = SimpleNamespace(meter=SimpleNamespace(copies_out=0))

    def held() -> Source:
        return Source("float32", DIMS[1:], 1, tensor=torch.ones(DIMS), on_release=lambda: None)

    backlog, read, waits = Backlog(copied), held(), held()
    for source in (read, waits):
        backlog.holds(source, here)  # type: ignore[arg-type]
    backlog.free_own({id(read)}, "head")
    assert here.meter.copies_out == 1
    assert not waits.detach(copied) and read.detach(copied)
    for source in (read, waits):
        backlog.gone(source)
    assert not backlog._own

    def full(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    poor = Backlog(full)
    poor.holds(held(), here)  # type: ignore[arg-type]
    with pytest.raises(SystemError_, match="nor memory") as raised:
        poor.free_own((), "head")
    assert (raised.value.code, raised.value.where) == ("NO_SPACE", "head")

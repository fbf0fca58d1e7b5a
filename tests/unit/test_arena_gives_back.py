"""Memory that an arena gives back: real shared memory, and what its readers see of it."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals_rig import no_room

from blockflow.core.errors import SystemError_, WireError
from blockflow.tensormq import arena
from blockflow.tensormq.arena import Arena, ArenaReader, arena_path, data_offset
from blockflow.tensormq.channel import OutBuffer
from blockflow.tensormq.ebb import SCARCE_NS, WINDOW_NS
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from tests import sockets_rig

KIB, MIB = 1024, 1024 * 1024
ME, READER = 41, 9
SLOTS = 8

run_dir = sockets_rig.run_dir


@pytest.fixture
def producer(run_dir: Path) -> Iterator[ShmProducer]:
    made = ShmProducer(Arena.create(run_dir, ME, 64 * MIB, SLOTS, warm_bytes=64 * KIB))
    yield made
    made.close()


@pytest.fixture
def consumer(run_dir: Path) -> Iterator[ShmConsumer]:
    made = ShmConsumer(run_dir)
    yield made
    made.close()


def taken(run_dir: Path) -> int:
    """What the data area takes of the file system."""
    return arena_path(run_dir, ME).stat().st_blocks * 512 - data_offset(SLOTS)


def reserve(producer: ShmProducer, nbytes: int, fill: bytes = b"x") -> OutBuffer:
    buffer = producer.reserve("uint8", (nbytes,))
    assert buffer is not None
    buffer.memory[:] = fill * nbytes
    return buffer


def windows(producer: ShmProducer, count: int = 3) -> None:
    """So many ticks, each at the end of a window."""
    for _ in range(count):
        producer.ebb(producer._ebb._begun_ns + WINDOW_NS)


def test_a_burst_is_given_back(run_dir: Path, producer: ShmProducer) -> None:
    for _ in range(2):
        buffers = [reserve(producer, 10 * MIB) for _ in range(4)]
        assert taken(run_dir) == producer.usage().committed == 40 * MIB
        for buffer in buffers:
            producer.discard(buffer)
        windows(producer, 1)
        assert taken(run_dir) == 40 * MIB, "it may come back at once"
        windows(producer)
        assert taken(run_dir) == producer.usage().committed == 256 * KIB


@pytest.mark.parametrize("short", ["the file system", "a control group"])
def test_where_memory_is_nearly_used_up_it_is_given_back_soon(
    run_dir: Path, producer: ShmProducer, monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    windows(producer, 1)
    now = producer._ebb._begun_ns
    producer.discard(reserve(producer, 40 * MIB))
    producer.ebb(now := now + 2 * SCARCE_NS)
    assert taken(run_dir) == 40 * MIB, "there is room for all"
    if short == "the file system":
        nearly_full = SimpleNamespace(f_bavail=24, f_blocks=100)
        monkeypatch.setattr(os, "statvfs", lambda _: nearly_full)
    else:
        monkeypatch.setattr(producer, "_rooms", lambda: [(900, 1000), (249, 1000)])
    for _ in range(2):
        producer.ebb(now := now + SCARCE_NS)
    assert taken(run_dir) == 256 * KIB


def test_what_is_leased_stays_and_what_lies_below_it(
    run_dir: Path, producer: ShmProducer, consumer: ShmConsumer
) -> None:
    low, kept, high = (reserve(producer, 4 * MIB, fill) for fill in (b"a", b"b", b"c"))
    (sent,) = producer.publish(kept, [READER])
    opened = consumer.open(sent.desc, None)
    producer.discard(low)
    producer.discard(high)
    producer.discard(reserve(producer, 16 * MIB))  # behind all of them
    windows(producer)
    assert taken(run_dir) == producer.usage().committed == 8 * MIB
    assert bytes(opened.memory) == b"b" * (4 * MIB)
    opened.release()
    windows(producer)
    assert taken(run_dir) == 256 * KIB


def test_what_is_held_stays(run_dir: Path, producer: ShmProducer, consumer: ShmConsumer) -> None:
    """A retained input whose first stage has read it, and that may be sent again."""
    buffer = reserve(producer, MIB, b"k")
    producer.hold(buffer)
    (sent,) = producer.publish(buffer, [READER])
    consumer.open(sent.desc, None).release()
    producer.discard(reserve(producer, 32 * MIB))
    windows(producer)
    assert taken(run_dir) == MIB
    (again,) = producer.publish(buffer, [READER])
    assert bytes(consumer.open(again.desc, None).memory) == b"k" * MIB


def test_a_reader_refuses_what_was_given_back_and_reads_what_comes_anew(
    run_dir: Path, producer: ShmProducer, consumer: ShmConsumer
) -> None:
    small = reserve(producer, KIB)
    producer.hold(small)
    large = reserve(producer, 8 * MIB, b"1")
    first, second = producer.publish(small, [READER])[0], producer.publish(large, [READER])[0]
    consumer.open(second.desc, None).release()  # it has mapped all of it
    windows(producer)
    assert taken(run_dir) == 256 * KIB
    # A handle that is current, but lies about where: it would read a hole.
    assert first.desc.handle is not None
    forged = replace(first.desc, handle=replace(first.desc.handle, offset=4 * MIB))
    with pytest.raises(WireError, match="outside the arena"):
        consumer.open(forged, None)
    for stale in (second.desc, replace(second.desc, dims=(1,))):
        with pytest.raises(WireError, match=r"outside|stale"):
            consumer.open(stale, None)
    assert taken(run_dir) == 256 * KIB, "nobody has filled a hole"
    again = reserve(producer, 8 * MIB, b"2")
    (sent,) = producer.publish(again, [READER])
    assert bytes(consumer.open(sent.desc, None).memory) == b"2" * (8 * MIB)


def test_a_reader_maps_no_more_than_the_tensor_that_it_took(
    run_dir: Path, producer: ShmProducer
) -> None:
    """Its look at the mark may be older than the owner's giving back: what it maps beyond its
    tensor would be allocated once more, and nobody would count it."""
    small = reserve(producer, 320 * KIB)
    producer.hold(small)
    (sent,) = producer.publish(small, [READER])
    producer.discard(reserve(producer, 32 * MIB))
    reader = ArenaReader.open(run_dir, ME)
    handle = sent.desc.handle
    assert handle is not None
    assert reader.view(handle.offset, 320 * KIB) is not None
    windows(producer)  # at this very moment
    assert reader.take(handle.slot, handle.lane, handle.generation)
    reader.map_ahead(handle.offset + 320 * KIB)
    assert taken(run_dir) == producer.usage().committed == 320 * KIB


class LargePages(mmap.mmap):
    """As a kernel with pages of 64 KiB has it, which many of ARM's machines run."""

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        if start % (64 * KIB):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().madvise(option, start, -(-length // (64 * KIB)) * 64 * KIB)


def test_where_pages_are_larger_they_are_given_back_whole(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors begin every 4 KiB there, too: one may end, and the next begin, within a page."""
    monkeypatch.setattr(arena, "_PAGE", 64 * KIB)
    monkeypatch.setattr(mmap, "mmap", LargePages)
    producer = ShmProducer(Arena.create(run_dir, ME, 64 * MIB, SLOTS, warm_bytes=64 * KIB))
    consumer = ShmConsumer(run_dir)
    kept = [reserve(producer, 300 * KIB, fill) for fill in (b"a", b"b")]
    opened = [consumer.open(producer.publish(k, [READER])[0].desc, None) for k in kept]
    for _ in range(2):
        producer.discard(reserve(producer, 16 * MIB, b"c"))
        windows(producer)
        assert taken(run_dir) == producer.usage().committed == 640 * KIB
        assert [bytes(o.memory) for o in opened] == [b"a" * (300 * KIB), b"b" * (300 * KIB)]
    consumer.close()
    producer.close()


def test_a_device_may_have_page_locked_it(run_dir: Path, producer: ShmProducer) -> None:
    """Then it would go on reading the pages that were given back."""
    producer.set_devices({READER: "cpu"})
    producer.discard(reserve(producer, 2 * MIB))
    windows(producer)
    assert taken(run_dir) == 256 * KIB
    producer.set_devices({READER: "cpu", 10: "cuda:0"})
    producer.set_devices({READER: "cpu"})
    producer.discard(reserve(producer, 2 * MIB))
    windows(producer)
    assert taken(run_dir) == 2 * MIB


def test_what_an_arena_was_made_with_stays(run_dir: Path) -> None:
    arena = Arena.create(run_dir, ME, 8 * MIB, SLOTS, warm_bytes=4 * MIB)
    arena.commit(6 * MIB)
    arena.give_back(0)
    assert arena.committed == taken(run_dir) == 4 * MIB
    arena.close()
    arena.give_back(0)


def test_a_file_system_without_holes_keeps_its_memory(
    run_dir: Path, producer: ShmProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoHoles:
        def madvise(self, *_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    producer.discard(reserve(producer, 2 * MIB))
    arena: Any = producer._arena
    with monkeypatch.context() as patch:
        patch.setattr(arena, "_mapping", NoHoles())
        windows(producer)
        assert producer.usage().committed == taken(run_dir) == 2 * MIB
    (sent,) = producer.publish(reserve(producer, 2 * MIB, b"z"), [READER])
    reader = ShmConsumer(run_dir)
    assert bytes(reader.open(sent.desc, None).memory) == b"z" * (2 * MIB)
    reader.close()


def test_who_finds_no_space_takes_none_from_others(
    run_dir: Path, producer: ShmProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = reserve(producer, MIB)
    producer.discard(reserve(producer, 8 * MIB))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(SystemError_, match="NO_SPACE"):
            producer.reserve("uint8", (32 * MIB,))
    assert taken(run_dir) == producer.usage().committed == MIB
    assert bytes(kept.memory) == b"x" * MIB


def test_growing_and_giving_back_beside_readers(run_dir: Path, producer: ShmProducer) -> None:
    """Each tensor is read as it was written, whatever is given back meanwhile."""
    wrong: list[str] = []
    over = threading.Event()
    now = 0

    def ebb() -> None:
        nonlocal now
        while not over.is_set():
            now += 2 * WINDOW_NS
            producer.ebb(now)

    thread = threading.Thread(target=ebb)
    thread.start()
    readers = [ShmConsumer(run_dir) for _ in range(2)]
    try:
        for n in range(300):
            fill, nbytes = bytes([n % 251 + 1]), (n * 7919 % 40 + 1) * 100 * KIB
            buffer = reserve(producer, nbytes, fill)
            for reader, sent in zip(readers, producer.publish(buffer, [1, 2]), strict=True):
                opened = reader.open(sent.desc, None)
                if bytes(opened.memory) != fill * nbytes:
                    wrong.append(f"tensor {n}")
                opened.release()
    finally:
        over.set()
        thread.join()
    assert not wrong
    producer.ebb(now + 2 * WINDOW_NS)
    producer.ebb(now + 4 * WINDOW_NS)
    assert taken(run_dir) == producer.usage().committed == 256 * KIB

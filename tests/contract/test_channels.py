"""The contract of every way that a tensor travels: one suite, a parameter per implementation.

To add one, write a :class:`Way` for it and name it in ``WAYS``.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blockflow.core.errors import RequestError, WireError
from blockflow.core.model import DTYPE_BYTES
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.channel import Consumer, InBuffer, OutBuffer, Payload, Producer, span_bytes
from blockflow.tensormq.cuda import CudaProducer
from blockflow.tensormq.cuda_book import make_book
from blockflow.tensormq.inline import InlineConsumer, InlineProducer
from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.leases import LeaseError
from blockflow.tensormq.mixed import MixedConsumer, MixedProducer
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.tensormq.views import as_numpy, as_torch
from blockflow.wire.tensor import Handle, TensorDesc, desc_from_wire
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
        for consumer in CONSUMERS:  # so that they count as able to open a slab
            books.callback(make_book(run_dir, consumer, 1).close)
        made.set_devices(dict.fromkeys(CONSUMERS, "cuda:0"))
    return made


def mixed_consumer(run_dir: Path) -> Consumer:
    device = cuda_rig.far_device(cuda_rig.double_folder(run_dir))
    cuda = cuda_rig.SettledConsumer(device, run_dir)
    return MixedConsumer(device, ShmConsumer(run_dir), cuda)


WAYS: dict[str, tuple[Callable[[Path, int, int], Producer], Callable[[Path], Consumer]]] = {
    "inline": (
        lambda _, capacity, slots: InlineProducer(slots, capacity),
        lambda _: InlineConsumer(),
    ),
    "shm": (shm_producer, ShmConsumer),
    # A worker's receiver takes whole tensors as well, whatever its own mode is.
    "inline-to-shm": (lambda _, capacity, slots: InlineProducer(slots, capacity), ShmConsumer),
    # Device memory, on the double of the driver (cuda_fake): one device, two that are peers, and
    # the edges between host and device. tests/gpu has the same on a real one.
    "cuda": (cuda_producer, cuda_consumer),
    "cuda-peer": (cuda_producer, lambda run_dir: cuda_consumer(run_dir, 1)),
    "device-to-host": (mixed_producer, ShmConsumer),
    "host-to-device": (shm_producer, mixed_consumer),
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


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_arrives_bit_by_bit(way: Way, dtype: str) -> None:
    producer, consumer = way.producer(), way.consumer()
    buffer = reserved(producer, (3, 5), dtype)
    assert (buffer.dtype, buffer.dims) == (dtype, (3, 5))
    assert buffer.nbytes == len(buffer.memory) == 15 * DTYPE_BYTES[dtype]
    sent = fill(buffer, 1)
    got = consumer.open(*carry(producer.publish(buffer, [21])[0]))
    assert bytes(got.memory) == sent
    tensor = as_torch(got.memory, got.desc.dtype, got.desc.dims)
    assert (tensor.dtype, tensor.shape) == (getattr(torch, dtype), (3, 5))
    assert as_numpy(got.memory, got.desc.dtype, got.desc.dims).tobytes() == sent
    got.release()


@pytest.mark.parametrize("rank", range(1, 9))
def test_every_rank(way: Way, rank: int) -> None:
    dims = (*range(2, rank + 1), 1)
    producer, consumer = way.producer(), way.consumer()
    buffer = reserved(producer, dims, "int16")
    sent = fill(buffer, rank)
    got = consumer.open(*carry(producer.publish(buffer, [21])[0]))
    assert got.desc.dims == dims
    assert bytes(got.memory) == sent


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4095, 4096, 4097, 300_001, 8 * MIB])
def test_every_size(way: Way, nbytes: int) -> None:
    producer, consumer = way.producer(), way.consumer()
    for seed in range(2):
        buffer = reserved(producer, (nbytes,))
        sent = fill(buffer, seed)
        got = consumer.open(*carry(producer.publish(buffer, [21])[0]))
        del buffer
        assert bytes(got.memory) == sent
        got.release()
    producer.sweep()
    assert producer.outstanding() == 0


def test_memory_is_aligned_for_vector_kernels(way: Way) -> None:
    producer = way.producer()
    for nbytes in (1, 100, 5000, 70, 4096):
        buffer = reserved(producer, (nbytes,))
        assert np.frombuffer(buffer.memory, np.uint8).ctypes.data % 64 == 0


def test_received_memory_is_read_only(way: Way) -> None:
    producer, consumer = way.producer(), way.consumer()
    got = consumer.open(*send(producer, b"abcd", [21])[0])
    assert got.memory.readonly
    with pytest.raises(TypeError):
        got.memory[0] = 0


def test_fan_out_to_three_consumers_released_in_any_order(way: Way) -> None:
    producer = way.producer()
    consumers = [way.consumer() for _ in CONSUMERS]
    sent = send(producer, b"to all", CONSUMERS)
    got = [c.open(*s) for c, s in zip(consumers, sent, strict=True)]
    for i in (2, 0, 1):
        assert bytes(got[i].memory) == b"to all"
        got[i].release()
    producer.sweep()
    assert producer.outstanding() == 0


def test_the_slots_last_reader_frees_it() -> None:
    with RunDir.create() as run_dir:
        producer, consumer = shm_producer(run_dir.path, MIB, 2), ShmConsumer(run_dir.path)
        sent = send(producer, b"to all", CONSUMERS)
        got = [consumer.open(*s) for s in sent]
        for n, buffer in enumerate(got, start=1):
            assert producer.outstanding() == 1
            buffer.release()
            assert producer.sweep() == (n == len(got))
        assert producer.outstanding() == 0
        producer.close()


def test_one_process_may_be_two_consumers(way: Way) -> None:
    producer, consumer = way.producer(), way.consumer()
    first, second = (consumer.open(*s) for s in send(producer, b"twice", [21, 21]))
    first.release()
    assert bytes(second.memory) == b"twice"
    second.release()
    producer.sweep()
    assert producer.outstanding() == 0


def test_release_out_of_order_reuses_what_is_free(way: Way) -> None:
    producer, consumer = way.producer(slots=3), way.consumer()
    got = [consumer.open(*send(producer, bytes([i]) * 100, [21])[0]) for i in range(3)]
    for i in (1, 2, 0):
        got[i].release()
        got[i] = consumer.open(*send(producer, bytes([10 + i]) * 100, [21])[0])
    assert [bytes(g.memory[:1]) for g in got] == [b"\x0a", b"\x0b", b"\x0c"]


def test_release_is_idempotent(way: Way) -> None:
    producer, consumer = way.producer(), way.consumer()
    got = consumer.open(*send(producer, b"once", [21])[0])
    got.release()
    got.release()
    again = consumer.open(*send(producer, b"next", [21])[0])
    got.release()
    producer.sweep()
    assert bytes(again.memory) == b"next"


@pytest.mark.parametrize("scarce", ["slots", "bytes"])
def test_exhausted_is_none_until_something_is_released(way: Way, scarce: str) -> None:
    if scarce == "slots":
        producer, consumer = way.producer(MIB, slots=2), way.consumer()
    else:
        producer, consumer = way.producer(16 * KIB, slots=8), way.consumer()
    held = [reserved(producer, (8 * KIB,)) for _ in range(2)]
    assert producer.reserve("uint8", (8 * KIB,)) is None
    assert producer.usage().stalls == 1
    got = consumer.open(*carry(producer.publish(held.pop(), [21])[0]))
    got.release()
    assert producer.reserve("uint8", (8 * KIB,)) is not None
    assert producer.usage().stalls == 1


@pytest.mark.parametrize(
    ("capacity", "dims"),
    [
        (64 * KIB, (64 * KIB + 1,)),
        (64 * KIB, (2**31 - 1,) * 8),
        (2**29, (2**28 + 1,)),  # fits the capacity, but no message is that large
    ],
)
def test_what_can_never_fit_is_too_large(way: Way, capacity: int, dims: tuple[int, ...]) -> None:
    producer = way.producer(capacity)
    with pytest.raises(RequestError) as info:
        producer.reserve("uint8", dims)
    assert info.value.code == "TOO_LARGE"
    assert (producer.outstanding(), producer.usage().stalls) == (0, 0)


def test_discard_gives_back(way: Way) -> None:
    producer = way.producer(slots=1)
    buffer = reserved(producer)
    producer.discard(buffer)
    del buffer
    assert producer.outstanding() == 0
    assert producer.reserve("uint8", (4,)) is not None


def test_a_held_buffer_is_kept_and_can_be_published_again(way: Way) -> None:
    producer, consumer = way.producer(slots=1), way.consumer()
    buffer = reserved(producer)
    buffer.memory[:] = b"kept"
    producer.hold(buffer)
    consumer.open(*carry(producer.publish(buffer, [21])[0])).release()
    producer.sweep()
    assert producer.outstanding() == 1
    assert bytes(buffer.memory) == b"kept"
    got = consumer.open(*carry(producer.publish(buffer, [22])[0]))
    assert bytes(got.memory) == b"kept"
    producer.unhold(buffer)
    del buffer
    got.release()
    producer.sweep()
    assert producer.outstanding() == 0


def test_a_revoked_payload_counts_as_released(way: Way) -> None:
    producer, consumer = way.producer(), way.consumer()
    buffer = reserved(producer)
    sent, unsent = producer.publish(buffer, [21, 22])
    got = consumer.open(*carry(sent))
    producer.revoke(unsent)
    got.release()
    del buffer, sent, unsent
    producer.sweep()
    assert producer.outstanding() == 0


def test_rows_of_a_batch_part_without_a_copy(way: Way) -> None:
    producer, consumer = way.producer(), way.consumer()
    buffer = reserved(producer, (5, 2), "int32")
    view = as_numpy(buffer.memory, "int32", (5, 2))
    view[:] = np.arange(10).reshape(5, 2)
    first, second = producer.publish(buffer, [21, 22])
    parts = [first.rows(0, 2), second.rows(2, 5)]
    got = [consumer.open(*carry(p)) for p in parts]
    assert [g.desc.dims for g in got] == [(2, 2), (3, 2)]
    back = np.concatenate([as_numpy(g.memory, "int32", g.desc.dims) for g in got])
    assert (back == view).all()
    for g in got:
        g.release()
    for start, stop in [(0, 0), (-1, 2), (2, 6), (3, 2)]:
        with pytest.raises(ValueError):
            first.rows(start, stop)
    del buffer, first, second, parts, view
    producer.sweep()
    assert producer.outstanding() == 0


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (1, 1), (3, 1), (4,), (3, 5), (0, 2)])
def test_rows_of_a_padded_batch_are_cut_without_a_copy(way: Way, shape: tuple[int, ...]) -> None:
    """A part of each row, contiguous or not, is read as what it is."""
    producer, consumer = way.producer(), way.consumer()
    buffer = reserved(producer, (5, 3, 4), "int32")
    view = as_numpy(buffer.memory, "int32", (5, 3, 4))
    view[:] = np.arange(60).reshape(5, 3, 4)
    whole = producer.publish(buffer, [21])[0]
    try:
        part = whole.rows(1, 3, shape)
    except ValueError:
        assert shape in ((4,), (3, 5), (0, 2)), "it is a part of none"
        producer.revoke(whole)
        return
    got = consumer.open(*carry(part))
    assert got.desc.dims == (2, *shape)
    back = as_numpy(got.memory, "int32", got.desc.dims, got.desc.strides)
    assert (back == view[1:3, : shape[0], : shape[1]]).all()
    torch_back = got.tensor()
    assert tuple(torch_back.shape) == (2, *shape) and torch_back.tolist() == back.tolist()
    got.release()


def test_one_row_cut_at_its_first_dim_is_contiguous(way: Way) -> None:
    producer = way.producer()
    whole = producer.publish(reserved(producer, (5, 3, 4), "int32"), [21])[0]
    assert whole.rows(2, 3, (2, 4)).desc.strides is None
    assert whole.rows(2, 4, (3, 4)).desc.strides is None
    assert whole.rows(2, 4, (2, 4)).desc.strides == (12, 4, 1)
    assert whole.rows(2, 3, (2, 3)).desc.strides == (12, 4, 1)


def test_peer_gone_gives_back_what_the_dead_held(way: Way) -> None:
    producer, consumer = way.producer(slots=2), way.consumer()
    dead, shared = send(producer, b"dead", [21])[0], send(producer, b"both", [21, 22])
    survivor = consumer.open(*shared[1])
    consumer.open(*dead)
    leased = producer.peer_gone(21)
    if isinstance(producer, ShmProducer):
        assert leased == 2
        assert producer.outstanding() == 1
    assert producer.peer_gone(21) == 0
    assert bytes(survivor.memory) == b"both"
    survivor.release()
    producer.sweep()
    assert producer.outstanding() == 0


def test_peer_gone_of_a_stranger_changes_nothing(way: Way) -> None:
    producer, consumer = way.producer(), way.consumer()
    got = consumer.open(*send(producer, b"mine", [21])[0])
    consumer.peer_gone(999)
    assert producer.peer_gone(999) == 0
    assert bytes(got.memory) == b"mine"


def test_usage_adds_up(way: Way) -> None:
    producer, consumer = way.producer(4 * MIB, slots=4), way.consumer()
    got = consumer.open(*send(producer, bytes(MIB), [21])[0])
    buffer = reserved(producer, (2 * MIB,))
    usage = producer.usage()
    assert (usage.capacity, usage.slots) == (4 * MIB, 4)
    assert usage.high_water >= 2 * MIB
    assert usage.used <= usage.high_water <= usage.capacity
    producer.discard(buffer)
    del buffer
    got.release()
    producer.sweep()
    usage = producer.usage()
    assert (usage.used, usage.slots_used) == (0, 0)
    assert usage.high_water >= 2 * MIB


MISUSES: dict[str, Callable[[Producer, OutBuffer], object]] = {
    "nobody": lambda p, b: p.publish(b, []),
    "too many": lambda p, b: p.publish(b, [21] * (p.max_consumers + 1)),
    "twice": lambda p, b: (p.publish(b, [21]), p.publish(b, [21])),
    "unhold": lambda p, b: p.unhold(b),
    "discard held": lambda p, b: (p.hold(b), p.discard(b)),
    "stranger": lambda p, b: p.publish(object(), [21]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("misuse", list(MISUSES))
def test_misuse_is_told_at_once(way: Way, misuse: str) -> None:
    producer = way.producer()
    buffer = reserved(producer)
    with pytest.raises((LeaseError, TypeError)):
        MISUSES[misuse](producer, buffer)


def test_the_most_consumers_are_served(way: Way) -> None:
    producer, consumer = way.producer(), way.consumer()
    sent = send(producer, b"many", [21] * producer.max_consumers)
    got = [consumer.open(*s) for s in sent]
    assert {bytes(g.memory) for g in got} == {b"many"}
    for g in got:
        g.release()
    producer.sweep()
    assert producer.outstanding() == 0


def test_close_is_idempotent_and_views_stay_readable(way: Way) -> None:
    producer, consumer = way.producer(), way.consumer()
    got = consumer.open(*send(producer, b"late", [21])[0])
    tensor = as_torch(got.memory, "uint8", (4,))
    for _ in range(2):
        producer.close()
        consumer.close()
    assert bytes(tensor.numpy()) == b"late"
    got.release()


def test_strides_describe_what_is_there(way: Way) -> None:
    producer, consumer = way.producer(), way.consumer()
    desc, frame = send(producer, bytes(range(12)), [21])[0]
    columns = replace(desc, dims=(4, 3), strides=(1, 4))
    assert span_bytes(columns) == 12
    got = consumer.open(columns, frame)
    expected = np.arange(12, dtype=np.uint8).reshape(3, 4).T
    assert (as_numpy(got.memory, "uint8", (4, 3), columns.strides) == expected).all()
    assert span_bytes(TensorDesc("int32", (0, 3), strides=(3, 1))) == 0


def test_wrong_frames_are_wire_errors() -> None:
    consumer = InlineConsumer()
    desc = TensorDesc("float32", (2, 2))
    for frame in (None, b"", bytes(15), bytes(17)):
        with pytest.raises(WireError) as info:
            consumer.open(desc, frame)
        assert info.value.code == "MALFORMED_MESSAGE"
    with pytest.raises(WireError):
        consumer.open(replace(desc, handle=Handle(1, 0, 0, 1, 0)), None)
    assert len(consumer.open(desc, np.zeros((2, 2), np.float32)).memory) == 16


@pytest.fixture
def shm() -> Iterator[tuple[ShmProducer, ShmConsumer]]:
    with RunDir.create() as run_dir:
        producer = ShmProducer(Arena.create(run_dir.path, OWNER, MIB, 4, lanes=4))
        consumer = ShmConsumer(run_dir.path)
        yield producer, consumer
        producer.close()


@pytest.mark.parametrize(
    "forgery",
    [
        {"slot": 1},
        {"slot": 4},
        {"slot": 2**32 - 1},
        {"lane": 4},
        {"lane": 255},
        {"generation": 2},
        {"generation": 2**32 - 1},
        {"offset": MIB},
        {"offset": MIB - 3},
        {"offset": 2**64 - 1},
    ],
)
def test_forged_handles_are_wire_errors(
    shm: tuple[ShmProducer, ShmConsumer], forgery: dict[str, int]
) -> None:
    producer, consumer = shm
    desc, _ = send(producer, b"abcd", [21])[0]
    assert desc.handle is not None
    with pytest.raises(WireError) as info:
        consumer.open(replace(desc, handle=replace(desc.handle, **forgery)), None)
    assert info.value.code == "MALFORMED_MESSAGE"
    assert bytes(consumer.open(desc, None).memory) == b"abcd"


def test_a_tensor_larger_than_its_arena_is_a_wire_error(
    shm: tuple[ShmProducer, ShmConsumer],
) -> None:
    producer, consumer = shm
    desc, _ = send(producer, b"abcd", [21])[0]
    for forged in (
        replace(desc, dims=(MIB + 1,)),
        replace(desc, dims=(2, 2), strides=(2**27, 2**27)),
    ):
        with pytest.raises(WireError):
            consumer.open(forged, None)


def test_stale_handles_are_wire_errors(shm: tuple[ShmProducer, ShmConsumer]) -> None:
    producer, consumer = shm
    released, revoked, orphaned = (send(producer, b"abcd", [n])[0][0] for n in (21, 22, 23))
    consumer.open(released, None).release()
    producer.revoke(Payload(revoked, None))
    producer.peer_gone(23)
    for desc in (released, revoked, orphaned):
        with pytest.raises(WireError, match="stale"):
            consumer.open(desc, None)
    producer.sweep()
    assert producer.outstanding() == 0
    # The slots' next life does not make them valid again.
    for _ in range(4):
        send(producer, b"next", [21])
    for desc in (released, revoked, orphaned):
        with pytest.raises(WireError, match="stale"):
            consumer.open(desc, None)


def test_a_handle_with_a_frame_is_a_wire_error(shm: tuple[ShmProducer, ShmConsumer]) -> None:
    producer, consumer = shm
    desc, _ = send(producer, b"abcd", [21])[0]
    with pytest.raises(WireError):
        consumer.open(desc, b"abcd")


def test_an_unknown_or_dead_owner_is_worker_lost(shm: tuple[ShmProducer, ShmConsumer]) -> None:
    producer, consumer = shm
    desc, _ = send(producer, b"abcd", [21])[0]
    assert desc.handle is not None
    with pytest.raises(RequestError) as info:
        consumer.open(replace(desc, handle=replace(desc.handle, incarnation=999)), None)
    assert info.value.code == "WORKER_LOST"
    held = consumer.open(desc, None)
    consumer.peer_gone(OWNER)
    assert bytes(held.memory) == b"abcd"
    with pytest.raises(RequestError) as info:
        consumer.open(desc, None)
    assert info.value.code == "WORKER_LOST"


def test_foreign_payloads_cannot_be_revoked(way: Way) -> None:
    producer = way.producer()
    with pytest.raises(ValueError):
        producer.revoke(Payload(TensorDesc("uint8", (1,), Handle(99, 0, 0, 1, 0)), None))


def test_two_threads_share_a_producer(way: Way) -> None:
    """A worker reserves in its engine thread and publishes in its data thread."""
    producer, consumer = way.producer(slots=4), way.consumer()
    rounds, errors = 300, []
    done = threading.Semaphore(0)
    handed: list[OutBuffer] = []
    ready = threading.Semaphore(0)

    def engine() -> None:
        for i in range(rounds):
            buffer = producer.reserve("uint8", (100,))
            while buffer is None:
                done.acquire(timeout=5)
                buffer = producer.reserve("uint8", (100,))
            buffer.memory[:] = bytes([i % 256]) * 100
            handed.append(buffer)
            del buffer
            ready.release()

    thread = threading.Thread(target=engine)
    thread.start()
    for i in range(rounds):
        assert ready.acquire(timeout=10)
        got: InBuffer = consumer.open(*carry(producer.publish(handed.pop(0), [21])[0]))
        if bytes(got.memory) != bytes([i % 256]) * 100:
            errors.append(i)
        got.release()
        done.release()
    thread.join(10)
    producer.sweep()
    assert not errors
    assert producer.outstanding() == 0

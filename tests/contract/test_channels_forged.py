"""Descriptors that lie, are stale or name the dead: an error of the request, never a wrong read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from blockflow.core.errors import RequestError, WireError
from blockflow.tensormq.arena import DEVICE_BIT, Arena
from blockflow.tensormq.channel import Payload
from blockflow.tensormq.inline import open_frame
from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.wire.tensor import TensorDesc
from tests.channel_rig import MIB, OWNER, send


def test_wrong_frames_are_wire_errors() -> None:
    desc = TensorDesc("float32", (2, 2))
    for frame in (None, b"", bytes(15), bytes(17)):
        with pytest.raises(WireError) as info:
            open_frame(desc, frame)
        assert info.value.code == "MALFORMED_MESSAGE"
    assert len(open_frame(desc, np.zeros((2, 2), np.float32)).memory) == 16


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


def test_the_book_of_device_memory_holds_no_tensors() -> None:
    """Whose owner takes this side for one on a device, too."""
    with RunDir.create() as run_dir:
        book = ShmProducer(Arena.create(run_dir.path, OWNER | DEVICE_BIT, MIB, 4))
        desc, _ = send(book, b"abcd", [21])[0]
        with pytest.raises(WireError, match="device memory"):
            ShmConsumer(run_dir.path).open(desc, None)
        book.close()


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

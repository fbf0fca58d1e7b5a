"""A slot that is free is shut: no handle opens it, not even by a lane that was never given out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from blockflow.core.errors import SystemError_, WireError
from blockflow.tensormq import shm
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.channel import OutBuffer, Payload
from blockflow.tensormq.leases import REVOKE_NS
from blockflow.tensormq.shm import ShmConsumer, ShmProducer

ME, READER = 5, 9
Freed = Callable[[ShmProducer, ShmConsumer, OutBuffer, Payload], object]


def read(consumer: ShmConsumer, payload: Payload) -> None:
    consumer.open(payload.desc, None).release()


def by_sweep(p: ShmProducer, c: ShmConsumer, buffer: OutBuffer, sent: Payload) -> object:
    return read(c, sent) or p.sweep()


def by_usage(p: ShmProducer, c: ShmConsumer, buffer: OutBuffer, sent: Payload) -> object:
    return read(c, sent) or p.usage()


def by_reserve(p: ShmProducer, c: ShmConsumer, buffer: OutBuffer, sent: Payload) -> object:
    return read(c, sent) or p.reserve("float32", (1, 2))


def by_revoke(p: ShmProducer, c: ShmConsumer, buffer: OutBuffer, sent: Payload) -> object:
    return p.revoke(sent)


def by_unhold(p: ShmProducer, c: ShmConsumer, buffer: OutBuffer, sent: Payload) -> object:
    p.hold(buffer)
    p.revoke(sent)
    return p.unhold(buffer)


def by_death(p: ShmProducer, c: ShmConsumer, buffer: OutBuffer, sent: Payload) -> object:
    return p.peer_gone(READER)


@pytest.fixture
def producer(tmp_path: Path) -> Iterator[ShmProducer]:
    one = ShmProducer(Arena.create(tmp_path, ME, 1 << 16, 4, lanes=4))
    yield one
    one.close()


@pytest.mark.parametrize(
    "freed",
    [by_sweep, by_usage, by_reserve, by_revoke, by_unhold, by_death],
    ids=lambda f: f.__name__,
)
def test_what_is_free_is_shut(freed: Freed, producer: ShmProducer, tmp_path: Path) -> None:
    consumer = ShmConsumer(tmp_path)
    buffer = producer.reserve("float32", (1, 2))
    assert buffer is not None
    (sent,) = producer.publish(buffer, [READER])
    handle = sent.desc.handle
    assert handle is not None
    forged = replace(sent.desc, handle=replace(handle, lane=handle.lane + 1))
    freed(producer, consumer, buffer, sent)
    with pytest.raises(WireError, match="stale"):
        consumer.open(forged, None)
    consumer.close()


def test_a_handle_that_nobody_has_opened_in_time_is_void_before_its_slot_is_free(
    producer: ShmProducer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or who opens it late would read what was written there since."""
    now = 10 * REVOKE_NS
    clock = SimpleNamespace(monotonic_ns=lambda: now)
    monkeypatch.setattr(shm, "time", clock)
    consumer = ShmConsumer(tmp_path)
    buffer = producer.reserve("float32", (1, 2))
    assert buffer is not None
    lost, opened = producer.publish(buffer, [READER, READER], until_ns=now)
    reading = consumer.open(opened.desc, None)
    now += REVOKE_NS
    assert producer.sweep() == 0
    with pytest.raises(WireError, match="stale"):
        consumer.open(lost.desc, None)
    now += REVOKE_NS
    assert producer.sweep() == 0, "one reads it"
    reading.release()
    assert producer.sweep() == 1 and producer.outstanding() == 0
    consumer.close()


def test_without_room_to_grow_no_slot_is_kept(
    producer: ShmProducer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(end: int) -> None:
        raise SystemError_("NO_SPACE", "full")

    first = producer.reserve("float32", (1, 2))
    assert first is not None
    with monkeypatch.context() as patch:
        patch.setattr(producer._arena, "commit", full)
        patch.setattr(producer._arena, "committed", 4096)
        assert producer.reserve("float32", (1024,)) is None, "the first one's room will do"
        with pytest.raises(SystemError_, match="NO_SPACE"):
            producer.reserve("float32", (2048,))
        assert producer.outstanding() == 1
    producer.discard(first)
    assert producer.outstanding() == 0

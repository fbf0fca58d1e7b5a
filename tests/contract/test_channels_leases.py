"""The contract of every way that a tensor travels: who holds a slot, and when it is free again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from blockflow.core.errors import RequestError, WireError
from blockflow.tensormq import leases
from blockflow.tensormq.channel import InBuffer, OutBuffer, Payload, Producer
from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.leases import LeaseError
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.tensormq.views import as_torch
from blockflow.wire.tensor import Handle, TensorDesc
from tests import channel_rig
from tests.channel_rig import CONSUMERS, KIB, MIB, Way, carry, reserved, send, shm_producer
from tests.dispatcher_rig import wait_until

way = channel_rig.way


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
        producer, consumer = way.producer(128 * KIB, slots=8), way.consumer()
    held = [reserved(producer, (64 * KIB,)) for _ in range(2)]
    assert producer.reserve("uint8", (64 * KIB,)) is None
    assert producer.usage().stalls == 1
    got = consumer.open(*carry(producer.publish(held.pop(), [21])[0]))
    got.release()
    assert producer.reserve("uint8", (64 * KIB,)) is not None
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


def test_what_was_lost_on_its_way_is_given_back(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that nobody gets, of a request that nobody waits for; its consumer lives on."""
    monkeypatch.setattr(leases, "REVOKE_NS", 1_000_000)
    producer, consumer = way.producer(slots=2), way.consumer()
    now = time.monotonic_ns()
    lost, kept = (
        producer.publish(reserved(producer, (4, 4)), [21], until)[0]
        for until in (now, now + 10**12)
    )
    stale = None if lost.frame is not None else carry(lost)
    del lost  # a whole tensor goes with its message
    wait_until(lambda: producer.reserve("uint8", (4,)) is not None)
    if stale is not None:
        with pytest.raises(WireError):
            consumer.open(*stale)
    consumer.open(*carry(kept)).release()


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

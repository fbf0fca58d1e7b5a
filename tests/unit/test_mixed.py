"""Tensors of a worker on a device: which way they take, what is copied, and what comes back."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockflow.core.errors import RequestError, WireError
from blockflow.tensormq.arena import DEVICE_BIT, arena_path
from blockflow.tensormq.channel import OutBuffer
from blockflow.tensormq.cuda import SLAB_ALIGN, CudaProducer
from blockflow.tensormq.cuda_consumer import CudaMapping
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.leases import LeaseError
from blockflow.wire.tensor import Handle, TensorDesc
from tests import cuda_rig, mixed_rig
from tests.dispatcher_rig import wait_until
from tests.mixed_rig import DIMS, HOST, MIB, NEAR, OWNER, PEER, Rig, chosen, finish, is_right

rig, run_dir = mixed_rig.rig, mixed_rig.run_dir


def test_between_devices_nothing_is_copied(rig: Rig) -> None:
    buffer = rig.computed(NEAR)
    assert (buffer.slot is not None, buffer.host) == (True, None)
    assert not finish(buffer)
    (payload,) = rig.producer.publish(buffer, [NEAR])
    handle = payload.desc.handle
    assert handle is not None and handle.incarnation == OWNER | DEVICE_BIT
    got = rig.near.open(payload.desc, None)
    assert is_right(got.tensor())
    got.release()
    assert rig.producer.sweep() == 1 and rig.producer.outstanding() == 0
    copies = rig.device.copies
    assert (copies.h2d_copies, copies.d2h_copies, copies.d2d_copies) == (0, 0, 0)


def test_a_handle_that_leaves_the_slab_is_refused(rig: Rig) -> None:
    buffer = rig.computed(NEAR)
    finish(buffer)
    desc = rig.producer.publish(buffer, [NEAR])[0].desc
    handle = desc.handle
    assert handle is not None

    def at(offset: int) -> Handle:
        return replace(handle, offset=offset)

    end = SLAB_ALIGN
    refused = [
        (replace(desc, handle=at(end - desc.nbytes + 1)), None),
        (TensorDesc("uint8", (2,), at(end - 2), (2,)), None),
        (desc, bytes(desc.nbytes)),
    ]
    for bad, frame in refused:
        with pytest.raises(WireError):
            rig.near.open(bad, frame)
    rig.near.open(replace(desc, handle=at(end - desc.nbytes)), None).release()
    assert rig.producer.sweep() == 1


def test_to_a_peer_the_reader_copies_once(rig: Rig) -> None:
    buffer = rig.computed(PEER)
    finish(buffer)
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
    finish(buffer)
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
    finish(buffer)
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
    finish(buffer)
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
    finish(buffer)
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
    finish(near)
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


# --- deaths, and closing before freeing ----------------------------------------------------------


def test_a_dead_consumer_gives_back_both_halves(rig: Rig) -> None:
    buffer = rig.computed(NEAR, HOST)
    finish(buffer)
    rig.producer.publish(buffer, [NEAR, HOST])
    assert rig.producer.peer_gone(NEAR) == 1
    assert rig.producer.peer_gone(HOST) == 1
    assert rig.producer.outstanding() == 0
    assert chosen(rig.producer, NEAR) == "host", "it is not known any more"


def test_a_dead_owners_tensors_are_lost_and_its_memory_is_let_go(rig: Rig) -> None:
    buffer = rig.computed(NEAR)
    finish(buffer)
    (payload,) = rig.producer.publish(buffer, [NEAR])
    got = rig.near.open(payload.desc, None)
    rig.near.peer_gone(OWNER)
    with pytest.raises(RequestError, match="died while its tensor waited"):
        got.tensor()
    assert rig.importers()
    got.release()
    wait_until(lambda: not rig.importers())  # consumers look a few times per second
    with pytest.raises(RequestError, match="is dead"):
        rig.near.open(payload.desc, None)


def test_a_death_between_the_look_and_the_wait_is_watched(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data thread hears of it just when the engine thread has found the owner alive: one of
    the two has to see the other's mark, or the device waits for ever and nobody knows."""
    rig = Rig(run_dir, eager=False)
    done = threading.Event()
    buffer = rig.computed(NEAR)
    assert buffer.slot is not None
    rig.device.api.launch(rig.device.stream, lambda: done.wait(30), writes=[])
    finish(buffer)
    (payload,) = rig.producer.publish(buffer, [NEAR])
    got = rig.near.open(payload.desc, None)
    real = CudaMapping.order_behind
    watched: list[str] = []

    def dies_first(mapping: CudaMapping, handle: Handle) -> None:
        rig.near.peer_gone(OWNER)
        real(mapping, handle)

    monkeypatch.setattr(CudaMapping, "order_behind", dies_first)
    monkeypatch.setattr(rig.openers[NEAR]._device, "watch", lambda *args: watched.append(args[2]))
    got.tensor()
    assert watched == [f"it waits for work of incarnation {OWNER}, which is dead"]
    done.set()
    got.release()
    rig.close()


def test_an_owner_waits_for_its_importers_to_close(rig: Rig) -> None:
    buffer = rig.computed(NEAR)
    finish(buffer)
    (payload,) = rig.producer.publish(buffer, [NEAR])
    rig.near.open(payload.desc, None).release()
    rig.producer.close()  # the near consumer notices by itself; nothing is broken, nothing is left
    assert rig.world.names("mem") == []
    with pytest.raises(RequestError):
        rig.consumer(0, 24).open(payload.desc, None)


def test_an_importer_that_does_not_close_is_not_freed_under(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = rig.computed(NEAR)
    finish(buffer)
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


def test_without_its_book_an_owner_leaves_the_slab_to_the_processs_end(
    rig: Rig, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody has removed the system's folder: whoever has the slab open cannot be asked."""
    finish(buffer := rig.computed(NEAR))
    rig.producer.discard(buffer)
    arena_path(run_dir, OWNER | DEVICE_BIT).unlink()
    rig.producer.close()
    assert "the process's end frees it" in caplog.text
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
    finish(buffer)
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

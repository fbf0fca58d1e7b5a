"""The way over the host: who takes it for which reason, and what a worker is put together from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from blockflow.core.errors import RequestError
from blockflow.tensormq import memory as memory_module
from blockflow.tensormq.cuda_api import CudaError
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.cuda_here import DOUBLE_ENV
from blockflow.tensormq.memory import TensorMemory, open_memory
from blockflow.tensormq.mixed import MixedProducer
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from tests import cuda_rig, mixed_rig
from tests.mixed_rig import DIMS, HOST, MIB, NEAR, OWNER, PEER, Rig, chosen, finish, is_right, send

rig, run_dir = mixed_rig.rig, mixed_rig.run_dir

# --- fallbacks -----------------------------------------------------------------------------------


def test_each_reason_to_take_the_host_is_told_once(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(run_dir, islands=[1])
    rig.producer.set_devices({NEAR: "cuda:0", PEER: "cuda:1", 99: "cuda:0", HOST: "cpu"})
    assert chosen(rig.producer, NEAR) == "device"
    assert chosen(rig.producer, PEER) == "host"
    assert chosen(rig.producer, 99) == "host", "no book: it cannot open device memory"
    assert "incarnation 99" in rig.producer.obstacle
    rig.producer.set_devices({PEER: "cuda:1"})
    assert caplog.text.count("cuda:0 and cuda:1 are no peers") == 1
    rig.producer.set_devices({NEAR: "cuda:0"})
    assert rig.producer.obstacle == "", "of those that are here"
    rig.close()


def test_without_memory_for_a_slab_tensors_go_over_the_host(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(run_dir, total_bytes=3 << 20)
    assert chosen(rig.producer, NEAR) == "host"
    assert "no slab on cuda:0" in rig.producer.obstacle
    monkeypatch.setattr(rig.cuda, "open_slab", lambda: pytest.fail("is not tried again"))
    assert chosen(rig.producer, NEAR) == "host"
    rig.producer.set_devices({NEAR: "cuda:0"})
    assert chosen(rig.producer, NEAR) == "host"
    assert rig.cuda.slab == 0
    rig.close()


def test_of_a_slab_that_cannot_be_exported_nothing_is_left(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pointer: int) -> bytes:
        raise CudaError("cuIpcGetMemHandle", 801, "CUDA_ERROR_NOT_SUPPORTED")

    assert isinstance(rig.device.api, FakeCuda)
    before = rig.device.api.counts()
    monkeypatch.setattr(rig.device.api, "mem_export", refused)
    assert chosen(rig.producer, NEAR) == "host"
    assert rig.device.api.counts() == before


def test_who_cannot_open_device_memory_gets_its_tensors_over_the_host(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(run_dir, lacks=["opening"])
    for _ in range(2):
        got = rig.near.open(send(rig, NEAR), None)
        assert is_right(got.tensor())
        got.release()
    assert rig.cuda.slab == 0, "no slab is made for nobody"
    want = f"incarnation {NEAR} cannot open memory of cuda:0: cuIpcOpenMemHandle_v2 failed"
    assert caplog.text.count(want) == 1
    assert rig.producer.obstacle.startswith(want), "that of the last tensor"
    rig.producer.peer_gone(NEAR)
    assert f"incarnation {PEER} cannot open" in rig.producer.obstacle
    rig.producer.peer_gone(PEER)
    assert rig.producer.obstacle == ""
    rig.close()


@pytest.mark.parametrize("first", ["memory", "event"])
def test_who_finds_out_later_that_it_cannot_open_says_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """What was sent by then is lost, and the code says that it may be run again; what follows goes
    over the host, and the others' way is what it was."""
    api = rig.openers[NEAR]._device.api
    sent = send(rig, NEAR)

    def refuse(handle: bytes) -> int:
        raise CudaError("cuIpcOpen", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(api, "mem_import" if first == "memory" else "event_import", refuse)
    with pytest.raises(RequestError, match="OUT_OF_MEMORY") as info:
        rig.near.open(sent, None).tensor()
    assert info.value.code == "WORKER_LOST" and info.value.retryable
    assert chosen(rig.producer, NEAR) == "host"
    assert "OUT_OF_MEMORY" in rig.producer.obstacle
    assert chosen(rig.producer, PEER) == "device"
    got = rig.near.open(send(rig, NEAR), None)
    assert is_right(got.tensor())
    got.release()
    rig.producer.set_devices({NEAR: "cuda:0", PEER: "cuda:1"})
    assert chosen(rig.producer, NEAR) == "host", "new routes change nothing"
    rig.producer.peer_gone(NEAR)
    rig.close()


def test_a_buffer_that_was_reserved_before_the_refusal_goes_as_a_whole(rig: Rig) -> None:
    buffer = rig.computed(NEAR)
    assert rig.producer.reaches(buffer, NEAR)
    rig.openers[NEAR]._verdicts.refused(OWNER, "no more")  # type: ignore[union-attr]
    assert rig.producer.reaches(buffer, NEAR), "a buffer's consumers change between two only"
    assert chosen(rig.producer, NEAR) == "host"
    assert not rig.producer.reaches(buffer, NEAR)
    finish(buffer)
    assert bytes(buffer.memory) == torch.arange(32.0).numpy().tobytes()
    rig.producer.discard(buffer)


def test_until_a_consumer_has_tried_its_tensors_go_over_the_host(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    late = rig.openers[NEAR]
    assert late._verdicts is not None
    late.meet(())
    rig.producer.set_devices({NEAR: "cuda:0", OWNER: "cuda:0"})
    assert rig.producer.obstacle == "", "nothing was sent"
    assert chosen(rig.producer, NEAR) == "host"
    assert "has opened no device memory yet" in rig.producer.obstacle
    late.meet({OWNER})
    assert chosen(rig.producer, NEAR) == "device"
    assert rig.producer.obstacle == "" and not caplog.text


def test_an_owner_that_has_nothing_to_try_sends_over_the_host(run_dir: Path) -> None:
    rig = Rig(run_dir, total_bytes=1 << 20)
    assert chosen(rig.producer, NEAR) == "host"
    assert "nothing to try" in rig.producer.obstacle
    rig.close()


# --- the composition -----------------------------------------------------------------------------


@pytest.fixture
def double(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = cuda_rig.double_folder(run_dir)
    monkeypatch.setenv(DOUBLE_ENV, str(folder))
    return folder


def opened(run_dir: Path, incarnation: int = OWNER, **options: Any) -> TensorMemory:
    return open_memory(run_dir, incarnation, arena_bytes=MIB, slots=4, **options)


def test_on_the_cpu_there_is_no_device(run_dir: Path) -> None:
    made = opened(run_dir)
    assert isinstance(made.slots, ShmProducer) and isinstance(made.consumer, ShmConsumer)
    assert (made.device, made.engine_device, made.fallback) == (None, "cpu", "")
    done: list[int] = []
    with made.engine_scope(), made.batch(1, lambda: done.append(1)):
        assert not done
    assert done
    assert (made.figures(), made.extra(), made.device_times) == ({}, {}, {})
    made.close()
    made.close()
    assert opened(run_dir, mode="zeromq").slots is None


def test_a_worker_on_a_device(run_dir: Path, double: Path) -> None:
    made = opened(run_dir, device="cuda:0")
    assert isinstance(made.slots, MixedProducer) and made.fallback == ""
    done: list[int] = []
    for n in range(3):
        with made.engine_scope(), made.batch(7, partial(done.append, n)):
            pass
    device = made.device
    assert isinstance(device, CudaDevice) and device.completions.wait_idle(10)
    assert made.device_times[7].count == 3 and done == [0, 1, 2]
    assert made.figures()["copies"]["d2h_copies"] == 0
    assert made.extra()["device_fallback"] == "" and made.extra()["slab_bytes"] == 0
    made.close()
    made.close()


def test_frames_of_a_worker_on_a_device(run_dir: Path, double: Path) -> None:
    made = opened(run_dir, device="cuda:0", mode="zeromq")
    assert made.slots is None and made.fallback == "the worker's mode is zeromq"
    buffer = made.frames.reserve("float32", DIMS)
    assert buffer is not None
    with made.engine_scope():
        buffer.tensor().copy_(torch.arange(32.0).view(DIMS))
    finish(buffer)
    (payload,) = made.frames.publish(buffer, [NEAR])
    got = made.consumer.open(payload.desc, payload.frame)
    with made.engine_scope():
        assert is_right(got.tensor())
    got.release()
    assert made.device is not None
    assert (made.device.copies.d2h_copies, made.device.copies.h2d_copies) == (1, 1)
    made.close()


def test_a_refusing_preflight_is_the_stated_fallback(
    run_dir: Path, double: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        memory_module, "open_device", lambda _: FakeCuda(double, lacks=["ipc_events"])
    )
    made = opened(run_dir, device="cuda:0")
    assert "interprocess events" in made.fallback == made.extra()["device_fallback"]
    assert isinstance(made.slots, MixedProducer)
    made.slots.set_devices({NEAR: "cuda:0"})
    assert chosen(made.slots, NEAR) == "host"
    made.close()


def test_what_cannot_be_had_leaves_nothing(run_dir: Path, double: Path) -> None:
    first = opened(run_dir, device="cuda:0")
    before = sorted(p.name for p in run_dir.iterdir())
    with pytest.raises(Exception, match="ALREADY_RUNNING"):
        opened(run_dir, device="cuda:0")
    assert sorted(p.name for p in run_dir.iterdir()) == before
    with pytest.raises(CudaError):
        opened(run_dir, 12, device="cuda:7")
    with pytest.raises(Exception, match="neither cpu nor cuda"):
        opened(run_dir, 12, device="tpu")
    assert sorted(p.name for p in run_dir.iterdir()) == before
    first.close()

"""A device that is lost answers every call with its error: what is closed then still comes to its
end, and leaves no file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from blockflow.tensormq.arena import DEVICE_BIT
from blockflow.tensormq.cuda import CudaProducer
from blockflow.tensormq.cuda_api import ILLEGAL_ADDRESS, CudaError
from blockflow.tensormq.cuda_here import DOUBLE_ENV
from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.memory import TensorMemory, open_memory
from blockflow.tensormq.mixed import MixedProducer
from tests.cuda_rig import close_devices, double_folder, far_device

ME, OTHER = 7, 8
MIB = 1 << 20


def batched(memory: TensorMemory, run_dir: Path) -> None:
    with memory.batch(0, lambda: None):
        pass


def followed(memory: TensorMemory, run_dir: Path) -> None:
    assert memory.device is not None
    memory.device.keep(b"")


def uploaded(memory: TensorMemory, run_dir: Path) -> None:
    """By way of the ring."""
    assert memory.device is not None
    pointer = memory.device.api.mem_alloc(MIB)
    memory.device.upload(pointer, memoryview(bytearray(MIB)))


def fetched(memory: TensorMemory, run_dir: Path) -> None:
    assert isinstance(memory.slots, MixedProducer)
    buffer = memory.slots.reserve("uint8", (64,), (9,))
    assert buffer is not None
    with memory.engine_scope():
        buffer.tensor()
    assert buffer.finish(lambda ns: None)


def opened(memory: TensorMemory, run_dir: Path) -> None:
    """Another worker's memory."""
    owner = CudaProducer(far_device(double_folder(run_dir)), run_dir, OTHER, MIB, 4)
    buffer = owner.reserve("uint8", (64,))
    assert buffer is not None
    buffer.tensor().fill_(1)
    buffer.finish(lambda ns: None)
    got = memory.consumer.open(owner.publish(buffer, [ME])[0].desc, None)
    got.tensor()
    got.release()


@pytest.mark.parametrize("use", [batched, followed, uploaded, fetched, opened])
def test_a_lost_device_is_closed(
    use: Callable[[TensorMemory, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDir.create() as run_dir:
        folder = double_folder(run_dir.path)
        monkeypatch.setenv(DOUBLE_ENV, str(folder))
        memory = open_memory(run_dir.path, ME, device="cuda:0", arena_bytes=8 * MIB, slots=4)
        device = memory.device
        assert device is not None
        use(memory, run_dir.path)
        assert device.completions.wait_idle(10)

        def fails() -> None:
            raise CudaError("cuLaunchKernel", ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS")

        with pytest.raises(CudaError):
            device.api.launch(device.stream, fails)  # type: ignore[attr-defined]
        memory.close()
        left = {name.partition("-")[2] for name in os.listdir(run_dir.path)}
        assert left.isdisjoint({str(ME), str(ME | DEVICE_BIT)})
        close_devices()
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

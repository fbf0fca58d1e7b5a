"""TensorMemory: what a worker sends from and receives into, chosen once by its device and mode."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.core.metrics import Histogram
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.channel import Consumer, Producer
from blockflow.tensormq.cuda import CudaProducer
from blockflow.tensormq.cuda_api import CudaApi
from blockflow.tensormq.cuda_consumer import CudaConsumer
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_here import DOUBLE_ENV
from blockflow.tensormq.cuda_preflight import preflight
from blockflow.tensormq.inline import InlineProducer
from blockflow.tensormq.mixed import MixedConsumer, MixedProducer
from blockflow.tensormq.shm import Rooms, ShmConsumer, ShmProducer

_LOG = logging.getLogger("blockflow.cuda")


@dataclass(slots=True)
class TensorMemory:
    """A worker's two ends of TensorMQ.

    Attributes:
        slots: producer of handles; None when the worker has no arena.
        frames: producer of whole tensors.
        consumer: opens whatever comes.
        engine_device: where torch keeps this worker's tensors.
        device: the worker's GPU; None on the CPU.
        fallback: why tensors go over the host although the worker is on a GPU; '' if they do not.
        device_times: by stage, how long its batches took on the device (nanoseconds).
    """

    slots: Producer | None
    frames: Producer
    consumer: Consumer
    engine_device: str = "cpu"
    device: CudaDevice | None = None
    fallback: str = ""
    device_times: dict[int, Histogram] = field(default_factory=dict)

    def engine_scope(self) -> AbstractContextManager[object]:
        """The engine thread computes within it."""
        device = self.device
        return nullcontext() if device is None else device.api.engine_scope(device.stream)

    def own_copy(self, tensor: Any) -> Any:
        """A copy in memory of its own, whichever thread asks for it: a device comes to it between
        what the engine thread has ordered before and what it orders after.

        Raises:
            RuntimeError: torch's, without memory for it.
        """
        with self.engine_scope():
            return tensor.clone()

    def figures(self) -> dict[str, Any]:
        """What the KPIs add for a worker on a device; nothing on the CPU."""
        device = self.device
        if device is None:
            return {}
        allocated, reserved = device.api.pool_bytes()
        return {
            "torch_allocated": allocated,
            "torch_reserved": reserved,
            "copies": asdict(device.copies),
        }

    def extra(self) -> dict[str, Any]:
        """Further figures by name: of the device's memory, of the slab or why there is none, and
        of uploads that did not come straight from page-locked memory."""
        device = self.device
        if device is None:
            return {}
        out: dict[str, Any] = {
            "device_fallback": self.fallback,
            "device_memory_used": device.api.memory_used(),
            **asdict(device.ways),
        }
        if isinstance(self.slots, MixedProducer):
            out["device_fallback"] = self.slots.obstacle or self.fallback
            if self.slots.cuda is not None:
                usage = self.slots.cuda.usage()
                out |= {
                    "slab_bytes": usage.committed,
                    "slab_used": usage.used,
                    "slab_high_water": usage.high_water,
                    "slab_slots_used": usage.slots_used,
                    "slab_stalls": usage.stalls,
                }
        return out

    @contextmanager
    def batch(
        self, stage: int, done: Callable[[], None], began: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """The engine thread orders one batch within it; on the CPU it is computed then.

        On a device it waits first until few enough batches are under way there, and its end marks
        the point that the batch's device time is measured to. ``done()`` is called, in another
        thread, when the device is past that; not if it is lost. ``began()`` is called there when
        the device comes to the batch: past the one before, and past what its input waits for.

        Raises:
            CudaError: it is.
        """
        device = self.device
        if device is None:
            yield
            done()
            return
        times = self.device_times.setdefault(stage, Histogram())

        def past(ns: int) -> None:
            times.record(ns)
            done()

        with device.queue.batch(past, began):
            yield

    def begins(self) -> None:
        """The engine thread has ordered what its batch reads, and orders the forward now."""
        if self.device is not None:
            self.device.queue.begins()

    def ebb(self, now_ns: int) -> None:
        """Give back what the arena has not needed for some seconds; to be called now and then."""
        if self.slots is not None:
            self.slots.ebb(now_ns)

    def forget_figures(self) -> None:
        """Count copies and device times from here on; while nothing is computed."""
        self.device_times.clear()
        if self.device is not None:
            self.device.forget_figures()

    def close(self) -> None:
        """Orderly: consumers close before owners free. Idempotent."""
        self.consumer.close()
        for producer in (self.slots, self.frames):
            if producer is not None:
                producer.close()
        device, self.device = self.device, None
        if device is not None and not device.close():
            _LOG.warning("%s still works, or is lost: the process's end frees it", device.name)


def open_memory(
    run_dir: Path,
    incarnation: int,
    *,
    device: str = "cpu",
    mode: str = "tensormq",
    arena_bytes: int = 0,
    slots: int = 1,
    rooms: Rooms = tuple,
    on_broken: Callable[[str], None] = lambda _: None,
) -> TensorMemory:
    """Make a worker's memory.

    Args:
        run_dir, incarnation, device, mode, arena_bytes, slots: as in WorkerLaunch; the slab of a
            worker on a device is as large as its arena.
        rooms: as in ShmProducer.
        on_broken: told, in any thread, why the device cannot be used any more.

    Raises:
        SystemError_: NO_SPACE; MISSING_EXTRA or INTERNAL when there is no such device. Nothing is
            left behind.
    """
    gpu = None if device == "cpu" else CudaDevice(open_device(device), on_broken)
    host: ShmProducer | None = None
    try:
        if arena_bytes > 0 and mode == "tensormq":
            host = ShmProducer(Arena.create(run_dir, incarnation, arena_bytes, slots), rooms)
        frames, consumer = InlineProducer(slots), ShmConsumer(run_dir)
        if gpu is None:
            return TensorMemory(host, frames, consumer)
        if host is not None:
            host.set_devices({incarnation: device})
        cuda: CudaProducer | None = None
        opener: CudaConsumer | None = None
        fallback = ""
        if host is None:
            fallback = "the worker's mode is zeromq"
        else:
            found = preflight(gpu.api, os.environ)
            fallback = found.reason
            for note in found.notes:
                _LOG.info("%s", note)
            if found.able:
                cuda = CudaProducer(gpu, run_dir, incarnation, arena_bytes, slots)
                opener = CudaConsumer(gpu, run_dir, cuda.verdicts, incarnation)
        if fallback:
            _LOG.warning("tensors of %s go over the host: %s", gpu.name, fallback)
        return TensorMemory(
            None if host is None else MixedProducer(gpu, host, cuda, run_dir, opener),
            MixedProducer(gpu, frames, None, run_dir),
            MixedConsumer(gpu, consumer, opener),
            gpu.api.torch_device,
            gpu,
            fallback,
        )
    except BlockFlowError:
        if host is not None:
            host.close()
        if gpu is not None:
            gpu.close()
        raise


def open_device(device: str) -> CudaApi:
    """The driver's device ``cuda:N``, or the double's (:data:`DOUBLE_ENV`).

    Raises:
        SystemError_: MISSING_EXTRA without a driver, or with a torch that was built without CUDA;
            INTERNAL when there is no such device.
    """
    number = device.removeprefix("cuda:")
    if not number.isdecimal():
        raise SystemError_("INTERNAL", f"{device!r} is neither cpu nor cuda:N", where="device")
    folder = os.environ.get(DOUBLE_ENV)
    if folder:
        from blockflow.tensormq.cuda_fake import FakeCuda  # tests and trials only

        return FakeCuda(Path(folder), int(number))
    from blockflow.tensormq.cuda_driver import CudaDriver  # loads the driver when a worker needs it

    driver = CudaDriver(int(number))
    import torch  # by now: whoever has a driver computes with it

    if torch.version.cuda is None:
        raise SystemError_(
            "MISSING_EXTRA",
            f"there is a {device}, but torch {torch.__version__} was built without CUDA",
            where=device,
            hint="install torch's build for CUDA, or place the block on cpu",
        )
    return driver

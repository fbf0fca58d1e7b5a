"""Tensors of a worker on a device: between devices by handle, over the edge by a copy.

``MixedProducer`` gives the engine device memory to write to, whoever the consumers are. What a
consumer on a device can open lies in the slab; what anybody else is to have is copied to the host
once, into a slot of the worker's arena (or a frame), when the engine is done. ``MixedConsumer`` is
the other way: what comes from the host is copied to the device when the engine asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockflow.core.departed import Departed
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import tensor_bytes
from blockflow.tensormq.arena import DEVICE_BIT
from blockflow.tensormq.channel import (
    Consumer,
    InBuffer,
    Landed,
    OutBuffer,
    Payload,
    Producer,
    Usage,
    own_buffer,
)
from blockflow.tensormq.cuda import CudaOutBuffer, CudaProducer
from blockflow.tensormq.cuda_consumer import CudaConsumer
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_reach import DeviceReach
from blockflow.tensormq.inline import open_frame
from blockflow.tensormq.leases import NEVER_NS, LeaseError
from blockflow.tensormq.shm import ShmConsumer, ShmInBuffer, ShmProducer
from blockflow.tensormq.views import typed
from blockflow.wire.tensor import TensorDesc

if TYPE_CHECKING:
    from torch import Tensor


class MixedOutBuffer(OutBuffer):
    """Device memory for the engine, and what it is published from: a slab slot, a host buffer, or
    both."""

    __slots__ = ("_device", "_raw", "_region", "holds", "host", "published", "slot")

    def __init__(
        self,
        device: CudaDevice,
        slot: CudaOutBuffer | None,
        host: OutBuffer | None,
        region: Callable[[], memoryview] | None,
        dtype: str,
        dims: Sequence[int],
    ) -> None:
        self.dtype = dtype
        self.dims = tuple(dims)
        self.nbytes = tensor_bytes(dtype, dims)
        self.slot = slot
        self.host = host
        self.holds = 0
        self.published: set[int] = set()
        self._device = device
        self._region = region
        self._raw: Tensor | None = None

    @property
    def memory(self) -> memoryview:  # type: ignore[override]
        if self.host is not None:
            return self.host.memory
        return memoryview(b"") if self.slot is None else self.slot.memory

    def tensor(self) -> Tensor:
        if self.slot is not None:
            return self.slot.tensor()
        if self._raw is None:
            self._raw = self._device.api.scratch(self.nbytes)
        return typed(self._raw, self.dtype, self.dims)

    def finish(self, landed: Landed) -> bool:
        """Record the slot; order the host's copy, whose message says that it is there."""
        if self.slot is not None:
            self.slot.finish(landed)
        if self.host is None:
            return False
        if self.slot is not None:
            source = self.slot.pointer
        elif self._raw is not None:
            source = int(self._raw.data_ptr())
        else:
            return False  # the engine never came to write anything
        if self._region is not None:
            self._device.pins.cover(self._region(), False)
        self._device.fetch(self.host.memory, source, landed)
        return True


class MixedProducer(Producer):
    """What a worker on a device sends.

    Args:
        device: of this process. host: slots of its arena, or frames.
        cuda: its slab; None when device memory cannot be shared (and then all goes over the host).
        run_dir: where consumers' books lie.
        opener: this worker's other end, which is to know who may send to it.
    """

    by_consumer = True

    def __init__(
        self,
        device: CudaDevice,
        host: Producer,
        cuda: CudaProducer | None,
        run_dir: Path,
        opener: CudaConsumer | None = None,
    ) -> None:
        self._device = device
        self._host = host
        self.cuda = cuda
        self._opener = opener
        own = 0 if cuda is None else cuda.incarnation & ~DEVICE_BIT
        self._reach = DeviceReach(device, run_dir, own)
        self._region = host.region if isinstance(host, ShmProducer) else None

    @property
    def obstacle(self) -> str:
        """Why tensors for some consumer on a device go over the host; '' where none do."""
        return self._reach.obstacle

    def set_devices(self, devices: Mapping[int, str]) -> None:
        placed = {n: device for n, device in devices.items() if device.startswith("cuda")}
        if self._opener is not None:
            self._opener.meet(placed)
        if self.cuda is not None:  # else nobody is given any, which was said at the start
            self._reach.set_consumers(placed)

    def tell_readers(self, readers: int) -> None:
        self._host.tell_readers(readers)

    def reaches(self, buffer: OutBuffer, consumer: int) -> bool:
        own = own_buffer(buffer, MixedOutBuffer)
        return own.host is not None or self._reach.takes(consumer)

    # --- the interface ---------------------------------------------------------------------------

    def _slab_open(self) -> bool:
        """Opens the slab when it is first needed; without memory for it, never."""
        if self.cuda is None:
            return False
        try:
            self.cuda.open_slab()
        except BlockFlowError as exc:
            # What others send can be opened all the same, so the book stays.
            self._reach.give_up(f"no slab on {self._device.name}: {exc.message}")
            return False
        return True

    @property
    def max_consumers(self) -> int:
        return self._host.max_consumers

    def reserve(
        self, dtype: str, dims: Sequence[int], consumers: Collection[int] = ()
    ) -> MixedOutBuffer | None:
        """A slab slot if any of the consumers can open one, host memory if any cannot."""
        self._reach.look(consumers)
        kinds = {self._reach.takes(c) for c in consumers}
        slot: CudaOutBuffer | None = None
        host: OutBuffer | None = None
        cuda = self.cuda if True in kinds and self._slab_open() else None
        if cuda is not None:
            slot = cuda.reserve(dtype, dims)
            if slot is None:
                return None
        if slot is None or False in kinds:
            try:
                host = self._host.reserve(dtype, dims)
            finally:
                if host is None and cuda is not None and slot is not None:
                    cuda.discard(slot)
            if host is None:
                return None
        return MixedOutBuffer(self._device, slot, host, self._region, dtype, dims)

    def publish(
        self, buffer: OutBuffer, consumers: Sequence[int], until_ns: int = NEVER_NS
    ) -> list[Payload]:
        own = own_buffer(buffer, MixedOutBuffer)
        if not consumers:
            raise LeaseError("published to nobody")
        chosen = [self._chosen(own, c) for c in consumers]
        payloads: dict[int, list[Payload]] = {}
        for producer, part in self._parts(own):
            mine = [c for c, p in zip(consumers, chosen, strict=True) if p is producer]
            if mine:
                payloads[id(producer)] = producer.publish(part, mine, until_ns)
                own.published.add(id(producer))
        self._drop_unused(own)
        return [payloads[id(p)].pop(0) for p in chosen]

    def _chosen(self, own: MixedOutBuffer, consumer: int) -> Producer:
        cuda = self.cuda
        on_device = own.slot is not None and self._reach.takes(consumer)
        if cuda is not None and on_device:
            return cuda
        if own.host is None:
            raise LeaseError(f"incarnation {consumer} cannot open a slab")
        return self._host

    def _parts(self, own: MixedOutBuffer) -> list[tuple[Producer, OutBuffer]]:
        parts: list[tuple[Producer, OutBuffer]] = []
        if own.slot is not None and self.cuda is not None:
            parts.append((self.cuda, own.slot))
        if own.host is not None:
            parts.append((self._host, own.host))
        return parts

    def _drop_unused(self, own: MixedOutBuffer) -> None:
        """Give back the half that nobody was given, once nobody can be given it any more."""
        if own.published and not own.holds:
            for producer, part in self._parts(own):
                if id(producer) not in own.published:
                    own.published.add(id(producer))
                    producer.discard(part)

    def revoke(self, payload: Payload) -> None:
        handle = payload.desc.handle
        if handle is not None and handle.incarnation & DEVICE_BIT and self.cuda is not None:
            self.cuda.revoke(payload)
        else:
            self._host.revoke(payload)

    def discard(self, buffer: OutBuffer) -> None:
        for producer, part in self._parts(own_buffer(buffer, MixedOutBuffer)):
            producer.discard(part)

    def hold(self, buffer: OutBuffer) -> None:
        own = own_buffer(buffer, MixedOutBuffer)
        for producer, part in self._parts(own):
            producer.hold(part)
        own.holds += 1

    def unhold(self, buffer: OutBuffer) -> None:
        own = own_buffer(buffer, MixedOutBuffer)
        for producer, part in self._parts(own):
            producer.unhold(part)
        own.holds -= 1
        self._drop_unused(own)

    def _all(self) -> list[Producer]:
        return [self._host] if self.cuda is None else [self._host, self.cuda]

    def sweep(self) -> int:
        return sum(p.sweep() for p in self._all())

    def peer_gone(self, incarnation: int) -> int:
        self._reach.forget(incarnation)
        return sum(p.peer_gone(incarnation) for p in self._all())

    def outstanding(self) -> int:
        return sum(p.outstanding() for p in self._all())

    def usage(self) -> Usage:
        """Of the host's memory; the slab's is ``cuda.usage()``."""
        return self._host.usage()

    def close(self) -> None:
        for producer in self._all():
            producer.close()


class UploadedInBuffer(InBuffer):
    """A tensor that came by the host; the engine gets a copy of it on the device."""

    __slots__ = ("_consumer", "_device", "_host", "_used")

    def __init__(self, device: CudaDevice, host: InBuffer, consumer: MixedConsumer) -> None:
        self.desc = host.desc
        self.memory = host.memory
        self._consumer = consumer
        self._device = device
        self._host: InBuffer | None = host
        self._used = False

    def tensor(self) -> Tensor:
        host, device = self._host, self._device
        if host is None:
            raise ValueError("the buffer was released")
        region = None
        reader = host.reader if isinstance(host, ShmInBuffer) else None
        if reader is not None and device.facts.read_only_pins:
            region = reader.region()
            device.pins.cover(region, True)
        raw = device.api.scratch(self.memory.nbytes)
        self._used = not device.upload(int(raw.data_ptr()), self.memory)
        if region is not None:
            self._consumer.page_locked(region, self.desc)
        return typed(raw, self.desc.dtype, self.desc.dims, self.desc.strides)

    def spare(self) -> int | None:
        return None if self._host is None else self._host.spare()

    def bring_home(self) -> bool:
        """On the host: what waits here needs no device memory, and who copies need not wait for
        the device."""
        host = self._host
        if host is None:
            return False
        try:
            copy = bytes(host.memory)
        except MemoryError as exc:
            raise RuntimeError("no memory for a copy of what waits") from exc
        self.desc = replace(self.desc, handle=None)
        self._host = open_frame(self.desc, copy)
        self.memory = self._host.memory
        host.release()
        return True

    def release(self) -> None:
        host, self._host = self._host, None
        if host is None:
            return
        self.memory = memoryview(b"")
        if self._used:
            self._device.queue.behind(host.release)
        else:
            host.release()


class MixedConsumer(Consumer):
    """What a worker on a device receives: handles of both kinds, and frames.

    Args:
        device: of this process. host: opens what comes by the host. cuda: opens device memory, None
            where that cannot be shared.
    """

    def __init__(self, device: CudaDevice, host: ShmConsumer, cuda: CudaConsumer | None) -> None:
        self._device = device
        self._host = host
        self._cuda = cuda
        self._gone = Departed()

    def open(self, desc: TensorDesc, frame: Any | None) -> InBuffer:
        handle = desc.handle
        if handle is not None and handle.incarnation & DEVICE_BIT and self._cuda is not None:
            return self._cuda.open(desc, frame)
        return UploadedInBuffer(self._device, self._host.open(desc, frame), self)

    def page_locked(self, region: memoryview, desc: TensorDesc) -> None:
        """An upload has page-locked the arena that ``desc`` lies in, while its owner lives.

        If that is dead already, the tensor has waited here, and no further death will unlock it.
        """
        if desc.handle is not None and desc.handle.incarnation in self._gone:
            self._unlock_later(region)

    def _unlock_later(self, region: memoryview) -> None:
        """Page-locked memory keeps its pages: let them go when nothing reads them any more."""
        pins, device = self._device.pins, self._device
        device.completions.after(device.stream, lambda: pins.drop(region))

    def peer_gone(self, incarnation: int) -> None:
        self._gone.add(incarnation)
        region = self._host.region(incarnation)
        self._host.peer_gone(incarnation)
        if region is not None:
            self._unlock_later(region)
        if self._cuda is not None:
            self._cuda.peer_gone(incarnation)

    def close(self) -> None:
        if self._cuda is not None:
            self._cuda.close()
        self._host.close()

"""Tensors of a worker on a device: between devices by handle, over the edge by a copy.

``MixedProducer`` gives the engine device memory to write to, whoever the consumers are. What a
consumer on a device can open lies in the slab; what anybody else is to have is copied to the host
once, into a slot of the worker's arena (or a frame), when the engine is done. ``MixedConsumer`` is
the other way: what comes from the host is copied to the device when the engine asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockflow.core.errors import BlockFlowError
from blockflow.core.model import tensor_bytes
from blockflow.tensormq.arena import DEVICE_BIT
from blockflow.tensormq.channel import Consumer, InBuffer, OutBuffer, Payload, Producer, Usage
from blockflow.tensormq.cuda import CudaOutBuffer, CudaProducer
from blockflow.tensormq.cuda_book import has_book
from blockflow.tensormq.cuda_consumer import CudaConsumer
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.leases import LeaseError
from blockflow.tensormq.shm import ShmConsumer, ShmInBuffer, ShmProducer
from blockflow.tensormq.views import typed
from blockflow.wire.tensor import TensorDesc

if TYPE_CHECKING:
    from torch import Tensor

_LOG = logging.getLogger("blockflow.cuda")


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

    def finish(self) -> int:
        """Record the slot; wait for the host's copy, since its message says that it is there."""
        if self.slot is not None:
            self.slot.finish()
        if self.host is None:
            return 0
        if self.slot is not None:
            source = self.slot.pointer
        elif self._raw is not None:
            source = int(self._raw.data_ptr())
        else:
            return 0  # the engine never came to write anything
        if self._region is not None:
            self._device.pins.cover(self._region(), False)
        return self._device.download(self.host.memory, source)


class MixedProducer(Producer):
    """What a worker on a device sends.

    Args:
        device: of this process. host: slots of its arena, or frames.
        cuda: its slab; None when device memory cannot be shared (and then all goes over the host).
        run_dir: where consumers' books lie.
    """

    by_consumer = True

    def __init__(
        self, device: CudaDevice, host: Producer, cuda: CudaProducer | None, run_dir: Path
    ) -> None:
        self._device = device
        self._host = host
        self.cuda = cuda
        self._run_dir = run_dir
        self._on_device: dict[int, bool] = {}
        self._told: set[str] = set()
        self._no_slab = self._last = ""
        self._region = host.region if isinstance(host, ShmProducer) else None

    @property
    def obstacle(self) -> str:
        """Why the last tensor that could have stayed on a device went over the host; '' if none."""
        return self._last

    # --- who can take what -----------------------------------------------------------------------

    def set_devices(self, devices: Mapping[int, str]) -> None:
        self._on_device = {
            incarnation: not (why := self._obstacle(incarnation, device)) or self._tell(device, why)
            for incarnation, device in devices.items()
        }

    def _obstacle(self, incarnation: int, device: str) -> str:
        """Why a consumer cannot be given device memory; '' if it can, ``-`` where that is no news:
        it is on the CPU, or this worker cannot share any (which was said when it started)."""
        kind, _, number = device.partition(":")
        if kind != "cuda" or self.cuda is None:
            return "-"
        if self._no_slab:
            return self._no_slab
        if not has_book(self._run_dir, incarnation):
            return f"incarnation {incarnation} cannot open device memory"
        if device == self._device.name or self._device.api.readable_by(int(number)):
            return ""
        return f"{self._device.name} and {device} are no peers"

    def _tell(self, device: str, why: str) -> bool:
        if why != "-":
            self._last = why
            if why not in self._told:
                self._told.add(why)
                _LOG.warning("tensors to %s go over the host: %s", device, why)
        return False

    def reaches(self, buffer: OutBuffer, consumer: int) -> bool:
        own = _own(buffer)
        return own.host is not None or self._on_device.get(consumer, False)

    def _slab_open(self) -> bool:
        """Opens the slab when it is first needed; without memory for it, never."""
        if self.cuda is None or self._no_slab:
            return False
        try:
            self.cuda.open_slab()
        except BlockFlowError as exc:
            # What others send can be opened all the same, so the book stays.
            self._no_slab = f"no slab on {self._device.name}: {exc.message}"
            self._on_device = dict.fromkeys(self._on_device, self._tell("others", self._no_slab))
            return False
        return True

    # --- the interface ---------------------------------------------------------------------------

    @property
    def max_consumers(self) -> int:
        return self._host.max_consumers

    def reserve(
        self, dtype: str, dims: Sequence[int], consumers: Collection[int] = ()
    ) -> MixedOutBuffer | None:
        """A slab slot if any of the consumers can open one, host memory if any cannot."""
        kinds = {self._on_device.get(c, False) for c in consumers}
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

    def publish(self, buffer: OutBuffer, consumers: Sequence[int]) -> list[Payload]:
        own = _own(buffer)
        if not consumers:
            raise LeaseError("published to nobody")
        chosen = [self._chosen(own, c) for c in consumers]
        payloads: dict[int, list[Payload]] = {}
        for producer, part in self._parts(own):
            mine = [c for c, p in zip(consumers, chosen, strict=True) if p is producer]
            if mine:
                payloads[id(producer)] = producer.publish(part, mine)
                own.published.add(id(producer))
        self._drop_unused(own)
        return [payloads[id(p)].pop(0) for p in chosen]

    def _chosen(self, own: MixedOutBuffer, consumer: int) -> Producer:
        cuda = self.cuda
        on_device = own.slot is not None and self._on_device.get(consumer, False)
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
        for producer, part in self._parts(_own(buffer)):
            producer.discard(part)

    def hold(self, buffer: OutBuffer) -> None:
        own = _own(buffer)
        for producer, part in self._parts(own):
            producer.hold(part)
        own.holds += 1

    def unhold(self, buffer: OutBuffer) -> None:
        own = _own(buffer)
        for producer, part in self._parts(own):
            producer.unhold(part)
        own.holds -= 1
        self._drop_unused(own)

    def _all(self) -> list[Producer]:
        return [self._host] if self.cuda is None else [self._host, self.cuda]

    def sweep(self) -> int:
        return sum(p.sweep() for p in self._all())

    def peer_gone(self, incarnation: int) -> int:
        self._on_device.pop(incarnation, None)
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

    __slots__ = ("_device", "_host", "_used")

    def __init__(self, device: CudaDevice, host: InBuffer) -> None:
        self.desc = host.desc
        self.memory = host.memory
        self._device = device
        self._host: InBuffer | None = host
        self._used = False

    def tensor(self) -> Tensor:
        host, device = self._host, self._device
        if host is None:
            raise ValueError("the buffer was released")
        reader = host.reader if isinstance(host, ShmInBuffer) else None
        if reader is not None and device.facts.read_only_pins:
            device.pins.cover(reader.region(), True)
        raw = device.api.scratch(self.memory.nbytes)
        device.upload(int(raw.data_ptr()), self.memory)
        self._used = True
        return typed(raw, self.desc.dtype, self.desc.dims, self.desc.strides)

    def release(self) -> None:
        host, self._host = self._host, None
        if host is None:
            return
        self.memory = memoryview(b"")
        if self._used:
            self._device.completions.after(self._device.stream, host.release)
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

    def open(self, desc: TensorDesc, frame: Any | None) -> InBuffer:
        handle = desc.handle
        if handle is not None and handle.incarnation & DEVICE_BIT and self._cuda is not None:
            return self._cuda.open(desc, frame)
        return UploadedInBuffer(self._device, self._host.open(desc, frame))

    def peer_gone(self, incarnation: int) -> None:
        region = self._host.region(incarnation)
        self._host.peer_gone(incarnation)
        if region is not None:
            # Page-locked memory keeps its pages: let them go when nothing reads them any more.
            pins, device = self._device.pins, self._device
            device.completions.after(device.stream, lambda: pins.drop(region))
        if self._cuda is not None:
            self._cuda.peer_gone(incarnation)

    def close(self) -> None:
        if self._cuda is not None:
            self._cuda.close()
        self._host.close()


def _own(buffer: OutBuffer) -> MixedOutBuffer:
    if not isinstance(buffer, MixedOutBuffer):
        raise TypeError(f"{type(buffer).__name__} is not a buffer of this producer")
    return buffer

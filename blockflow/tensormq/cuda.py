"""CudaProducer: tensors stay in this worker's device memory; the message carries a handle.

One slab per worker: a plain allocation of the driver (not of torch's pool, so that its settings,
expandable segments among them, do not matter), exported once. Slots, lanes, generations and marks
are those of host memory (``shm``), kept in the book (``cuda_book``). What the device adds:

* each slot has a READY event, recorded when the engine has *ordered* the result. The message may
  leave at once: the consumer's stream waits for the event, no host does;
* a slot is free when all marks are in, as ever. A consumer writes its mark when its own device work
  that read the slot is done, so that the producer's next kernel has nothing to wait for.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from blockflow.core import limits
from blockflow.core.model import tensor_bytes
from blockflow.tensormq.channel import Landed, OutBuffer, Payload
from blockflow.tensormq.cuda_api import CudaError, EventKind
from blockflow.tensormq.cuda_book import Export, await_closed, make_book, write_export
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_trial import TrialPiece
from blockflow.tensormq.cuda_verdict import VerdictBook
from blockflow.tensormq.extents import GRANULE
from blockflow.tensormq.leases import NEVER_NS, Lease, LeaseError, LeaseTable
from blockflow.tensormq.shm import ShmOutBuffer, ShmProducer
from blockflow.tensormq.views import typed

if TYPE_CHECKING:
    from torch import Tensor

_LOG = logging.getLogger("blockflow.cuda")

SLAB_ALIGN = 2 << 20
"""Of a slab's size: IPC shares whole allocations of the driver, which are cut at 2 MiB; a smaller
one could lie in one piece with memory that is nobody's business."""

MAX_SLOTS = 512
"""One interprocess event each; torch stays below 1000 of them per process (CudaIPCTypes.h)."""

_CLOSE_S = 1.0


class CudaOutBuffer(ShmOutBuffer):
    """A slot of the slab.

    The engine writes to :meth:`tensor`. ``memory`` is for whoever wants host bytes: what is written
    there before publishing goes to the device with it, what the engine wrote is copied here. Both
    are counted copies, and not the way of a tensor between devices.
    """

    __slots__ = ("_host", "_ordered", "_producer", "_uploaded")

    def __init__(
        self, producer: CudaProducer, lease: Lease, nbytes: int, dtype: str, dims: tuple[int, ...]
    ) -> None:
        self.lease = lease
        self.nbytes = nbytes
        self.dtype = dtype
        self.dims = dims
        self._producer = producer
        self._host: memoryview | None = None
        self._ordered = False
        self._uploaded = False

    @property
    def memory(self) -> memoryview:  # type: ignore[override]
        if self._host is None:
            raw = np.empty(self.nbytes + GRANULE, np.uint8)
            lead = -raw.__array_interface__["data"][0] % GRANULE
            self._host = raw.data[lead : lead + self.nbytes]
            if self._ordered:
                self._producer.device.download(self._host, self.pointer)
        return self._host

    @property
    def pointer(self) -> int:
        """Of the slot's first byte."""
        return self._producer.slab + self.lease.offset

    def tensor(self) -> Tensor:
        self._ordered = True
        start = self.lease.offset
        raw = self._producer.bytes_tensor()[start : start + self.nbytes]
        return typed(raw, self.dtype, self.dims)

    def finish(self, landed: Landed) -> bool:
        self._producer.record(self.lease.slot)
        return False

    def put_on_device(self) -> None:
        """Bring what was written to ``memory`` to the device, once."""
        if self._host is not None and not self._ordered and not self._uploaded:
            self._uploaded = True
            device = self._producer.device
            if not device.upload(self.pointer, self._host):
                device.keep(self._host)
            self._producer.record(self.lease.slot)


class CudaProducer(ShmProducer):
    """Slots of one slab.

    Args:
        device: of this process. run_dir: where the book lies. incarnation: of this worker.
        capacity: bytes for tensors; the slab for them is allocated by :meth:`open_slab`.
        slots: at most :data:`MAX_SLOTS`.

    Attributes:
        slab: its address; 0 while there is none.
        verdicts: what this worker knows of others' device memory, in the same book.

    Raises:
        SystemError_: NO_SPACE, ALREADY_RUNNING: as for an arena.
    """

    def __init__(
        self, device: CudaDevice, run_dir: Path, incarnation: int, capacity: int, slots: int
    ) -> None:
        self.device = device
        self.slab = 0
        self._capacity = -(-capacity // limits.ARENA_ALIGN) * limits.ARENA_ALIGN
        self._bytes: Tensor | None = None
        self._ready: list[int] = []
        super().__init__(make_book(run_dir, incarnation, min(slots, MAX_SLOTS)))
        self.verdicts = VerdictBook(self._arena)
        self._trial = TrialPiece(device.api, device.facts.uuid, self._arena)

    def _make_leases(self) -> LeaseTable:
        return LeaseTable(self._capacity, self._arena.slots, self._arena.lanes)

    def open_slab(self) -> None:
        """Allocate and export the slab, if that is not done: a worker that never sends to a device
        never needs it.

        Raises:
            CudaError: no memory, or a device that exports none.
        """
        with self._lock:
            self._check_open()
            if self.slab:
                return
            api = self.device.api
            nbytes = -(-self._capacity // SLAB_ALIGN) * SLAB_ALIGN
            slab = api.mem_alloc(nbytes)
            try:
                for _ in range(self._arena.slots):
                    self._ready.append(api.event_create(EventKind.READY))
                events = tuple(api.event_export(event) for event in self._ready)
                export = Export(self.device.facts.uuid, nbytes, api.mem_export(slab), events)
            except CudaError:
                self._destroy_events()
                api.mem_free(slab)
                raise
            self._bytes = api.tensor(slab, nbytes)
            write_export(self._arena, export)
            self.slab = slab

    def reserve(
        self, dtype: str, dims: Sequence[int], consumers: Collection[int] = ()
    ) -> CudaOutBuffer | None:
        """As the interface says; the slab is opened by the first one.

        Raises:
            CudaError: besides, what :meth:`open_slab` raises.
        """
        if not self.slab:
            self.open_slab()
        nbytes = tensor_bytes(dtype, dims)
        with self._lock:
            lease = self._take(nbytes)
        return None if lease is None else CudaOutBuffer(self, lease, nbytes, dtype, tuple(dims))

    def publish(
        self, buffer: OutBuffer, consumers: Sequence[int], until_ns: int = NEVER_NS
    ) -> list[Payload]:
        if isinstance(buffer, CudaOutBuffer):
            buffer.put_on_device()
        return super().publish(buffer, consumers, until_ns)

    def bytes_tensor(self) -> Tensor:
        """The whole slab."""
        if self._bytes is None:
            raise LeaseError("the slab was never opened, or is closed")
        return self._bytes

    def record(self, slot: int) -> None:
        """All that the stream holds now comes before whoever reads the slot."""
        self.device.api.event_record(self._ready[slot], self.device.stream)

    def _committed(self) -> int:
        return self._capacity if self.slab else 0

    def close(self) -> None:
        """Free the slab when every consumer has closed it and the device is through, or leave that
        to the process's end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            slab, self.slab = self.slab, 0
            self._bytes = None
            self._free(slab)
            self._arena.close()

    def _free(self, slab: int) -> None:
        if not await_closed(self._arena, _CLOSE_S):
            # Freed under an importer's eyes it would be undefined behaviour; with the process it
            # goes in an order that the driver keeps.
            _LOG.warning("a consumer may have the slab open still: the process's end frees it")
            return
        try:
            self.device.keep(self)
            if not self.device.completions.wait_idle(_CLOSE_S):
                # The driver frees when the device has done all it was given: never, perhaps.
                _LOG.warning("the device is at something still: the process's end frees the slab")
                return
            self._trial.free()
            if slab:
                self._destroy_events()
                self.device.api.mem_free(slab)
        except CudaError as exc:
            _LOG.warning("the slab goes with the process: %s", exc)

    def _destroy_events(self) -> None:
        while self._ready:
            self.device.api.event_destroy(self._ready.pop())

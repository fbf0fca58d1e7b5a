"""CudaConsumer: opens handles to other workers' device memory.

Each owner's slab is opened once and kept, its events as long as there is room for them. A tensor is
used where it lies if that is this worker's device, and is copied over by this worker if it is a
peer: the reader knows when it needs the bytes, and the owner needs no context on the reader's
device.

What cannot be opened is no handle's fault: owners are told by this worker's verdicts, and send
their tensors over the host from then on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from blockflow.core.departed import Departed
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.tensormq.arena import DEVICE_BIT
from blockflow.tensormq.channel import Consumer, InBuffer, bad_handle, span_bytes
from blockflow.tensormq.cuda_api import CudaError
from blockflow.tensormq.cuda_book import BookReader
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_events import MAX_IMPORTED, ImportedEvents
from blockflow.tensormq.cuda_trial import try_owners
from blockflow.tensormq.cuda_verdict import VerdictBook
from blockflow.tensormq.views import typed
from blockflow.wire.tensor import Handle, TensorDesc

if TYPE_CHECKING:
    from torch import Tensor

_LOG = logging.getLogger("blockflow.cuda")
_EMPTY = memoryview(b"")
_CLOSE_S = 2.0

DEATH_GRACE_S = 5.0
"""A dead producer's unfinished event may never come, and a wait for it cannot be called back. So
long after the death the device is given up, and with it the process, if it is still waiting."""


class CudaMapping:
    """One owner's device memory as this process has it open.

    Attributes:
        owner: incarnation. users: buffers that are open. gone: the owner is proven dead.
        closed: by this process. slots: of the slab.
        waits: handles whose event this device was told to wait for, each with its wait's number,
            until it is past the batch that they are in.

    Raises:
        RequestError: WORKER_LOST: the owner is gone, about to go, or has exported nothing.
        WireError: MALFORMED_MESSAGE: its book is none.
        CudaError: its memory cannot be opened here.
    """

    def __init__(
        self, device: CudaDevice, events: ImportedEvents, run_dir: Path, owner: int
    ) -> None:
        self.device = device
        self.owner = owner
        self.users = 0
        self.gone = self.closed = False
        self.waits: dict[Handle, int] = {}
        self._events = events
        self.book = BookReader(run_dir, owner)
        try:
            export = self.book.export()
            if export is None:
                raise RequestError(
                    "WORKER_LOST", f"incarnation {owner} has no device memory to open"
                )
            self.pointer = device.api.mem_import(export.memory)
        except BlockFlowError:
            self.book.unlock()
            raise
        self._handles = export.events
        self.slots = len(export.events)
        self.nbytes = export.nbytes
        peer = export.uuid != device.facts.uuid
        self._bytes = None if peer else device.api.tensor(self.pointer, self.nbytes)

    def order_behind(self, handle: Handle) -> None:
        """This device's stream comes behind the owner's work on a slot, once it gets there.

        Raises:
            CudaError: the slot's event cannot be opened.
        """
        key = self.owner, handle.slot
        wait = self._events.order_behind(key, self._handles[handle.slot])
        if wait:
            self.waits[handle] = wait
            self.device.queue.within(lambda: self._passed(handle))

    def _passed(self, handle: Handle) -> None:
        """The owner's work came, and the device is past the wait for it."""
        wait = self.waits.pop(handle, 0)
        if wait:
            self._events.passed((self.owner, handle.slot), wait)

    def stuck(self, waits: Mapping[Handle, int]) -> bool:
        """Whether the device still waits for any of these. A wait is kept here for as long as the
        batch that has it: this worker's own work may take long after an owner has died, and needs
        nothing more of it."""
        return any(
            self.waits.get(handle) == wait
            and not self._events.is_past((self.owner, handle.slot), wait)
            for handle, wait in waits.items()
        )

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        """The slab's bytes on this device: a view, or a copy queued in the stream."""
        if self._bytes is not None:
            return self._bytes[offset : offset + nbytes]
        device = self.device
        target = device.api.scratch(nbytes)
        if nbytes:
            device.api.copy_d2d(target.data_ptr(), self.pointer + offset, nbytes, device.stream)
            device.copies.d2d_copies += 1
            device.copies.d2d_bytes += nbytes
        return target

    def close(self) -> None:
        """No work that uses it may be under way: all users have been released *and marked*."""
        self.closed = True
        self._bytes = None
        try:
            self._events.close_owner(self.owner)
            self.device.api.mem_close(self.pointer)
        except CudaError as exc:
            _LOG.warning("slab of incarnation %d: %s", self.owner, exc)
        self.book.unlock()


class CudaInBuffer(InBuffer):
    """A tensor in another worker's slab. ``memory`` is a host copy of it, for whoever wants one."""

    __slots__ = ("_consumer", "_handle", "_host", "_mapping", "_used")

    def __init__(
        self, desc: TensorDesc, handle: Handle, mapping: CudaMapping, consumer: CudaConsumer
    ) -> None:
        self.desc = desc
        self._handle = handle
        self._mapping: CudaMapping | None = mapping
        self._consumer = consumer
        self._host: memoryview | None = None
        self._used = False

    @property
    def memory(self) -> memoryview:  # type: ignore[override]
        if self._host is None:
            mapping = self._ordered()
            raw = np.empty(span_bytes(self.desc), np.uint8)
            mapping.device.download(raw.data, mapping.pointer + self._handle.offset)
            self._host = raw.data.toreadonly()
        return self._host

    def tensor(self) -> Tensor:
        """In order behind the producer's work: this worker's stream waits, its host does not."""
        mapping = self._ordered()
        raw = mapping.bytes_at(self._handle.offset, span_bytes(self.desc))
        return typed(raw, self.desc.dtype, self.desc.dims, self.desc.strides)

    def _ordered(self) -> CudaMapping:
        mapping = self._mapping
        if mapping is None or mapping.closed:
            raise ValueError("the buffer was released, or its consumer is closed")
        if mapping.gone:
            # Its memory may still be there, but nothing promises that: it is not touched any more.
            raise RequestError(
                "WORKER_LOST", f"incarnation {mapping.owner} died while its tensor waited here"
            )
        if not self._used:
            self._consumer.order(mapping, self._handle)
            self._used = True
        return mapping

    def release(self) -> None:
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        self._host = _EMPTY
        self._consumer.released(mapping, self._handle, self._used)


class CudaConsumer(Consumer):
    """Opens handles with :data:`DEVICE_BIT`; for all others see ``mixed``.

    Args:
        device: of this process. run_dir: where books lie.
        verdicts: of this worker, in its own book; None tells nobody.
        incarnation: of this worker.
        most_events: of others that may be open here at once.
    """

    def __init__(
        self,
        device: CudaDevice,
        run_dir: Path,
        verdicts: VerdictBook | None = None,
        incarnation: int = 0,
        most_events: int = MAX_IMPORTED,
    ) -> None:
        self._device = device
        self._run_dir = run_dir
        self._verdicts = verdicts
        self._incarnation = incarnation
        self._events = ImportedEvents(device.api, device.stream, most_events)
        self._mappings: dict[int, CudaMapping] = {}
        self._gone = Departed()
        self._lock = threading.Lock()
        device.tend = self.tend

    def meet(self, owners: Collection[int]) -> None:
        """These workers may send handles: find out, before they do, whether they can be opened."""
        if self._verdicts is not None:
            others = {owner for owner in owners if owner != self._incarnation}
            try_owners(self._device, self._run_dir, self._verdicts, others)

    def open(self, desc: TensorDesc, frame: Any | None) -> InBuffer:
        handle = desc.handle
        if handle is None or not handle.incarnation & DEVICE_BIT:
            raise bad_handle(desc, "not a handle to device memory")
        if frame is not None:
            raise bad_handle(desc, "a handle and a frame in one message")
        owner = handle.incarnation & ~DEVICE_BIT
        if owner in self._gone:
            raise RequestError("WORKER_LOST", f"incarnation {owner} is dead")
        with self._lock:
            mapping = self._mappings.get(owner) or self._map(owner)
            if handle.offset + span_bytes(desc) > mapping.nbytes or handle.slot >= mapping.slots:
                raise bad_handle(desc, "the handle points outside the slab")
            if not mapping.book.marks.take(handle.slot, handle.lane, handle.generation):
                raise bad_handle(desc, "the handle is stale or names no slot")
            mapping.users += 1
        return CudaInBuffer(desc, handle, mapping, self)

    def _map(self, owner: int) -> CudaMapping:
        try:
            made = CudaMapping(self._device, self._events, self._run_dir, owner)
        except CudaError as exc:
            raise self._refused(owner, exc) from exc
        self._mappings[owner] = made
        return made

    def order(self, mapping: CudaMapping, handle: Handle) -> None:
        """Order this device's work behind the owner's, in the engine thread."""
        try:
            mapping.order_behind(handle)
        except CudaError as exc:
            raise self._refused(mapping.owner, exc) from exc
        if mapping.gone:  # since it was looked at; what came between may not have seen this wait
            self._watch(mapping)

    def _refused(self, owner: int, exc: CudaError) -> RequestError:
        """Note that the owner's memory cannot be used here, and say so.

        An owner that has just died looks the same from here, so the code is the one by which the
        Dispatcher runs the request again as soon as that death is proven.
        """
        if self._verdicts is not None:
            self._verdicts.refused(owner, exc.message)
        _LOG.warning("device memory of incarnation %d cannot be opened: %s", owner, exc.message)
        return RequestError(
            "WORKER_LOST",
            f"the device memory of incarnation {owner} cannot be opened: {exc.message}",
            where=self._device.name,
            hint="send it again: its tensors go over the host from now on",
        )

    def released(self, mapping: CudaMapping, handle: Handle, used: bool) -> None:
        """A buffer is given back: mark its lane when the device work that read it is done."""

        def mark() -> None:
            mapping.book.marks.release(handle.slot, handle.lane, handle.generation)
            with self._lock:
                mapping.users -= 1

        if used:
            self._device.queue.behind(mark)
        else:
            mark()

    def tend(self) -> None:
        """Close what its owner has died of or wants to free, once nobody here uses it.

        Called a few times per second, in the completions' thread and without a lock: the driver
        closes when the device has nothing more to do, which may be in two batches' time, or never
        (it waits for a dead owner). Nobody else can wait for that.
        """
        with self._lock:
            idle = [
                m for m in self._mappings.values() if not m.users and (m.gone or m.book.closing)
            ]
            for mapping in idle:
                del self._mappings[mapping.owner]
        for mapping in idle:
            mapping.close()

    def peer_gone(self, incarnation: int) -> None:
        self._gone.add(incarnation)
        with self._lock:
            mapping = self._mappings.get(incarnation)
            if mapping is not None:
                mapping.gone = True
        if mapping is not None:
            self._watch(mapping)

    def _watch(self, mapping: CudaMapping) -> None:
        """The owner is dead: what the device waits for now is to come within the grace, or never.

        Called once ``gone`` is set *and* once a wait is noted, whichever thread comes last.
        """
        before = dict(mapping.waits)
        if before:
            why = f"it waits for work of incarnation {mapping.owner}, which is dead"
            self._device.watch(DEATH_GRACE_S, lambda: mapping.stuck(before), why)

    def close(self) -> None:
        """Close all slabs once this worker's own work is done; after a time-out leave them.

        Buffers that are open still hold nothing any more, but for host copies that were made.
        """
        with self._lock:
            mappings, self._mappings = list(self._mappings.values()), {}
        with suppress(CudaError):  # of a device that is lost: all of it goes with the process
            if mappings:
                self._device.keep(mappings)
                if not self._device.completions.wait_idle(_CLOSE_S):
                    return
                for mapping in mappings:
                    mapping.close()
            self._events.close()

"""Host memory for copies to and from a device: page-locked where it lies, or by way of a ring.

A copy from memory that is not page-locked is the driver's to stage, and it "may synchronize with
the stream" for that (CUDA driver API, "API synchronization behavior"): the host then waits until
the device is through with what it was given before, and orders nothing meanwhile. So what cannot be
page-locked is staged here.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from blockflow.tensormq.cuda_api import CudaApi, CudaError, EventKind

_LOG = logging.getLogger("blockflow.cuda")

SMALL_BYTES = 64 << 10
"""Up to here a copy from pageable memory does not wait for the device either (programming guide,
"Concurrent Execution between Host and Device"); staging would only copy it once more."""

CHUNK_BYTES = 2 << 20
CHUNKS = 8


class Pins:
    """Page-locked host regions: each one wholly or not at all, as copies require.

    A region grows while its address stays (an arena commits memory as it is needed): the old
    registration is then replaced, which waits for the stream. Where the system registers nothing,
    ``failed`` says why, by whether the region was read-only.
    """

    def __init__(self, api: CudaApi, stream: int) -> None:
        self._api = api
        self._stream = stream
        self._regions: dict[int, tuple[int, memoryview]] = {}
        self._lock = threading.Lock()
        self.failed: dict[bool, str] = {}

    def cover(self, region: memoryview, read_only: bool) -> bool:
        """See that all of ``region`` is page-locked; False where that cannot be had."""
        address = address_of(region)
        known = self._regions.get(address)
        if known is not None and known[0] >= len(region):
            return True
        if known is None and read_only in self.failed:
            return False
        with self._lock:
            self._drop(address)  # in any case: a copy must not begin within it and end beyond
            if read_only in self.failed:
                return False
            try:
                self._api.host_register(address, len(region), read_only)
            except CudaError as exc:
                self.failed[read_only] = str(exc)
                _LOG.warning("host memory is not page-locked, copies take longer: %s", exc)
                return False
            # The view keeps the mapping: it must not vanish while it is registered.
            self._regions[address] = len(region), region
        return True

    def hold(self, memory: memoryview) -> bool:
        """Whether all of ``memory`` lies in a page-locked region."""
        address, nbytes = address_of(memory), memory.nbytes
        regions = list(self._regions.items())  # another thread may add one
        return any(a <= address and address + nbytes <= a + size for a, (size, _) in regions)

    def read(self, memory: memoryview, order: Callable[[], None]) -> bool:
        """Order a copy of ``memory`` if all of it is page-locked, which it stays until the stream
        is past that copy; False: it is not, and nothing was ordered."""
        with self._lock:
            if not self.hold(memory):
                return False
            order()
        return True

    def drop(self, region: memoryview) -> None:
        """Undo :meth:`cover`, when no copy of the region is wanted any more."""
        with self._lock:
            self._drop(address_of(region))

    def close(self) -> None:
        with self._lock:
            for address in list(self._regions):
                self._drop(address)

    def _drop(self, address: int) -> None:
        if self._regions.pop(address, None) is not None:
            self._api.stream_synchronize(self._stream)
            self._api.host_unregister(address)


class Staging:
    """A ring of page-locked chunks that large pageable memory is uploaded through.

    The host copies chunk after chunk into the ring and queues each one's way to the device. It
    waits only when the whole ring is under way: of a tensor within its size
    (:data:`CHUNK_BYTES` x :data:`CHUNKS`) it waits for nothing while the ring rests. The ring is
    made when it is first needed.

    Attributes:
        failed: why there is none; '' if there is, or was no need yet.
    """

    def __init__(self, api: CudaApi, stream: int) -> None:
        self._api = api
        self._stream = stream
        self._ring: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._events: list[int] = []  # of each chunk: its copy to the device is done
        self._next = 0
        self._lock = threading.Lock()
        self.failed = ""

    def upload(self, target: int, memory: memoryview) -> bool:
        """Queue a copy to device memory; ``memory`` has been read when this returns.

        Returns:
            False: nothing was done, since no memory can be page-locked.
        """
        source = np.frombuffer(memory, np.uint8)
        with self._lock:
            ring = self._ring
            if ring is None:
                ring = self._make()
            if ring is None:
                return False
            for start in range(0, source.nbytes, CHUNK_BYTES):
                part = source[start : start + CHUNK_BYTES]
                self._upload_part(ring, target + start, part)
        return True

    def _upload_part(
        self, ring: np.ndarray[Any, Any], target: int, part: np.ndarray[Any, Any]
    ) -> None:
        at, self._next = self._next, (self._next + 1) % CHUNKS
        self._api.event_synchronize(self._events[at])
        chunk = ring[at * CHUNK_BYTES :][: part.nbytes]
        np.copyto(chunk, part)
        self._api.copy_h2d(target, address_of(chunk), part.nbytes, self._stream)
        self._api.event_record(self._events[at], self._stream)

    def _make(self) -> np.ndarray[Any, Any] | None:
        if self.failed:
            return None
        ring = np.frombuffer(mmap.mmap(-1, CHUNK_BYTES * CHUNKS), np.uint8)
        try:
            while len(self._events) < CHUNKS:
                self._events.append(self._api.event_create(EventKind.DONE))
            self._api.host_register(address_of(ring), ring.nbytes, False)
        except CudaError as exc:
            self.failed = str(exc)
            _LOG.warning("uploads wait for the driver's own staging: %s", exc)
            self._destroy_events()
            return None
        self._ring = ring
        return ring

    def close(self) -> None:
        """When no upload is wanted any more. Idempotent."""
        with self._lock:
            ring, self._ring = self._ring, None
            if ring is not None:
                self._api.stream_synchronize(self._stream)
                self._api.host_unregister(address_of(ring))
                self._destroy_events()

    def _destroy_events(self) -> None:
        while self._events:
            self._api.event_destroy(self._events.pop())


def address_of(memory: Any) -> int:
    """Where a buffer begins."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)

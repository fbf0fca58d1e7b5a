"""Whole tensors as raw message frames: between hosts, and the baseline for handles."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from blockflow.core import limits
from blockflow.core.errors import RequestError, WireError
from blockflow.core.model import tensor_bytes
from blockflow.core.scarcity import failure
from blockflow.tensormq.channel import (
    InBuffer,
    OutBuffer,
    Payload,
    Producer,
    Usage,
    own_buffer,
    span_bytes,
)
from blockflow.tensormq.extents import GRANULE
from blockflow.tensormq.leases import NEVER_NS, LeaseError
from blockflow.wire.tensor import TensorDesc

_EMPTY = memoryview(b"")


class InlineOutBuffer(OutBuffer):
    """Fresh memory, aligned for vector kernels; it lives as long as anything refers to it."""

    __slots__ = ("published",)

    def __init__(self, memory: memoryview, dtype: str, dims: tuple[int, ...]) -> None:
        self.memory = memory
        self.nbytes = len(memory)
        self.dtype = dtype
        self.dims = dims
        self.published = False


class InlineInBuffer(InBuffer):
    """A received frame."""

    __slots__ = ()

    def __init__(self, desc: TensorDesc, memory: memoryview) -> None:
        self.desc = desc
        self.memory = memory

    def release(self) -> None:
        self.memory = _EMPTY


class Living:
    """Objects, and their bytes, until the last reference to each goes, in whatever thread that is:
    ZeroMQ lets go of a frame in one of its own."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._dropped: deque[weakref.ref[Any]] = deque()
        self._there: dict[int, tuple[weakref.ref[Any], int]] = {}

    def add(self, thing: Any, nbytes: int) -> None:
        ref = weakref.ref(thing, self._dropped.append)  # that other thread does nothing else
        self._there[id(ref)] = ref, nbytes
        self._nbytes += nbytes

    def collect(self) -> int:
        """Forget those that have gone; returns how many."""
        freed = 0
        while self._dropped:
            self._nbytes -= self._there.pop(id(self._dropped.popleft()))[1]
            freed += 1
        return freed

    @property
    def nbytes(self) -> int:
        if self._dropped:
            self.collect()
        return self._nbytes

    def __len__(self) -> int:
        self.collect()
        return len(self._there)


class InlineProducer(Producer):
    """Fresh buffers whose frames a socket can send without a further copy.

    A buffer counts as outstanding until the last reference to its memory is dropped, by the
    sender's I/O thread for a sent frame; ``max_buffers`` and ``capacity`` bytes bound what can be
    on its way, so that memory stays flat when a receiver is slow. Several consumers share one
    memory.
    """

    def __init__(self, max_buffers: int = 64, capacity: int = limits.MAX_MESSAGE_BYTES) -> None:
        if max_buffers < 1 or capacity < 1:
            raise ValueError(f"{max_buffers} buffers of {capacity} bytes together")
        self._max_buffers = max_buffers
        self._capacity = capacity
        self._high_water = 0
        self._stalls = 0
        self._living = Living()
        self._held: dict[int, tuple[OutBuffer, int]] = {}
        self._lock = threading.Lock()

    @property
    def max_consumers(self) -> int:
        return limits.MAX_ITEMS_PER_MESSAGE

    def reserve(
        self, dtype: str, dims: Sequence[int], consumers: Collection[int] = ()
    ) -> InlineOutBuffer | None:
        nbytes = tensor_bytes(dtype, dims)
        if nbytes > min(limits.MAX_MESSAGE_BYTES, self._capacity):
            raise RequestError(
                "TOO_LARGE",
                f"a tensor of {nbytes} bytes is over the limit of "
                f"{min(limits.MAX_MESSAGE_BYTES, self._capacity)}",
                hint="send fewer rows",
            )
        living = self._living
        with self._lock:
            if len(living) >= self._max_buffers or living.nbytes + nbytes > self._capacity:
                self._stalls += 1
                return None
            try:
                raw = np.empty(nbytes + GRANULE, np.uint8)
            except MemoryError as exc:
                raise failure(exc, f"no memory for a tensor of {nbytes} bytes", "") from None
            living.add(raw, nbytes)
            self._high_water = max(self._high_water, living.nbytes)
        lead = -raw.__array_interface__["data"][0] % GRANULE
        return InlineOutBuffer(raw.data[lead : lead + nbytes], dtype, tuple(dims))

    def publish(
        self, buffer: OutBuffer, consumers: Sequence[int], until_ns: int = NEVER_NS
    ) -> list[Payload]:
        own = own_buffer(buffer, InlineOutBuffer)
        if not consumers or len(consumers) > self.max_consumers:
            raise LeaseError(f"published to {len(consumers)} consumers")
        if own.published and id(own) not in self._held:
            raise LeaseError("published again without being held")
        own.published = True
        desc = TensorDesc(own.dtype, own.dims)
        frame = own.memory.toreadonly()
        return [Payload(desc, frame) for _ in consumers]

    def revoke(self, payload: Payload) -> None:
        if payload.frame is None:
            raise ValueError(f"{payload.desc} has no frame")

    def discard(self, buffer: OutBuffer) -> None:
        own = own_buffer(buffer, InlineOutBuffer)
        if own.published or id(own) in self._held:
            raise LeaseError("discard of a published or held buffer")
        own.published = True
        own.memory = _EMPTY

    def hold(self, buffer: OutBuffer) -> None:
        own, count = self._held.get(id(buffer), (own_buffer(buffer, InlineOutBuffer), 0))
        self._held[id(buffer)] = own, count + 1

    def unhold(self, buffer: OutBuffer) -> None:
        if id(buffer) not in self._held:
            raise LeaseError("unheld more often than held")
        own, count = self._held.pop(id(buffer))
        if count > 1:
            self._held[id(buffer)] = own, count - 1

    def sweep(self) -> int:
        with self._lock:
            return self._living.collect()

    def peer_gone(self, incarnation: int) -> int:
        """Frames to the dead go with the socket that is dropped; nothing is leased."""
        return 0

    def outstanding(self) -> int:
        return self.usage().slots_used

    def usage(self) -> Usage:
        living = self._living
        with self._lock:
            return Usage(
                capacity=self._capacity,
                used=living.nbytes,
                high_water=self._high_water,
                committed=living.nbytes,
                slots=self._max_buffers,
                slots_used=len(living),
                stalls=self._stalls,
                stale=0,
            )

    def close(self) -> None:
        self._held.clear()


def open_frame(desc: TensorDesc, frame: Any | None) -> InlineInBuffer:
    """Wrap a received frame (bytes, a buffer, or a ``zmq.Frame``) without copying it.

    Raises:
        WireError: MALFORMED_MESSAGE: no frame, or one of another size than the descriptor's.
    """
    if frame is None:
        raise WireError(
            "MALFORMED_MESSAGE", f"{desc} came without its elements", where="tensor frame"
        )
    memory = memoryview(getattr(frame, "buffer", frame)).toreadonly()
    if memory.nbytes != span_bytes(desc):
        raise WireError(
            "MALFORMED_MESSAGE",
            f"{memory.nbytes} bytes came for {desc}, which has {span_bytes(desc)}",
            where="tensor frame",
        )
    return InlineInBuffer(desc, memory if memory.format == "B" else memory.cast("B"))

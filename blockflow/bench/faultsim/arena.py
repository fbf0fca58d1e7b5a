"""Arenas without shared memory: the real books of slots, with a few bytes behind each.

A lease that is leaked or freed twice shows here as it would in ``/dev/shm``; only mapping and
marks are left out: a release is told to the book at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from blockflow.core.errors import RequestError, WireError
from blockflow.core.model import tensor_bytes
from blockflow.tensormq.channel import (
    Consumer,
    InBuffer,
    OutBuffer,
    Payload,
    Producer,
    Usage,
    span_bytes,
)
from blockflow.tensormq.inline import open_frame
from blockflow.tensormq.leases import NEVER_NS, Lease, LeaseTable
from blockflow.wire.tensor import Handle, TensorDesc

_SLOT_BYTES = 256
_LANES = 32


class Arena:
    """One process's slots."""

    def __init__(self, incarnation: int, slots: int) -> None:
        self.incarnation = incarnation
        self.leases = LeaseTable(slots * _SLOT_BYTES, slots, _LANES, align=_SLOT_BYTES)
        self._content = bytearray(slots * _SLOT_BYTES)

    def memory(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of a slot."""
        return memoryview(self._content)[offset : offset + nbytes]

    def current(self, handle: Handle) -> bool:
        """Whether a handle names what its consumer may read now."""
        lease = self.leases[handle.slot]
        return lease.generation == handle.generation and handle.lane in lease.lanes


Arenas = dict[int, Arena]
"""What the host's memory holds, by incarnation of the owner."""


class _Slot(OutBuffer):
    """A reserved slot."""

    __slots__ = ("lease",)

    def __init__(self, lease: Lease, memory: memoryview, dtype: str, dims: Sequence[int]) -> None:
        self.lease = lease
        self.memory = memory
        self.nbytes = len(memory)
        self.dtype = dtype
        self.dims = tuple(dims)


class _Opened(InBuffer):
    """A slot of another process; the lane is released once, whoever has died meanwhile."""

    __slots__ = ("_arena",)

    def __init__(self, desc: TensorDesc, memory: memoryview, arena: Arena) -> None:
        self.desc = desc
        self.memory = memory
        self._arena: Arena | None = arena

    def release(self) -> None:
        arena, self._arena = self._arena, None
        handle = self.desc.handle
        if arena is not None and handle is not None:
            arena.leases.release(handle.slot, handle.lane, handle.generation)


class SlotProducer(Producer):
    """The owner's side of an :class:`Arena`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._leases = arena.leases

    @property
    def max_consumers(self) -> int:
        return _LANES

    def reserve(
        self, dtype: str, dims: Sequence[int], consumers: Collection[int] = ()
    ) -> OutBuffer | None:
        nbytes = tensor_bytes(dtype, dims)
        if not self._leases.fits(nbytes):
            raise RequestError("TOO_LARGE", f"{nbytes} bytes do not fit")
        lease = self._leases.reserve(nbytes)
        if lease is None:
            return None
        return _Slot(lease, self._arena.memory(lease.offset, nbytes), dtype, dims)

    def publish(
        self, buffer: OutBuffer, consumers: Sequence[int], until_ns: int = NEVER_NS
    ) -> list[Payload]:
        lease = _own(buffer).lease
        lanes = self._leases.publish(lease.slot, consumers)
        owner, generation = self._arena.incarnation, lease.generation
        handles = [Handle(owner, lease.slot, lane, generation, lease.offset) for lane in lanes]
        return [Payload(TensorDesc(buffer.dtype, buffer.dims, h), None) for h in handles]

    def revoke(self, payload: Payload) -> None:
        handle = payload.desc.handle
        if handle is None:
            raise ValueError(f"{payload.desc} has no handle")
        self._leases.release(handle.slot, handle.lane, handle.generation)

    def discard(self, buffer: OutBuffer) -> None:
        self._leases.discard(_own(buffer).lease.slot)

    def hold(self, buffer: OutBuffer) -> None:
        self._leases.hold(_own(buffer).lease.slot)

    def unhold(self, buffer: OutBuffer) -> None:
        self._leases.unhold(_own(buffer).lease.slot)

    def sweep(self) -> int:
        return 0

    def peer_gone(self, incarnation: int) -> int:
        return self._leases.peer_gone(incarnation)[0]

    def outstanding(self) -> int:
        return self._leases.outstanding

    def usage(self) -> Usage:
        book = self._leases
        capacity = book.extents.capacity
        return Usage(
            capacity,
            book.used,
            book.high_water,
            capacity,
            book.slots,
            book.outstanding,
            book.stalls,
            book.stale,
        )

    def close(self) -> None:
        """The arena ends with its process."""


class SlotConsumer(Consumer):
    """Opens what other processes' arenas hold."""

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self._gone: set[int] = set()

    def open(self, desc: TensorDesc, frame: Any | None) -> InBuffer:
        handle = desc.handle
        if handle is None:
            return open_frame(desc, frame)
        arena = self._arenas.get(handle.incarnation)
        if arena is None or handle.incarnation in self._gone:
            raise RequestError("WORKER_LOST", f"incarnation {handle.incarnation} is dead")
        if not arena.current(handle):
            raise WireError("MALFORMED_MESSAGE", f"{desc}: the handle is stale")
        return _Opened(desc, arena.memory(handle.offset, span_bytes(desc)), arena)

    def peer_gone(self, incarnation: int) -> None:
        self._gone.add(incarnation)

    def close(self) -> None:
        """Nothing is mapped."""


def _own(buffer: OutBuffer) -> _Slot:
    if not isinstance(buffer, _Slot):
        raise TypeError(f"{type(buffer).__name__} is not a slot of this arena")
    return buffer

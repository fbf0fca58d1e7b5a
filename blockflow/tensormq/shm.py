"""Tensors in shared memory: the message carries a handle of ~25 bytes, whatever their size."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockflow.core import limits
from blockflow.core.departed import Departed
from blockflow.core.errors import RequestError, SystemError_, WireError
from blockflow.core.model import tensor_bytes
from blockflow.tensormq.arena import DEVICE_BIT, Arena, ArenaReader
from blockflow.tensormq.channel import (
    Consumer,
    InBuffer,
    OutBuffer,
    Payload,
    Producer,
    Usage,
    bad_handle,
    own_buffer,
    span_bytes,
)
from blockflow.tensormq.ebb import WINDOW_NS, Ebb, window_ns
from blockflow.tensormq.inline import open_frame
from blockflow.tensormq.leases import NEVER_NS, Lease, LeaseError, LeaseTable
from blockflow.wire.tensor import Handle, TensorDesc

_log = logging.getLogger("blockflow.tensormq")
_EMPTY = memoryview(b"")

Rooms = Callable[[], Iterable[tuple[int, int]]]
"""Of each bound on memory what is left and what there is in all, in bytes."""


class ShmOutBuffer(OutBuffer):
    """A reserved slot."""

    __slots__ = ("lease",)

    def __init__(
        self, lease: Lease, memory: memoryview, nbytes: int, dtype: str, dims: tuple[int, ...]
    ) -> None:
        self.lease = lease
        self.memory = memory
        self.nbytes = nbytes
        self.dtype = dtype
        self.dims = dims


class ShmInBuffer(InBuffer):
    """A tensor in another process's slot."""

    __slots__ = ("_reader",)

    def __init__(self, desc: TensorDesc, memory: memoryview, reader: ArenaReader) -> None:
        self.desc = desc
        self.memory = memory
        self._reader: ArenaReader | None = reader

    @property
    def reader(self) -> ArenaReader | None:
        """The arena that it lies in; None once released."""
        return self._reader

    def spare(self) -> int | None:
        return None if self._reader is None else self._reader.spare()

    def release(self) -> None:
        reader, handle = self._reader, self.desc.handle
        if reader is None or handle is None:
            return
        self._reader = None
        self.memory = _EMPTY
        reader.release(handle.slot, handle.lane, handle.generation)


class ShmProducer(Producer):
    """Slots of one :class:`Arena`, which it owns and closes.

    The lock makes it usable from a worker's engine thread (reserve) and data thread (publish,
    sweep) alike; it is held for microseconds, but for the arena's rare growth and shrinking.

    Args:
        arena: to own.
        rooms: what bounds the memory that it is made of, beside the file system.
    """

    def __init__(self, arena: Arena, rooms: Rooms = tuple) -> None:
        self._arena = arena
        self._rooms = rooms
        self._leases = self._make_leases()
        self._lock = threading.Lock()
        self._closed = False
        self._told_full = False
        self._ebb = Ebb()
        self._lasting = False
        self._shared = False  # a reader that is the only one does not ask what is left to others

    def _make_leases(self) -> LeaseTable:
        return LeaseTable(self._arena.capacity, self._arena.slots, self._arena.lanes)

    @property
    def max_consumers(self) -> int:
        return self._arena.lanes

    @property
    def incarnation(self) -> int:
        """What the handles name."""
        return self._arena.incarnation

    def set_devices(self, devices: Mapping[int, str]) -> None:
        """From the first device on that may read here (or is this process's own) nothing is given
        back: it may have page-locked the pages, and would go on reading those, not the file's."""
        self._lasting = self._lasting or any(d != "cpu" for d in devices.values())

    def tell_readers(self, readers: int) -> None:
        with self._lock:
            if not self._closed:
                self._shared = readers > 1
                self._arena.tell_taken(self._leases.taken)
                self._arena.tell_readers(readers)

    def region(self) -> memoryview:
        """All data memory that is committed now; stays where it is."""
        return self._arena.data[: self._arena.committed]

    def reserve(
        self, dtype: str, dims: Sequence[int], consumers: Collection[int] = ()
    ) -> ShmOutBuffer | None:
        nbytes = tensor_bytes(dtype, dims)
        with self._lock:
            lease = self._take(nbytes)
            if lease is None:
                return None
            offset = lease.offset
            end = offset + lease.size
            if end > self._arena.committed and not self._commit(lease, end):
                return None
            if end > self._ebb.peak:
                self._ebb.peak = end
            memory = self._arena.data[offset : offset + nbytes]
        return ShmOutBuffer(lease, memory, nbytes, dtype, tuple(dims))

    def _take(self, nbytes: int) -> Lease | None:
        """A lease for so many bytes, None when there is none now; the lock is held."""
        leases = self._leases
        self._check_open()
        if leases.outstanding:
            self._mark_free(leases.sweep(self._arena.marks))
        lease = leases.reserve(nbytes) if nbytes <= limits.MAX_MESSAGE_BYTES else None
        if lease is None and leases.outstanding and self._reclaim():
            lease = leases.reserve(nbytes)
        if self._shared:
            self._arena.tell_taken(leases.slots if lease is None else leases.taken)
        if lease is None and (nbytes > limits.MAX_MESSAGE_BYTES or not leases.fits(nbytes)):
            raise RequestError(
                "TOO_LARGE",
                f"{nbytes} bytes do not fit into an arena of {leases.extents.capacity}",
                hint="raise the block's max_rows or arena size, or send fewer rows",
            )
        return lease

    def _collect(self) -> int:
        """Of what was released or lost, free the slots; returns how many. The lock is held."""
        freed = self._leases.sweep(self._arena.marks)
        self._mark_free(freed)
        return len(freed) + self._reclaim()

    def _reclaim(self) -> int:
        """Free what was lost on its way to a consumer that lives; returns how many slots."""
        leases = self._leases
        lost = leases.lost
        revoked, freed = leases.reclaim(self._arena.marks, time.monotonic_ns())
        self._mark_free(revoked)
        self._mark_free(freed)
        if leases.lost.bit_length() > lost.bit_length():  # at 1, 2, 4, 8, ...: a bounded log
            _log.warning("handles that nobody has opened in time: %d so far", leases.lost)
        return len(freed)

    def _commit(self, lease: Lease, end: int) -> bool:
        """Grow the arena for a new lease; False: not now, but releases will help."""
        arena, leases = self._arena, self._leases
        try:
            arena.commit(end)
        except SystemError_ as exc:
            leases.discard(lease.slot)
            if not self._told_full:
                self._told_full = True
                _log.warning("the arena stays at %d bytes: %s", arena.committed, exc)
            if exc.code != "NO_SPACE" or not leases.outstanding or lease.size > arena.committed:
                if exc.code == "NO_SPACE":  # what this tensor cannot have may serve others
                    self._give_back(leases.extents.end)
                raise
            # Others' slots lie in what is committed, and this tensor fits there once they are free.
            leases.stalls += 1
            return False
        return True

    def ebb(self, now_ns: int) -> None:
        ebb = self._ebb
        if not ebb.due(now_ns):
            return
        window = self._window_ns()
        with self._lock:
            if self._closed:
                return
            self._collect()
            keep = ebb.look(now_ns, self._leases.extents.end, self._arena.committed, window)
            if keep is not None:
                self._give_back(keep)

    def _window_ns(self) -> int:
        try:
            left = os.statvfs(self._arena.run_dir)
        except OSError:  # the folder has been removed: this process is about to end
            return WINDOW_NS
        return window_ns((left.f_bavail, left.f_blocks), *self._rooms())

    def _give_back(self, keep: int) -> None:
        """Nobody holds a lease on anything behind ``keep``; the lock is held."""
        if not self._lasting:
            self._arena.give_back(keep)

    def publish(
        self, buffer: OutBuffer, consumers: Sequence[int], until_ns: int = NEVER_NS
    ) -> list[Payload]:
        lease = own_buffer(buffer, ShmOutBuffer).lease
        arena = self._arena
        slot, offset, owner = lease.slot, lease.offset, arena.incarnation
        with self._lock:
            self._check_open()
            lanes = self._leases.publish(slot, consumers, until_ns)
            generation = lease.generation
            base = slot * arena.lanes
            for lane in lanes:
                # A lane unused for 2**32 publications could still show this very generation.
                arena.marks[base + lane] = 0
            arena.generations[slot] = generation
        dtype, dims = buffer.dtype, buffer.dims
        return [
            Payload(TensorDesc(dtype, dims, Handle(owner, slot, lane, generation, offset)), None)
            for lane in lanes
        ]

    def revoke(self, payload: Payload) -> None:
        handle = payload.desc.handle
        if handle is None or handle.incarnation != self._arena.incarnation:
            raise ValueError(f"{payload.desc} is not a tensor of this arena")
        with self._lock:
            if self._leases.release(handle.slot, handle.lane, handle.generation):
                self._mark_free((handle.slot,))

    def discard(self, buffer: OutBuffer) -> None:
        with self._lock:
            self._leases.discard(own_buffer(buffer, ShmOutBuffer).lease.slot)

    def hold(self, buffer: OutBuffer) -> None:
        with self._lock:
            self._leases.hold(own_buffer(buffer, ShmOutBuffer).lease.slot)

    def unhold(self, buffer: OutBuffer) -> None:
        slot = own_buffer(buffer, ShmOutBuffer).lease.slot
        with self._lock:
            if self._leases.unhold(slot):
                self._mark_free((slot,))

    def sweep(self) -> int:
        with self._lock:
            return 0 if self._closed else self._collect()

    def peer_gone(self, incarnation: int) -> int:
        with self._lock:
            count, freed = self._leases.peer_gone(incarnation)
            self._mark_free(freed)
        return count

    def outstanding(self) -> int:
        return self._leases.outstanding

    def usage(self) -> Usage:
        # Marks are otherwise collected when memory is needed: an idle arena would look in use.
        with self._lock:
            leases = self._leases
            if not self._closed:
                self._collect()
            return Usage(
                capacity=leases.extents.capacity,
                used=leases.used,
                high_water=leases.high_water,
                committed=self._committed(),
                slots=leases.slots,
                slots_used=leases.outstanding,
                stalls=leases.stalls,
                stale=leases.stale,
            )

    def _committed(self) -> int:
        return self._arena.committed

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._arena.close()

    def _check_open(self) -> None:
        if self._closed:
            raise LeaseError("the producer is closed")

    def _mark_free(self, slots: Iterable[int]) -> None:
        """From now on a handle to these slots is refused by every consumer."""
        if not self._closed:
            for slot in slots:
                self._arena.generations[slot] = 0


class ShmConsumer(Consumer):
    """Opens handles by way of one cached mapping per producer; takes whole frames as well.

    A dead producer's arena stays mapped, and what it holds readable, until :meth:`peer_gone`.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._readers: dict[int, ArenaReader] = {}
        self._gone = Departed()

    def open(self, desc: TensorDesc, frame: Any | None) -> InBuffer:
        handle = desc.handle
        if handle is None:
            return open_frame(desc, frame)
        if frame is not None:
            raise bad_handle(desc, "a handle and a frame in one message")
        reader = self._readers.get(handle.incarnation) or self._map(handle.incarnation)
        nbytes = span_bytes(desc)
        memory = reader.view(handle.offset, nbytes)
        if memory is None:
            raise bad_handle(desc, "the handle points outside the arena")
        if not reader.take(handle.slot, handle.lane, handle.generation):
            raise bad_handle(desc, "the handle is stale or names no slot")
        reader.map_ahead(handle.offset + nbytes)
        return ShmInBuffer(desc, memory, reader)

    def _map(self, incarnation: int) -> ArenaReader:
        if incarnation & DEVICE_BIT:  # the arena of that name is a book, not tensors
            raise WireError("MALFORMED_MESSAGE", "device memory, which cannot be opened here")
        if incarnation in self._gone:
            raise RequestError("WORKER_LOST", f"incarnation {incarnation} is dead")
        reader = ArenaReader.open(self._run_dir, incarnation)
        self._readers[incarnation] = reader
        return reader

    def region(self, incarnation: int) -> memoryview | None:
        """All of a producer's committed memory, if its arena is mapped here."""
        reader = self._readers.get(incarnation)
        return None if reader is None else reader.region()

    def peer_gone(self, incarnation: int) -> None:
        self._gone.add(incarnation)
        self._readers.pop(incarnation, None)

    def close(self) -> None:
        self._readers.clear()

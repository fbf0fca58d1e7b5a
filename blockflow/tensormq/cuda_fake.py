"""FakeCuda: CudaApi without a GPU, over shared memory, for tests and for trying a topology out.

Device memory is files in a folder that all processes of a test share; device pointers are the
addresses of this process's mappings, so that torch's CPU tensors can stand for device tensors. It
does not only imitate: it enforces the rules of CUDA IPC, and what the real driver would answer with
silence or a crash is a :class:`RuleBroken` here (docs/cuda-ipc.md lists the rules).

Two manners of a stream. ``eager``: every call is done when it returns, as if the device were
infinitely fast; waiting for another process's event still blocks. Otherwise a stream is a queue
with a thread, and :meth:`FakeCuda.launch` puts work into it, so that a test decides what is still
under way when a message arrives.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from blockflow.tensormq import cuda_api
from blockflow.tensormq.cuda_api import CudaApi, DeviceFacts, EventKind
from blockflow.tensormq.cuda_fake_host import LockedHost
from blockflow.tensormq.cuda_fake_memory import Mapped, Region
from blockflow.tensormq.cuda_fake_world import RuleBroken, Stream, World, failed, place_of
from blockflow.tensormq.cuda_here import DOUBLE_DEVICES

if TYPE_CHECKING:
    from torch import Tensor

_MAX_IMPORTED_EVENTS = 1000
"""torch's own bound (CudaIPCTypes.h): beyond it the driver has run out of interprocess events."""


class FakeCuda(CudaApi):
    """A device of the double.

    Args:
        folder: shared by all processes; its files are the devices' memory and events.
        ordinal: which device. devices: how many there are; all are peers of each other but those
            in ``islands``.
        total_bytes: of a device's memory; OUT_OF_MEMORY beyond.
        eager: see the module.
        lacks: facts of :class:`DeviceFacts` that shall be missing (``ipc_events``, ...), besides
            ``registering`` for a system that page-locks nothing, and ``opening`` for a process that
            can open no other's memory. A file ``lacks`` in the folder adds to them, in every
            process.
        read_only_pins: memory that may only be read can be page-locked, which few systems can.
        process: play this (living) process instead of one's own, so that two ends of a channel can
            be tested in one.
    """

    def __init__(
        self,
        folder: Path,
        ordinal: int = 0,
        *,
        devices: int = DOUBLE_DEVICES,
        islands: Iterable[int] = (),
        total_bytes: int = 1 << 30,
        eager: bool = True,
        lacks: Iterable[str] = (),
        read_only_pins: bool = False,
        process: int = 0,
    ) -> None:
        if not 0 <= ordinal < devices:
            raise failed("cuDeviceGet", 101)
        self.ordinal = ordinal
        self.torch_device = "cpu"
        self.world = World(folder, process or os.getpid())
        self._eager = eager
        self._devices = devices
        self._islands = frozenset(islands)
        self._total = total_bytes
        self._lacks = frozenset(lacks)
        self._read_only_pins = read_only_pins
        self._real_pid = os.getpid()
        self._events: dict[int, tuple[str, EventKind, bool]] = {}
        self._streams: dict[int, Stream] = {}
        self.host = LockedHost(self._broken)
        self._lock = threading.RLock()
        self._mapped = Mapped(self._lock, self._broken)
        self._scope = threading.local()

    def facts(self) -> DeviceFacts:
        has = {n: not self._lacking(n) for n in ("unified_addressing", "ipc_events")}
        return DeviceFacts(
            "FakeCuda",
            f"GPU-fake-{self.ordinal}",
            self._total,
            **has,
            read_only_pins=self._read_only_pins,
        )

    def _lacking(self, what: str) -> bool:
        return what in self._lacks or what in self.world.lacks()

    def readable_by(self, ordinal: int) -> bool:
        return 0 <= ordinal < self._devices and ordinal != self.ordinal and self._is_peer(ordinal)

    def _is_peer(self, ordinal: int) -> bool:
        return {self.ordinal, ordinal}.isdisjoint(self._islands)

    def memory_used(self) -> int:
        """Of all devices of the double, without torch's own, which is the host's here."""
        return self.world.held_bytes()

    def counts(self) -> dict[str, int]:
        """What this process holds of the driver: a leak shows here, whatever its size."""
        return {
            "memories": len(self._mapped),
            "events": len(self._events),
            "streams": len(self._streams),
            "locked": len(self.host),
        }

    # --- memory ----------------------------------------------------------------------------------

    def mem_alloc(self, nbytes: int) -> int:
        self._check()
        if nbytes <= 0:
            raise failed("cuMemAlloc_v2", cuda_api.INVALID_VALUE)
        with self._lock:
            if self._mapped.own_bytes + nbytes > self._total:
                raise failed("cuMemAlloc_v2", cuda_api.OUT_OF_MEMORY)
            name = self.world.new("mem", nbytes, self.ordinal)
            return self._mapped.add(name, self.world.map(name), own=True)

    def mem_free(self, pointer: int) -> None:
        self._check()
        with self._lock:
            memory = self._mapped.find(pointer, "cuMemFree_v2", own=True)
            users = self.world.importers(memory.name)
            if users:
                raise self._broken(f"{memory.name} freed while processes {users} have it open")
        self._await_all()
        with self._lock:
            self._mapped.forget(memory)
            self.world.remove(memory.name)

    def mem_export(self, pointer: int) -> bytes:
        self._check()
        return self.world.handle(self._mapped.find(pointer, "cuIpcGetMemHandle", own=True).name)

    def mem_import(self, handle: bytes) -> int:
        self._check()
        call = "cuIpcOpenMemHandle_v2"
        name, pid = self.world.read_handle(handle, call)
        if self._lacking("opening"):
            raise failed(call, cuda_api.NOT_SUPPORTED)
        if pid == self.world.pid:
            raise failed(call, cuda_api.INVALID_CONTEXT)
        if not self.world.alive(name):
            raise failed(call, cuda_api.INVALID_HANDLE)
        place = place_of(name)
        if place != self.ordinal and not self._is_peer(place):
            raise failed(call, cuda_api.NO_PEER_ACCESS)
        with self._lock:
            memory = self._mapped.named(name)
            if memory is not None:
                memory.opened += 1
                return memory.pointer
            self.world.opened(name)
            return self._mapped.add(name, self.world.map(name), own=False)

    def mem_close(self, pointer: int) -> None:
        self._check()
        with self._lock:
            memory = self._mapped.find(pointer, "cuIpcCloseMemHandle", own=False)
            memory.opened -= 1
            if memory.opened:
                return
            pending = self.world.pending(memory.name)
            if pending:
                raise self._broken(f"{memory.name} closed while it is in use: {pending}")
        self._await_all()
        with self._lock:
            self._mapped.forget(memory)
            self.world.closed(memory.name)

    def _await_all(self) -> None:
        """The driver closes and frees when the device has nothing more to do for this process."""
        for stream in list(self._streams.values()):
            stream.synchronize()

    def host_register(self, address: int, nbytes: int, read_only: bool) -> None:
        self._check()
        if self._lacking("registering") or (read_only and not self._read_only_pins):
            raise failed("cuMemHostRegister_v2", cuda_api.NOT_SUPPORTED)
        self.host.register(address, nbytes, read_only)

    def host_unregister(self, address: int) -> None:
        self._check()
        self.host.unregister(address)

    # --- events and streams ----------------------------------------------------------------------

    def event_create(self, kind: EventKind) -> int:
        self._check()
        name = self.world.new("event", 32, self.ordinal)
        return self._open_event(name, kind, own=True)

    def _open_event(self, name: str, kind: EventKind, own: bool) -> int:
        with self._lock:
            number = max(self._events, default=0) + 1
            self._events[number] = name, kind, own
            return number

    def event_export(self, event: int) -> bytes:
        name, kind, _ = self._event(event, "cuIpcGetEventHandle")
        if kind is not EventKind.READY:
            raise failed("cuIpcGetEventHandle", cuda_api.INVALID_HANDLE)
        return self.world.handle(name)

    def event_import(self, handle: bytes) -> int:
        self._check()
        call = "cuIpcOpenEventHandle"
        name, pid = self.world.read_handle(handle, call)
        if pid == self.world.pid:
            raise failed(call, cuda_api.INVALID_CONTEXT)
        if not self.world.alive(name):
            raise failed(call, cuda_api.INVALID_HANDLE)
        if sum(not own for _, _, own in self._events.values()) >= _MAX_IMPORTED_EVENTS:
            raise self._broken(f"more than {_MAX_IMPORTED_EVENTS} imported events")
        self.world.opened(name)
        return self._open_event(name, EventKind.READY, own=False)

    def event_destroy(self, event: int) -> None:
        name, _, own = self._event(event, "cuEventDestroy_v2")
        with self._lock:
            del self._events[event]
        if not own:
            self.world.closed(name)
        elif users := self.world.importers(name):
            raise self._broken(f"{name} destroyed while processes {users} have it open")
        else:
            self.world.remove(name)

    def event_record(self, event: int, stream: int) -> None:
        name, kind, own = self._event(event, "cuEventRecord")
        if kind is EventKind.READY and not own:
            raise self._broken("an imported event is recorded: two processes would race for it")
        number = self.world.record(name)
        self._put(stream, lambda: self.world.complete(name, number))

    def event_query(self, event: int) -> bool:
        return self.world.has_come(self._event(event, "cuEventQuery")[0])

    def event_synchronize(self, event: int) -> None:
        self.world.wait(self._event(event, "cuEventSynchronize")[0], None)

    def event_elapsed_ns(self, start: int, stop: int) -> int:
        call = "cuEventElapsedTime"
        names = []
        for event in (start, stop):
            name, kind, _ = self._event(event, call)
            if kind is not EventKind.CLOCK:
                raise failed(call, cuda_api.INVALID_HANDLE)
            if not self.world.recorded(name):
                raise failed(call, cuda_api.INVALID_HANDLE)
            if not self.world.has_come(name):
                raise failed(call, cuda_api.NOT_READY)
            names.append(name)
        return self.world.came_ns(names[1]) - self.world.came_ns(names[0])

    def stream_create(self) -> int:
        self._check()
        with self._lock:
            number = max(self._streams, default=0) + 1
            self._streams[number] = Stream(threaded=not self._eager, failed=self.world.fail)
            return number

    def stream_destroy(self, stream: int) -> None:
        with self._lock:
            self._streams.pop(stream).close()

    def stream_wait(self, stream: int, event: int) -> None:
        name = self._event(event, "cuStreamWaitEvent")[0]
        captured = self.world.recorded(name)
        self._put(stream, lambda: self.world.wait(name, captured))

    def stream_synchronize(self, stream: int) -> None:
        self._streams[stream].synchronize()

    def launch(
        self,
        stream: int,
        work: Callable[[], None],
        *,
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
    ) -> None:
        """Put ``work`` into the stream as a kernel that touches these regions of device memory.

        Raises (in the stream, and from every call after it):
            RuleBroken: it reads what is still being written, or writes what is still being read.
        """
        accesses = [self._mapped.access(r, "r") for r in reads] + [
            self._mapped.access(r, "w") for r in writes
        ]
        tokens = self.world.begin(accesses)

        def run() -> None:
            try:
                self.world.check(accesses, tokens)
                work()
            finally:
                self.world.end(tokens)

        self._put(stream, run)

    # --- copies ----------------------------------------------------------------------------------

    def copy_h2d(self, target: int, address: int, nbytes: int, stream: int) -> None:
        read = self.host.read(address, nbytes)
        writes = [(target, nbytes)] if self._mapped.holds(target) else []
        self.launch(stream, lambda: _move(target, read(), nbytes), writes=writes)

    def copy_d2h(self, address: int, source: int, nbytes: int, stream: int) -> None:
        write = self.host.write(address, nbytes)
        reads = [(source, nbytes)] if self._mapped.holds(source) else []
        self.launch(stream, lambda: write(source), reads=reads)
        if not self.host.locked(address, nbytes):
            self.stream_synchronize(stream)

    def copy_d2d(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.launch(
            stream,
            partial(_move, target, source, nbytes),
            reads=[(source, nbytes)] if self._mapped.holds(source) else [],
            writes=[(target, nbytes)] if self._mapped.holds(target) else [],
        )

    # --- torch -----------------------------------------------------------------------------------

    def tensor(self, pointer: int, nbytes: int) -> Tensor:
        import torch

        return torch.from_numpy(self._mapped[pointer].array[:nbytes])

    def scratch(self, nbytes: int) -> Tensor:
        import torch

        if not getattr(self._scope, "stream", 0):
            raise self._broken("memory of torch's pool for no stream of ours")
        return torch.empty(nbytes, dtype=torch.uint8)

    def pool_bytes(self) -> tuple[int, int]:
        return 0, 0

    @contextmanager
    def engine_scope(self, stream: int) -> Iterator[None]:
        outer = getattr(self._scope, "stream", 0)
        self._scope.stream = stream
        try:
            yield
        finally:
            self._scope.stream = outer

    def close(self) -> None:
        for stream in list(self._streams):
            self.stream_destroy(stream)

    # --- bookkeeping -----------------------------------------------------------------------------

    def _check(self) -> None:
        if os.getpid() != self._real_pid:
            raise failed("cuda in a forked process", cuda_api.NOT_INITIALIZED)
        if self.world.failure is not None:
            raise self.world.failure

    def _put(self, stream: int, work: Callable[[], None]) -> None:
        self._check()
        self._streams[stream].put(work)

    def _event(self, event: int, call: str) -> tuple[str, EventKind, bool]:
        self._check()
        found = self._events.get(event)
        if found is None:
            raise failed(call, cuda_api.INVALID_HANDLE)
        if not found[2] and not self.world.exists(found[0]):
            raise self._broken(f"{call} on {found[0]}, which its maker has destroyed")
        return found

    def _broken(self, rule: str) -> RuleBroken:
        return self.world.broken(rule)


def _move(target: int, source: int | bytes, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)

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
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from blockflow.tensormq import cuda_api
from blockflow.tensormq.cuda_api import CudaApi, DeviceFacts, EventKind
from blockflow.tensormq.cuda_fake_host import READ_ONLY, LockedHost
from blockflow.tensormq.cuda_fake_world import Access, Memory, RuleBroken, Stream, World, failed
from blockflow.tensormq.cuda_here import DOUBLE_DEVICES

if TYPE_CHECKING:
    from torch import Tensor

Region = tuple[int, int]
"""First byte and number of bytes of device memory."""

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
        self._memories: dict[int, Memory] = {}
        self._gone: list[Memory] = []  # kept mapped, so that no address comes twice
        self._events: dict[int, tuple[str, EventKind, bool]] = {}
        self._streams: dict[int, Stream] = {}
        self.host = LockedHost()
        self._lock = threading.RLock()

    def facts(self) -> DeviceFacts:
        has = {n: not self._lacking(n) for n in ("unified_addressing", "ipc_events")}
        return DeviceFacts(
            "FakeCuda",
            f"GPU-fake-{self.ordinal}",
            self._total,
            **has,
            exclusive=self._lacking("sharing"),
            read_only_pins=self._read_only_pins,
        )

    def _lacking(self, what: str) -> bool:
        return what in self._lacks or what in self.world.lacks()

    def readable_by(self, ordinal: int) -> bool:
        near = {self.ordinal, ordinal}.isdisjoint(self._islands)
        return 0 <= ordinal < self._devices and ordinal != self.ordinal and near

    def memory_used(self) -> int:
        """Of all devices of the double, without torch's own, which is the host's here."""
        return self.world.held_bytes()

    def counts(self) -> dict[str, int]:
        """What this process holds of the driver: a leak shows here, whatever its size."""
        return {
            "memories": len(self._memories),
            "events": len(self._events),
            "streams": len(self._streams),
            "locked": len(self.host),
        }

    # --- memory ----------------------------------------------------------------------------------

    def mem_alloc(self, nbytes: int) -> int:
        self._check()
        with self._lock:
            used = sum(m.nbytes for m in self._memories.values() if m.own)
            if used + nbytes > self._total:
                raise failed("cuMemAlloc_v2", cuda_api.OUT_OF_MEMORY)
            name = self.world.new("mem", nbytes)
            return self._map(name, own=True)

    def _map(self, name: str, own: bool) -> int:
        memory = Memory(name, self.world.map(name), own)
        self._memories[memory.pointer] = memory
        return memory.pointer

    def mem_free(self, pointer: int) -> None:
        self._check()
        with self._lock:
            memory = self._memory(pointer, "cuMemFree_v2", own=True)
            users = self.world.importers(memory.name)
            if users:
                raise self._broken(f"{memory.name} freed while processes {users} have it open")
            self._forget(memory)
            self.world.remove(memory.name)

    def mem_export(self, pointer: int) -> bytes:
        self._check()
        return self.world.handle(self._memory(pointer, "cuIpcGetMemHandle", own=True).name)

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
        with self._lock:
            for memory in self._memories.values():
                if memory.name == name:
                    memory.opened += 1
                    return memory.pointer
            self.world.opened(name)
            return self._map(name, own=False)

    def mem_close(self, pointer: int) -> None:
        self._check()
        with self._lock:
            memory = self._memory(pointer, "cuIpcCloseMemHandle", own=False)
            memory.opened -= 1
            if memory.opened:
                return
            pending = self.world.pending(memory.name)
            if pending:
                raise self._broken(f"{memory.name} closed while it is in use: {pending}")
            self._forget(memory)
            self.world.closed(memory.name)

    def host_register(self, address: int, nbytes: int, read_only: bool) -> None:
        if self._lacking("registering") or (read_only and not self._read_only_pins):
            raise failed("cuMemHostRegister_v2", cuda_api.NOT_SUPPORTED)
        self.host.register(address, nbytes, read_only)

    def host_unregister(self, address: int) -> None:
        self.host.unregister(address)

    # --- events and streams ----------------------------------------------------------------------

    def event_create(self, kind: EventKind) -> int:
        self._check()
        name = self.world.new("event", 32)
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
        accesses = [self._access(r, "r") for r in reads] + [self._access(r, "w") for r in writes]
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
        locked = self.host.locked(address, nbytes) is not None
        # What is not page-locked is read before the call returns.
        source = address if locked else ctypes.string_at(address, nbytes)
        writes = [(target, nbytes)] if self._known(target) else []
        self.launch(stream, partial(_move, target, source, nbytes), writes=writes)

    def copy_d2h(self, address: int, source: int, nbytes: int, stream: int) -> None:
        if self.host.locked(address, nbytes) == READ_ONLY:
            raise self._broken("a copy into memory that was page-locked for reading")
        reads = [(source, nbytes)] if self._known(source) else []
        self.launch(stream, partial(_move, address, source, nbytes), reads=reads)

    def copy_d2d(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.launch(
            stream,
            partial(_move, target, source, nbytes),
            reads=[(source, nbytes)] if self._known(source) else [],
            writes=[(target, nbytes)] if self._known(target) else [],
        )

    # --- torch -----------------------------------------------------------------------------------

    def tensor(self, pointer: int, nbytes: int) -> Tensor:
        import torch

        return torch.from_numpy(self._memories[pointer].array[:nbytes])

    def scratch(self, nbytes: int) -> Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8)

    def pool_bytes(self) -> tuple[int, int]:
        return 0, 0

    def engine_scope(self, stream: int) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
        for stream in list(self._streams):
            self.stream_destroy(stream)

    # --- bookkeeping -----------------------------------------------------------------------------

    def _check(self) -> None:
        if os.getpid() != self._real_pid:
            raise failed("cuda in a forked process", cuda_api.NOT_INITIALIZED)

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

    def _memory(self, pointer: int, call: str, own: bool) -> Memory:
        memory = self._memories.get(pointer)
        if memory is None or memory.own != own:
            raise failed(call, cuda_api.INVALID_VALUE)
        return memory

    def _forget(self, memory: Memory) -> None:
        del self._memories[memory.pointer]
        self._gone.append(memory)

    def _known(self, pointer: int) -> bool:
        """Whether it is in a mapping of this process (else it is torch's scratch)."""
        with self._lock:
            if any(m.pointer <= pointer < m.pointer + m.nbytes for m in self._gone):
                raise self._broken("device memory is used after it was freed or closed")
            return any(p <= pointer < p + m.nbytes for p, m in self._memories.items())

    def _access(self, region: Region, kind: str) -> Access:
        start, nbytes = region
        with self._lock:
            for pointer, memory in self._memories.items():
                if pointer <= start and start + nbytes <= pointer + memory.nbytes:
                    return Access(memory.name, start - pointer, nbytes, kind)
        self._known(start)
        raise failed("launch", cuda_api.ILLEGAL_ADDRESS)

    def _broken(self, rule: str) -> RuleBroken:
        return self.world.broken(rule)


def _move(target: int, source: int | bytes, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)

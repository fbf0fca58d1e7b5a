"""What the processes that use one FakeCuda folder share: files for memory, events and accesses.

Names carry the maker's process id (``mem-<pid>-<device>-<n>``), so that everyone can tell whether
it lives. An event is two counters, records asked for and records that have come. An access is
noted while a kernel is queued or runs, so that another process's conflicting one is seen.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from blockflow.tensormq import cuda_api
from blockflow.tensormq.cuda_api import IPC_HANDLE_BYTES, CudaError

_RECORDED, _COME, _CAME_NS = range(3)
_POLL_S = 0.0002
_ACCESSES, _BROKEN, _LACKS = "accesses", "broken", "lacks"


class RuleBroken(AssertionError):
    """A rule of CUDA IPC was broken: undefined behaviour on a real device."""


@dataclass(frozen=True, slots=True)
class Access:
    """A kernel's use of device memory: ``kind`` is ``r`` or ``w``."""

    memory: str
    start: int
    nbytes: int
    kind: str

    def conflicts(self, other: Access) -> bool:
        return (
            self.memory == other.memory
            and self.start < other.start + other.nbytes
            and other.start < self.start + self.nbytes
            and "w" in (self.kind, other.kind)
        )


class Memory:
    """One allocation as this process maps it."""

    def __init__(self, name: str, mapping: mmap.mmap, own: bool) -> None:
        self.name = name
        self.mapping = mapping
        self.array = np.frombuffer(mapping, np.uint8)
        self.pointer = int(self.array.ctypes.data)
        self.nbytes = len(mapping)
        self.own = own
        self.opened = 1


class World:
    """The shared folder. Several processes, several threads."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.folder = folder
        self.pid = pid
        self._events: dict[str, memoryview] = {}
        self.failure: CudaError | None = None

    def fail(self, exc: BaseException) -> None:
        """Work of this process has failed. A device's own error is sticky: all that waits hears it,
        and the host only then, for what was ordered had been ordered well."""
        if self.failure is None and isinstance(exc, CudaError):
            self.failure = exc

    # --- files -----------------------------------------------------------------------------------

    def new(self, kind: str, nbytes: int, place: int) -> str:
        name = f"{kind}-{self.pid}-{place}-{secrets.token_hex(6)}"
        with open(self.folder / name, "xb") as f:
            f.truncate(nbytes)
        return name

    def map(self, name: str) -> mmap.mmap:
        with open(self.folder / name, "r+b") as f:
            return mmap.mmap(f.fileno(), 0)

    def remove(self, name: str) -> None:
        self._events.pop(name, None)
        (self.folder / name).unlink(missing_ok=True)

    def exists(self, name: str) -> bool:
        return (self.folder / name).exists()

    def alive(self, name: str) -> bool:
        """Whether it exists and its maker lives."""
        return self.exists(name) and running(_maker(name))

    def handle(self, name: str) -> bytes:
        return name.encode().ljust(IPC_HANDLE_BYTES, b"\0")

    def read_handle(self, handle: bytes, call: str) -> tuple[str, int]:
        """Name and maker's process id."""
        name = handle.rstrip(b"\0").decode(errors="replace")
        try:
            return name, _maker(name)
        except (IndexError, ValueError) as exc:
            raise CudaError(call, cuda_api.INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE") from exc

    def opened(self, name: str) -> None:
        (self.folder / f"{name}.open.{self.pid}").touch()

    def closed(self, name: str) -> None:
        (self.folder / f"{name}.open.{self.pid}").unlink(missing_ok=True)

    def importers(self, name: str) -> list[int]:
        """Living processes that have it open."""
        pids = [int(p.name.rpartition(".")[2]) for p in self.folder.glob(f"{name}.open.*")]
        return [pid for pid in pids if running(pid)]

    def held_bytes(self) -> int:
        """Of all memory whose maker lives, or that some process has open: what a driver keeps."""
        names = [n for n in self.names("mem") if self.alive(n) or self.importers(n)]
        sizes = [self._size(name) for name in names]
        return sum(sizes)

    def _size(self, name: str) -> int:
        try:
            return (self.folder / name).stat().st_size
        except FileNotFoundError:  # freed meanwhile
            return 0

    def lacks(self) -> frozenset[str]:
        """What all processes' devices lack (see ``FakeCuda``)."""
        try:
            return frozenset((self.folder / _LACKS).read_text(encoding="utf-8").split())
        except FileNotFoundError:
            return frozenset()

    def names(self, kind: str) -> list[str]:
        """What there is of a kind (``mem``, ``event``): for tests that look for leaks."""
        return sorted(p.name for p in self.folder.glob(f"{kind}-*") if ".open." not in p.name)

    # --- events ----------------------------------------------------------------------------------

    def _words(self, name: str) -> memoryview:
        words = self._events.get(name)
        if words is None:
            words = self._events[name] = memoryview(self.map(name)).cast("Q")
        return words

    def record(self, name: str) -> int:
        words = self._words(name)
        words[_RECORDED] += 1
        return int(words[_RECORDED])

    def recorded(self, name: str) -> int:
        return int(self._words(name)[_RECORDED])

    def complete(self, name: str, number: int) -> None:
        words = self._words(name)
        words[_CAME_NS] = time.monotonic_ns()
        words[_COME] = max(int(words[_COME]), number)

    def has_come(self, name: str) -> bool:
        words = self._words(name)
        return bool(words[_COME] >= words[_RECORDED])

    def came_ns(self, name: str) -> int:
        return int(self._words(name)[_CAME_NS])

    def wait(self, name: str, number: int | None) -> None:
        """Until record ``number`` (None: the last one) has come. For ever, as the device would.

        Raises:
            CudaError: the device has failed.
        """
        words = self._words(name)
        wanted = int(words[_RECORDED]) if number is None else number
        while words[_COME] < wanted and self.failure is None:
            time.sleep(_POLL_S)
        if self.failure is not None:
            raise self.failure

    # --- accesses --------------------------------------------------------------------------------

    def begin(self, accesses: Sequence[Access]) -> list[str]:
        """Note queued accesses; returns a token for each."""
        tokens = [secrets.token_hex(8) for _ in accesses]
        if accesses:
            rows = [
                [t, self.pid, a.memory, a.start, a.nbytes, a.kind]
                for t, a in zip(tokens, accesses, strict=True)
            ]
            self._edit(lambda table: table + rows)
        return tokens

    def end(self, tokens: Sequence[str]) -> None:
        if tokens:
            self._edit(lambda table: [row for row in table if row[0] not in tokens])

    def check(self, accesses: Sequence[Access], tokens: Sequence[str]) -> None:
        """A kernel starts: what was queued before it and conflicts with it must be done."""
        before = takewhile(lambda row: row[0] not in tokens, self._table())
        others = [row for row in before if running(row[1])]
        for access in accesses:
            for _, pid, *rest in others:
                other = Access(*rest)
                if access.conflicts(other):
                    what = "written" if other.kind == "w" else "read"
                    raise self.broken(f"{access} while process {pid} has it {what}")

    def pending(self, memory: str) -> list[Access]:
        """What this process has queued on ``memory``."""
        return [
            Access(*row[2:]) for row in self._table() if row[1] == self.pid and row[2] == memory
        ]

    def _table(self) -> list[list[Any]]:
        table: list[list[Any]] = []
        self._edit(lambda now: table.extend(now) or now)  # type: ignore[func-returns-value]
        return table

    def _edit(self, change: Callable[[list[list[Any]]], list[list[Any]]]) -> None:
        fd = os.open(self.folder / _ACCESSES, os.O_RDWR | os.O_CREAT, 0o600)
        with open(fd, "r+b") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            table = change(json.loads(f.read() or b"[]"))
            f.seek(0)
            f.write(json.dumps(table).encode())
            f.truncate()

    # --- broken rules ----------------------------------------------------------------------------

    def broken(self, rule: str) -> RuleBroken:
        """Note it for the test that watches, in whichever process it happened."""
        with open(self.folder / _BROKEN, "a", encoding="utf-8") as f:
            f.write(rule.replace("\n", " ") + "\n")
        return RuleBroken(rule)

    def broken_rules(self) -> list[str]:
        """All that any process has broken so far."""
        path = self.folder / _BROKEN
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


class Stream:
    """Work in order; a failure sticks, as on a device: every later call raises it again."""

    def __init__(self, threaded: bool, failed: Callable[[BaseException], None]) -> None:
        self._error: BaseException | None = None
        self._failed = failed
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="bf-fake-stream", daemon=True)
            self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        if self._thread is not None:
            self._queue.put(work)
        else:
            self._do(work)
            if self._error is not None:
                raise self._error

    def synchronize(self) -> None:
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done.set)
            done.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._do(work)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as exc:
            self._error = self._error or exc
            self._failed(exc)


def running(pid: object) -> bool:
    """Whether the process lives (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def failed(call: str, status: int) -> CudaError:
    """What a call of the double raises."""
    return CudaError(call, status, "status of the double")


def place_of(name: str) -> int:
    """The number of the device that memory or an event is of."""
    return int(name.split("-")[2])


def _maker(name: str) -> int:
    return int(name.split("-")[1])

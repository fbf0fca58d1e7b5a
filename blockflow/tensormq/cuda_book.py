"""The book of a worker's device memory: what consumers must know of it, once, and the marks.

A second, small arena beside the worker's own, named by its incarnation with :data:`DEVICE_BIT` set:
generations and release marks are what they are for host memory. Its data area holds, instead of
tensors:

* a head of words: whether the owner is *closing*, and how long the two exports are;
* the owner's *verdicts*: whose device memory it can open itself (``cuda_verdict``);
* the export of a small *trial* piece, there from the beginning (``cuda_trial``);
* the *export* of the slab: its IPC handle, and one of a READY event per slot.

So no message carries IPC handles, and a consumer opens each once.

Closing before freeing (a rule of CUDA IPC): a consumer that has the slab open holds a shared flock
on the book's file. An owner that wants to free its slab raises the *closing* word, which consumers
look at a few times per second, and waits until it can have the lock for itself. The kernel drops
the lock of a consumer that dies, so nobody waits for the dead.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from blockflow.core.errors import BlockFlowError, RequestError, WireError
from blockflow.core.scarcity import no_room
from blockflow.tensormq.arena import DEVICE_BIT, Arena, ArenaReader, arena_path
from blockflow.tensormq.cuda_api import IPC_HANDLE_BYTES
from blockflow.wire.codec import decode, encode

VERDICTS = 128
"""Owners that one worker can have a verdict on at once."""

VERDICT_BYTES = 128
"""A word, and a reason in the rest."""

_HEAD = 64
_CLOSING, _EXPORT_LENGTH, _TRIAL_LENGTH = range(3)
_VERDICTS_END = _HEAD + VERDICTS * VERDICT_BYTES
_TRIAL_ROOM = 512
_EXPORT_AT = _VERDICTS_END + _TRIAL_ROOM
_LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class Export:
    """What a consumer needs to open a worker's device memory.

    Attributes:
        uuid: of the device. nbytes: of the slab, a multiple of 2 MiB.
        memory: the slab's IPC handle. events: one per slot.
    """

    uuid: str
    nbytes: int
    memory: bytes
    events: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        return encode([self.uuid, self.nbytes, self.memory, b"".join(self.events)])

    @classmethod
    def from_bytes(cls, data: bytes) -> Export:
        """Inverse of :meth:`to_bytes`. Raises WireError."""
        raw = decode(data, max_bytes=len(data), what="device export")
        if type(raw) is not list or [type(x) for x in raw] != [str, int, bytes, bytes]:
            raise WireError("MALFORMED_MESSAGE", "not a device export", where="device book")
        uuid, nbytes, memory, events = raw
        if nbytes <= 0 or len(memory) != IPC_HANDLE_BYTES or len(events) % IPC_HANDLE_BYTES:
            raise WireError("MALFORMED_MESSAGE", "handles of a wrong size", where="device book")
        cuts = range(0, len(events), IPC_HANDLE_BYTES)
        return cls(uuid, nbytes, memory, tuple(events[i : i + IPC_HANDLE_BYTES] for i in cuts))


def make_book(run_dir: Path, incarnation: int, slots: int) -> Arena:
    """The owner's book, with nothing exported yet.

    Raises:
        SystemError_: NO_SPACE; ALREADY_RUNNING when the incarnation has one.
    """
    room = _EXPORT_AT + 256 + (slots + 1) * IPC_HANDLE_BYTES
    return Arena.create(run_dir, incarnation | DEVICE_BIT, room, slots, warm_bytes=room)


def write_export(book: Arena, export: Export) -> None:
    """Of the slab. To be called once, before the first handle is sent."""
    _write(book, export, _EXPORT_AT, _EXPORT_LENGTH)


def write_trial(book: Arena, export: Export) -> None:
    """Of the trial piece, with one event. To be called once, before anybody knows the worker."""
    _write(book, export, _VERDICTS_END, _TRIAL_LENGTH)


def _write(book: Arena, export: Export, at: int, length: int) -> None:
    data = export.to_bytes()
    book.data[at : at + len(data)] = data
    book.data[:_HEAD].cast("Q")[length] = len(data)


def verdict_rows(data: memoryview) -> memoryview:
    """Where the owner's verdicts lie in a book's data area."""
    return data[_HEAD:_VERDICTS_END]


def await_closed(book: Arena, timeout_s: float) -> bool:
    """Tell consumers to close, and wait until all have; False when some has not in time, or nobody
    can tell, since the folder was removed."""
    book.data[:_HEAD].cast("Q")[_CLOSING] = 1
    end = time.monotonic() + timeout_s
    try:
        fd = os.open(
            arena_path(book.run_dir, book.incarnation), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
    except FileNotFoundError:
        return False
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    return False
                time.sleep(_LOOK_S)  # bounded, at the end of a process's life
            else:
                return True
    finally:
        os.close(fd)


class BookReader:
    """A consumer's side; it holds the shared lock until :meth:`unlock`.

    Attributes:
        marks: the mapped arena.

    Raises:
        RequestError: WORKER_LOST: the owner is gone or about to go.
        SystemError_: NO_SPACE: this process has no descriptor or memory left for it.
        WireError: MALFORMED_MESSAGE: not a book.
    """

    def __init__(self, run_dir: Path, incarnation: int) -> None:
        number = incarnation | DEVICE_BIT
        self._incarnation = incarnation
        self._fd = -1
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(arena_path(run_dir, number), flags)
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self.marks = ArenaReader.open(run_dir, number)
            self._words = self.marks.region()[:_HEAD].cast("Q")
            if self.closing:
                raise self._lost()
        except BlockFlowError:
            self.unlock()
            raise
        except BlockingIOError as exc:  # the owner has the lock for itself
            self.unlock()
            raise self._lost() from exc
        except OSError as exc:
            self.unlock()
            why = f"cannot open the device book: {exc.strerror}"
            raise no_room(exc, why, "device book") or self._lost() from exc

    @property
    def closing(self) -> bool:
        """The owner wants to free its slab."""
        return bool(self._words[_CLOSING])

    def export(self) -> Export | None:
        """Of the slab; None while there is none. Raises WireError."""
        return self._read(_EXPORT_AT, _EXPORT_LENGTH)

    def trial(self) -> Export | None:
        """Of the trial piece; None where the owner could make none. Raises WireError."""
        return self._read(_VERDICTS_END, _TRIAL_LENGTH)

    def _read(self, at: int, length: int) -> Export | None:
        nbytes = self._words[length]
        if not nbytes:
            return None
        return Export.from_bytes(bytes(self.marks.region()[at : at + nbytes]))

    def unlock(self) -> None:
        """What was opened is closed here. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _lost(self) -> RequestError:
        return RequestError(
            "WORKER_LOST", f"the device memory of incarnation {self._incarnation} is gone"
        )

"""One shared-memory file per process: its owner writes it, consumers map it read-only.

Two files in the instance's private directory:

``arena-<incarnation>``
    A page-aligned header (:data:`HEADER_WORDS`, then a generation word per slot) and the data. Only
    the owner writes it; consumers map it PROT_READ, so that no consumer can change a tensor or the
    book.
``marks-<incarnation>``
    slots x lanes words of 32 bits. A consumer writes into its lane which generation it has opened
    (``leases.opened_mark``), and the generation itself when it has released it; the owner sweeps
    them. This is all that consumers can write.

The data area's *capacity* is virtual. What is handed out for the first time is committed first with
``posix_fallocate`` and pre-faulted, so that a full file system is a typed error and never the
SIGBUS that an overcommitted mapping gives, and so that memory in use is the high-water mark of what
was needed at once: an idle arena costs its minimum, and a loaded one stays flat. What a burst has
left is given back when nobody needs it (:meth:`Arena.give_back`).

Marks and generations are aligned words, stored and loaded whole. Data is published through a socket
message (whose system calls order it), and a mark is stored after the consumer has used what it
read.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

from blockflow.core.errors import RequestError, SystemError_, WireError
from blockflow.core.scarcity import SCARCE, no_room
from blockflow.tensormq.arena_files import checked_size, refused
from blockflow.tensormq.leases import opened_mark

MAGIC = int.from_bytes(b"BFarena\x00", "little")
LAYOUT_VERSION = 2
HEADER_WORDS = 10
"""u64: magic, layout version, incarnation, capacity, slots, lanes, data offset, committed, taken,
readers."""

DEVICE_BIT = 1 << 63
"""Set in a handle's incarnation (and in an arena's name) when the tensor lies in device memory: see
``cuda_book``. Incarnations themselves are far smaller."""

_COMMITTED, _TAKEN, _READERS = 7, 8, 9
_PAGE = mmap.PAGESIZE
_STEP = 256 * 1024
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23

_log = logging.getLogger("blockflow.tensormq")


def arena_path(run_dir: Path, incarnation: int) -> Path:
    return run_dir / f"arena-{incarnation}"


def marks_path(run_dir: Path, incarnation: int) -> Path:
    return run_dir / f"marks-{incarnation}"


def data_offset(slots: int) -> int:
    """Where the data starts: after the header and the generation words, on a page."""
    return _round_up(HEADER_WORDS * 8 + 4 * slots)


class Arena:
    """The owner's mapping.

    Attributes:
        data: the data area, writable; what is not committed must not be touched.
        generations: one word per slot: the generation under which it may be read now, 0 = none.
        marks: the release marks, ``[slot * lanes + lane]``.
        committed: bytes of ``data`` that are backed by memory.
    """

    def __init__(
        self, run_dir: Path, incarnation: int, capacity: int, slots: int, lanes: int
    ) -> None:
        self.run_dir = run_dir
        self.incarnation = incarnation
        self.capacity = _round_up(capacity)
        self.slots = slots
        self.lanes = lanes
        self.committed = 0
        self._least = 0
        self.data = self.generations = self.marks = self._words = _nothing()
        self._start = data_offset(slots)
        self._files: list[Path] = []  # what this owner has made, and may remove
        self._fd = -1
        self._mapping: mmap.mmap | None = None

    @classmethod
    def create(
        cls,
        run_dir: Path,
        incarnation: int,
        capacity: int,
        slots: int,
        lanes: int = 32,
        warm_bytes: int = _STEP,
    ) -> Arena:
        """Make and map the two files.

        Args:
            run_dir: the instance's private directory.
            incarnation: of the owner; names the files.
            capacity: bytes of the data area, rounded up to whole pages.
            slots: descriptors.
            lanes: release marks per slot.
            warm_bytes: how much of the data area to commit at once, and for good.

        Raises:
            SystemError_: NO_SPACE; ALREADY_RUNNING when the incarnation has an arena.
        """
        if capacity < 1 or slots < 1 or lanes < 1 or incarnation < 1:
            raise ValueError(f"arena of {capacity} bytes, {slots} slots, {lanes} lanes")
        arena = cls(run_dir, incarnation, capacity, slots, lanes)
        try:
            arena._map()
            arena.commit(min(warm_bytes, arena.capacity))
            arena._least = arena.committed
        except BaseException:
            arena.close()
            raise
        return arena

    def _map(self) -> None:
        length = self._start + self.capacity
        marks_bytes = _round_up(4 * self.slots * self.lanes)
        try:
            self._fd = self._create_file(arena_path(self.run_dir, self.incarnation))
            os.ftruncate(self._fd, length)
            os.posix_fallocate(self._fd, 0, self._start)
            mapping = mmap.mmap(self._fd, length, mmap.MAP_SHARED)
            fd = self._create_file(marks_path(self.run_dir, self.incarnation))
            try:
                os.posix_fallocate(fd, 0, marks_bytes)
                marks = mmap.mmap(fd, marks_bytes, mmap.MAP_SHARED)
            finally:
                os.close(fd)
        except OSError as exc:
            raise self._error(exc) from exc
        self._mapping = mapping
        whole = memoryview(mapping)
        self._words = whole[: HEADER_WORDS * 8].cast("Q")
        self.generations = whole[HEADER_WORDS * 8 : HEADER_WORDS * 8 + 4 * self.slots].cast("I")
        self.data = whole[self._start :]
        self.marks = memoryview(marks)[: 4 * self.slots * self.lanes].cast("I")
        header = [
            LAYOUT_VERSION,
            self.incarnation,
            self.capacity,
            self.slots,
            self.lanes,
            self._start,
        ]
        for i, word in enumerate(header, start=1):
            self._words[i] = word
        self._words[0] = MAGIC

    def commit(self, end: int) -> None:
        """Back ``data[:end]`` with memory: a no-op below the high-water mark.

        Raises:
            SystemError_: NO_SPACE; what was committed before stays usable.
        """
        if end <= self.committed:
            return
        if self._mapping is None or end > self.capacity:
            raise ValueError(f"commit of {end} bytes in a closed arena or one of {self.capacity}")
        start = self.committed
        wanted = min(self.capacity, max(_round_up(end), start + _STEP))
        try:
            os.posix_fallocate(self._fd, self._start + start, wanted - start)
        except OSError as exc:
            needed = _round_up(end)
            if exc.errno not in SCARCE or needed == wanted:
                raise self._error(exc) from exc
            try:
                os.posix_fallocate(self._fd, self._start + start, needed - start)
            except OSError as last:
                raise self._error(last) from last
            wanted = needed
        self._populate(self._mapping, start, wanted)
        self.committed = wanted
        self._words[_COMMITTED] = wanted

    def give_back(self, end: int) -> None:
        """Let go of the memory behind ``data[end:]``, where nothing lies that anybody may still
        read: it becomes a hole, and is committed anew when it is needed again."""
        before, keep = self.committed, max(_round_up(end), self._least)
        if self._mapping is None or keep >= before:
            return
        # First the word: whatever a handle says, from now on nobody looks there.
        self.committed = self._words[_COMMITTED] = keep
        try:
            self._mapping.madvise(mmap.MADV_REMOVE, self._start + keep, self.capacity - keep)
        except OSError as exc:  # a file system without holes
            self.committed = self._words[_COMMITTED] = self._least = before
            _log.info("the arena keeps what it has: %s", exc.strerror)

    def tell_taken(self, slots: int) -> None:
        """So many slots are not to be had now."""
        self._words[_TAKEN] = slots

    def tell_readers(self, readers: int) -> None:
        """So many receivers get what lies here, each at its own pace."""
        self._words[_READERS] = readers

    def _populate(self, mapping: mmap.mmap, start: int, end: int) -> None:
        """Fault the pages in now: a first write into fresh pages is several times slower."""
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, self._start + start, end - start)
        except OSError:  # a kernel before 5.14; the pages are allocated, so touching them is safe
            for at in range(start, end, _PAGE):
                self.data[at] = 0

    def close(self) -> None:
        """Remove the files and drop the mapping. Idempotent.

        Tensors may still look into the mapping (``mmap.close`` would raise BufferError): only the
        reference is dropped, and the memory goes when the last view does.
        """
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._mapping = None
        self.data = self.generations = self.marks = self._words = _nothing()

    def _create_file(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._files.append(path)
        return fd

    def _error(self, exc: OSError) -> SystemError_:
        where = str(arena_path(self.run_dir, self.incarnation))
        return refused(exc, self.incarnation, self.capacity, where)


class ArenaReader:
    """A consumer's mapping of another process's arena.

    Attributes:
        capacity: bytes of the data area.
        slots, lanes: size of the book.
        marks: this consumer's (and all others') release marks, writable.
        held: slots that this process has taken and not released.
    """

    def __init__(self, mapping: mmap.mmap, marks: mmap.mmap, incarnation: int, where: str) -> None:
        whole = memoryview(mapping)
        words = whole[: HEADER_WORDS * 8].cast("Q")
        magic, version, owner, capacity, slots, lanes, start, *_ = words
        if (
            magic != MAGIC
            or version != LAYOUT_VERSION
            or owner != incarnation
            or not 1 <= slots <= 2**20
            or not 1 <= lanes <= 256
            or start != data_offset(slots)
            or len(whole) != start + capacity
            or len(marks) < 4 * slots * lanes
        ):
            raise WireError(
                "MALFORMED_MESSAGE",
                f"not an arena of incarnation {incarnation} in layout {LAYOUT_VERSION}",
                where=where,
                hint="run the same BlockFlow release in all processes",
            )
        self.capacity = capacity
        self.slots = slots
        self.lanes = lanes
        self.marks = memoryview(marks)[: 4 * slots * lanes].cast("I")
        self.held = 0
        self._mapping = mapping
        self._words = words
        self._generations = whole[HEADER_WORDS * 8 : HEADER_WORDS * 8 + 4 * slots].cast("I")
        self._start = start
        self._data = whole[start:]
        self._populated = 0

    @classmethod
    def open(cls, run_dir: Path, incarnation: int) -> ArenaReader:
        """Map the arena of ``incarnation``.

        Raises:
            RequestError: WORKER_LOST: there is no such arena (any more).
            WireError: MALFORMED_MESSAGE: not an arena, or not this user's private files.
            SystemError_: NO_SPACE: this process has no descriptor or memory left for it.
        """
        where = str(arena_path(run_dir, incarnation))
        try:
            fd = os.open(
                arena_path(run_dir, incarnation), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
            try:
                mapping = mmap.mmap(
                    fd, checked_size(fd, HEADER_WORDS * 8, where), mmap.MAP_SHARED, mmap.PROT_READ
                )
            finally:
                os.close(fd)
            fd = os.open(marks_path(run_dir, incarnation), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                marks = mmap.mmap(fd, checked_size(fd, HEADER_WORDS * 8, where), mmap.MAP_SHARED)
            finally:
                os.close(fd)
        except FileNotFoundError as exc:
            raise RequestError(
                "WORKER_LOST", f"the arena of incarnation {incarnation} is gone", where=where
            ) from exc
        except OSError as exc:
            why = f"cannot map the arena: {exc.strerror}"
            scarce = no_room(exc, why, where)
            raise scarce or WireError("MALFORMED_MESSAGE", why, where=where) from exc
        return cls(mapping, marks, incarnation, where)

    def current(self, slot: int, lane: int, generation: int) -> bool:
        """Whether a handle names what the slot holds now and has not been released by this lane."""
        return (
            slot < self.slots
            and lane < self.lanes
            and self._generations[slot] == generation
            and self.marks[slot * self.lanes + lane] != generation
        )

    def take(self, slot: int, lane: int, generation: int) -> bool:
        """Whether a handle may be opened; then its lane says so.

        Marked first and looked at once more: the owner revokes first and looks at the marks later.
        """
        if not self.current(slot, lane, generation):
            return False
        self.marks[slot * self.lanes + lane] = opened_mark(generation)
        self.held += 1
        if self._generations[slot] == generation:
            return True
        self.release(slot, lane, generation)
        return False

    def spare(self) -> int | None:
        """Slots that are to be had, less those that are held here: a reader that has more of them
        than are left has more than its share, and others may go without. None: there are no others.
        As of the owner's last look.
        """
        words = self._words
        if words[_READERS] < 2:
            return None
        return self.slots - min(words[_TAKEN], self.slots) - self.held

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """Read-only memory, or None when it is not within what the owner has committed.

        Beyond that mark lie holes of a sparse file, where even a read may end in SIGBUS. The owner
        lowers the mark, too, but never below a tensor that is leased.
        """
        end = offset + nbytes
        committed = min(self._words[_COMMITTED], self.capacity)
        if committed < self._populated:
            self._populated = committed
        return None if end > committed else self._data[offset:end]

    def region(self) -> memoryview:
        """All data memory that the owner has committed by now; stays where it is."""
        return self._data[: min(self._words[_COMMITTED], self.capacity)]

    def release(self, slot: int, lane: int, generation: int) -> None:
        """Write this lane's mark; the slot may be reused at once."""
        self.marks[slot * self.lanes + lane] = generation
        self.held -= 1

    def map_ahead(self, end: int) -> None:
        """Map all up to the end of a tensor that was taken, in one go instead of a fault per page
        or few. Not beyond: what the owner is just giving back would be allocated once more."""
        if end <= self._populated:
            return
        first = (self._start + self._populated) // _PAGE * _PAGE
        try:
            self._mapping.madvise(_MADV_POPULATE_READ, first, self._start + end - first)
        except OSError:
            _log.debug("no MADV_POPULATE_READ here: pages are mapped as they are read")
        self._populated = end


def _nothing() -> memoryview:
    return memoryview(bytearray())


def _round_up(n: int) -> int:
    return -(-n // _PAGE) * _PAGE

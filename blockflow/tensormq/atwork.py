"""Which requests a worker executes at this moment, in a small shared file that outlives it.

``work-<incarnation>`` in the instance's private directory. The worker writes it just before a
forward and clears it after; a message would come too late, for a process that dies cannot send one.
The Manager reads it: while the worker lives, to end a forward that takes too long even if the
process can do nothing any more, and once it is dead, to know whose requests it died with.

A header (:data:`HEADER_WORDS`), then lanes, one per forward that may be under way at once:
:data:`LANE_WORDS` (start on the monotonic clock, 0 = nothing; stage; requests) and room for their
records. A record is request id, attempt and hop: :data:`RECORD_BYTES`. The start is written last
and cleared first. Words are stored and loaded whole, records are not: a reader of a live worker may
see those of the next batch, one of a dead worker sees what it died with.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockflow.core.limits import MAX_DEADLINE_MS
from blockflow.core.scarcity import failure
from blockflow.wire.data import REQUEST_ID_BYTES, Item

MAGIC = int.from_bytes(b"BFwork\x00\x00", "little")
LAYOUT_VERSION = 1
HEADER_WORDS = 8
"""u64: magic, layout version, incarnation, lanes, records per lane; the rest is 0."""
LANE_WORDS = 4
"""u64: start in ns of the monotonic clock (0 = idle), stage, number of requests, 0."""

_RECORD = struct.Struct(f"{REQUEST_ID_BYTES}s2B")
RECORD_BYTES = _RECORD.size
MAX_RECORDS = 1024
"""Requests of one batch that are named; of a larger one, the first."""
WAITS_NS = 2 * MAX_DEADLINE_MS * 1_000_000
"""A device comes to a batch sooner, or nobody can be waiting for it any more."""
DEFAULT_LANES = 4
NO_LANE = -1


def work_path(run_dir: Path, incarnation: int) -> Path:
    return run_dir / f"work-{incarnation}"


def record(item: Item) -> bytes:
    """One request at one node: id, attempt, hop."""
    return _RECORD.pack(item.request_id, item.attempt, item.hop)


@dataclass(frozen=True, slots=True)
class Work:
    """One forward under way: ``records`` of its requests (:func:`record`), ``count`` of all. Its
    start lies in the future while it waits for a device."""

    stage: int
    started_ns: int
    count: int
    records: tuple[bytes, ...]


def _lane_bytes(records: int) -> int:
    """Words and records of one lane; the next one begins on a word."""
    return LANE_WORDS * 8 + -(-records * RECORD_BYTES // 8) * 8


class AtWork:
    """The worker's side: one writer process, a lane per engine thread at work.

    The file is removed with the process's other leavings
    (:func:`~blockflow.tensormq.janitor.remove_leavings`).

    Args:
        mapping: of the whole file.
        lanes, records: its size.
    """

    def __init__(self, mapping: mmap.mmap, lanes: int, records: int) -> None:
        self._mapping = mapping
        self._words = memoryview(mapping)[: len(mapping) // 8 * 8].cast("Q")
        self._records = records
        self._stride = _lane_bytes(records)
        # Taken and given back by single operations of a deque: threads need no lock for it.
        self._free = deque(range(lanes))

    @classmethod
    def create(
        cls, run_dir: Path, incarnation: int, records: int, lanes: int = DEFAULT_LANES
    ) -> AtWork:
        """Make the file.

        Args:
            run_dir: the instance's private directory.
            incarnation: of this worker.
            records: most requests of a batch; capped at :data:`MAX_RECORDS`.
            lanes: forwards that may be under way at once.

        Raises:
            SystemError_: NO_SPACE, or INTERNAL.
        """
        path = work_path(run_dir, incarnation)
        records = max(1, min(records, MAX_RECORDS))
        size = HEADER_WORDS * 8 + lanes * _lane_bytes(records)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)  # a full file system is an error now, not a SIGBUS
                mapping = mmap.mmap(fd, size, mmap.MAP_SHARED)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
        except OSError as exc:
            what, where = f"cannot make the at-work file: {exc.strerror}", str(path)
            raise failure(exc, what, where) from exc
        made = cls(mapping, lanes, records)
        for i, word in enumerate((LAYOUT_VERSION, incarnation, lanes, records), start=1):
            made._words[i] = word
        made._words[0] = MAGIC
        return made

    def begin(self, stage: int, items: Sequence[Item], later_ns: int = 0) -> int:
        """A forward of ``items`` starts now, or ``later_ns`` from now unless :meth:`renew` says
        when.

        Returns:
            The lane, for :meth:`restart` and :meth:`end`; :data:`NO_LANE` when all are taken.
        """
        try:
            lane = self._free.popleft()
        except IndexError:
            return NO_LANE
        self.restart(lane, stage, items, later_ns)
        return lane

    def restart(self, lane: int, stage: int, items: Sequence[Item], later_ns: int = 0) -> None:
        """The same engine thread goes on with other requests (a failed batch, one by one)."""
        if lane == NO_LANE:
            return
        at = HEADER_WORDS * 8 + lane * self._stride
        word = at // 8
        words = self._words
        words[word] = 0
        count, start = len(items), at + LANE_WORDS * 8
        for item in items if count <= self._records else items[: self._records]:
            _RECORD.pack_into(self._mapping, start, item.request_id, item.attempt, item.hop)
            start += RECORD_BYTES
        words[word + 1] = stage
        words[word + 2] = count
        words[word] = time.monotonic_ns() + later_ns

    def renew(self, lane: int) -> None:
        """All who are named stay at work, and have the time of a forward once more."""
        if lane != NO_LANE:
            self._words[(HEADER_WORDS * 8 + lane * self._stride) // 8] = time.monotonic_ns()

    def end(self, lane: int) -> None:
        """The forward is over."""
        if lane != NO_LANE:
            self._words[(HEADER_WORDS * 8 + lane * self._stride) // 8] = 0
            self._free.append(lane)


class AtWorkReader:
    """Another process's file, mapped for reading; it can be read when the file is gone, too."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._words = memoryview(mapping)[: len(mapping) // 8 * 8].cast("Q")
        self._lanes, self._records = self._words[3], self._words[4]

    @classmethod
    def open(cls, run_dir: Path, incarnation: int) -> AtWorkReader | None:
        """Map it; None when there is no such file, or it is not one of a worker of ours."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(work_path(run_dir, incarnation), flags)
            try:
                st = os.fstat(fd)
                if not stat.S_ISREG(st.st_mode) or st.st_size < HEADER_WORDS * 8:
                    return None
                mapping = mmap.mmap(fd, st.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
            finally:
                os.close(fd)
        except OSError:
            return None
        magic, version, owner, lanes, records = memoryview(mapping)[:40].cast("Q")
        size = HEADER_WORDS * 8 + lanes * _lane_bytes(records)
        found = (magic, version, owner, size)
        if found != (MAGIC, LAYOUT_VERSION, incarnation, len(mapping)) or records > MAX_RECORDS:
            return None  # another release's, or its maker was killed before it was whole
        return cls(mapping)

    def read(self) -> list[Work]:
        """The forwards under way, by start."""
        found = []
        for lane in range(self._lanes):
            at = HEADER_WORDS * 8 + lane * _lane_bytes(self._records)
            started, stage, count = self._words[at // 8 : at // 8 + 3]
            if not started:
                continue
            start = at + LANE_WORDS * 8
            stop = start + RECORD_BYTES * min(count, self._records)
            records = tuple(
                self._mapping[i : i + RECORD_BYTES] for i in range(start, stop, RECORD_BYTES)
            )
            if self._words[at // 8] == started:  # or the forward has ended while it was read
                found.append(Work(stage, started, count, records))
        return sorted(found, key=lambda w: w.started_ns)

"""StateStore: the desired state on disk, so that a restarted control plane deploys it again.

Two generations of one small JSON file, each with a checksum, in a folder that one control plane
locks. A save is temp file + fsync + rename + fsync of the folder; the former generation is kept.
A torn or altered current file falls back to the previous one, with a warning; when neither can be
read, the answer is STATE_CORRUPT: the system is never silently empty. What was given out under the
lost one is not given again: the previous generation is always what the store held one save before,
and one save's worth of numbers is left out. While an update is under way a small file says so, so
that a control plane that was killed in its middle can tell.

On a disk without room no epoch can be stored, but processes that die can be replaced: numbers are
reserved long before the last are given out, and a successor goes on with those that are left.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blockflow.control import pending
from blockflow.control.crashes import FILE as CRASHES
from blockflow.control.discarded import put_aside
from blockflow.control.disk import Patience, patiently
from blockflow.control.documents import seal, take_lock, unusable, write_file
from blockflow.control.generations import (
    CURRENT,
    MISSING,
    PREVIOUS,
    latest_generation,
    read_generation,
    sealed,
)
from blockflow.control.numbers import KINDS, NONE, NumbersFile, Span
from blockflow.control.stored import FORMAT, NUMBER_STRIDE, PastEpoch, StoredState
from blockflow.core.errors import SystemError_
from blockflow.tensormq.janitor import same_file

log = logging.getLogger("blockflow.control")

LOCK = "lock"
_ALL = (CURRENT, PREVIOUS, CRASHES)
LOW = NUMBER_STRIDE // 2
"""So few numbers left: others are reserved. A disk that fills up leaves as many for successors."""

_RETRY_NS = 5_000_000_000

CORRUPT_HINT = (
    "start the release that wrote it, restore one of the files from a backup, or start with "
    "--fresh and post the topology again (the files are kept)"
)


class StateStore:
    """The locked state folder of one control plane. Not thread-safe: the Manager owns it.

    Args:
        root: the folder.
        succeeds: a Manager was here that has died, and what it ran is served: then a state that
            cannot be read is put aside like a broken one, and the former one does.

    Raises (constructor):
        SystemError_: ALREADY_RUNNING when another process holds the folder; STATE_CORRUPT when no
            generation can be read; STATE_UNUSABLE when it cannot be used; NO_SPACE when it is full.

    Attributes:
        patience: whether its disk is waited for, for any thread.
    """

    patience: Patience
    _lock: int
    _epochs = _found = _scarce = ""
    _spans: dict[str, Span]
    _left: dict[str, Span]
    _file: NumbersFile | None
    _retry_ns = 0

    def __init__(self, root: Path | str, *, succeeds: bool = False) -> None:
        self._succeeds = succeeds
        self._open(root)
        try:
            self._state = self._load()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def state(self) -> StoredState:
        return self._state

    @property
    def warning(self) -> str:
        """What was found at the start, or holds at present, and should be known; "" = nothing. How
        the epoch in force came about is told until the next one is stored."""
        return "; ".join(filter(None, (self._epochs, self._found, self._scarce)))

    def close(self) -> None:
        """Give the folder free. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @patiently
    def save(self, state: StoredState) -> None:
        """Make ``state`` the current generation, durably; on an error the old one stays as it is.

        Raises:
            SystemError_: NO_SPACE when the disk is full, STATE_UNUSABLE when it cannot be written,
                or would be too large to be read, ALREADY_RUNNING when the lock was removed and
                another control plane has taken it.
        """
        try:
            state, data = sealed(state)
        except ValueError as e:
            hint = "post a smaller topology; the stored state is unchanged"
            raise SystemError_(
                "STATE_UNUSABLE", f"too large to be stored: {e}", where=str(self.root), hint=hint
            ) from e
        temp, spare = self.root / f".{CURRENT}.new", self.root / f".{PREVIOUS}.new"
        try:
            self._keep_lock()
            write_file(temp, data, sync=True)
            if former := self._copy_former(spare):
                os.replace(spare, self.root / PREVIOUS)
            os.replace(temp, self.root / CURRENT)
            try:
                self._sync_folder()
            except OSError:
                if former:  # it was told as not stored: the next start must not deploy it
                    os.replace(self.root / PREVIOUS, self.root / CURRENT)
                raise
        except OSError as e:
            for path in (temp, spare):
                with suppress(OSError):
                    os.unlink(path)
            raise unusable(e, self.root) from e
        self._state, self._scarce = state, ""

    def tend(self, now_ns: int) -> None:
        """Where nothing could be stored, try again now and then: the warning shall go when its
        cause does. Call it often."""
        if self._scarce and now_ns >= self._retry_ns:
            self._retry_ns = now_ns + _RETRY_NS
            with suppress(SystemError_):
                self.save(self._state)

    def commit(
        self,
        epoch: int,
        posted: Mapping[str, Any],
        topology: Mapping[str, Any],
        digests: Mapping[str, str] | None = None,
        how: str = "system-update",
    ) -> None:
        """Store a new epoch; the reserved numbers stay. Raises as :meth:`save`.

        Args:
            epoch: its number.
            posted: the body as it was posted.
            topology: its normalised form.
            digests: of the artifacts that it means, by block of the repository.
            how: kind of the update.
        """
        when = datetime.now(UTC).isoformat(timespec="seconds")
        past = PastEpoch(epoch, how, when, posted, dict(digests or {}))
        self.save(self._state.committed(past, topology))
        self._epochs = ""

    @patiently
    def begin(self, epoch: int) -> None:
        """An update to ``epoch`` is under way."""
        self._pending = epoch
        pending.begin(self.root, epoch)

    @patiently
    def ended(self, epoch: int) -> None:
        """The update to ``epoch`` has ended, one way or the other. Where another one has begun in
        the meantime, that is the one to be told of."""
        if epoch == self._pending:
            pending.ended(self.root)

    def warn(self, text: str) -> None:
        """Add something to :attr:`warning`."""
        log.warning("%s: %s", self.root, text)
        self._found = f"{self._found}; {text}" if self._found else text

    def attend(self, run_dir: Path) -> None:
        """Write down in ``run_dir`` what is given out from now on, for a successor; and where no
        numbers can be reserved, go on with what a predecessor in the same one has left."""
        self._file = NumbersFile(run_dir)
        self._left = self._file.read()
        # They are reserved, though the state may have been put back to one that does not say so.
        last = {kind: span.end - 1 for kind, span in self._left.items()}
        if last:
            self._state = self._state.beyond(**last, epoch=0)
        self._note()

    def take_incarnation(self) -> int:
        """A number that no worker ever had, higher than all before it.

        Saves now and then. Raises as :meth:`save` when that fails and no number is left.
        """
        return self._take("incarnation")

    def take_stage(self) -> int:
        """A stage number that was never used, likewise."""
        return self._take("stage")

    def epoch_after(self, epoch: int) -> int:
        """The number for the topology that follows ``epoch``; no other one ever had it in force."""
        return max(epoch + 1, self._state.next_epoch)

    def skip(self, *, incarnation: int, stage: int, epoch: int) -> None:
        """These numbers are in use, whatever the state says: give higher ones only. The next save
        stores that in both generations, before any number is given."""
        self._state = self._state.beyond(incarnation=incarnation, stage=stage, epoch=epoch)
        self._spans.clear()
        used = {"incarnation": incarnation, "stage": stage}
        self._left = {kind: span.after(used[kind]) for kind, span in self._left.items()}

    @patiently
    def discard(self, told: Sequence[str] = _ALL) -> None:
        """Start from epoch 0 on purpose; files that tell of something (``told``) are kept under
        other names. Incarnations and stages go on where a readable state left them."""
        put_aside(self.root, told)
        self._state = StoredState(
            next_incarnation=self._state.next_incarnation, next_stage=self._state.next_stage
        )
        self.save(self._state)
        pending.ended(self.root)
        self._epochs = self._found = ""
        self._spans.clear()

    @classmethod
    def open_fresh(cls, root: Path | str) -> StateStore:
        """Open a folder and discard what it holds, even if that cannot be read."""
        store = cls.__new__(cls)
        store._succeeds = False
        store._open(root)
        try:
            try:
                store._state = store._load()
            except SystemError_ as e:
                log.warning("discarding unreadable state: %s", e)
                store._state = StoredState()
                store.discard()
            else:
                store.discard(_ALL if store._state.epoch else (CRASHES,))
        except BaseException:
            os.close(store._lock)
            raise
        return store

    def _open(self, root: Path | str) -> None:
        self.root = Path(root)
        self.patience = Patience(f"the state directory {self.root}")
        self._spans, self._left, self._file = {}, {}, None
        self._pending = 0
        self._lock = self._acquire()

    def _take(self, kind: str) -> int:
        # Numbers are reserved on disk by the thousand, so that a launch costs no fsync and a crash
        # wastes a few numbers instead of giving one out twice.
        span = self._spans.get(kind, NONE)
        if len(span) <= LOW:
            span = self._reserved(kind, span)
        self._spans[kind] = Span(span.next + 1, span.end)
        self._note()
        return span.next

    def _reserved(self, kind: str, span: Span) -> Span:
        """More numbers than ``span``; where none can be reserved, what there is must do."""
        key = f"next_{kind}"
        ceiling: int = getattr(self._state, key)
        # What lies between an end and the ceiling is somebody else's.
        first = span.next if span.end == ceiling else ceiling
        more: dict[str, Any] = {key: first + NUMBER_STRIDE}
        try:
            self.save(replace(self._state, **more))
        except SystemError_ as e:
            rest = span or self._left.pop(kind, NONE)
            if not rest:
                raise
            if not self._scarce:
                self._scarce = f"{e.message}; new processes get numbers that were reserved before"
                log.warning("%s: %s", self.root, self._scarce)
            return rest
        self._left.pop(kind, None)  # lower ones than these
        return Span(first, first + NUMBER_STRIDE)

    def _note(self) -> None:
        """Write down what is left, before the number that was taken is used."""
        if self._file is None:
            return
        try:
            self._file.write({k: self._spans.get(k) or self._left.get(k, NONE) for k in KINDS})
        except OSError as e:
            log.error("what numbers are left cannot be written down: %s", e)
            self._file = None

    @patiently
    def _acquire(self) -> int:
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            return take_lock(self.root / LOCK)
        except OSError as e:
            raise unusable(e, self.root) from e

    def _keep_lock(self) -> None:
        """Who removes the lock file, or all of the folder, lets another control plane in; then that
        one has it. Otherwise it is made again."""
        if same_file(self._lock, self.root / LOCK):
            return
        old, self._lock = self._lock, self._acquire()
        try:
            os.write(self._lock, os.pread(old, 64, 0))  # its mark, if it has one
        finally:
            os.close(old)
        log.warning("%s was removed, and is made again", self.root / LOCK)

    @patiently
    def _load(self) -> StoredState:
        try:
            state, found = latest_generation(self.root, strict=not self._succeeds)
        except OSError as e:
            raise unusable(e, self.root) from e
        if state is not None:
            told: list[str] = []
            if found:
                state = state.fallen_back()
                told.append(
                    f"{CURRENT} cannot be used ({found[CURRENT]}); "
                    f"the previous generation (epoch {state.epoch}) is in force"
                )
                with suppress(OSError):  # a later save tells of it
                    put_aside(self.root, [CURRENT])
            told.append(pending.interrupted(self.root, state.epoch))
            for text in filter(None, told):
                log.warning("%s: %s", self.root, text)
            self._epochs = "; ".join(filter(None, told))
            return state
        if set(found.values()) == {MISSING} and self._is_new():
            return StoredState()
        raise SystemError_(
            "STATE_CORRUPT",
            f"no generation of the state can be used: {CURRENT}: {found[CURRENT]}; "
            f"{PREVIOUS}: {found[PREVIOUS]}",
            where=str(self.root),
            hint=CORRUPT_HINT,
        )

    def _copy_former(self, spare: Path) -> bool:
        """Make ``spare`` the state before this save; False: there is none, the folder is new.

        It is the current file (by a link: there is one at any moment), unless that has been broken
        or exchanged meanwhile. A broken one must not push the good previous one out, nor must that
        one stay: it would fall behind the numbers by more than one save.
        """
        with suppress(FileNotFoundError):
            os.unlink(spare)
        try:
            there = read_generation(self.root / CURRENT).numbers == self._state.numbers
        except (OSError, ValueError):
            there = False
        if there:
            with suppress(OSError):  # a file system without links: FAT, a folder of another machine
                os.link(self.root / CURRENT, spare)
                return True
        elif self._is_new():
            return False
        write_file(spare, seal(self._state.to_dict(), FORMAT), sync=True)
        return True

    def _is_new(self) -> bool:
        """Nothing was ever stored here: the lock file gets its mark with the first save."""
        return os.fstat(self._lock).st_size == 0

    def _sync_folder(self) -> None:
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        if self._is_new():
            os.write(self._lock, b"blockflow state\n")  # from now on missing files are a loss
            os.fsync(self._lock)

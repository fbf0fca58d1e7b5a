"""Run directories: made private, locked while their system lives, swept when it no longer does.

A run directory is ``<root>/<instance>/`` with everything that a running system keeps in the file
system: sockets, arenas, and ``lock``. Whoever holds the flock on ``lock`` is alive: the kernel
drops it with the process, however that ended, and no process id can be mistaken for another one's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path

from blockflow.core.errors import RequestError
from blockflow.core.scarcity import no_room
from blockflow.core.text import has_half
from blockflow.tensormq.arena import DEVICE_BIT, arena_path, marks_path
from blockflow.tensormq.atwork import work_path

ROOT_ENV = "BLOCKFLOW_RUN_ROOT"
LOCK_NAME = "lock"
MAX_PATH_CHARS = 100
"""Longest path of a socket file (the kernel's limit for a unix socket is 107)."""

_BELOW_ROOT = 1 + 8 + 1 + 20  # /<instance>/<socket>, the longest being d<14 digits>.sock

MAX_ROOT_BYTES = MAX_PATH_CHARS - _BELOW_ROOT
"""Longest path of the folder that run directories are made in."""
_OF_A_PROCESS = re.compile(r"(?:arena|marks|work)-(\d{1,20})|[dg](\d{1,20})\.sock")
_PASSES = 10
_log = logging.getLogger("blockflow.tensormq")


def run_root() -> Path:
    """Where run directories lie: $BLOCKFLOW_RUN_ROOT, else this user's folder in shared memory."""
    chosen = os.environ.get(ROOT_ENV)
    return Path(chosen) if chosen else _default_root()


def _default_root() -> Path:
    shm = Path("/dev/shm")
    return (shm if shm.is_dir() else Path(tempfile.gettempdir())) / f"blockflow-{os.geteuid()}"


def data_socket_path(run_dir: Path, incarnation: int) -> Path:
    return run_dir / f"d{incarnation}.sock"


def grant_socket_path(run_dir: Path, incarnation: int) -> Path:
    """Where a Dispatcher hands memory to clients of its host."""
    return run_dir / f"g{incarnation}.sock"


class RunDir:
    """A run directory of this process; a context manager that removes it.

    Attributes:
        path: the directory, mode 0700.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, root: Path | None = None) -> RunDir:
        """Make and lock a new directory below ``root`` (default :func:`run_root`).

        Raises:
            SystemError_: NO_SPACE.
            RequestError: INVALID_REQUEST when the root is not a private directory of this user, or
                its path is too long for sockets or not UTF-8.
        """
        # Absolute: clients elsewhere are told its addresses.
        root = (run_root() if root is None else root).absolute()
        if len(os.fsencode(root)) > MAX_ROOT_BYTES:
            raise RequestError(
                "INVALID_REQUEST",
                f"{root} is too long: sockets below it would exceed {MAX_PATH_CHARS} characters",
                where=ROOT_ENV,
                hint=f"set {ROOT_ENV} to a shorter path",
            )
        if has_half(str(root)):
            raise RequestError(
                "INVALID_REQUEST",
                f"{root} is not UTF-8, as the addresses of sockets below it have to be",
                where=ROOT_ENV,
                hint=f"set {ROOT_ENV} to another path",
            )
        try:
            while True:
                _make_root(root)  # each time: another system's end may have taken it away
                made = cls._try(root / secrets.token_hex(4))
                if made is not None:
                    return made
        except OSError as exc:
            why = f"cannot make a run directory: {exc.strerror}"
            hint = f"set {ROOT_ENV} to a directory of yours"
            scarce = no_room(exc, why, str(root))
            raise scarce or RequestError(
                "INVALID_REQUEST", why, where=str(root), hint=hint
            ) from exc

    @classmethod
    def of_another(cls, path: Path) -> RunDir:
        """A directory that another process has made, holds and removes."""
        return cls(path, -1)

    @classmethod
    def _try(cls, path: Path) -> RunDir | None:
        """None when the name is taken, or when a sweep took the directory before it was locked."""
        try:
            path.mkdir(mode=0o700)
            fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except (FileExistsError, FileNotFoundError):
            return None
        if _lock(fd) and same_file(fd, path / LOCK_NAME):
            return cls(path, fd)
        os.close(fd)
        return None

    def leave(self) -> None:
        """In a forked process: the directory stays the other's, which holds the lock on."""
        os.close(self._lock_fd)
        self._lock_fd = -1

    def remove(self) -> None:
        """Remove the directory, then let go of the lock. Idempotent. What cannot be removed is told
        and left to the next start's sweep: the end of a system has more to do."""
        if self._lock_fd < 0:
            return
        try:
            _remove_tree(self.path)
        except OSError as exc:
            text = "%s cannot be removed: %s; the next start below %s does that"
            _log.error(text, self.path, exc.strerror, self.path.parent)
        os.close(self._lock_fd)
        self._lock_fd = -1
        for root in self.goes_with()[1:]:
            with contextlib.suppress(OSError):  # others use it
                root.rmdir()

    def goes_with(self) -> list[Path]:
        """What this system's end removes: the directory, and its root once that is empty. A root
        that the user named stays the user's."""
        root = self.path.parent
        return [self.path, root] if root == _default_root() else [self.path]

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def sweep_stale(root: Path | None = None) -> list[Path]:
    """Remove the run directories whose system is gone; returns which.

    A directory is judged by its lock alone. What is not a directory of this user, what is a
    symbolic link, and a directory with contents but without a lock file (not one of ours) is left
    alone; so is all of a root that others may change: they could put a link in its place meanwhile.
    """
    root = run_root() if root is None else root
    removed = []
    try:
        if not _is_private(root.lstat()):
            return []
        entries = list(root.iterdir())
    except OSError:  # there is none, or it is closed to us, which whoever makes it is told
        return []
    for path in entries:
        # Several may sweep at once (systems that start together), and each system's end takes its
        # own directory away: what is gone by now is nobody's to remove.
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if ours and _sweep_one(path):
                removed.append(path)
    return removed


def _is_private(found: os.stat_result) -> bool:
    """A directory of this user, in which nobody else may make or exchange anything."""
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def remove_leavings(run_dir: Path, incarnation: int) -> None:
    """Remove what a dead process left in a live run directory: its arena, its sockets, and
    the file that says what it was at.

    Consumers that have the arena mapped keep what they hold; nobody can map it anew. What cannot be
    removed is told and left: there is more to be done about a death.
    """
    for path in (
        arena_path(run_dir, incarnation),
        marks_path(run_dir, incarnation),
        arena_path(run_dir, incarnation | DEVICE_BIT),
        marks_path(run_dir, incarnation | DEVICE_BIT),
        data_socket_path(run_dir, incarnation),
        grant_socket_path(run_dir, incarnation),
        work_path(run_dir, incarnation),
    ):
        _remove(path)


def remove_strangers(run_dir: Path, known: Collection[int]) -> None:
    """Remove what processes have left that nobody knows any more: all but those in ``known``."""
    for name in os.listdir(run_dir):
        found = _OF_A_PROCESS.fullmatch(name)
        if found is not None and (int(found[1] or found[2]) & ~DEVICE_BIT) not in known:
            _remove(run_dir / name)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        _log.warning("cannot remove %s: %s", path, exc.strerror)


def _sweep_one(path: Path) -> bool:
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        # Killed between making the directory and its lock file, or about to make that: the maker
        # notices and takes another name.
        try:
            path.rmdir()
        except OSError:
            return False
        return True
    except OSError as exc:
        _log.warning("cannot judge %s: %s", path, exc.strerror)
        return False
    try:
        if not _lock(fd):
            return False
        _remove_tree(path)
        return True
    except OSError as exc:
        _log.warning("cannot remove %s: %s", path, exc)
        return False
    finally:
        os.close(fd)


def _remove_tree(path: Path) -> None:
    """Remove a run directory, its lock file last: the next sweep finishes a killed one."""
    for left in reversed(range(_PASSES)):
        try:
            _empty(path)
            (path / LOCK_NAME).unlink(missing_ok=True)
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            # A process that is about to die has made another file, or there was no memory or
            # descriptor for a look: once more.
            if not left:
                raise


def _empty(path: Path) -> None:
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name == LOCK_NAME:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                Path(entry).unlink(missing_ok=True)


def _make_root(root: Path) -> None:
    """The root has a guessable name in a directory open to all users: check whose it is."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    st = os.lstat(root)
    if not stat.S_ISDIR(st.st_mode) or st.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM, "the run root is not a directory of this user", str(root)
        )
    if st.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "other users can write to the run root", str(root))


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def same_file(fd: int, path: Path) -> bool:
    """Whether ``path`` still names the file that was opened as ``fd``."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_ino, here.st_dev) == (there.st_ino, there.st_dev)

"""Weights that the processes of a host hold once: files in the run directory that all of them map.

A worker with replicas puts its block's weights, as it has loaded them, into a file here and
computes from a mapping of it; whoever comes later maps the same pages. What it finds there is not
trusted: each process has loaded the artifact itself, and compares before it lets its own copy go.

* **Making.** A file without a name is reserved (where there is no room, weights stay private; a
  mapping that ends in SIGBUS is never made), filled, locked and only then named: nobody ever sees
  half of one, and a process that is killed meanwhile leaves nothing.
* **Using.** Each mapping holds a shared lock on the file; the kernel drops it with the process.
* **Removing.** Who gets the exclusive lock at once knows that nobody maps the file
  (:func:`remove_unused`).

Mappings are copy-on-write: a block that writes into its weights changes pages of its own.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from blockflow.tensormq.janitor import same_file

FOLDER = "weights"
"""Below the run directory."""

MOST_OF_FREE = 0.5
"""Share of the free memory, and of the file system's free space, that one block's weights may take:
arenas live there, too, and who makes the file has its own copy still."""

_TRIES = 3
"""A file may be named, or go away, between a look for it and the making of another."""

_log = logging.getLogger("blockflow.tensormq")


class WeightFiles:
    """The weights of one run directory.

    Args:
        run_dir: the instance's private directory.
        before: called before a file is made, to give back the memory that is free in this process.
        left: bytes that this process may still take where something limits it, else None.
    """

    def __init__(
        self,
        run_dir: Path,
        before: Callable[[], None] = lambda: None,
        left: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._folder = run_dir / FOLDER
        self._before = before
        self._left = left

    def hold(
        self, key: str, nbytes: int, pieces: Sequence[tuple[int, memoryview]]
    ) -> mmap.mmap | None:
        """A mapping of the file ``key``; it is made of ``pieces`` where there is none.

        Args:
            key: names the file; safe as a file's name.
            nbytes: size of the file, above 0.
            pieces: (offset, bytes, one dimension of them): what a new file holds, zeros in between.

        Returns:
            Memory that others may map as well, for as long as it is referred to, with whatever the
            first of them had to put there; None where it cannot be had.
        """
        path = self._folder / key
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for _ in range(_TRIES):
                found = _found(path, nbytes) or self._made(path, nbytes, pieces)
                if found is not None:
                    return found
        except OSError as exc:
            _log.warning("weights stay private: %s: %s", path.name, exc.strerror)
        return None

    def _made(
        self, path: Path, nbytes: int, pieces: Sequence[tuple[int, memoryview]]
    ) -> mmap.mmap | None:
        """None: somebody else has just named one.

        Raises:
            OSError: no room, or a file system that cannot do this.
        """
        self._before()
        free, left = _free(self._folder), self._left()
        if nbytes > MOST_OF_FREE * (free if left is None else min(free, left)):
            raise OSError(0, f"{nbytes} bytes are more than half of what is free")
        with (
            _opened(self._folder, os.O_DIRECTORY) as folder,
            _opened(self._folder, os.O_TMPFILE | os.O_RDWR) as fd,
        ):
            os.posix_fallocate(fd, 0, nbytes)
            for offset, piece in pieces:
                _write(fd, piece, offset)
            fcntl.flock(fd, fcntl.LOCK_SH)
            try:
                # With a folder's descriptor it is linkat, which alone follows this link.
                os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:
                return None
            return _mapped(fd, nbytes)


def remove_unused(run_dir: Path) -> None:
    """Remove the weights that no living process maps. What cannot be looked at for now (no
    descriptor is left, say) stays until the next time."""
    with suppress(OSError), os.scandir(run_dir / FOLDER) as entries:
        for entry in entries:
            path = Path(entry.path)
            with suppress(OSError), _opened(path) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _found(path: Path, nbytes: int) -> mmap.mmap | None:
    """None where there is no such file, or it is about to go."""
    with suppress(FileNotFoundError, BlockingIOError), _opened(path) as fd:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if same_file(fd, path):
            if os.fstat(fd).st_size != nbytes:
                raise OSError(0, "others hold weights of another size by this name")
            return _mapped(fd, nbytes)
    return None


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    """A mapping that keeps the file's lock: it has a duplicate of the descriptor for as long as it
    lives, and a lock ends with the last of them."""
    return mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)


def _free(folder: Path) -> int:
    """Bytes that both the machine and the file system have left."""
    room = os.statvfs(folder)
    found = [room.f_bavail * room.f_frsize]
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as f:
        found += [int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable:")]
    return min(found)


def _write(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):  # the kernel takes 2 GiB at a time
        done += os.pwrite(fd, data[done:], offset + done)


@contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o400)  # written by its maker alone
    try:
        yield fd
    finally:
        os.close(fd)

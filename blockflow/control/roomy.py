"""RoomyFile: a small file that can be replaced as a whole on a file system that is full.

There are two of them, with all the room that they may need set aside beforehand. What is new is
written into the one that is not read, in place, and their names are exchanged: that asks for no
room. So it goes on as long as what is written fits; when it does not, more room, twice what is
needed, is taken. Where the file system cannot give it, there is no file any more, which is better
than an old one, but both keep their room for the next try. (In memory, that is: a file system that
copies what is overwritten needs room all the same.)
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

GRANULE = 64 * 1024
"""Room is a multiple of it. What is written is followed by blanks up to its end."""

_WRITE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class RoomyFile:
    """One file by its name, with a second one beside it.

    Args:
        path: of the file; the names of the others are made of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spare = path.with_name(f".{path.name}.new")
        self._former = path.with_name(f".{path.name}.old")
        self._void = path.with_name(f".{path.name}.void")

    @property
    def given_up(self) -> bool:
        """It could not be written, and so there is none."""
        return os.path.lexists(self._void)

    def write(self, data: bytes) -> None:
        """Replace it by ``data``, which does not end with blanks. Raises OSError; then there is
        none."""
        try:
            with open(os.open(self._spare, _WRITE, 0o600), "wb", buffering=0) as f:
                size = _reserve(f.fileno(), len(data))
                text = memoryview(data.ljust(size))
                while text:
                    text = text[f.write(text) :]
            self._exchange()
        except OSError:
            self._give_up()
            raise
        with suppress(OSError):  # the next write tells
            fd = os.open(self._spare, _WRITE, 0o600)
            try:
                _reserve(fd, size, spare=False)
            finally:
                os.close(fd)

    def read(self, most: int) -> bytes:
        """What was written, without the blanks. Raises OSError where there is none; ValueError
        where it is no file of this class, or larger than ``most`` bytes."""
        try:
            raw = _read(self._path, most)
        except FileNotFoundError:  # whoever wrote it died while the names were exchanged
            raw = _read(self._former, most)
        data = raw.rstrip(b" ")
        if not data or len(raw) % GRANULE:
            raise ValueError("torn: it is not as long as it was")
        if len(data) > most:
            raise ValueError("too large")
        return data

    def _exchange(self) -> None:
        with suppress(FileNotFoundError):
            os.replace(self._path, self._former)
        os.replace(self._spare, self._path)
        for room in (self._void, self._former):
            with suppress(FileNotFoundError):
                os.replace(room, self._spare)

    def _give_up(self) -> None:
        for path in (self._former, self._path):
            try:
                os.replace(path, self._void)
            except FileNotFoundError:
                continue
            except OSError:
                with suppress(OSError):
                    os.unlink(path)


def _reserve(fd: int, need: int, *, spare: bool = True) -> int:
    """See to it that ``need`` bytes have room, and as many again where it has to be made and
    ``spare`` is wanted; the size of the file."""
    size = os.fstat(fd).st_size
    if size >= need and size % GRANULE == 0:
        return size
    room = -(-max(need * (1 + spare), size) // GRANULE) * GRANULE
    os.posix_fallocate(fd, 0, room)
    return room


def _read(path: Path, most: int) -> bytes:
    with open(os.open(path, _READ), "rb") as f:
        if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
            raise ValueError("no regular file")
        return f.read(2 * most + 2 * GRANULE)

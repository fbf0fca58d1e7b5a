"""Scratch: a folder for the temporary files of one export or conversion, gone when that is over.

Its owner holds a lock on it, which the kernel drops with the process. So what is left by one that
was killed can be told from what another one uses at the moment, and the next one removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blockflow.core.errors import RepositoryError
from blockflow.core.scarcity import no_room

_PREFIX = "blockflow-scratch-"
_OURS = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def scratch() -> Iterator[Path]:
    """A new private folder where temporary files lie, for as long as the context lasts.

    Raises:
        SystemError_: NO_SPACE.
        RepositoryError: REPOSITORY_UNUSABLE: no folder can be made in TMPDIR or /tmp.
    """
    try:
        base = Path(tempfile.gettempdir())
        sweep(base)
        folder, held = _make(base)
    except OSError as e:
        where = os.environ.get("TMPDIR", "/tmp")
        raise no_room(e, str(e), where) or RepositoryError(
            "REPOSITORY_UNUSABLE",
            f"there is no place for temporary files: {e}",
            where=where,
            hint="free room there, or name another folder in TMPDIR",
        ) from e
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def sweep(base: Path) -> list[Path]:
    """Remove this user's scratch folders in ``base`` whose owners are dead; returns which."""
    removed = []
    for folder in base.iterdir():
        held = _hold(folder) if _OURS.fullmatch(folder.name) else -1
        if held >= 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)
            removed.append(folder)
    return removed


def _make(base: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        try:
            held = os.open(folder, _OPEN)
        except FileNotFoundError:  # swept before it was held
            continue
        except OSError:
            folder.rmdir()
            raise
        fcntl.flock(held, fcntl.LOCK_EX)
        if folder.exists():
            return folder, held
        os.close(held)


def _hold(folder: Path) -> int:
    """A descriptor with the lock of a folder of this user; -1 where there is none to be had."""
    try:
        fd = os.open(folder, _OPEN)
    except OSError:
        return -1
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    except BlockingIOError:  # its owner lives
        pass
    os.close(fd)
    return -1

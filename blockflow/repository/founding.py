"""Founding: the folder of a block that may be stored for the first time, by several at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from blockflow.core.errors import RepositoryError
from blockflow.repository.folder import refuse_link, written

FOLDER_MODE = 0o775
"""Of each folder of a repository, and those made for it, less what the umask takes: who may write
there may have code run, so a umask of 0 (that of many a container) does not give this to everybody.
"""


@contextmanager
def founded(path: Path, locked: Callable[[str], AbstractContextManager[int]]) -> Iterator[int]:
    """A block's folder, locked for writing: made unless it is there, and removed again if that was
    for nothing, as what is done in it fails.

    It is removed under its lock: who has waited for that finds another one in its place, or none,
    and begins anew.

    Args:
        path: the folder.
        locked: opens and locks the one of a block's name.

    Raises:
        RepositoryError: REPOSITORY_UNUSABLE: it cannot be made, or is a link, through which
            nothing is read either.
    """
    while True:
        made = _make(path)
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(locked(path.name))
            except RepositoryError:
                if path.exists():
                    raise
                continue
            if not _is_at(path, folder):
                continue
            try:
                yield folder
            except BaseException:
                if made:
                    with suppress(OSError):  # it is in use: a version was stored before this one
                        path.rmdir()
                raise
            return


def _make(path: Path) -> bool:
    """Make the folder; False: it is there already."""
    refuse_link(path)
    with written(path):
        for above in reversed(path.parents):  # mkdir's own way to make them heeds no mode
            if not above.exists():
                above.mkdir(FOLDER_MODE, exist_ok=True)
        try:
            path.mkdir(FOLDER_MODE)
        except FileExistsError:
            if path.exists() and not path.is_dir():
                raise
            return False
    return True


def _is_at(path: Path, folder: int) -> bool:
    try:
        return os.path.samestat(os.fstat(folder), path.lstat())
    except FileNotFoundError:
        return False

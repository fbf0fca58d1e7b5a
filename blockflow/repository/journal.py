"""Blocks that are stored together are stored together also where their writer is killed.

An undo log. Before the first of several manifests is put in force, the file ``.storing`` in the
repository's root says which blocks they are; its removal is the moment from which all of them stay.
The writer holds it locked while it lives. Whoever finds it unlocked (the kernel lets go of what a
killed process held) lets its blocks be as they were.

No deadlock: locks on blocks' folders are taken first, by name; who has the journal's waits for no
other.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from blockflow.repository.folder import OPEN_FOLDER, OPEN_ROOT, UNFINISHED, Pending, restore
from blockflow.repository.manifest import is_block_name

log = logging.getLogger("blockflow.repository")

JOURNAL = ".storing"
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_MOST_BYTES = 16 << 20


@contextmanager
def journalled(root: Path, blocks: Sequence[Pending]) -> Iterator[None]:
    """Inside, the manifests of ``blocks`` are put in force: all of them, or none.

    One manifest is replaced by one rename, and needs no journal.

    Raises:
        OSError: the journal cannot be written.
    """
    folder = os.open(root, OPEN_ROOT)
    try:
        with nullcontext() if len(blocks) < 2 else _undone(folder, blocks):
            yield
        # new folders stay, and the journal does not come back, also where the power fails
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _undone(root: int, blocks: Sequence[Pending]) -> Iterator[None]:
    journal = _own(root)
    try:
        said = {b.manifest.name: [b.temp, b.replaces] for b in blocks}
        _write(journal, json.dumps(said).encode())
        os.fsync(root)
        yield
    except BaseException:
        with suppress(OSError):  # where it cannot be undone the journal stays
            _roll_back(root, journal)
            os.unlink(JOURNAL, dir_fd=root)
        raise
    else:
        os.unlink(JOURNAL, dir_fd=root)
    finally:
        os.close(journal)


def recover(root: Path, *, wait: bool = False) -> None:
    """Let be as they were the blocks that a killed writer was about to store together.

    Args:
        root: the repository.
        wait: for another that does so, or for a writer that lives: whoever is going to write, and
            has locked its folders, has to. A reader goes on with what is there.
    """
    try:
        journal = os.open(root / JOURNAL, _OPEN)
    except OSError:  # there is none, or it is not ours to end
        return
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        folder = os.open(root, OPEN_ROOT)
        try:
            if _is_there(folder, journal):
                _of_killed(folder, journal)
                os.unlink(JOURNAL, dir_fd=folder)
        finally:
            os.close(folder)
    except BlockingIOError:
        pass  # its writer lives
    except OSError as e:
        log.warning("what a killed export has left cannot be undone: %s", e)
    finally:
        os.close(journal)


def _own(root: int) -> int:
    """The locked journal, without what a killed writer has said in it."""
    while True:
        journal = os.open(JOURNAL, _OPEN | os.O_CREAT, 0o644, dir_fd=root)
        try:
            fcntl.flock(journal, fcntl.LOCK_EX)
            if _is_there(root, journal):
                _of_killed(root, journal)
                os.ftruncate(journal, 0)
                return journal
        except BaseException:
            os.close(journal)
            raise
        os.close(journal)  # another one has removed it meanwhile


def _is_there(root: int, journal: int) -> bool:
    """Whether the open journal is the one that lies in the folder."""
    try:
        found = os.stat(JOURNAL, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(journal))


def _write(journal: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(journal, view) :]
    os.fsync(journal)


def _roll_back(root: int, journal: int) -> list[str]:
    """Names of the blocks. Idempotent: killed in its middle, it is done again by the next one."""
    blocks = _said(os.pread(journal, _MOST_BYTES, 0))
    for name, (temp, replaces) in blocks.items():
        try:
            folder = os.open(name, OPEN_FOLDER, dir_fd=root)
        except OSError as e:
            if e.errno in _GONE:  # somebody has removed the block
                continue
            raise
        try:
            restore(folder, temp, replaces)
        finally:
            os.close(folder)
    return list(blocks)


def _of_killed(root: int, journal: int) -> None:
    if names := _roll_back(root, journal):
        log.warning("whoever stored %s was killed: they are what they were", ", ".join(names))


def _said(raw: bytes) -> dict[str, tuple[str, bool]]:
    """What a journal says; nothing where its writer has not come to its end: no manifest had been
    touched then."""
    try:
        said: Any = json.loads(raw)
        blocks = {name: (temp, bool(replaces)) for name, (temp, replaces) in said.items()}
        sound = all(is_block_name(n) and UNFINISHED.fullmatch(t) for n, (t, _) in blocks.items())
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}
    return blocks if sound else {}

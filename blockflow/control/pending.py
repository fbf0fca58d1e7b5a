"""Pending: a small file that says that an update is under way. When a control plane was killed in
its middle it tells the next one so: it serves a note, no decision."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from blockflow.control.documents import write_file
from blockflow.repository.descriptors import file_of

log = logging.getLogger("blockflow.control")

PENDING = "update.pending"


def begin(root: Path, epoch: int) -> None:
    """An update to ``epoch`` is under way. Best effort."""
    try:
        write_file(root / PENDING, f"{epoch}\n".encode(), sync=True)
    except OSError as e:
        log.warning("%s cannot be written: %s", PENDING, e)


def ended(root: Path) -> None:
    """The update has ended, one way or the other."""
    with suppress(OSError):
        os.unlink(root / PENDING)


def interrupted(root: Path, epoch: int) -> str:
    """What became of an update in whose middle the former control plane ended, once; "" where it
    did not. True only as long as ``epoch``, which is stored, is not followed by another one."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with file_of(os.open(root / PENDING, flags)) as f:
            aim = int(f.read(32) or b"")  # None: of a pipe whose writer is silent
    except FileNotFoundError:
        return ""
    except (OSError, ValueError):
        aim = 0  # torn: that there was one is still true
    ended(root)
    what = f"the control plane ended during the update to epoch {aim or 'unknown'}"
    if aim and epoch >= aim:
        return f"{what}; it had been stored, and epoch {epoch} is in force"
    return f"{what}; it had not been stored, and epoch {epoch} is in force again"

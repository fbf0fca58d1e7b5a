"""Files of stored KPI samples, below the state directory."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from tempfile import mkstemp

from blockflow.control.documents import NO_ROOM
from blockflow.core.errors import RequestError, SystemError_

FILE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\.jsonl$"
_FILE_NAME = re.compile(FILE_PATTERN)


_UNFINISHED = ".new"
_ONE_AT_A_TIME = threading.Lock()
"""A state folder is one process's: whoever has this finds only what killed ones have left."""


class Former(StrEnum):
    """What becomes of a file that is there already."""

    KEPT = "kept"
    REPLACED = "replaced"


def store_samples(
    folder: Path, name: str, lines: Iterable[str], former: Former = Former.KEPT
) -> Path:
    """Write ``lines`` to a private file ``name``, which is the former one or whole at any moment.

    Raises:
        RequestError: INVALID_REQUEST when ``name`` is not a plain ``*.jsonl`` file name,
            FILE_EXISTS when there is such a file, which is to be kept.
        SystemError_: NO_SPACE; STATE_UNUSABLE when it cannot be written for another reason.
    """
    if not _FILE_NAME.fullmatch(name):
        raise RequestError(
            "INVALID_REQUEST",
            f"{name[:120]!r} is not a file name",
            where="file",
            hint="letters, digits, '_', '.' and '-', ending in .jsonl; no folders",
        )
    path = folder / name
    temp = ""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _ONE_AT_A_TIME:
            for left in folder.glob(f".*{_UNFINISHED}"):
                with suppress(OSError):
                    left.unlink()
            if former is Former.KEPT and os.path.lexists(path):
                raise RequestError(
                    "FILE_EXISTS",
                    f"{name} is there already",
                    where=str(path),
                    hint='take another name, or replace it: --force, or "force": true',
                )
            fd, temp = mkstemp(prefix=".", suffix=_UNFINISHED, dir=folder)
            with os.fdopen(fd, "w", encoding="utf-8") as f:
                f.writelines(f"{line}\n" for line in lines)
            os.replace(temp, path)
    except OSError as e:
        if temp:
            with suppress(OSError):
                os.unlink(temp)
        full = e.errno in NO_ROOM
        raise SystemError_(
            "NO_SPACE" if full else "STATE_UNUSABLE",
            f"the figures cannot be written: {e.strerror}",
            where=str(path),
            hint="free some disk space" if full else "check the folder, or take another name",
        ) from e
    return path

"""Files that a command is told to write: looked at before the work that makes them."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from blockflow.core.errors import RequestError, SystemError_

PLOTS = (".png", ".svg", ".pdf")


def check_output(path: Path | None, option: str, suffixes: Collection[str] = ()) -> None:
    """Whether ``path``, if one is given, can be written.

    Raises:
        RequestError: INVALID_REQUEST: it cannot, or it would replace what is no file.
    """
    if path is None:
        return
    why = ""
    if suffixes and path.suffix.lower() not in suffixes:
        why = f"its name ends with none of {', '.join(suffixes)}"
    elif os.path.exists(path) and not os.path.isfile(path):
        why = "it is there, and no regular file"
    elif lacking := _no_path(path):
        why = lacking
    else:
        above = next(p for p in path.absolute().parents if os.path.exists(p))
        if not above.is_dir():
            why = f"{above} is no folder"
        elif not os.access(above, os.W_OK | os.X_OK):
            why = f"{above} cannot be written to"
    if why:
        raise RequestError("INVALID_REQUEST", f"{option} cannot be written: {why}", where=str(path))


def _no_path(path: Path) -> str:
    """Why the system does not even look whether it is there."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as exc:
        return str(getattr(exc, "strerror", None) or exc)
    return ""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Translate what the system refuses while ``path`` is written."""
    try:
        yield
    except OSError as exc:
        why = f"cannot write it: {exc.strerror or exc}"
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SystemError_("NO_SPACE", why, where=str(path)) from exc
        raise RequestError("INVALID_REQUEST", why, where=str(path)) from exc

"""Whereabouts: what lasts when the working directory of a system is removed, or moved away.

A system runs for longer than the folder from which it was started may exist. Paths are made
absolute once, at the start, and a process that finds its working directory gone goes to the root:
some libraries ask for it when they are imported, and fail where there is none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = "/"


def lasting(path: Path) -> Path:
    """``path`` from the root. What leads up from a folder (``..``) is followed now, so that the
    folder may go; links behind that stay links, for they may be changed on purpose.

    Raises:
        FileNotFoundError: it is relative, and the working directory is gone.
    """
    parts = path.absolute().parts
    if ".." not in parts:
        return Path(*parts)
    ups = len(parts) - parts[::-1].index("..")
    return Path(os.path.realpath(Path(*parts[:ups])), *parts[ups:])


def lasting_imports(paths: Iterable[str]) -> list[str]:
    """Entries of ``sys.path`` that are folders below the working directory, by their full names;
    all others as they are. Where it is gone, "" is left out, which stands for it."""
    here = working_directory()
    found = (_import_path(p, here) for p in paths)
    return list(dict.fromkeys(p for p in found if p))


def _import_path(path: str, here: str) -> str:
    if os.path.isabs(path) or not os.path.exists(path):
        return path or here
    return os.path.join(here, path)


def working_directory() -> str:
    """The working directory; "" where it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def leave_what_is_gone() -> None:
    """Go to the root if the working directory of this process is gone."""
    if not working_directory():
        os.chdir(ROOT)


def settle() -> None:
    """Let later changes of the working directory matter to no import of this process."""
    sys.path[:] = lasting_imports(sys.path)

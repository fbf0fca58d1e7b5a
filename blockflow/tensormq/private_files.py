"""Private files: secrets of this user, which nobody else may read or replace."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from blockflow.core.errors import SystemError_

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def read_private(path: Path, what: str, max_bytes: int, hint: str = "") -> bytes:
    """The content of a secret file, checked on the opened file.

    Args:
        path: a regular file of this user (or root), mode 0600 or less; no symbolic link.
        what: the file in words, for errors (``the token file``).
        max_bytes: more than this is not read.
        hint: how to make such a file.

    Raises:
        SystemError_: UNAUTHORIZED: the file cannot serve as a secret.
    """
    try:
        fd = os.open(path, _READ)
    except OSError as e:
        raise unfit(path, what, f"cannot be opened: {e.strerror}", hint) from e
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
            raise unfit(path, what, "is not a regular file of this user", hint)
        if status.st_mode & 0o077:
            raise unfit(path, what, "can be read by others", f"chmod 600 {path}")
        return os.read(fd, max_bytes)
    finally:
        os.close(fd)


def write_private(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a new file; an existing one is never written over.

    Raises:
        SystemError_: UNAUTHORIZED: it exists, or cannot be made. NO_SPACE: nothing is left of it.
    """
    try:
        fd = os.open(path, _NEW, mode)
    except FileExistsError as e:
        hint = "a secret is never written over: name another file, or remove this one"
        raise unfit(path, "the file", "exists", hint) from e
    except OSError as e:
        raise _unwritten(path, e) from e
    try:
        with os.fdopen(fd, "wb") as f:
            os.fchmod(f.fileno(), mode)  # whatever the umask
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        path.unlink(missing_ok=True)
        raise _unwritten(path, e) from e


def _unwritten(path: Path, error: OSError) -> SystemError_:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space on that file system"
        return SystemError_("NO_SPACE", f"cannot write {path}: {error}", where=str(path), hint=hint)
    return unfit(path, "the file", f"cannot be made: {error.strerror}", "")


def private_folder(path: Path) -> None:
    """Make ``path`` a folder of mode 0700, or check the one that is there.

    Raises:
        SystemError_: UNAUTHORIZED.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise unfit(path, "the folder", f"cannot be made: {e.strerror}", "") from e
    check_folder(path)


def check_folder(path: Path, hint: str = "") -> None:
    """Check that nobody else can put files into ``path``. Raises SystemError_: UNAUTHORIZED."""
    try:
        status = path.lstat()
    except OSError as e:
        raise unfit(path, "the folder", f"cannot be opened: {e.strerror}", hint) from e
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
        raise unfit(path, "the folder", "is not a directory of this user", "name another one")
    if status.st_mode & 0o022:
        raise unfit(path, "the folder", "can be written to by others", f"chmod 700 {path}")


def unfit(path: Path, what: str, why: str, hint: str) -> SystemError_:
    """The error for a file or folder that cannot hold a secret."""
    return SystemError_("UNAUTHORIZED", f"{what} {why}", where=str(path), hint=hint)

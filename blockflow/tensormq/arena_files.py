"""What an arena's files must be, and what is said when they cannot be had."""

from __future__ import annotations

import errno
import os
import stat

from blockflow.core.errors import SystemError_, WireError
from blockflow.core.scarcity import SCARCE

_HINTS = {
    errno.EMFILE: "raise the limit of descriptors (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f)",
}


def refused(exc: OSError, incarnation: int, capacity: int, where: str) -> SystemError_:
    """Why the arena of ``incarnation`` cannot be made or grow."""
    if exc.errno in SCARCE:
        return SystemError_(
            "NO_SPACE",
            f"no space for an arena of up to {capacity} bytes: {exc.strerror}",
            where=where,
            hint=_HINTS.get(
                exc.errno or 0,
                "free /dev/shm or enlarge it (docker: --shm-size); a block needs less with fewer "
                "slots or a smaller max_rows",
            ),
        )
    if exc.errno == errno.EEXIST:
        return SystemError_(
            "ALREADY_RUNNING",
            f"incarnation {incarnation} has an arena already",
            where=where,
            hint="incarnations are never reused; start in a fresh run directory",
        )
    return SystemError_("INTERNAL", f"cannot create the arena: {exc}", where=where)


def checked_size(fd: int, least: int, where: str) -> int:
    """Size of a private regular file of this user, of ``least`` bytes or more.

    Raises:
        WireError: MALFORMED_MESSAGE: it is none.
    """
    st = os.fstat(fd)
    if (
        not stat.S_ISREG(st.st_mode)
        or st.st_uid != os.geteuid()
        or stat.S_IMODE(st.st_mode) != 0o600
    ):
        raise WireError("MALFORMED_MESSAGE", "not a private regular file of this user", where=where)
    if st.st_size < least:
        raise WireError(
            "MALFORMED_MESSAGE", f"a file of {st.st_size} bytes is no arena", where=where
        )
    return st.st_size

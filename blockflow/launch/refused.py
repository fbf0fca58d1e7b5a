"""What it is told as where the machine gives no process, or no thread."""

from __future__ import annotations

import errno

from blockflow.core.errors import SystemError_
from blockflow.core.scarcity import SCARCE

_FORBIDDEN = "`blockflow doctor` says which call the kernel or a seccomp profile forbids"
_HINTS = {errno.ENOSYS: _FORBIDDEN, errno.EPERM: _FORBIDDEN}


def not_started(what: str, why: str, number: int, where: str) -> SystemError_:
    """A process that could not be started.

    Args:
        what: was tried. why: for people. number: the system call's errno, 0 = it was not that.

    Returns:
        NO_SPACE where the machine has no room for a process at present, else INTERNAL.
    """
    if number not in SCARCE:
        return SystemError_("INTERNAL", f"{what}: {why}", where=where, hint=_HINTS.get(number, ""))
    return SystemError_(
        "NO_SPACE",
        f"{what}: {why}",
        where=where,
        hint="raise what limits processes, memory or descriptors: ulimit -u, -v, -n, the cgroup's "
        "pids.max and memory.max",
    )


def thread_refused(error: Exception) -> int:
    """The errno where the system gives this process no further thread, else 0; Python's error has
    none, and a type that it shares with others."""
    refused = isinstance(error, RuntimeError) and "start new thread" in str(error)
    return errno.EAGAIN if refused else 0

"""Small Linux calls that launchers and children share: names, adoption, descriptors, pidfds."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

DESCRIPTORS = 65_536
"""File descriptors of one process, where it may have so many."""

EXIT_START_FAILED = 2
"""Of a process that has told its controller why it could not start."""

EXIT_UNKNOWN = 255
"""Reported for a process that is certainly dead, but whose status somebody else collected."""


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arg = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(option, arg, 0, 0, 0) != 0:
        err = ctypes.get_errno()
        raise OSError(err, os.strerror(err))


def set_process_name(name: str) -> None:
    """Show ``name`` in ps and top; the kernel keeps 15 bytes of it."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def become_subreaper() -> None:
    """Adopt orphaned descendants: workers of a dead template become children of this process.

    The manager calls it once before its first launch, so that it can still collect how they ended.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Adoption:
    """Notices that this process's parent, the template, has died and the manager has adopted it.

    Nobody is then left who would kill it if it were stuck when the manager dies: from there on the
    kernel does, with the manager's process. Not before, for the template's death is no reason.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()

    def check(self) -> None:
        """Look now; called now and then."""
        parent = os.getppid()
        if parent != self._parent:
            self._parent = parent
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def give_up_privileges() -> None:
    """Drop what no worker needs, for this process and whatever it starts; irrevocable.

    No program that it executes can gain rights (setuid, file capabilities); a crash leaves no
    core file with clients' tensors in it; files that it makes are this user's alone. The process
    stays *dumpable*: without that, /proc/self belongs to root, and verified artifacts are opened
    through /proc/self/fd, while the control plane reads the memory figures there.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)


def raise_descriptor_limit() -> None:
    """As many file descriptors as this process may allow itself, up to a bound; its children get
    the same. The usual soft limit of 1024 is for programs that still call ``select``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def close_descriptors(keep: frozenset[int]) -> None:
    """Close every open descriptor but 0, 1, 2 and ``keep``."""
    for text in os.listdir("/proc/self/fd"):
        fd = int(text)
        if fd > 2 and fd not in keep:
            with suppress(OSError):  # the listing's own descriptor
                os.close(fd)


def thread_count() -> int:
    """Threads of this process, those of native libraries included."""
    return len(os.listdir("/proc/self/task"))


def has_exited(pidfd: int) -> bool:
    """True once the process of ``pidfd`` has ended; never blocks."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def collect_own_child(pidfd: int) -> int | None:
    """Reap a child of this process.

    Returns:
        Exit code (0..255), minus the signal that killed it, :data:`EXIT_UNKNOWN` when it is not (or
        no longer) ours to reap, or None while it runs.
    """
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return EXIT_UNKNOWN if has_exited(pidfd) else None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


__all__ = [
    "DESCRIPTORS",
    "EXIT_UNKNOWN",
    "Adoption",
    "become_subreaper",
    "close_descriptors",
    "collect_own_child",
    "give_up_privileges",
    "has_exited",
    "raise_descriptor_limit",
    "set_process_name",
    "thread_count",
]

"""Scarcity: which failures are the machine's, which has no more to give at present.

A start that fails so is tried again (docs/control-plane.md, Deaths); one that fails for another
reason is not. Frameworks say it in exceptions of many types, and some in the text alone.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from blockflow.core.errors import BlockFlowError, RepositoryError, SystemError_

SCARCE = frozenset(
    {
        errno.ENOMEM,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,  # the limit on a file's size
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,  # the kernel's memory for sockets
        errno.ETOOMANYREFS,  # the limit on descriptors that are under way in messages
        errno.EAGAIN,  # the limits on processes, threads and locked memory
    }
)
"""What system calls fail with that make files, mappings, sockets or threads."""

_SAID = (
    "out of memory",  # torch.OutOfMemoryError, CUDA
    "alloc_failed",  # cuBLAS's and cuDNN's status
    "allocate memory",  # strerror(ENOMEM); torch: "can't", ONNX Runtime: "Failed to"
    "bad_alloc",  # C++'s own, as OpenVINO hands it on
    "too many open files",
    "no space left on device",
    "no buffer space available",
    "resource temporarily unavailable",
    "can't start new thread",  # Python's RuntimeError
    "memoryerror",  # its type, in an error that came from another process
)
"""In lower case. EFBIG's text is not among them: a file may be "too large" for good."""


AWAY = "away"
"""Marks, in an error's details, that what starts need is not there at all: the repository, whose
mount may be late, or an installation that works."""

_UNANSWERED = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,  # a file system whose process has ended
        errno.EHOSTDOWN,
        errno.EREMOTEIO,
    }
)
"""What files fail with whose disk, or network's folder, does not answer at present."""


def is_away(error: BlockFlowError) -> bool:
    """Whether ``error`` says that what starts need is away. It may come back, as room may."""
    return error.details.get(AWAY) is True


@contextmanager
def passed_over() -> Iterator[None]:
    """Go on without a block that cannot be read, unless the repository is away: then nobody knows
    what there is."""
    try:
        yield
    except RepositoryError as e:
        if is_away(e):
            raise


def is_scarcity(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised for, is for want of memory, disk, descriptors or
    threads."""
    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and cause not in seen:  # "raise e from e" is its own
        if isinstance(cause, MemoryError):
            return True
        if isinstance(cause, OSError) and cause.errno in SCARCE:
            return True
        if isinstance(cause, BlockFlowError) and cause.code == "NO_SPACE":
            return True
        text = str(cause).lower()
        if any(words in text for words in _SAID):
            return True
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return False


def unanswered(error: OSError, path: str) -> RepositoryError | None:
    """UNKNOWN_BLOCK, away, where what ``path`` lies on does not answer; else None: only then does
    ``error`` tell something of what is stored."""
    if error.errno not in _UNANSWERED:
        return None
    return RepositoryError(
        "UNKNOWN_BLOCK",
        f"the repository does not answer: {error.strerror}",
        where=path,
        hint="look after the disk, or the network's folder, that it lies on",
        details={AWAY: True},
    )


def named(error: BlockFlowError) -> BlockFlowError:
    """``error``; NO_SPACE in its words where it is a scarcity that was not called so."""
    if error.code == "NO_SPACE":
        return error
    return no_room(error, error.message, error.where) or error


def failure(error: BaseException, message: str, where: str) -> SystemError_:
    """What an exception that nobody expected is told as: NO_SPACE with ``message`` where it is a
    scarcity, else INTERNAL."""
    return no_room(error, message, where) or SystemError_("INTERNAL", message, where=where)


def no_room(error: BaseException, message: str, where: str) -> SystemError_ | None:
    """NO_SPACE with ``message``; None where ``error`` is no scarcity."""
    if not is_scarcity(error):
        return None
    return SystemError_(
        "NO_SPACE",
        message,
        where=where,
        hint="free memory, /dev/shm or disk, or raise what limits memory, descriptors and threads: "
        "ulimit -v, -n, -u, the cgroup's memory.max and pids.max",
    )

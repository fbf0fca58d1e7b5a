"""What ZeroMQ's threads need, tried before it has any: where that is refused, it ends the process
(``thread.cpp``, SIGABRT)."""

from __future__ import annotations

import ctypes
import os
import threading

from blockflow.core.errors import SystemError_
from blockflow.core.scarcity import failure

THREADS = 2
"""Of a context: one for input and output, one that closes sockets."""

_PARAM_BYTES = 64
"""More than ``struct sched_param`` has in any C library."""


def check_threads(count: int) -> None:
    """Whether this process gets ``count`` more threads, and each may say how it is scheduled.

    Raises:
        SystemError_: NO_SPACE: they are not to be had; INTERNAL: a sandbox forbids the latter.
    """
    go = threading.Event()
    refused: list[int] = []

    def stay() -> None:
        refused.append(_schedule())
        go.wait()

    threads = [threading.Thread(target=stay, daemon=True) for _ in range(count)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError as e:
        raise failure(e, f"ZeroMQ needs {count} threads: {e}", "libzmq") from e
    finally:
        go.set()
        for thread in started:
            thread.join()
    if number := max(refused):
        raise SystemError_(
            "INTERNAL",
            f"ZeroMQ's threads may not say how they are scheduled: {os.strerror(number)}",
            where="libzmq",
            hint="allow sched_getscheduler, sched_getparam and sched_setscheduler in the seccomp "
            "profile (of systemd's SystemCallFilter: @resources)",
        )


def _schedule() -> int:
    """Say of the calling thread what is so already, as ZeroMQ does; the errno, or 0."""
    libc = ctypes.CDLL(None)
    libc.pthread_self.restype = ctypes.c_void_p
    own = ctypes.c_void_p(libc.pthread_self())
    policy, param = ctypes.c_int(), ctypes.create_string_buffer(_PARAM_BYTES)
    number = libc.pthread_getschedparam(own, ctypes.byref(policy), param)
    return int(number or libc.pthread_setschedparam(own, policy, param))

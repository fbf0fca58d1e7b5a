"""Room: the descriptors that a client needs are taken when it begins, or it does not begin.

libzmq ends the process where it finds none (``epoll.cpp``: ``Too many open files``).
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.garbage import gc

_NO_COPY_BYTES = 256 * 1024
"""From here on a frame refers to the caller's memory; below, a copy is cheaper than that."""

_DESCRIPTORS = 20
"""A client has ten, and pyzmq's collector of arrays, of which a process has one, seven."""

_BEGINNING = threading.Lock()
"""pyzmq's collector is to be begun by one thread at a time."""


def check_descriptors(one: int) -> None:
    """Whether so many are free: where there are too few, libzmq ends the process (``epoll.cpp``).

    Args:
        one: any descriptor, to be copied.

    Raises:
        OSError: they are not.
    """
    free: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            free.append(os.dup(one))
    finally:
        for fd in free:
            os.close(fd)


def begin_collector() -> None:
    """Have pyzmq's collector of arrays take its descriptors now, when they were found to be free.

    It would do so with the first large tensor of the process, whenever that comes; where they are
    not there then, it is the end of the process, too. It is begun by a frame, as a child of a fork
    needs another one, which pyzmq sees to. At the interpreter's exit there is none any more.
    """
    with _BEGINNING, suppress(RuntimeError):  # no threads: :func:`frame_of` does without
        zmq.Frame(b"\0", copy=False)


def frame_of(body: Any) -> zmq.Frame:
    """What is sent of ``body``: a copy if it is small, or if there is no collector."""
    return zmq.Frame(body, copy=body.nbytes < _NO_COPY_BYTES or not gc.is_alive())

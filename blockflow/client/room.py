"""Room: the descriptors and threads that a client needs are there when it begins, or it does not
begin.

libzmq ends the process where it finds none (``epoll.cpp``: ``Too many open files``, ``thread.cpp``:
``Resource temporarily unavailable``).
"""

from __future__ import annotations

import os
from typing import Any

import zmq
from zmq.utils.garbage import gc

from blockflow.core.errors import BlockFlowError, RequestError, make_error
from blockflow.core.scarcity import named, no_room
from blockflow.tensormq.zmq_threads import check_threads

_NO_COPY_BYTES = 256 * 1024
"""From here on a frame refers to the caller's memory; below, a copy is cheaper than that."""

_DESCRIPTORS = 20
"""A client has ten, and pyzmq's collector of arrays, of which a process has one, seven."""

_THREADS = 6
"""A client has three, two of them ZeroMQ's, and pyzmq's collector as many."""


def check_room(one: int) -> None:
    """Whether so many descriptors and threads are free: where there are too few, libzmq ends the
    process.

    Args:
        one: any descriptor, to be copied.

    Raises:
        OSError: the descriptors are not.
        SystemError_: NO_SPACE: the threads are not; INTERNAL: a sandbox forbids what they do.
    """
    check_threads(_THREADS)
    free: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            free.append(os.dup(one))
    finally:
        for fd in free:
            os.close(fd)


def frame_of(body: Any) -> zmq.Frame:
    """What is sent of ``body``: a copy if it is small, or if there is no collector."""
    return zmq.Frame(body, copy=body.nbytes < _NO_COPY_BYTES or not gc.is_alive())


def cannot_begin(exc: Exception, address: str) -> BlockFlowError:
    """Why there can be no client."""
    if isinstance(exc, BlockFlowError):
        return named(exc)
    scarce = no_room(exc, f"no room for a client: {exc}", address)
    if scarce is not None:
        return scarce
    if isinstance(exc, zmq.ZMQError | UnicodeError):  # the latter: halves of characters
        text, hint = f"not an address: {exc}", "use tcp://host:port or ipc://path"
        return RequestError("INVALID_REQUEST", text, where=address, hint=hint)
    return make_error("INTERNAL", f"a client cannot begin: {exc!r}", where=address)

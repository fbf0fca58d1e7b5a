"""pyzmq's collector of arrays: a thread that lets go of large frames once they are written."""

from __future__ import annotations

import threading
from contextlib import suppress

import zmq

_BEGINNING = threading.Lock()
"""It is to be begun by one thread at a time."""


def begin_collector() -> None:
    """Have it take its descriptors and its thread now, when they were found to be free.

    It would do so with the first large tensor of the process, whenever that comes; where they are
    not there then, it is the end of the process, or of what was to be sent. It is begun by a frame,
    as a child of a fork needs another one, which pyzmq sees to. At the interpreter's exit there is
    none any more.
    """
    with _BEGINNING, suppress(RuntimeError):  # no threads
        zmq.Frame(b"\0", copy=False)

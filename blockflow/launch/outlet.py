"""Outlet: a standard stream that waits for its reader for a moment only.

A pipe that nobody reads and a terminal that was stopped (Ctrl-S) take nothing, for as long as that
lasts. Who writes to one waits in the kernel, and a control plane that waits there supervises nobody
and does not end. Here what is not taken within a moment is lost, and how many lines were is said as
soon as something is taken again.
"""

from __future__ import annotations

import io
import logging
import os
import select
import socket
import stat
import sys
import threading
import time
from contextlib import suppress
from typing import Any, TextIO, cast

from blockflow.launch.stream import LogStream, lost_lines

PATIENCE_S = 0.5
"""A reader that is only slow gets that; whose pipe is full after it, no more until it is not."""

_REFILL = 0.1
"""Part of the time that may be spent on waiting, however long the stream is slow."""

_CHUNK = select.PIPE_BUF
"""A pipe that says it can be written to has room for so much."""


class Outlet(LogStream):
    """Text that is written at once, or lost.

    The descriptor itself stays as it is: whether writes to it wait is a flag that it shares with
    other processes. So pipes and terminals are opened once more. Where that is forbidden (they
    belong to another user), the kernel is asked before each write; a second writer may then take
    the room in between.

    Args:
        number: of the stream, 1 or 2; a pipe, a terminal or a socket.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._socket: socket.socket | None = None
        self._own: int | None = None
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                self._socket = socket.socket(fileno=os.dup(number))
            else:
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self._own = os.open(f"/proc/self/fd/{number}", flags)
        self._lock = threading.RLock()
        self._patience_s = PATIENCE_S
        self._waited_at = time.monotonic()
        self._lost = 0
        self._amid = False  # the last line that was taken has no end

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, text: str) -> int:
        """Raises OSError where it was closed at the other end."""
        with self._lock:
            if self._put(self._loss() + text):
                self._lost = 0
            else:
                self._lost += text.count("\n")
        return len(text)

    def _loss(self) -> str:
        """What is to be said of it; with the next line, so that it is not said for each lost one
        that would have had no room but for this."""
        if not self._lost:
            return ""
        start = "\n" if self._amid else ""
        return start + lost_lines(self._lost, "nobody has read this output")

    def _put(self, text: str) -> bool:
        """False: some of it was not taken."""
        data = self._bytes(text)
        while data:
            sent = self._send(data[:_CHUNK])
            if sent:
                self._amid = data[sent - 1] != ord("\n")
                data = data[sent:]
            elif not self._wait():
                return False
        return True

    def _send(self, data: memoryview) -> int:
        """How much is taken at once."""
        try:
            if self._socket is not None:
                return self._socket.send(data, socket.MSG_DONTWAIT)
            if self._own is not None:
                return os.write(self._own, data)
            return os.write(self._number, data) if self._takes(0) else 0
        except BlockingIOError:
            return 0
        except OSError:
            self.release()  # the number may be given to something that takes more
            raise

    def _wait(self) -> bool:
        """For the reader; False where there is no patience left."""
        begin = time.monotonic()
        more = (begin - self._waited_at) * _REFILL
        self._patience_s = min(PATIENCE_S, self._patience_s + more)
        self._waited_at = begin
        if self._lost or self._patience_s < 0.001:
            return False
        taken = self._takes(int(self._patience_s * 1000))
        self._waited_at = time.monotonic()
        self._patience_s -= self._waited_at - begin
        return taken

    def _takes(self, timeout_ms: int) -> bool:
        poll = select.poll()
        poll.register(self._number, select.POLLOUT)
        return bool(poll.poll(timeout_ms))

    def release(self) -> None:
        """Close what is its own; from here on it writes to the stream's number."""
        if self._socket is not None:
            self._socket.close()
        if self._own is not None:
            os.close(self._own)
        self._socket = self._own = None


def wait_for_nobody() -> None:
    """Put an :class:`Outlet` in the place of each standard stream whose reader might keep this
    process waiting, also for the log. Files are left alone, and what a test has put there."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if not _may_block(stream, number):
            continue
        with suppress(OSError):
            stream.flush()
        outlet = cast(TextIO, Outlet(number))
        setattr(sys, name, outlet)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                handler.setStream(outlet)


class Present(io.TextIOBase):
    """The standard error of the moment, whichever that is by then."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def follow_stderr() -> None:
    """Let the handlers of libraries (each logger of torch has one) write to the standard error of
    the process that logs. They keep the one that they were imported with: in a forked process that
    has another one, which waits for no disk, they would wait for it all the same. For the parent:
    looking through all loggers writes to pages that a fork shares."""
    for logger in list(logging.Logger.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and _is_stderr(handler.stream):
                handler.setStream(Present())


def _is_stderr(stream: object) -> bool:
    return stream is sys.stderr or stream is sys.__stderr__


def leave_to_child() -> None:
    """In a forked process, before its descriptors are closed: what is the parent's own is given up.
    Libraries may keep the standard error that they were imported with, and would write into
    whatever has got the number of that descriptor since."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, Outlet):
            stream.release()
        setattr(sys, name, getattr(sys, f"__{name}__"))


def _may_block(stream: Any, number: int) -> bool:
    try:
        if isinstance(stream, Outlet) or stream.fileno() != number:
            return False
        mode = os.fstat(number).st_mode
    except (AttributeError, OSError, ValueError):  # it is no file at all
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(number)

"""Launcher: starts processes from an entry and a spec, and says how they ended.

A Launcher runs in the manager. Its children live no longer than the control plane: each holds the
read end of the *lifeline*, a pipe whose only write end is in the guardian (without one, in the
launcher's process), and ends when it is cut. Deaths are told by pidfd, which any poller can wait
on, so nothing here needs a thread or a signal handler.
"""

from __future__ import annotations

import os
import select
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from blockflow.launch.process import EXIT_UNKNOWN, collect_own_child, has_exited, open_process

LIFELINE_ENV = "BLOCKFLOW_LIFELINE_FD"
"""Environment variable that tells a child the number of its lifeline descriptor."""


class Child:
    """A launched process. ``fileno()`` (its pidfd) becomes readable when it has ended.

    Args:
        name: as given to :meth:`Launcher.launch`.
        pid: process id; never signal it directly, it may be reused.
        pidfd: owned by this object.
        collect: how its launcher finds the exit status; None while it is not known yet.
    """

    def __init__(self, name: str, pid: int, pidfd: int, collect: Callable[[], int | None]) -> None:
        self.name = name
        self.pid = pid
        self.pidfd = pidfd
        self._collect = collect
        self._status: int | None = None

    def __repr__(self) -> str:
        return f"Child({self.name!r}, pid={self.pid}, status={self._status})"

    def fileno(self) -> int:
        return self.pidfd

    def poll(self) -> int | None:
        """How it ended: exit code 0..255 or minus the signal's number; None while it runs.

        ``EXIT_UNKNOWN`` (255) also stands for a status that could not be collected.
        """
        if self._status is None and self.pidfd >= 0 and has_exited(self.pidfd):
            self._status = self._collect()
        return self._status

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Send a signal; nothing happens when the process has ended."""
        if self._status is None and self.pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, sig)

    def wait(self, timeout_s: float) -> int | None:
        """Wait until it has ended and return :meth:`poll`'s value; None on time-out."""
        wait_any([self], timeout_s)
        return self.poll()

    def close(self) -> None:
        """Give the pidfd back. Idempotent; the process is left alone."""
        fd, self.pidfd = self.pidfd, -1
        if fd >= 0:
            os.close(fd)


def wait_any(children: Iterable[Child], timeout_s: float) -> list[Child]:
    """Wait until one of ``children`` has ended; returns those that have, [] on time-out."""
    poll = select.poll()
    by_fd = {c.pidfd: c for c in children if c.pidfd >= 0}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(max(0, int(timeout_s * 1000)))]


class Launcher(ABC):
    """Starts processes somewhere. Used from one thread at a time (implementations take a lock)."""

    @abstractmethod
    def start(self) -> None:
        """Prepare (start a template, for instance) without waiting for it. Idempotent."""

    @abstractmethod
    def launch(self, entry: str, spec: Mapping[str, Any], name: str) -> Child:
        """Start a process that calls ``entry(spec)`` and exits with what it returns.

        Args:
            entry: ``package.module:function``, taking one dict and returning an exit code.
            spec: plain JSON values. ``cores`` (cpu numbers) and ``log_path`` (file for stdout and
                stderr, '' = inherited) are applied here, before the entry is called. ``modules``
                names what the entry will import: who forks imports it first, once for all.
            name: of the replica; ps shows ``bf:<name>``.

        Raises:
            SystemError_: TIMEOUT or INTERNAL when the process cannot be started.
        """

    def attempt(self, entry: str, spec: Mapping[str, Any], name: str) -> Child | None:
        """:meth:`launch` for who cannot wait for what launches rely on.

        Returns:
            The process; or None when nothing was started, because that is still being prepared:
            ask again.

        Raises:
            SystemError_: as :meth:`launch`; it will not come about, nobody need ask again.
        """
        return self.launch(entry, spec, name)

    @property
    def template_pid(self) -> int:
        """Of the process that others are forked from, 0 = there is none."""
        return 0

    def adopt(self, name: str, pid: int, started: int) -> Child | int:
        """Take over a process that a launcher of a former Manager has started.

        Args:
            name: as it was launched.
            pid, started: which process (:func:`~blockflow.launch.process.start_time`).

        Returns:
            The process; or, when it is gone, how it ended.
        """
        pidfd = open_process(pid, started)
        if pidfd < 0:
            return self._how_ended(pid)
        return Child(name, pid, pidfd, lambda: self._collect_adopted(pid, pidfd))

    def _collect_adopted(self, pid: int, pidfd: int) -> int:
        """How an adopted process, which has ended, did."""
        status = collect_own_child(pidfd)
        return EXIT_UNKNOWN if status is None else status

    def _how_ended(self, pid: int) -> int:
        """How a process ended that was gone before it could be adopted."""
        return EXIT_UNKNOWN

    @abstractmethod
    def close(self) -> None:
        """Kill and reap what still runs, then free everything. Idempotent."""

    @abstractmethod
    def tend(self) -> None:
        """Look after what launches rely on, so that none has to wait for it. Call it often."""


class Lifeline:
    """The pipe that ties children to this process. Nothing is ever written to it."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    @classmethod
    def of_another(cls, read_fd: int) -> Lifeline:
        """One whose write end is in another process, to which the children are tied."""
        line = cls.__new__(cls)
        line.read_fd, line._write_fd = read_fd, -1
        return line

    def read_only(self) -> int:
        """In a forked process: leave the write end to the other one; returns the read end."""
        os.close(self._write_fd)
        self._write_fd = -1
        return self.read_fd

    def cut(self) -> None:
        """Close both ends: every child sees end of file and ends. Idempotent."""
        for fd in (self.read_fd, self._write_fd):
            if fd >= 0:
                os.close(fd)
        self.read_fd = self._write_fd = -1


def stop_all(children: Iterable[Child], timeout_s: float) -> None:
    """Kill ``children`` and wait until all of them are gone or the time is over."""
    left = [c for c in children if c.poll() is None]
    for child in left:
        child.kill()
    end = time.monotonic() + timeout_s
    while left and time.monotonic() < end:
        wait_any(left, end - time.monotonic())
        left = [c for c in left if c.poll() is None]

"""Vitals: what the kernel says of a process that does not answer: stopped, asleep, or starved?"""

from __future__ import annotations

import os
from dataclasses import dataclass

_PROC = "/proc"
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_WANTS_CPU = frozenset({"R", "D"})
"""Running or waiting for a core; waiting for the disk, which a starved machine does as well."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """One look at a process.

    Attributes:
        state: of its main thread as in ps: ``R``, ``S``, ``D``, ``T`` (stopped), ``t`` (traced)...
        cpu_ns: of all its threads since its start, in steps of the kernel's tick.
        main_cpu_ns: of its main thread.
        eager: some thread that was looked at runs, waits for a core or for the disk.
    """

    state: str
    cpu_ns: int
    main_cpu_ns: int
    eager: bool

    @property
    def stopped(self) -> bool:
        """By SIGSTOP or its like; not by a debugger, which has its reasons."""
        return self.state == "T"

    @property
    def traced(self) -> bool:
        return self.state == "t"

    @property
    def main_eager(self) -> bool:
        return self.state in _WANTS_CPU


def read_vitals(pid: int, *, every_thread: bool = False) -> Vitals | None:
    """Look at a process; None when there is none.

    Args:
        pid: of the process.
        every_thread: look at all threads' states, which costs some 10 us per thread; otherwise
            ``eager`` speaks of the main thread alone.
    """
    proc = f"{_PROC}/{pid}"
    try:
        state, ticks = _stat(proc)
        main_ns = _run_ns(proc, ticks)
        eager = state in _WANTS_CPU
        if every_thread and not eager:
            eager = any(_eager(f"{proc}/task/{task}") for task in os.listdir(f"{proc}/task"))
    except OSError:
        return None
    return Vitals(state, ticks * _TICK_NS, main_ns, eager)


class Stopped:
    """For how long a process has been seen stopped (SIGSTOP), by whoever looks again and again."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None  # process id, when it was first seen so

    def seconds(self, pid: int, now: float) -> float:
        """0.0 for a process that is not stopped, or is none (``pid`` 0); ``now`` in seconds."""
        vitals = read_vitals(pid) if pid else None
        if vitals is None or not vitals.stopped:
            self._first = None
            return 0.0
        if self._first is None or self._first[0] != pid:
            self._first = pid, now
        return now - self._first[1]


def _read(file: str) -> bytes:
    """All of a small file, by the fewest steps: the Manager looks at each process four times a
    second, and where there are many its own time goes into that."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _stat(folder: str) -> tuple[str, int]:
    """State and used ticks of ``/proc/<pid>`` (all threads) or of one task below it."""
    # The name in parentheses may hold anything, blanks and parentheses too.
    fields = _read(f"{folder}/stat").rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[11]) + int(fields[12])


def _eager(task: str) -> bool:
    """False for a thread that has ended since it was listed: its process may live on."""
    try:
        return _stat(task)[0] in _WANTS_CPU
    except OSError:
        return False


def _run_ns(folder: str, ticks: int) -> int:
    """What the main thread has run; in ticks of the process where the kernel does not say."""
    try:
        return int(_read(f"{folder}/schedstat").split()[0])
    except (OSError, IndexError):
        return ticks * _TICK_NS

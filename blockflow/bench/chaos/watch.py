"""Watch: the memory of a system's processes over time, and what it leaves behind.

A process is the system's if it descends from this one, which is looked at now and then; or if it
has inherited the mark that this one bears in its environment meanwhile: so has one that has left
the family before anybody looked, or was started while the system ended.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from blockflow.bench.demo.server import is_zombie

MARK = "BLOCKFLOW_CHAOS_RUN"
"""Name of the variable in the environment of the processes of a run."""
PREFIX = "bf:"
"""Of the names that the launcher gives its processes."""
_UP = "blockflow"
"""A word of the command of who has been started with ``python -m blockflow up``."""
_LOOK_S = 0.1
_PRIVATE_EVERY = 10
"""Samples: it takes a few milliseconds per process, in which that one cannot map memory."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """At ``at_s`` of the run: resident and shared-memory bytes, processes, their descriptors.

    ``by_name`` are the resident bytes of each process of the system; what else this process has
    started (busy programs, say) is not counted. ``anonymous`` are those that are no file's: its
    heap, and what it inherited by fork. ``private`` are those that it shares with nobody and has
    written; they come in some samples only, as the kernel has to look through all pages for them.
    ``pids`` tell a process from its successor of the same name.
    """

    at_s: float
    rss: int
    run_dir: int
    processes: int
    descriptors: int
    by_name: Mapping[str, int] = field(default_factory=dict)
    anonymous: Mapping[str, int] = field(default_factory=dict)
    private: Mapping[str, int] = field(default_factory=dict)
    pids: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Watch:
    """Samples the descendants of this process in a thread of its own.

    Args:
        run_dir: of the system; its files lie in shared memory.
        gone_s: after the system's end, what it may take its processes to be gone.
        others: descendants of this process that are not the system's.
        mark: of the run (:func:`marked`); '' = none.

    Attributes:
        failure: why there are no samples any more, in words; '' = nothing is wrong.
    """

    run_dir: Path
    interval_s: float = 0.5
    gone_s: float = 10.0
    others: Collection[psutil.Process] = ()
    mark: str = ""
    failure: str = ""
    samples: list[MemorySample] = field(default_factory=list)
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _origin: float = 0.0

    def start(self) -> None:
        self._origin = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="chaos-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Call it while the system still runs: who started last is seen as well."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.samples.append(self.sample())

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.interval_s):
                self.samples.append(self.sample())
        except Exception as e:  # growth would be judged by what there is until now
            self.failure = f"nobody watched the memory any more: {e!r}"

    def sample(self) -> MemorySample:
        descriptors = 0
        by_name: dict[str, int] = {}
        anonymous: dict[str, int] = {}
        private: dict[str, int] = {}
        pids: dict[str, int] = {}
        thorough = len(self.samples) % _PRIVATE_EVERY == 0
        for process in psutil.Process().children(recursive=True):
            if process in self.others:
                continue
            self.seen[process.pid] = process
            try:
                name = process.name()
                if not name.startswith(PREFIX) and _UP not in process.cmdline():
                    continue
                rss = process.memory_info().rss
                if not rss:  # it has ended, and somebody will reap it
                    continue
                descriptors += process.num_fds()
                heap = proc_bytes(process.pid, "status", "RssAnon")
                own = proc_bytes(process.pid, "smaps_rollup", "Private_Dirty") if thorough else 0
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
            # Two of one name: an old life beside the new one, or a fork that has no name yet.
            if rss > by_name.get(name, 0):
                by_name[name], pids[name] = rss, process.pid
            anonymous[name] = max(heap, anonymous.get(name, 0))
            if thorough:
                private[name] = max(own, private.get(name, 0))
        used = allocated_bytes(self.run_dir)
        now = time.monotonic() - self._origin
        total = sum(by_name.values())
        return MemorySample(
            now, total, used, len(by_name), descriptors, by_name, anonymous, private, pids
        )

    def survivors(self) -> list[str]:
        """Processes of the system that are there ``gone_s`` after its end."""
        known = {p for p in self.seen.values() if p.is_running()}
        end = time.monotonic() + self.gone_s
        while True:
            known |= bearers(self.mark) if self.mark else set()
            _, alive = psutil.wait_procs(known, timeout=_LOOK_S)
            # An orphan's parent is whoever adopts orphans, which need not be one that reaps.
            known = {p for p in alive if not is_zombie(p)}
            if not known or time.monotonic() >= end:
                return [describe(p) for p in sorted(known, key=lambda p: p.pid)]

    def files(self) -> list[str]:
        """What is there of the run directory after the system's end."""
        return [str(self.run_dir)] if self.run_dir.exists() else []


@contextmanager
def marked() -> Iterator[str]:
    """A mark that all processes bear that are started meanwhile, and theirs."""
    before, mark = os.environ.get(MARK), secrets.token_hex(8)
    os.environ[MARK] = mark
    try:
        yield mark
    finally:
        del os.environ[MARK]
        if before is not None:
            os.environ[MARK] = before


def bearers(mark: str) -> set[psutil.Process]:
    """The living processes that have inherited it, but for this one and its forks."""
    wanted, found = f"{MARK}={mark}".encode(), set()
    for pid in psutil.pids():
        with suppress(OSError, psutil.NoSuchProcess):
            # As it was when the program began: this process had no mark then.
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(psutil.Process(pid))
    return found


def proc_bytes(pid: int, file: str, key: str) -> int:
    """What ``/proc/PID/FILE`` says of ``key`` in kB; 0 where it does not.

    Raises:
        OSError: the process is gone, or another user's.
    """
    for line in Path(f"/proc/{pid}/{file}").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    return 0


def allocated_bytes(folder: Path) -> int:
    """What the files below ``folder`` occupy (arenas are sparse until they are used)."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:  # it was removed meanwhile
                continue
    return total


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.name()} ({process.status()})"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"

"""Watch: the memory of a system's processes over time, and what it leaves behind."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class MemorySample:
    """At ``at_s`` of the run: resident and shared-memory bytes, processes, their descriptors."""

    at_s: float
    rss: int
    run_dir: int
    processes: int
    descriptors: int


@dataclass(slots=True)
class Watch:
    """Samples the descendants of this process in a thread of its own.

    Args:
        run_dir: of the system; its files lie in shared memory.
        interval_s: between samples.
    """

    run_dir: Path
    interval_s: float = 0.5
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
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.samples.append(self.sample())

    def sample(self) -> MemorySample:
        rss = descriptors = 0
        family = psutil.Process().children(recursive=True)
        for process in family:
            self.seen[process.pid] = process
            try:
                rss += process.memory_info().rss
                descriptors += process.num_fds()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        used = allocated_bytes(self.run_dir)
        now = time.monotonic() - self._origin
        return MemorySample(now, rss, used, len(family), descriptors)

    def survivors(self, timeout_s: float = 10.0) -> list[str]:
        """Processes of the system that are there ``timeout_s`` after its end."""
        known = [p for p in self.seen.values() if p.is_running()]
        _, alive = psutil.wait_procs(known, timeout=timeout_s)
        return [describe(p) for p in alive]


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

"""SubprocessLauncher: each process is a fresh interpreter (CUDA allows no fork after it; tests)."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping
from typing import Any

from blockflow.core.errors import SystemError_
from blockflow.launch.base import Child, Launcher, Lifeline, stop_all
from blockflow.launch.child import Order
from blockflow.launch.environment import spawn
from blockflow.launch.process import EXIT_UNKNOWN
from blockflow.launch.refused import not_started


class SubprocessLauncher(Launcher):
    """Starts ``python -m blockflow.launch.child`` for each process: slower, nothing inherited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lifeline = Lifeline()
        self._alive: dict[int, Child] = {}

    def start(self) -> None:
        """Nothing to prepare."""

    def launch(self, entry: str, spec: Mapping[str, Any], name: str) -> Child:
        order = Order(entry, dict(spec), name)
        with self._lock:
            if self._lifeline.read_fd < 0:
                raise SystemError_("INTERNAL", "the launcher is closed")
            try:
                with order.in_memory() as memory:
                    fds = (memory, self._lifeline.read_fd)
                    process = spawn("blockflow.launch.child", *map(str, fds), fds=fds)
                pid = process.pid
                try:
                    pidfd = os.pidfd_open(pid)
                except OSError:
                    process.kill()
                    process.wait()
                    raise
            except OSError as exc:
                raise not_started(f"launch of {name!r}", str(exc), exc.errno or 0, name) from exc
            child = Child(name, pid, pidfd, lambda: self._collect(process))
            self._alive[pid] = child
            return child

    def tend(self) -> None:
        """Every launch is on its own: there is nothing to look after."""

    def close(self) -> None:
        with self._lock:
            children = list(self._alive.values())
            self._alive.clear()
        stop_all(children, 5.0)
        self._lifeline.cut()

    def _collect(self, process: subprocess.Popen[bytes]) -> int:
        try:
            status = process.wait(1.0)  # its pidfd has spoken: there is something to collect
        except subprocess.TimeoutExpired:
            status = EXIT_UNKNOWN
        with self._lock:
            self._alive.pop(process.pid, None)
        return status

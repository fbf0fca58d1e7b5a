"""Sampler: looks at something every so often in a thread of its own; and what there is to look at.

CPU time is the kernel's count for a process and all its threads, so a share of a visit is exact to
a tick (10 ms) however coarsely it is sampled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import psutil

from blockflow.core.errors import make_error
from blockflow.launch.process_kpi import private_and_shared

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Memory:
    """A process's memory in bytes: resident, proportional and private."""

    rss: int
    pss: int
    uss: int


class Sampler(Generic[T]):
    """Calls ``look`` at once, every ``interval_s``, and once more at the end.

    Args:
        look: what is read; called from one thread at a time.

    Attributes:
        samples: (seconds since the begin, what was seen).

    Use it as a context manager. An error of ``look`` ends the looking and is raised at the end.
    """

    def __init__(self, look: Callable[[], T], interval_s: float) -> None:
        self._look = look
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._origin = 0.0
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self.samples: list[tuple[float, T]] = []

    def __enter__(self) -> Self:
        self._origin = time.monotonic()
        self._add()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is not None:
            return
        if self._error is not None:
            raise self._error
        self._add()

    @property
    def seconds(self) -> float:
        """From the first look to the last one."""
        return self.samples[-1][0] - self.samples[0][0]

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._interval_s):
                self._add()
        except Exception as exc:
            self._error = exc

    def _add(self) -> None:
        seen = self._look()
        self.samples.append((time.monotonic() - self._origin, seen))


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU time of each process since its start, in user and in kernel mode.

    Raises:
        SystemError_: INTERNAL when a process has ended.
    """
    out = {}
    for name, pid in pids.items():
        times = _read(name, pid, psutil.Process.cpu_times)
        out[name] = times.user + times.system
    return out


def memory_of(pids: Mapping[str, int]) -> dict[str, Memory]:
    """Memory of each process.

    Raises:
        SystemError_: INTERNAL when a process has ended.
    """
    out = {}
    for name, pid in pids.items():
        rss = _read(name, pid, psutil.Process.memory_info).rss
        uss, pss = private_and_shared(pid)
        if not pss:
            raise make_error(
                "INTERNAL",
                f"the memory of {name} cannot be read",
                where=f"/proc/{pid}/smaps_rollup",
                hint="this needs Linux 4.14 or later, and a process that lives",
            )
        out[name] = Memory(rss, pss, uss)
    return out


def _read(name: str, pid: int, look: Callable[[psutil.Process], Any]) -> Any:
    try:
        return look(psutil.Process(pid))
    except psutil.Error as exc:
        raise make_error("INTERNAL", f"{name} cannot be read: {exc}") from exc

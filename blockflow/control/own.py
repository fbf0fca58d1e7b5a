"""OwnFigures: resources of the control plane's own processes, sampled when somebody asks."""

from __future__ import annotations

import threading
import time
from typing import Any

from blockflow.launch.process_kpi import MemoryWalk, ProcessSampler, resident

_EVERY_NS = 1_000_000_000


class OwnFigures:
    """Of the Manager's process, and of the one that workers are forked from. For any thread."""

    def __init__(self) -> None:
        self._sampler = ProcessSampler()
        # One asker at a time: a look just after another one divides a tick of the cpu clock by next
        # to nothing.
        self._lock = threading.Lock()
        self._walk = MemoryWalk(0)
        self._last: tuple[int, dict[str, Any]] | None = None

    def figures(self, template_pid: int) -> dict[str, Any]:
        """``{process, template}``, not older than a second.

        Args:
            template_pid: 0 = there is none.
        """
        with self._lock:
            now = time.monotonic_ns()
            if self._last is None or now - self._last[0] >= _EVERY_NS:
                if template_pid != self._walk.pid:
                    self._walk = MemoryWalk(template_pid)
                uss, pss = self._walk.look(now, resident(template_pid)) if template_pid else (0, 0)
                kpi = {
                    "process": self._sampler.sample(now).to_dict(),
                    "template": {"pid": template_pid or None, "uss": uss, "pss": pss},
                }
                self._last = (now, kpi)
            return self._last[1]

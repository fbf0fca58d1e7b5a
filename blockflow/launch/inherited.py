"""Inherited: a template that a former Manager has started, and whose parent is the guardian."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

from blockflow.launch.process import open_process, readable


class Inherited:
    """A template that another process has started: as much of Popen as its launcher needs.

    Args:
        pid, started: which process (:func:`~blockflow.launch.process.start_time`).
    """

    def __init__(self, pid: int, started: int) -> None:
        self.pid = pid
        # A Manager collects the death of the template that is its child, and the guardian does not
        # hear of it: by now the number may be another process's.
        self._pidfd = open_process(pid, started)

    def kill(self) -> None:
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """Until it has ended; somebody else reaps it. Raises subprocess.TimeoutExpired."""
        if self._pidfd < 0:
            return
        if not readable(self._pidfd, timeout):
            raise subprocess.TimeoutExpired("template", timeout or 0.0)
        os.close(self._pidfd)
        self._pidfd = -1

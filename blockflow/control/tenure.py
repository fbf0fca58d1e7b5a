"""Tenure: what a Manager owes its guardian and its successor while it turns."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from blockflow.control.journal import Recorder
from blockflow.control.realm import Realm
from blockflow.launch.process import readable
from blockflow.launch.ward import Ward
from blockflow.tensormq.agent import ORPHAN_STATUS
from blockflow.tensormq.janitor import LOCK_NAME

log = logging.getLogger("blockflow.control")

CONTROL_SOCKET = "control.sock"
"""Of the Controller, in the run directory."""

_LOOK_NS = 1_000_000_000
_NEVER_NS = 1 << 63


class Tenure:
    """What a Manager does for the guardian, and for its successor, while it turns.

    Args:
        ward: of the guardian, None without.
        run_dir: of the instance.
        warn: told what people should know.
    """

    def __init__(self, ward: Ward | None, run_dir: Path, warn: Callable[[str], None]) -> None:
        self._ward = ward
        self._run_dir = run_dir
        self._warn = warn
        self._recorder = None if ward is None else Recorder(run_dir)
        self._look_ns = 0

    @property
    def warning(self) -> str:
        """What a successor would lack, "" = nothing."""
        return self._recorder.warning if self._recorder is not None else ""

    def record(self, realm: Realm) -> None:
        """Write down what a successor must know, before it is done."""
        if self._recorder is not None:
            self._recorder.record(realm)

    def ordered(self, status: int) -> bool:
        """Whether a process with this exit status has ended in order: its lifeline was cut, since
        the guardian is dead. That ends the whole instance, this process too in the same moment."""
        if status != ORPHAN_STATUS or self._ward is None:
            return False
        return readable(self._ward.lifeline_fd, 0)  # nobody writes there

    def attend(self, now_ns: int) -> None:
        """Say that the Manager turns, and see whether the run directory is there: without it no
        process reaches another one, whatever they say of themselves. It is made again with all that
        is in it, which only the guardian can do; where there is none, people are told."""
        if self._ward is not None:
            self._ward.line.alive(now_ns)
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + _LOOK_NS
        lost = [name for name in (LOCK_NAME, CONTROL_SOCKET) if _removed(self._run_dir / name)]
        if not lost:
            return
        text = f"somebody has removed {', '.join(lost)} from the run directory {self._run_dir}"
        if self._ward is None:
            self._look_ns = _NEVER_NS
            self._warn(f"{text}: requests cannot be served, start the system anew")
            return
        log.error("%s", text)
        self._ward.line.anew(text)
        os._exit(1)


def _removed(path: Path) -> bool:
    """Only what is certainly not there: a look that fails proves nothing."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False

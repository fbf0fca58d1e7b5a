"""Ends: how a process ended, before its parent has come to collect that.

A dead process is kept by the kernel until its parent reaps it. Whoever may trace it can read there
what the parent will be told, and need not wait for a parent that is stopped, or starved of the CPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from blockflow.core.errors import SystemError_
from blockflow.core.scarcity import AWAY
from blockflow.launch.process import describe_exit

TEMPLATE_STATUS = "template_status"
"""Detail of an error: how the template ended that was to launch something."""

_EXIT_CODE = 49
"""Of the fields of /proc/PID/stat behind the name: number 52 of proc(5), the state being 3."""


def unreaped_status(pid: int, pidfd: int) -> int | None:
    """Exit code (0..255) or minus the signal of a process that has ended.

    Args:
        pid: its number.
        pidfd: of the same process: by the number alone another one could be meant.

    Returns:
        None: it runs, or was reaped, or the kernel does not tell this user.
    """
    proc = Path("/proc", str(pid))
    try:
        fields = (proc / "stat").read_bytes().rpartition(b")")[2].split()
        # Told to the same people, root or not. Others are not refused the exit code, but shown a 0.
        (proc / "ns/pid").readlink()
        held = Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii")
    except OSError:
        return None
    # Read last: as long as it is not reaped, nobody else has its number.
    if f"\nPid:\t{pid}\n" not in held or fields[0] != b"Z":
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))


def template_died(status: int | None) -> SystemError_:
    """Nothing can be launched: INTERNAL, with the status of the template where it is known."""
    how = "" if status is None else f": {describe_exit(status)}"
    details: dict[str, Any] = {} if status is None else {TEMPLATE_STATUS: status}
    hint = ""
    if status is not None and status > 0:  # it could not import something, or ended by itself
        how += "; the output of `blockflow up` has its last words"
        hint, details[AWAY] = "mend the installation", True
    return SystemError_("INTERNAL", f"the template process died{how}", hint=hint, details=details)


def template_late(what: str) -> SystemError_:
    """TIMEOUT: the template has not done ``what`` in time."""
    return SystemError_("TIMEOUT", f"waited too long for {what}", where="template")

"""What the control groups of this process allow it, of either version of the kernel's interface."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from blockflow.core.cores import Cores

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and what of it is files that nobody has looked at lately, in ``memory.stat``."""
_UNLIMITED = 1 << 60
"""Without a limit version 1 says the most pages that it can count."""
VMSTAT = Path("/proc/vmstat")
_KILLED = ("memory.events", "memory.oom_control")


class OomKills(NamedTuple):
    """How many processes the kernel has killed so far for want of memory: of the ``own`` control
    group, or else on the whole machine, whoever they belonged to."""

    total: int
    own: bool


def cpu_quota() -> float:
    """Cores' worth of time that the tightest control group allows, 0 = no limit."""
    found = []
    for group in _groups("cpu"):
        limit, _, period = _read(group / "cpu.max").partition(" ")
        if not limit:
            limit, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if limit.isdecimal() and period.isdecimal() and int(period):
            found.append(int(limit) / int(period))
    return min(found, default=0.0)


def memory_limit() -> int:
    """Bytes that the tightest control group allows, 0 = no limit."""
    found = []
    for group in _groups("memory"):
        for name, _, _ in _MEMORY:
            text = _read(group / name)
            if text.isdecimal() and 0 < int(text) < _UNLIMITED:
                found.append(int(text))
    return min(found, default=0)


def tasks_limit() -> int:
    """Processes and threads that the tightest control group allows, 0 = no limit."""
    found = [_read(group / "pids.max") for group in _groups("pids")]
    return min((int(text) for text in found if text.isdecimal()), default=0)


def memory_left() -> int | None:
    """Bytes that this process may still take before a control group's limit; None = no limit."""
    return min((left for left, _ in memory_rooms()), default=None)


def memory_rooms() -> list[tuple[int, int]]:
    """Of each control group that limits this process's memory, what it may still take and the
    limit, in bytes. Files that the kernel can drop at once do not count; those of a tmpfs do."""
    found = []
    for group in _groups("memory"):
        for limit, usage, dropped in _MEMORY:
            most = _read(group / limit)
            if not most.isdecimal() or int(most) >= _UNLIMITED:
                continue
            if (used := _read(group / usage)).isdecimal():
                stat = _fields(group / "memory.stat")
                left = int(most) - int(used) + int(stat.get(dropped, 0))
                found.append((left, int(most)))
    return found


def oom_kills() -> OomKills:
    """What the kernel has killed for want of memory.

    The nearest group that counts is asked. It counts whom it has lost, whichever group's limit, or
    the machine's end, it was; in version 2 also those below it.
    """
    for group in _groups("memory"):
        for name in _KILLED:
            found = _fields(group / name).get("oom_kill", "")
            if found.isdecimal():
                return OomKills(int(found), True)
    found = _fields(VMSTAT).get("oom_kill", "")
    return OomKills(int(found) if found.isdecimal() else 0, False)


def available_cores() -> Cores:
    """The cores that this process may use."""
    return Cores(sorted(os.sched_getaffinity(0)), cpu_quota())


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control group and of those above it."""
    for line in _read(OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = ROOT / controllers if controllers else ROOT
        # In a container the path may be the host's, while the folder is the container's own root.
        group = root / path.strip("/")
        while group != root.parent:
            yield group
            group = group.parent


def _fields(path: Path) -> dict[str, str]:
    """Lines of a name and its value."""
    pairs = (line.split(" ", 1) for line in _read(path).splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) > 1}


def _read(path: Path) -> str:
    """Without the spaces around it; "" for what is not there or may not be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""

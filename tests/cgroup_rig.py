"""A control group (version 1) for processes that shall meet a limit of the kernel's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dispatcher_rig import wait_until


@contextmanager
def cgroup(kind: str, limit: str, value: int | str) -> Iterator[Path]:
    """One below this process's own; skips where none may be made. Who is in it in the end is moved
    out of it.

    Args:
        kind: ``cpu``, ``memory``, ``pids``. limit: the file of its limit, which gets ``value``.
    """
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    mine = next((path for _, kinds, path in own if kind in kinds.split(",")), None)
    if mine is None:
        pytest.skip(f"no {kind} cgroup (version 1) here")
    base = Path("/sys/fs/cgroup") / kind
    parent = base / mine.lstrip("/")
    made = (parent if parent.is_dir() else base) / f"blockflow-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as e:
        pytest.skip(f"no cgroup may be made here: {e}")
    try:
        (made / limit).write_text(str(value))
        yield made
    finally:
        move_out(made)
        wait_until(lambda: removed(made))


def move_out(group: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        (group.parent / "cgroup.procs").write_text(pid)


def removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:  # the dead have not quite gone yet
        return False
    return True

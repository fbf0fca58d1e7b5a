"""A small tmpfs in a mount namespace of its own, for whoever shall run out of room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_rig import Warm


@pytest.fixture
def mount() -> Iterator[Path]:
    """An empty folder with a short name, where a file system can be mounted."""
    path = Path("/dev/shm") / f"bf-{os.getpid()}"
    path.mkdir()
    yield path
    path.rmdir()


def on_small_disk(mount: Path, options: str) -> list[str]:
    """Words before a command that shall find a tmpfs at ``mount``; skips where none may be made.

    Args:
        mount: an empty folder.
        options: of the tmpfs, as ``mount -o`` takes them (``size=1m``).
    """
    inner = f'mount -t tmpfs -o {options},mode=700 none {mount} && exec "$0" "$@"'
    base = ["unshare", "-m", "sh", "-c", inner]
    try:
        probe = subprocess.run([*base, "true"], capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("no unshare(1) here")
    if probe.returncode:
        pytest.skip(f"no mount namespace may be made here: {probe.stderr.strip()}")
    return base


def small_disk(mount: Path, options: str) -> tuple[Path, str]:
    """The same, as ``warm_rig.Warm.popen`` takes it."""
    on_small_disk(mount, options)
    return mount, f"{options},mode=700"


def told_there(
    warm: Warm, script: str, mount: Path, options: str, *arguments: str
) -> tuple[Any, str]:
    """What ``script`` prints last, as JSON, and what it writes to its standard error; its arguments
    are the mount and these."""
    process = warm.popen(
        [sys.executable, "-c", script, str(mount), *arguments],
        disk=small_disk(mount, options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1]), errors

"""A small tmpfs in a mount namespace of its own, for whoever shall run out of room."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


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

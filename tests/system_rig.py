"""A whole system in the test's process, with or without failpoints in what it starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blockflow.control.system import System
from blockflow.launch.base import Launcher
from blockflow.launch.local import TemplateLauncher


@contextmanager
def served(root: Path, topology: Any, launcher: Launcher) -> Iterator[System]:
    """The blocks in ``root/blocks``, deployed by ``topology``, on free ports."""
    with System(
        repository=root / "blocks",
        state_dir=root / "state",
        rest_port=0,
        client_port=0,
        launcher=launcher,
    ) as running:
        running.apply(topology)
        yield running


@contextmanager
def idle_system(blocks: Path, state: Path, launcher: Launcher) -> Iterator[System]:
    """A repository's system with nothing deployed yet, on free ports."""
    with System(
        repository=blocks, state_dir=state, rest_port=0, client_port=0, launcher=launcher
    ) as running:
        yield running


@contextmanager
def own_template(**environment: str) -> Iterator[Launcher]:
    """A template of a system's own; whoever it launches has this in its environment."""
    launcher = TemplateLauncher()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            launcher.start()  # it keeps the environment that it was started with
            launcher.wait_ready()
        yield launcher
    finally:
        launcher.close()

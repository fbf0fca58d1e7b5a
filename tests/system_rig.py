"""A whole system in the test's process, with or without failpoints in what it starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blockflow.control.system import System
from blockflow.launch.local import TemplateLauncher
from blockflow.worker.failpoints import ENV


@contextmanager
def served(root: Path, topology: Any, failpoints: str = "") -> Iterator[System]:
    """The blocks in ``root/blocks``, deployed by ``topology``, on free ports."""
    launcher = TemplateLauncher()
    try:
        with pytest.MonkeyPatch.context() as patch:
            if failpoints:
                patch.setenv(ENV, failpoints)
            launcher.start()  # it keeps the environment that it was started with
            launcher.wait_ready()
        with System(
            repository=root / "blocks",
            state_dir=root / "state",
            rest_port=0,
            client_port=0,
            launcher=launcher,
        ) as running:
            running.apply(topology)
            yield running
    finally:
        launcher.close()

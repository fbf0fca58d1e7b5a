"""A whole system in the test's process, with or without failpoints in what it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blockflow.control.system import System
from blockflow.launch.base import Launcher
from blockflow.launch.local import TemplateLauncher

WAIT_S = 60.0


def idle_system(blocks: Path, state: Path, launcher: Launcher | None = None) -> System:
    """A repository's system with nothing deployed yet, on free ports; ``with`` starts it."""
    return System(repository=blocks, state_dir=state, rest_port=0, client_port=0, launcher=launcher)


@contextmanager
def served(root: Path, topology: Any, launcher: Launcher) -> Iterator[System]:
    """The blocks in ``root/blocks``, deployed by ``topology``, on free ports."""
    with idle_system(root / "blocks", root / "state", launcher) as running:
        running.apply(topology)
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


def worker(system: System, name: str) -> dict[str, Any]:
    return system.commands.worker(name)


def wait_for(system: System, test: Callable[[], Any]) -> Any:
    """What ``test`` says in the Manager's thread, once it is true."""
    found = system.manager.wait(lambda: test() or None, WAIT_S)
    assert found is not None
    return found


def replaced(system: System, old: dict[str, Any]) -> dict[str, Any]:
    """Wait until the successor of ``old`` serves; returns it."""

    def settled() -> bool:
        view = system.manager.views().worker(old["name"])
        assert view is not None
        well = view["incarnation"] > old["incarnation"] and view["state"] == "ready"
        return well and not system.manager.brain.realm.reasons_not_ready()

    wait_for(system, settled)
    return worker(system, old["name"])

"""A repository that is away for a while, when a system starts and when a worker dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from control_rig import echo_repository
from system_rig import idle_system

from blockflow.control.system import System
from blockflow.launch.base import Launcher

AB = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}


class Place:
    """A repository that can be away, and systems that use it."""

    def __init__(self, root: Path, launcher: Launcher) -> None:
        self._root = root
        self._launcher = launcher
        self.blocks = root / "blocks"
        echo_repository(self.blocks)

    def system(self) -> System:
        return idle_system(self.blocks, self._root / "state", self._launcher)

    def take_away(self) -> None:
        self.blocks.rename(self._root / "away")

    def bring_back(self) -> None:
        (self._root / "away").rename(self.blocks)


@pytest.fixture
def place(tmp_path: Path, launcher: Launcher) -> Place:
    made = Place(tmp_path, launcher)
    with made.system() as system:
        system.apply(AB)
    return made


def until(system: System, test: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    end = time.monotonic() + 60
    while not test(status := system.status()):
        assert time.monotonic() < end, status
        time.sleep(0.05)
    return status


def test_what_is_stored_is_deployed_when_the_repository_comes(place: Place) -> None:
    place.take_away()
    place.blocks.mkdir()  # what is left of a mount
    with place.system() as system:
        assert system.announcement()["state"] == "degraded"
        assert any("UNKNOWN_BLOCK" in r for r in system.status()["reasons"])
        assert [e["in_force"] for e in system.commands.history()] == [False]
        told = system.commands.topology()
        assert (told["epoch"], told["topology"], told["posted"]) == (1, None, AB)
        place.bring_back()
        assert until(system, lambda s: s["ready"])["epoch"] == 1
        assert system.announcement()["state"] == "ready"
        assert [e["in_force"] for e in system.commands.history()] == [True]


def test_who_dies_meanwhile_is_replaced_when_it_is_back(place: Place) -> None:
    with place.system() as system:
        (pid,) = [w["pid"] for w in system.commands.workers() if w["name"] == "b#0"]
        place.take_away()
        os.kill(pid, signal.SIGKILL)
        until(system, lambda s: _failed(s, "b#0"))
        place.bring_back()
        status = until(system, lambda s: s["ready"])
        assert all(w.get("given_up") is None for w in status["workers"])


def _failed(status: dict[str, Any], name: str) -> bool:
    (crash,) = [w["crash"] for w in status["workers"] if w["name"] == name]
    return crash is not None and "UNKNOWN_BLOCK" in crash["cause"]

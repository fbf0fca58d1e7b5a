"""A defect in the Manager's thread takes nothing with it but what it was in."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blockflow.control import manager as manager_module
from blockflow.control.events import Exited, Received, Send
from blockflow.control.manager import Manager
from blockflow.control.settings import ControlSettings
from blockflow.control.store import StateStore
from blockflow.wire.control import Ping


class Stub:
    """Stands for what talks to processes; says what it was given."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send(self, incarnation: int, _message: Any) -> None:
        if incarnation == 1:
            raise ValueError("a defect")
        self.sent.append(incarnation)

    def echo(self, _done: Any) -> None:
        pass

    def forget(self, incarnation: int) -> None:
        self.send(incarnation, None)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Manager, Stub]]:
    """A Manager whose thread does not run, and of whose messages those to 1 are a defect."""
    stub = Stub()
    monkeypatch.setattr(manager_module, "Controller", lambda *_: stub)
    settings = ControlSettings(repository=tmp_path, state_dir=tmp_path / "state")
    store = StateStore(settings.state_dir)
    launcher: Any = SimpleNamespace(tend=lambda: None)
    run_dir: Any = SimpleNamespace(path=tmp_path)
    made = Manager(settings, store, launcher, run_dir)
    yield made, stub
    made._inbox.close()
    made._prober.close()
    store.close()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{r.getMessage()}: {r.exc_info[1]}" for r in caplog.records if r.exc_info]


def test_what_came_with_a_message_that_is_a_defect_is_taken(
    rig: tuple[Manager, Stub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager, _ = rig
    handled: list[int] = []

    def handle(event: Any, _now: int) -> None:
        if event.incarnation == 1:
            raise ValueError("a defect")
        handled.append(event.incarnation)

    monkeypatch.setattr(manager.brain, "handle", handle)
    for incarnation in (1, 2):
        manager._inbox.put(Received(incarnation, Ping(0)))
    asked = Future[int]()
    manager._inbox.put(lambda: asked.set_result(3))
    manager._turn()
    assert (handled, asked.result(0)) == ([2], 3)
    assert told(caplog) == ["defect in the manager's loop: a defect"]


def test_the_other_instructions_are_carried_out(
    rig: tuple[Manager, Stub], caplog: pytest.LogCaptureFixture
) -> None:
    manager, stub = rig
    manager.brain.crew.out += [Send(n, Ping(0)) for n in (1, 2, 3)]
    manager._inbox.put(lambda: None)
    manager._turn()
    assert stub.sent == [2, 3]
    assert told(caplog) == ["defect in the manager's loop: a defect"]


def test_the_other_deaths_are_told(
    rig: tuple[Manager, Stub], caplog: pytest.LogCaptureFixture
) -> None:
    manager, stub = rig
    for incarnation in (1, 2):
        manager._children._unborn.append(Exited(incarnation, 0))
    manager._inbox.put(lambda: None)
    manager._turn()
    assert stub.sent == [2]
    assert told(caplog) == ["defect in the manager's loop: a defect"]

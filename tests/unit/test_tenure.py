"""What a Manager sees of its run directory where no guardian could make it again, and of deaths."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from control_rig import World

from blockflow.control.events import Exited, Received
from blockflow.control.journal import NAME, JournalFile
from blockflow.control.manager import Manager
from blockflow.control.tenure import CONTROL_SOCKET, Tenure
from blockflow.launch.ward import Ward
from blockflow.tensormq.agent import ORPHAN_STATUS
from blockflow.tensormq.janitor import LOCK_NAME
from blockflow.wire.control import Drained, Pong, Stats

SECOND_NS = 1_000_000_000


@pytest.mark.parametrize("lost", [LOCK_NAME, CONTROL_SOCKET])
def test_who_has_no_guardian_is_told_once(tmp_path: Path, lost: str) -> None:
    for name in (LOCK_NAME, CONTROL_SOCKET):
        (tmp_path / name).touch()
    told: list[str] = []
    tenure = Tenure(None, tmp_path, told.append)
    tenure.record(World().up().brain.realm)
    assert tenure.warning == "" and not (tmp_path / NAME).exists()
    tenure.attend(SECOND_NS)
    (tmp_path / lost).unlink()
    tenure.attend(SECOND_NS + 1)  # it looks once a second
    assert told == []
    for seconds in (3, 5, 7):
        tenure.attend(seconds * SECOND_NS)
    assert len(told) == 1 and lost in told[0] and "anew" in told[0]


def test_a_guardian_is_told_that_all_is_to_be_made_anew_and_this_manager_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK_NAME).touch()
    (tmp_path / CONTROL_SOCKET).touch()
    said: list[int | str] = []
    line = SimpleNamespace(alive=said.append, anew=said.append)
    ward = cast(Ward, SimpleNamespace(line=line))
    tenure = Tenure(ward, tmp_path, pytest.fail)
    tenure.record(World().up().brain.realm)
    assert JournalFile(tmp_path).read().epoch == 0 and tenure.warning == ""
    (tmp_path / f".{NAME}.new").unlink()
    (tmp_path / f".{NAME}.new").mkdir()
    world = World().up()
    world.brain.monitor(2.0)
    tenure.record(world.brain.realm)
    assert "the journal cannot be written" in tenure.warning
    for when in (SECOND_NS, SECOND_NS + 1):
        tenure.attend(when)
    assert said == [SECOND_NS, SECOND_NS + 1], "however seldom it looks"
    (tmp_path / LOCK_NAME).unlink()
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as e:
        tenure.attend(3 * SECOND_NS)
    assert e.value.code == 1
    assert said[3:] == [f"somebody has removed {LOCK_NAME} from the run directory {tmp_path}"]


def test_a_look_that_fails_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told: list[str] = []
    Tenure(None, tmp_path / "file", told.append).attend(SECOND_NS)  # ENOTDIR
    assert told == []


def test_who_ends_by_the_lifeline_has_not_crashed(tmp_path: Path) -> None:
    """The guardian was killed, and the Manager sees the others' ends before it is killed itself."""
    read, write = os.pipe()
    tenure = Tenure(cast(Ward, SimpleNamespace(lifeline_fd=read)), tmp_path, lambda _: None)
    assert not tenure.ordered(ORPHAN_STATUS)  # a block may end its process so
    os.close(write)
    assert tenure.ordered(ORPHAN_STATUS) and not tenure.ordered(1)
    os.close(read)
    assert not Tenure(None, tmp_path, lambda _: None).ordered(ORPHAN_STATUS)


def test_a_manager_records_nothing_of_such_an_end(tmp_path: Path) -> None:
    manager: Any = object.__new__(Manager)  # nothing else of it may be asked
    manager._tenure = SimpleNamespace(ordered=lambda status: status == ORPHAN_STATUS)
    manager._died(Exited(7, ORPHAN_STATUS, ()))
    with pytest.raises(AttributeError):
        manager._died(Exited(7, 1, ()))


def test_everybody_is_told_of_a_death_before_it_is_written_down(tmp_path: Path) -> None:
    """The requests of a dead worker wait for that, and a disk that is busy keeps whoever writes."""
    done: list[str] = []
    manager: Any = object.__new__(Manager)
    manager._tenure = SimpleNamespace(ordered=lambda status: False)
    nobody = SimpleNamespace(find=lambda incarnation: None)
    manager.brain = SimpleNamespace(crew=nobody, handle=lambda event, now: done.append("decided"))
    for name in ("controller", "kpis", "_prober"):
        setattr(manager, name, SimpleNamespace(forget=lambda incarnation: None))
    manager._unproved, manager.run_dir = {}, SimpleNamespace(path=tmp_path)
    manager._health = SimpleNamespace(died=lambda incarnation: ())
    manager._carry_out = lambda: done.append("told")
    manager._crashes = SimpleNamespace(take=lambda crew, incarnation, now: done.append("written"))
    manager._died(Exited(7, 1, ()))
    assert done == ["decided", "told", "written"]


def test_of_answers_and_figures_nothing_is_looked_for_in_the_journal() -> None:
    """Each look is at all processes, and each of them sends five such messages a second."""
    manager: Any = object.__new__(Manager)
    taken: list[object] = []
    at: list[int] = []

    def pong(incarnation: int, message: Pong, read_ns: int) -> None:
        taken.append(message)
        at.append(read_ns)

    manager._health = SimpleNamespace(pong=pong)
    manager.kpis = SimpleNamespace(add=lambda *of: taken.append(of[2]))
    life, topology = SimpleNamespace(name="w#0"), SimpleNamespace(tasks=())
    manager.brain = SimpleNamespace(
        crew=SimpleNamespace(find=lambda incarnation: life),
        realm=SimpleNamespace(topology=topology),
        handle=lambda event, now: taken.append(event.message),
    )
    manager._carry_out = lambda: taken.append("journal")
    told = [Pong(7, 1, "ready"), Stats(7, 1, [], {}), Drained(7)]
    for message in told:
        manager._take(Received(7, message, 5))
    assert taken == [*told, "journal"]
    assert at == [5]  # when it was read, however long it lay there

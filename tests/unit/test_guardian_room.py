"""Successors that lack room, or the state's disk: who is served is served on without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from blockflow.cli import up
from blockflow.control import guardian, release
from blockflow.core.errors import SystemError_
from blockflow.launch import ward
from tests.unit.test_guardian import END, KILLED, Life, Scripted, alone, it

__all__ = ["alone", "it"]

SHORT = Life(5, serves=False, short="NO_SPACE")
AWAY = Life(5, serves=False, short="STATE_UNUSABLE")


def awaited(it: Scripted) -> Callable[[SystemError_], None]:
    """Room, without a second between two tries."""

    def check(error: SystemError_) -> None:
        assert it._served and error.code in (SHORT.short, AWAY.short)

    return check


def test_for_a_successor_that_gets_no_process_there_is_another_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would end all that serves."""
    it = Scripted(Life(), END)
    fork, answers = it._fork, iter(["", "NO_SPACE", "NO_SPACE", ""])

    def perhaps(*given: Any) -> None:
        if code := next(answers):
            raise SystemError_(code, "no process")
        fork(*given)

    monkeypatch.setattr(it, "_fork", perhaps)
    monkeypatch.setattr(it, "_await_room", awaited(it))
    assert it.run() == 0
    assert it.forks == [(False, ""), (True, "killed by SIGKILL")]
    assert (it.pauses, it.begun, it.ended) == (1, 0, 1)


@pytest.mark.parametrize("lacking", [SHORT, AWAY])
def test_those_that_find_no_room_cost_nobody_who_serves_his_life(
    monkeypatch: pytest.MonkeyPatch, lacking: Life
) -> None:
    """As long as that lasts, and they do not count as crashes."""
    it = Scripted(Life(), *[lacking] * 9, Life(), END)
    monkeypatch.setattr(it, "_await_room", awaited(it))
    assert it.run() == 0
    assert it.forks == [(False, "")] + [(True, "killed by SIGKILL")] * 11
    assert (it.pauses, it.begun, it.ended) == (2, 0, 1)


def test_one_that_has_taken_over_or_begins_anew_dies_as_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = replace(SHORT, anew="there is no journal: it could not be written")
    for torn in (Life(KILLED, anew="torn"), lost):
        it = Scripted(Life(), Life(5, short="NO_SPACE"), torn, SHORT, END)
        monkeypatch.setattr(it, "_await_room", awaited(it))
        assert it.run() == 0
        assert [a for a, _ in it.forks] == [False, True, True, False, True]
        assert it.pauses == 4


def test_while_they_are_waited_for_no_other_release_comes_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was waited for may have been the installation, which has been replaced."""
    found = iter(["", "", "9.1.0"])
    monkeypatch.setattr(release, "replaced_by", lambda: next(found))
    it = Scripted(Life(), SHORT, SHORT, Life())
    monkeypatch.setattr(it, "_await_room", awaited(it))
    with pytest.raises(SystemError_, match=r"is release 9\.1\.0 by now"):
        it.run()
    assert (len(it.forks), it.ended) == (3, 1)


def test_what_successors_wait_for_is_said_once_and_in_their_words(
    it: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guardian, "_AGAIN_S", 0.0)
    it._served = True
    full = SystemError_("NO_SPACE", "the disk is full", where="/state", hint="free some")
    gone = SystemError_("STATE_UNUSABLE", "the folder is gone", where="/state")
    said = []
    for error in (full, full, gone, gone, None, gone):
        caplog.clear()
        if error is None:  # one has taken over meanwhile
            it.theirs.serving(4711)
            assert it._hear()
            continue
        it.theirs.failing(error)
        assert it._hear()
        it._await_room(it._short)
        said.append(caplog.messages)
    served = "who is served is served without"
    assert [len(s) for s in said] == [1, 0, 1, 0, 1]
    assert said[0] == [f"{full}; {served}"] and said[2] == said[4] == [f"{gone}; {served}"]


def test_a_successor_leaves_it_to_the_guardian_to_say_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up.os, "_exit", lambda status: None)
    told: list[Any] = []
    ward: Any = SimpleNamespace(adopt=True, line=SimpleNamespace(failing=told.append))
    full, other = SystemError_("NO_SPACE", "full"), SystemError_("INTERNAL", "torn")
    for error in (full, other, ValueError("a defect")):
        with up._ending_at_once(ward):
            raise error
    assert told == [full]
    said = capsys.readouterr().err
    assert "torn" in said and "a defect" in said and "full" not in said


def test_a_broken_installation_is_waited_for_as_room_is(
    it: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are being replaced, say: what serves needs none of them."""

    def broken(_name: str) -> None:
        raise SyntaxError("invalid syntax")

    monkeypatch.setattr(up.os, "_exit", lambda status: None)
    monkeypatch.setattr(up, "import_module", broken)
    monkeypatch.setattr(guardian, "_AGAIN_S", 0.0)
    with up._ending_at_once(SimpleNamespace(adopt=True, line=it.theirs)):  # type: ignore[arg-type]
        up._import_all()
    it._served = True
    assert it._hear() and "SyntaxError: invalid syntax" in it._short.message
    it._await_room(it._short)
    assert not it._no_room


def test_what_was_imported_of_another_release_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guardian, which asks too, has looked before that."""
    monkeypatch.setattr(release, "replaced_by", lambda: "9.1.0")
    with pytest.raises(SystemError_, match=r"is release 9\.1\.0 by now") as e:
        up._import_all()
    assert not ward.awaited(e.value)


# --- others that are let live --------------------------------------------------------------------


def test_one_that_turns_is_looked_at_in_time_and_lives(
    it: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[Any] = []
    looked: list[int] = []

    def look(*_: Any) -> str:
        looked.append(it._vigil.due)
        return ""

    monkeypatch.setattr(guardian.os, "kill", lambda *what: killed.append(what))
    monkeypatch.setattr(guardian, "read_vitals", lambda *_, **__: None)
    it._vigil = SimpleNamespace(deadline=lambda: it._vigil.due, look=look)
    for it._vigil.due in (1 << 62, 0):
        it._look()
    assert looked == [0] and killed == []
    monkeypatch.setattr(guardian.os, "fork", lambda: 4711)
    it._line.close()
    assert it._fork(False, 0, "") is None and it._manager == 4711 and killed == []


def test_one_that_starts_has_the_time_that_it_takes(
    it: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([None, 0])
    monkeypatch.setattr(it, "_reap", lambda: next(ends))
    monkeypatch.setattr(it, "_hear", lambda: True)
    monkeypatch.setattr(it, "_look", pytest.fail)
    it.theirs.alive(1)  # something to wake up for
    assert it._watch() == 0 and it._line.fileno() == -1

"""The line between guardian and Manager, at the Manager's end."""

from __future__ import annotations

import errno
from typing import NoReturn

import pytest

from blockflow.control.guardian import Guardian
from blockflow.core.errors import SystemError_
from blockflow.launch import ward
from blockflow.launch.process import readable
from blockflow.launch.ward import Line, Reaped
from blockflow.tensormq.janitor import run_root


def test_how_the_dead_ended_is_awaited_and_not_remembered_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ward, "_STATUSES_KEPT", 2)
    mine, theirs = Line.pair()
    for pid in (1, 2, 3):
        mine.tell_reaped(pid, pid)
    assert [theirs.reaped(pid, 0) for pid in (1, 2, 3)] == [None, 2, 3]
    waited: list[float] = []

    def late(fd: int, timeout_s: float) -> bool:
        """It comes, or the guardian ends, only while it is waited for."""
        if timeout_s:
            waited.append(timeout_s)
            if len(waited) == 3:
                mine.close()
            else:
                mine.tell_reaped(len(waited), 9)
        return readable(fd, timeout_s)

    monkeypatch.setattr(ward, "readable", late)
    assert theirs.reaped(2, 60.0) == 9 and len(waited) == 2
    assert theirs.reaped(3, 60.0) is None and len(waited) == 3
    theirs.close()


def test_a_successor_knows_how_those_ended_of_whom_nobody_has_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reaped = Reaped({7: -9, 8: 1})
    guardian, manager = Line.pair(reaped)
    assert [manager.reaped(pid, 0) for pid in (7, 8, 9)] == [-9, 1, None]
    guardian.tell_reaped(9, 2)
    assert manager.reaped(9, 0) == 2 and reaped == {7: -9, 8: 1}
    for line in (guardian, manager):
        line.close()

    def pair(known: Reaped) -> NoReturn:
        assert known is it._reaped
        raise OSError(errno.EMFILE, "it was tried")

    it = Guardian(run_root())
    monkeypatch.setattr(Line, "pair", pair)
    with pytest.raises(SystemError_, match="it was tried"):
        it._fork(adopt=True, died_ns=0, cause="")

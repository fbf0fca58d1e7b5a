"""The line between guardian and Manager, at the Manager's end."""

from __future__ import annotations

import pytest

from blockflow.launch import ward
from blockflow.launch.process import readable
from blockflow.launch.ward import Line


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

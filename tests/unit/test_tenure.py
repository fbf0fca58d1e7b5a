"""What a Manager sees of its run directory where no guardian could make it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockflow.control.tenure import CONTROL_SOCKET, Tenure
from blockflow.tensormq.janitor import LOCK_NAME

SECOND_NS = 1_000_000_000


@pytest.mark.parametrize("lost", [LOCK_NAME, CONTROL_SOCKET])
def test_who_has_no_guardian_is_told_once(tmp_path: Path, lost: str) -> None:
    for name in (LOCK_NAME, CONTROL_SOCKET):
        (tmp_path / name).touch()
    told: list[str] = []
    tenure = Tenure(None, tmp_path, told.append)
    tenure.attend(SECOND_NS)
    (tmp_path / lost).unlink()
    tenure.attend(SECOND_NS + 1)  # it looks once a second
    assert told == []
    for seconds in (3, 5, 7):
        tenure.attend(seconds * SECOND_NS)
    assert len(told) == 1 and lost in told[0] and "anew" in told[0]


def test_a_look_that_fails_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told: list[str] = []
    Tenure(None, tmp_path / "file", told.append).attend(SECOND_NS)  # ENOTDIR
    assert told == []

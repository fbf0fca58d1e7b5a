"""What is said of an update in whose middle a control plane ended: once, whatever lies there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blockflow.control.pending import PENDING, begin, ended, interrupted

STORED = "; it had been stored, and epoch {} is in force"
NOT_STORED = "; it had not been stored, and epoch {} is in force again"


@pytest.mark.parametrize(("epoch", "what"), [(2, NOT_STORED), (3, STORED), (4, STORED)])
def test_the_epoch_in_force_tells_what_became_of_it(tmp_path: Path, epoch: int, what: str) -> None:
    assert interrupted(tmp_path, epoch) == ""
    begin(tmp_path, 3)
    told = "the control plane ended during the update to epoch 3" + what.format(epoch)
    assert interrupted(tmp_path, epoch) == told
    assert interrupted(tmp_path, epoch) == ""


def test_of_one_that_has_ended_nothing_is_said(tmp_path: Path) -> None:
    ended(tmp_path)
    begin(tmp_path, 3)
    ended(tmp_path)
    assert interrupted(tmp_path, 3) == ""


@pytest.mark.parametrize("kind", ["empty", "torn", "link", "pipe"])
def test_what_cannot_be_read_says_that_there_was_one(tmp_path: Path, kind: str) -> None:
    file = tmp_path / PENDING
    if kind == "link":
        (tmp_path / "other").write_bytes(b"1\n")
        file.symlink_to(tmp_path / "other")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.write_bytes(b"" if kind == "empty" else b"3x")
    assert interrupted(tmp_path, 5).endswith("update to epoch unknown" + NOT_STORED.format(5))
    assert interrupted(tmp_path, 5) == ""

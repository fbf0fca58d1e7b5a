"""``blockflow stop``: which process it waits for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blockflow.cli import act
from blockflow.tensormq.janitor import LOCK_NAME


def test_stop_knows_the_process_though_it_closes_a_descriptor_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = {"pid": os.getpid(), "run_dir": str(tmp_path)}
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: ["9999999", *real(path)])
    with open(tmp_path / LOCK_NAME, "w"):
        found = act._open_here(status)
        assert found is not None
        os.close(found)
    assert act._open_here(status) is None  # another process has that number here

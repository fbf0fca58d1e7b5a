"""``blockflow stop``: which process it waits for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blockflow.cli import act
from blockflow.cli.exits import ExitCode
from blockflow.cli.main import main
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


@pytest.mark.parametrize(
    "words",
    [["stop", "--yes", "--url", ""], ["infer", "digit", "--random", "--address="]],
    ids=lambda words: words[0],
)
def test_an_empty_address_is_not_the_system_that_is_meant_without(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, where in (("URL", "http"), ("ADDRESS", "tcp")):
        monkeypatch.setenv(f"BLOCKFLOW_{name}", f"{where}://127.0.0.1:1")
    assert main(words) == ExitCode.BAD_INPUT
    assert "is empty -- leave it out for BLOCKFLOW_" in capsys.readouterr().err

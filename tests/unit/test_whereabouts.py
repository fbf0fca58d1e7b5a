"""What lasts when the working directory is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blockflow.control.settings import ControlSettings
from blockflow.launch.environment import child_environment, spawn
from blockflow.launch.whereabouts import lasting, lasting_imports, leave_what_is_gone

HERE = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_way_up_does_not_lead_through_the_folder_any_more(here: Path) -> None:
    (here.parent / "blocks").mkdir()
    (here.parent / "current").symlink_to("blocks")
    found = [lasting(Path(p)) for p in ("../blocks", "../current", "../here/../blocks", "state")]
    here.rmdir()
    blocks = here.parent / "blocks"
    assert found == [blocks, here.parent / "current", blocks, here / "state"]
    assert found[0].is_dir() and lasting(blocks) == blocks
    with pytest.raises(FileNotFoundError):
        lasting(Path("blocks"))


def test_all_paths_of_the_settings_last(here: Path) -> None:
    relative = Path("../x")
    given = ControlSettings(
        repository=relative,
        state_dir=relative,
        run_root=relative,
        token_file=relative,
        keys=relative,
        rest_cert=relative,
        rest_key=relative,
    )
    for name in given.__dataclass_fields__:
        value = getattr(given.lasting(), name)
        assert value == (here.parent / "x" if isinstance(value, Path) else getattr(given, name))
    assert ControlSettings(keys=None).lasting().keys is None


def test_imports_are_found_by_full_names(here: Path) -> None:
    (here / "own").mkdir()
    hook = "__editable__.finder.__path_hook__"
    assert lasting_imports(["", "/a", "own", hook, "/a"]) == [
        str(here),
        "/a",
        str(here / "own"),
        hook,
    ]


def test_a_process_without_a_working_directory_goes_to_one_that_lasts(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_what_is_gone()
    assert Path.cwd() == here
    here.rmdir()
    monkeypatch.setattr(sys, "path", ["", "/a"])
    assert child_environment(base={})["PYTHONPATH"] == "/a"
    leave_what_is_gone()
    assert os.getcwd() == "/"
    monkeypatch.chdir(HERE)


def test_an_interpreter_is_started_where_it_can_be(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_args, **how: told.append(how["cwd"]))
    spawn("module", fds=())
    here.rmdir()
    spawn("module", fds=())
    assert told == [None, "/"]

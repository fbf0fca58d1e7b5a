"""Files that commands are told to write: what cannot be written is said before the work."""

from __future__ import annotations

import atexit
import errno
import gc
import os
from pathlib import Path

import pytest

from blockflow.cli.exits import ExitCode
from blockflow.cli.main import main
from blockflow.cli.outputs import PLOTS, check_output, writing
from blockflow.core.errors import BlockFlowError, RequestError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "d.png").mkdir()
    (tmp_path / "plain").write_text("x")
    os.mkfifo(tmp_path / "pipe.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "suffixes", "why"),
    [
        ("d.png", PLOTS, "no regular file"),
        ("pipe.jsonl", (), "no regular file"),
        ("/dev/full", (), "no regular file"),
        ("plain/x.jsonl", (), "is no folder"),
        ("x" * 300 + ".jsonl", (), "name too long"),
        ("x" * 300 + "/y.jsonl", (), "name too long"),
        ("x\0.png", PLOTS, "embedded null"),
        ("x.txt", PLOTS, "none of .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_written(
    folder: Path, name: str, suffixes: tuple[str, ...], why: str
) -> None:
    with pytest.raises(RequestError, match=why) as e:
        check_output(Path(name), "--results", suffixes)
    assert e.value.code == "INVALID_REQUEST" and e.value.where == name


def test_what_can_be_written(folder: Path) -> None:
    for name in ("plain", "new.jsonl", "a/new/folder/x.svg"):
        check_output(Path(name), "--plot")
    check_output(None, "--plot", PLOTS)
    check_output(Path("x.PNG"), "--plot", PLOTS)
    assert not (folder / "a").exists(), "it only looks"


def test_a_folder_that_takes_no_new_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "access", lambda _, mode: asked.append(mode))
    with pytest.raises(RequestError, match="cannot be written to"):
        check_output(Path("new.jsonl"), "--results")
    assert asked == [os.W_OK | os.X_OK]


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "NO_SPACE"), (errno.EDQUOT, "NO_SPACE"), (errno.EACCES, "INVALID_REQUEST")],
)
def test_what_is_refused_while_it_is_written(number: int, code: str) -> None:
    with pytest.raises(BlockFlowError) as e, writing(Path("x.png")):
        raise OSError(number, os.strerror(number))
    assert e.value.code == code and e.value.where == "x.png"


@pytest.mark.parametrize("option", ["--results", "--plot"])
@pytest.mark.parametrize("command", [["simulate", "--example"], ["profile", "none"]])
def test_commands_look_before_they_work(
    folder: Path, capsys: pytest.CaptureFixture[str], command: list[str], option: str
) -> None:
    assert main([*command, option, "d.png"]) == 2
    assert "d.png" in capsys.readouterr().err


def test_nobody_looks_for_garbage_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes longer than most commands where torch has been imported."""
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    assert main(["--version"]) == 0
    assert gc.freeze in registered


def test_a_home_that_takes_no_completion_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home/of"))
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", ""))  # these may have no shell
    assert main(["--install-completion"]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "INVALID_REQUEST: the completion cannot be installed: Not a directory" in told
    assert str(tmp_path / "home") in told and "--show-completion" in told

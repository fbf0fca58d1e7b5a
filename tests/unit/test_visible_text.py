"""What others have written does nothing to a person's terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_rest import FakeRest
from rich.console import Console
from torch import Tensor, nn

from blockflow.cli.main import main
from blockflow.core.text import a_kind, visible, worth_a_line
from blockflow.monitor.screen import status_screen


class Rude(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("\x1b]0;owned\x07\x1b[2J\u202egone\r")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ümläut, 漢字, a\ttab\nand a line", "plain, ümläut, 漢字, a\ttab\nand a line"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        (
            "bell\x07 back\x08 del\x7f csi\x9b31m \r",
            "bell\\x07 back\\x08 del\\x7f csi\\x9b31m \\x0d",
        ),
        ("\u202etxt.exe", "\\u202etxt.exe"),
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_the_log_tells_of_fewer_and_fewer() -> None:
    assert [n for n in range(1, 20) if worth_a_line(n)] == [1, 2, 4, 8, 16]


def test_a_models_error_is_told_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    given = ["--input", "float32[rows,4]", "-r", str(tmp_path)]
    assert main(["export", f"{__name__}:Rude", "--prefix", "r", *given]) == 2
    told = capsys.readouterr().err
    assert "\\x1b]0;owned\\x07" in told and "\\u202egone" in told
    assert not {"\x1b", "\x07", "\u202e", "\r"} & set(told)


def test_a_crashes_log_is_shown_as_it_is() -> None:
    crash = {"cause": "exit 1", "log": ["\x1b[2Jboo"], "age_s": 1.0}
    status = {"workers": [{"name": "w#0", "worker": "w", "crash": crash}]}
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(status_screen(status, 120))
    text = console.export_text()
    assert "\\x1b[2Jboo" in text and "\x1b[2J" not in text


def acts(text: str) -> bool:
    """Of what is no terminal's rich makes plain text."""
    return not {"\x1b", "\x07", "\u202e", "\x9b"}.isdisjoint(text)


RUDE = "\x1b]0;owned\x07\u202e\x9b2J"


@pytest.mark.parametrize(
    ("command", "asked", "answer"),
    [
        ("status", "GET /v1/status", {"state": RUDE, "rest": RUDE, "tasks": [{"name": RUDE}]}),
        ("tasks", "GET /v1/tasks", {"tasks": [{"name": RUDE, "path": [RUDE]}]}),
        ("ping", "POST /v1/ping", {"ok": True, "pings": [{"worker": RUDE, "ok": True}]}),
        ("history", "GET /v1/history", {"epochs": [{"epoch": 7, "when": RUDE, "how": RUDE}]}),
    ],
)
def test_what_answers_at_the_address_may_be_anybody(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    asked: str,
    answer: dict[str, Any],
) -> None:
    with FakeRest({asked: (200, answer)}) as rest:
        monkeypatch.setenv("BLOCKFLOW_URL", rest.url)
        main(command.split())
    told = capsys.readouterr()
    assert "\\x1b]0;owne" in told.out + told.err  # a table may leave the middle of a name out
    assert not acts(told.out + told.err)


def test_the_doctor_quotes_the_names_of_files_that_others_have_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    planted = tmp_path / RUDE
    planted.touch()
    planted.chmod(0o666)
    main(["doctor", "-r", str(tmp_path), "--state-dir", str(tmp_path / "s")])
    told = capsys.readouterr().out
    assert "\\x1b]0;owned" in "".join(told.split()) and not acts(told)


def test_a_type_has_its_article() -> None:
    assert [a_kind(value) for value in (1, {}, nn.Identity(), ())] == [
        "an int",
        "a dict",
        "an Identity",
        "a tuple",
    ]

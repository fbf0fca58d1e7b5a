"""Commands whose work the control plane does: Ctrl-C ends the waiting, and they say so."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blockflow import __main__ as entry
from blockflow.cli.main import main
from blockflow.monitor.rest import RestClient


@pytest.mark.parametrize(
    "words", [("apply", "t.json"), ("rollback",), ("restart", "a"), ("drain", "a"), ("stop", "a")]
)
def test_what_was_asked_for_goes_on(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def post(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("nobody was interrupted")

    monkeypatch.setattr(RestClient, "post", post)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text("{}")
    assert main(words) == 130
    out, err = capsys.readouterr()
    assert out.strip() == ""
    assert "the control plane goes on" in err and "blockflow status" in err


class _Left(BaseException):
    """In a process's place."""


def test_a_system_that_is_ended_before_it_has_begun_ends_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(status: int) -> None:
        raise _Left(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(
        "blockflow.launch.process.raise_descriptor_limit",
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(_Left) as left:
        main(["up"])
    assert left.value.args == (0,)
    assert signal.getsignal(signal.SIGTERM) == before


def test_who_presses_ctrl_c_again_as_a_system_ends_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python takes handlers away before its process has ended, but leaves alone what is ignored."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def ended() -> None:
        for number in before:
            signal.signal(number, lambda *_: None)
        raise SystemExit(0)

    monkeypatch.setattr("blockflow.launch.process.raise_descriptor_limit", ended)
    try:
        assert main(["up"]) == 0
        assert {signal.getsignal(n) for n in before} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("found", "then"),
    [(signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)],
)
def test_ctrl_c_amid_the_imports_of_the_command_line_is_no_traceback(
    found: Any, then: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    loaded = SimpleNamespace(main=lambda: seen.append(signal.getsignal(signal.SIGINT)))
    monkeypatch.setitem(sys.modules, "blockflow.cli.main", loaded)
    before = signal.signal(signal.SIGINT, found)
    try:
        entry.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [then]


def test_what_a_parent_has_blocked_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a supervisor has that takes its own signals by sigwait: `up` could not be ended."""
    masks: list[Any] = []
    look = SimpleNamespace(main=lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    monkeypatch.setitem(sys.modules, "blockflow.cli.main", look)
    handler = signal.getsignal(signal.SIGINT)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGCHLD))
    try:
        entry.main()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    assert masks[0].isdisjoint({signal.SIGTERM, signal.SIGCHLD})

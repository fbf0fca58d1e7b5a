"""What the end of a process means: who has ended it, and what it has said."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from blockflow.control.endings import ABORTED, describe_end, ended_outside, last_words
from blockflow.control.events import Exited
from blockflow.core.errors import BlockError, SystemError_
from blockflow.launch.child import CRASH_STATUS

ABRT, KILL, TERM, INT, SEGV = (
    -getattr(signal, f"SIG{name}") for name in ("ABRT", "KILL", "TERM", "INT", "SEGV")
)


def life(**changes: Any) -> Any:
    """One that had said hello and was not told to end."""
    asked = {"condemned": "", "outside": False, "error": None, "hello": True}
    return SimpleNamespace(**asked | changes)


@pytest.mark.parametrize(
    ("status", "tail", "words"),
    [
        (CRASH_STATUS, ("Traceback", "ValueError: odd"), "ValueError: odd"),
        (CRASH_STATUS, (), ""),
        (ABRT, ("Assertion failed: x", ABORTED, "Thread 1"), "Assertion failed: x"),
        (ABRT, ("a word", "another"), ""),
        (ABRT, (), ""),
        (SEGV, ("a word", ABORTED), ""),
        (0, ("a word", "another"), ""),
    ],
)
def test_last_words(status: int, tail: Sequence[str], words: str) -> None:
    assert last_words(status, tail) == words


@pytest.mark.parametrize("status", [KILL, TERM, INT, 0, SEGV, ABRT, 1])
def test_who_was_ended_by_somebody_else(status: int) -> None:
    by_hand = status in (KILL, TERM, INT)
    assert ended_outside(life(), Exited(1, status)) is (by_hand or status == 0)
    assert ended_outside(life(hello=False), Exited(1, status)) is by_hand
    for outside in (False, True):  # why it had to end is known
        for known in ({"condemned": "hung"}, {"error": BlockError("BLOCK_FAILED", "odd")}):
            assert ended_outside(life(outside=outside, **known), Exited(1, status)) is outside


def test_an_error_of_its_own_is_told_without_class_and_hint() -> None:
    error = SystemError_("NO_SPACE", "no threads: odd", where="zmq", hint="free memory")
    tail = ("Traceback", f"{type(error).__module__}.SystemError_: {error}")
    told = describe_end(life(), Exited(1, CRASH_STATUS, tail), starting=True)
    assert told == "exit status 1 while it started: NO_SPACE: no threads: odd (at zmq)"


def test_only_who_had_begun_can_have_ended_well() -> None:
    event = Exited(1, 0)
    assert "from outside" in describe_end(life(), event, starting=False)
    assert "from outside" not in describe_end(life(hello=False), event, starting=True)

"""A Manager that no signal ends, for it waits in the kernel: for a disk that is frozen, say."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from blockflow.control import guardian
from blockflow.control.guardian import Guardian
from blockflow.control.vigil import Vigil
from blockflow.launch.ward import Line
from blockflow.tensormq.janitor import run_root

S = 1_000_000_000


@pytest.fixture
def it() -> Iterator[Any]:
    """A guardian whose Manager, of process id 5, never ends; ``told`` is what was done."""
    made: Any = Guardian(run_root())
    made._line, theirs = Line.pair()
    made._wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    made._vigil, made._served, made._manager = Vigil(0), True, 5
    yield made
    for fd in (made._wake, wake):
        os.close(fd)
    theirs.close()
    made._line.close()


def test_who_was_told_to_end_goes_without_it(it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now, done = 100 * S, list[Any]()
    waits: list[int | None] = []

    class Poll:
        def register(self, *_: Any) -> None: ...

        def poll(self, ms: int | None) -> None:
            """The time that it waits passes at once."""
            nonlocal now
            waits.append(ms)
            assert ms is not None, "for ever"
            now += ms * 1_000_000

    monkeypatch.setattr(guardian.time, "monotonic_ns", lambda: now)
    monkeypatch.setattr(guardian.select, "poll", Poll)
    monkeypatch.setattr(guardian.os, "kill", lambda pid, number: done.append((pid, number)))
    monkeypatch.setattr(guardian.log, "error", done.append)
    monkeypatch.setattr(it, "_reap", lambda: None)
    it._stop()
    assert it._watch() == -signal.SIGKILL
    kill, killed, left = done
    assert kill == (5, signal.SIGKILL) and "does not end" in killed and "left to that" in left
    assert waits == [60_000, 5_000]
    assert it._outcome(-signal.SIGKILL, it._hung) == 1

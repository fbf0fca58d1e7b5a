"""Ends that do not come by themselves: a Manager that waits in the kernel, for a frozen disk, say,
and a machine that leaves no room to look for who is left."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockflow.control import guardian
from blockflow.control.guardian import Guardian
from blockflow.control.vigil import Vigil
from blockflow.launch.ward import Line
from blockflow.tensormq import janitor
from blockflow.tensormq.janitor import RunDir, run_root, sweep_stale

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


def test_the_end_gets_by_without_room_for_a_look(it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor, say, that the whole machine has not got: who was seen before is ended."""
    it._manager = 0
    it._begin()
    left, killed = {7: 70}, list[tuple[int, int]]()
    looks = iter([left, errno.ENFILE, left, errno.ENOMEM, {}, {}])

    def look(*_: Any) -> dict[int, int]:
        found = next(looks)
        if isinstance(found, int):
            raise OSError(found, os.strerror(found), "/proc")
        return found

    monkeypatch.setattr(guardian, "descendants", look)
    monkeypatch.setattr(guardian, "kill_process", lambda *who: killed.append(who))
    monkeypatch.setattr(it, "_reap", lambda: None)
    monkeypatch.setattr(guardian.time, "monotonic", iter([0.0, 0.1, 0.2, 9.0, 9.0, 9.1]).__next__)
    it._end()
    assert killed == [(7, 70)] and not it._run_dir.path.exists()


def test_what_cannot_be_removed_now_is_tried_again_and_then_left_to_the_next_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root, real, fails = run_root() / "stuck", os.scandir, [errno.ENOMEM]

    def scandir(path: Path) -> Any:
        if fails:
            raise OSError(fails[0], os.strerror(fails.pop()), str(path))
        return real(path)

    monkeypatch.setattr("os.scandir", scandir)
    with RunDir.create(root) as made:
        (made.path / "numbers").touch()
    assert not made.path.exists() and not caplog.messages
    fails += [errno.ENFILE] * janitor._PASSES
    with RunDir.create(root) as made:
        fds = len(os.listdir("/proc/self/fd"))
    assert made.path.exists() and len(os.listdir("/proc/self/fd")) == fds - 1
    why = f"{os.strerror(errno.ENFILE)}; the next start below {root} does that"
    assert caplog.messages == [f"{made.path} cannot be removed: {why}"]
    assert sweep_stale(root) == [made.path]
    root.rmdir()

"""A state directory whose disk does not answer keeps the Manager's thread for a moment only: the
dead are told and replaced meanwhile. Where it has to wait, it is said for what."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from blockflow.control import crashes, disk, logfiles, manager, store, waiters
from blockflow.control.crashes import FILE, CrashBook
from blockflow.control.disk import Glance, Patience
from blockflow.control.fleet import Crash
from blockflow.control.logfiles import LogFiles
from blockflow.control.manager import Manager
from blockflow.control.store import StateStore
from blockflow.core.errors import SystemError_

SECOND = 1_000_000_000


class Silence:
    """What is done on a disk, and does not end until it is ``over``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.over = threading.Event()
        self.begun = 0
        patch.setattr(disk, "LOOK_S", 0.0)

    def __call__(self, *_: Any, **__: Any) -> str:
        self.begun += 1
        self.over.wait()
        return "done"

    def end(self) -> None:
        """The disk is back, and has done what it was asked for."""
        self.over.set()
        for thread in threading.enumerate():
            if thread.name == "bf-disk":
                thread.join()
        self._patch.setattr(disk, "LOOK_S", 30.0)


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silence]:
    made = Silence(monkeypatch)
    yield made
    made.end()


def test_what_is_asked_meanwhile_is_not_done(silence: Silence) -> None:
    glance = Glance()
    for _ in range(3):
        assert glance.at(silence, "not now") == "not now"
    assert silence.begun == 1  # no thread waits for each
    silence.end()
    assert glance.at(silence, "not now") == "done"
    with pytest.raises(ZeroDivisionError):
        glance.at(lambda: 1 // 0, 0)


def test_a_launch_goes_without_a_log_file(
    tmp_path: Path, silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    files = LogFiles(tmp_path, told.append)
    path = str(tmp_path / "a#0.1.log")
    with monkeypatch.context() as patch:
        patch.setattr(logfiles, "_made", silence)
        assert not files.make(path, "a#0")
    assert "a#0 has no log file: its disk does not answer" in told[0]
    Path(path).write_text("last\n")
    files.prune(())
    files.look([path], 0)
    files.closed(path, 1)
    assert files.tail(path) == ()
    silence.end()
    assert files.tail(path) == ("last",)
    assert files.make(str(tmp_path / "a#0.2.log"), "a#0")


def test_what_could_not_be_written_of_a_crash_is_written_with_the_next(
    tmp_path: Path, silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crew:
        fleet = ()
        dispatcher_crash: Crash

    def died(incarnation: int) -> None:
        Crew.dispatcher_crash = Crash(incarnation, SECOND, "killed", None, (), True)
        book.take(Crew, incarnation, SECOND)  # type: ignore[arg-type]

    book = CrashBook(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(crashes, "write_file", silence)
        died(1)
        died(2)
        assert [c["incarnation"] for c in book.latest("dispatcher", SECOND)] == [2, 1]
        assert not (tmp_path / FILE).exists()
        silence.end()
    died(3)
    written = json.loads((tmp_path / FILE).read_bytes())["body"]["dispatcher"]
    assert [c["incarnation"] for c in written] == [3, 2, 1]


@pytest.mark.parametrize("lasts", [True, False])
def test_who_must_have_the_disks_answer_says_so(
    tmp_path: Path, lasts: bool, silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update, or a control plane that starts: the log says it, and REST to whoever asks."""
    said: list[str] = []
    heard = threading.Event()

    def hear(text: str, *args: Any) -> None:
        said.append(text % args)
        heard.set()

    monkeypatch.setattr(disk.log, "warning", hear)
    monkeypatch.setattr(waiters, "_LOOK_S", 0.01)
    monkeypatch.setattr(manager, "_CALL_S", 600.0 if lasts else 0.0)
    told = f"the state directory {tmp_path} has not answered for "
    with StateStore(tmp_path) as it:
        made = Manager.__new__(Manager)
        made.store = it
        monkeypatch.setattr(made, "submit", lambda _: Future())
        write = store.write_file

        def late(*args: Any, **kwargs: Any) -> None:
            if lasts:
                assert heard.wait(60)
                with pytest.raises(SystemError_, match=f"is busy: {told}") as e:
                    made.call(lambda: None)
                assert e.value.code == "TIMEOUT"
            write(*args, **kwargs)

        monkeypatch.setattr(store, "write_file", late)
        monkeypatch.setattr(disk, "PATIENCE_S", 0.01 if lasts else 600.0)
        it.begin(1)
        it.commit(1, {}, {})
        assert it.patience.reason() == ""
        monkeypatch.setattr(manager, "_CALL_S", 0.0)
        with pytest.raises(SystemError_, match="the control plane is busy -- try again"):
            made.call(lambda: None)
    assert bool(said) == lasts
    if lasts:
        assert said[0].startswith(told) and "has answered, after" in said[-1]


def test_one_question_within_another_is_the_same_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """To begin, commit and end is to write several times."""
    monkeypatch.setattr(disk, "PATIENCE_S", 0.0)
    it = Patience("the folder")
    with it.asking():
        with it.asking():
            assert it.reason().startswith("the folder has not answered for ")
        assert it.reason(), "it is still waited for"
    assert it.reason() == ""

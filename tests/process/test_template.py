"""The template: what it preloads, and what happens when it dies."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockflow.core.errors import SystemError_
from blockflow.launch import begin, local
from blockflow.launch.base import wait_any
from blockflow.launch.ends import TEMPLATE_STATUS
from blockflow.launch.local import TemplateLauncher
from blockflow.launch.process import become_subreaper, gpu_descriptors
from tests.contract.test_launchers import ENTRY, report, spec_for
from tests.template_gate import Gate

WAIT_S = 30.0


@pytest.fixture
def launcher() -> Iterator[TemplateLauncher]:
    made = TemplateLauncher(preload=["msgpack"])
    yield made
    made.close()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(*pids: int) -> None:
    end = time.monotonic() + WAIT_S
    while not all(map(gone, pids)):
        assert time.monotonic() < end, f"still there: {[p for p in pids if not gone(p)]}"
        select.select([], [], [], 0.01)


def test_children_outlive_a_dead_template(launcher: TemplateLauncher, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    become_subreaper()
    first = launcher.launch(ENTRY, spec_for(tmp_path, "hang"), "w#0")
    report(first, tmp_path)
    template = launcher.template_pid
    os.kill(template, signal.SIGKILL)
    assert wait_any([first], 0.2) == []  # lives on
    second = launcher.launch(ENTRY, spec_for(tmp_path / "b", 4), "w#1")  # by a new template
    assert launcher.template_pid not in (0, template)
    assert second.wait(WAIT_S) == 4
    first.kill(signal.SIGTERM)
    assert first.wait(WAIT_S) == -signal.SIGTERM  # adopted, so its end is still collected


DIES_ON_ITS_FIRST_FORK = """
import os, signal
from pathlib import Path

forked, opened = Path({forked!r}), os.pidfd_open

def pidfd_open(pid):
    if not forked.exists():
        forked.write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)
    return opened(pid)

os.pidfd_open = pidfd_open
"""


def test_nobody_is_left_of_a_launch_on_which_the_template_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = tmp_path / "forked"
    (tmp_path / "dies.py").write_text(DIES_ON_ITS_FIRST_FORK.format(forked=str(forked)))
    monkeypatch.syspath_prepend(str(tmp_path))
    launcher = TemplateLauncher(preload=["dies"])
    try:
        child = launcher.launch(ENTRY, spec_for(tmp_path, "hang"), "w#0")
        # By the next one. What the first had forked would be a second worker of that name.
        assert report(child, tmp_path)["pid"] == child.pid
        assert child.pid != int(forked.read_text())
        wait_gone(int(forked.read_text()))
        assert child.poll() is None
    finally:
        launcher.close()


def test_a_dead_template_is_replaced_before_it_is_needed(launcher: TemplateLauncher) -> None:
    launcher.wait_ready()
    template = launcher.template_pid
    launcher.tend()
    assert launcher.template_pid == template  # nothing to do
    os.kill(template, signal.SIGKILL)
    wait_gone(template)
    launcher.tend()
    successor = launcher.template_pid
    assert successor not in (0, template)
    os.kill(successor, signal.SIGKILL)  # before it is ready: not tried again and again
    end = time.monotonic() + WAIT_S
    while launcher.template_pid == successor:
        launcher.tend()
        assert time.monotonic() < end
    assert launcher.template_pid == 0


def test_one_that_the_machine_has_no_room_for_is_tried_again(
    launcher: TemplateLauncher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its caller, the Manager's thread, hears nothing of it; a launch does."""
    asked: list[str] = []

    def refuse(*args: object, **_: object) -> None:
        asked.append("template")
        raise BlockingIOError(errno.EAGAIN, "no process left")

    launcher.wait_ready()
    os.kill(launcher.template_pid, signal.SIGKILL)
    wait_gone(launcher.template_pid)
    with monkeypatch.context() as patch:
        patch.setattr(begin, "spawn", refuse)
        launcher.tend()
        launcher.tend()  # too soon
        assert len(asked) == 1 and launcher.template_pid == 0
        patch.setattr(local, "_AGAIN_S", 0.0)
        with pytest.raises(SystemError_, match="no process left") as err:
            launcher.launch(ENTRY, spec_for(tmp_path, 0), "w#0")
        assert err.value.code == "NO_SPACE"
        for _ in range(3):
            launcher.tend()
        assert len(asked) == 5
    said = [r for r in caplog.records if "nothing can be launched" in r.getMessage()]
    assert len(said) == 1
    launcher.tend()
    assert launcher.template_pid != 0
    assert launcher.launch(ENTRY, spec_for(tmp_path, 6), "w#0").wait(WAIT_S) == 6


def test_a_stopped_template_is_replaced_by_who_needs_it(
    launcher: TemplateLauncher, tmp_path: Path
) -> None:
    launcher.wait_ready()
    stopped = launcher.template_pid
    os.kill(stopped, signal.SIGSTOP)
    begun = time.monotonic()
    child = launcher.launch(ENTRY, spec_for(tmp_path, 6), "w#0")
    assert child.wait(WAIT_S) == 6
    assert launcher.template_pid not in (0, stopped) and gone(stopped)
    assert time.monotonic() - begun < WAIT_S
    # The next one is stopped before it is ready.
    os.kill(launcher.template_pid, signal.SIGKILL)
    wait_gone(launcher.template_pid)
    launcher.tend()
    stopped = launcher.template_pid
    os.kill(stopped, signal.SIGSTOP)
    child = launcher.launch(ENTRY, spec_for(tmp_path, 7), "w#1")
    assert child.wait(WAIT_S) == 7
    assert launcher.template_pid not in (0, stopped)


def test_a_template_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = TemplateLauncher(preload=["msgpack"], log_path=str(tmp_path / "log"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemError_) as err:
        launcher.launch(ENTRY, spec_for(tmp_path, 0), "w#0")
    assert err.value.code == "INTERNAL"
    monkeypatch.undo()
    child = launcher.launch(ENTRY, spec_for(tmp_path, 6), "w#0")  # the next try may succeed
    assert child.wait(WAIT_S) == 6
    launcher.close()


def test_an_attempt_waits_for_no_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(tmp_path / "site")
    monkeypatch.syspath_prepend(str(gate.folder))
    launcher = TemplateLauncher(preload=["msgpack"])
    order = (ENTRY, spec_for(tmp_path, 6), "w#0")
    try:
        with gate.shut():
            assert launcher.attempt(*order) is None
            first = launcher.template_pid
            assert launcher.attempt(*order) is None and launcher.template_pid == first
            os.kill(first, signal.SIGKILL)
            wait_gone(first)
            assert launcher.attempt(*order) is None
            second = launcher.template_pid
            assert second not in (0, first)
            os.kill(second, signal.SIGKILL)
            wait_gone(second)
            with pytest.raises(SystemError_, match="died: killed by SIGKILL") as died:
                launcher.attempt(*order)  # two in a row
            assert died.value.details == {TEMPLATE_STATUS: -signal.SIGKILL}
            assert launcher.attempt(*order) is None  # another launch begins anew
        launcher.wait_ready()
        child = launcher.attempt(*order)
        assert child is not None and child.wait(WAIT_S) == 6
    finally:
        launcher.close()


def test_imports_that_hang_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a template's start, and those that a launch has it do."""
    gate = Gate(tmp_path / "site")
    (tmp_path / "hangs.py").write_text("import select; select.select([], [], [])")
    for folder in (gate.folder, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(local, "_IMPORTS_S", 0.5)
    launcher = TemplateLauncher(preload=["msgpack"])
    order = (ENTRY, spec_for(tmp_path, 6), "w#0")
    try:
        with gate.shut():
            assert launcher.attempt(*order) is None
            first = launcher.template_pid
            wait_for_another(launcher, first, *order)
            assert gone(first)
        monkeypatch.setattr(local, "_IMPORTS_S", WAIT_S)  # this machine may be slow
        assert launcher.launch(*order).wait(WAIT_S) == 6
        order = (ENTRY, {**spec_for(tmp_path, 7), "modules": ["hangs"]}, "w#1")
        assert launcher.attempt(*order) is None
        monkeypatch.setattr(local, "_IMPORTS_S", 0.5)
        wait_for_another(launcher, launcher.template_pid, *order)
        monkeypatch.setattr(local, "_IMPORTS_S", WAIT_S)
        launcher.wait_ready()
        assert launcher.attempt(*order) is None  # it may have been something else: once more
        monkeypatch.setattr(local, "_IMPORTS_S", 0.5)
        wait_for_another(launcher, launcher.template_pid, *order)
        monkeypatch.setattr(local, "_IMPORTS_S", WAIT_S)
        assert launcher.launch(*order).wait(WAIT_S) == 7  # without it
    finally:
        launcher.close()


def wait_for_another(launcher: TemplateLauncher, template: int, *order: Any) -> None:
    end = time.monotonic() + WAIT_S
    while launcher.template_pid == template:
        assert time.monotonic() < end
        assert launcher.attempt(*order) is None
        select.select([], [], [], 0.01)
    assert launcher.template_pid != 0


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", "2 threads"),
        ("sys.modules['__main__'].gpu_descriptors = lambda: ['/dev/nvidia0']", "/dev/nvidia0"),
    ],
)
def test_it_forks_nothing_where_that_would_be_unsound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    (tmp_path / "breaks_the_rule.py").write_text(f"import sys, threading\n{code}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    launcher = TemplateLauncher(preload=["breaks_the_rule"])
    try:
        with pytest.raises(SystemError_, match=f"{why}, a fork would be unsound"):
            launcher.launch(ENTRY, spec_for(tmp_path, 0), "w#0")
    finally:
        launcher.close()


def test_open_device_files_are_seen(tmp_path: Path) -> None:
    assert gpu_descriptors(str(tmp_path)) == []
    with (tmp_path / "gpu0").open("w"):
        assert gpu_descriptors(str(tmp_path)) == [str(tmp_path / "gpu0")]


BAD = """
import threading
from pathlib import Path

def start_a_thread(spec):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    Path(spec["mark"]).write_text("was here")

def fail(spec):
    Path(spec["mark"]).write_text("was here")
    raise ValueError("told to fail")
"""
"""Rehearsals that break the rule."""


@pytest.mark.parametrize("what", ["start_a_thread", "fail"])
def test_a_bad_rehearsal_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "bad.py").write_text(BAD)
    monkeypatch.syspath_prepend(str(tmp_path))
    rehearsals = [(f"bad:{what}", {"mark": str(mark)})]
    launcher = TemplateLauncher(preload=["msgpack"], rehearsals=lambda: rehearsals)
    try:
        child = launcher.launch(ENTRY, spec_for(tmp_path, "hang"), "w#0")
        assert report(child, tmp_path)["threads"] == 1
        assert mark.exists()
    finally:
        launcher.close()


SEEN = """
import sys
from pathlib import Path

def seen(spec):
    there = [name for name in ("fine", "bad") if name in sys.modules]
    Path(spec["report"]).write_text(" ".join(there))
    return 0
"""
"""A child that says which of two modules were there when it was forked."""


@pytest.mark.parametrize(
    "bad",
    [
        "import os; os.kill(os.getpid(), 9)",
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "raise ImportError",
    ],
)
def test_what_a_launch_names_is_imported_before_its_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    """Once for all; and a module that no template survives is left to the processes."""
    become_subreaper()
    (tmp_path / "fine.py").write_text("")
    (tmp_path / "bad.py").write_text(bad)
    (tmp_path / "child.py").write_text(SEEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = "child:seen"
    launcher = TemplateLauncher(preload=["msgpack"])

    def launched(*modules: str) -> str:
        spec = {"report": str(tmp_path / "report"), "modules": list(modules)}
        child = launcher.launch(entry, spec, "w#0")
        assert child.wait(WAIT_S) == 0
        child.close()
        return (tmp_path / "report").read_text()

    try:
        assert launched() == ""
        first = launcher.template_pid
        assert launched("fine") == launched() == "fine"
        assert launcher.template_pid == first
        assert launched("bad") == "fine"
        assert launched("bad", "fine") == "fine"
        last = launcher.template_pid
        assert (last == first) == (bad == "raise ImportError")
        # A new one imports from the start what its predecessors have survived.
        os.kill(last, signal.SIGKILL)
        wait_gone(last)
        assert launched() == "fine"
    finally:
        launcher.close()


def test_a_process_with_many_descriptors_has_a_template_too(tmp_path: Path) -> None:
    """``select`` refuses descriptors beyond 1023; a program with a System in it may have more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    launcher = TemplateLauncher(preload=["msgpack"])
    try:
        child = launcher.launch(ENTRY, spec_for(tmp_path, 3), "w#0")
        assert child.wait(WAIT_S) == 3
        launcher.tend()
    finally:
        launcher.close()
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_template_that_still_imports_is_not_waited_for(launcher: TemplateLauncher) -> None:
    """Whoever ends a system amid its start has nothing of what it would import."""
    launcher.start()
    process = launcher._process
    launcher.close()
    assert isinstance(process, subprocess.Popen) and process.returncode == -signal.SIGKILL

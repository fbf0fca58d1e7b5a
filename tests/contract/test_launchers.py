"""One contract suite for all launchers."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockflow.control.logfiles import tail
from blockflow.core.errors import SystemError_
from blockflow.launch.base import LIFELINE_ENV, Child, Launcher, wait_any
from blockflow.launch.fresh import SubprocessLauncher
from blockflow.launch.local import TemplateLauncher
from blockflow.launch.process import descendants
from blockflow.tensormq import agent
from tests.refusals_rig import no_descriptor

ENTRY = "tests.launched:trivial"
WAIT_S = 20.0


@pytest.fixture(params=[TemplateLauncher, SubprocessLauncher])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    if request.param is TemplateLauncher:
        made: Launcher = TemplateLauncher(preload=["msgpack", "no.such.module"])
    else:
        made = SubprocessLauncher()
    made.start()
    yield made
    made.close()


def spec_for(folder: Path, then: int | str, **more: Any) -> dict[str, Any]:
    return {"report": str(folder / "report.json"), "then": then, **more}


def report(child: Child, folder: Path) -> dict[str, Any]:
    """What the child wrote; waits for it (or for the child's death)."""
    path = folder / "report.json"
    while not path.exists():
        assert child.wait(0.02) is None or path.exists(), "ended without a report"
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts


def test_lifeline_has_one_name() -> None:
    assert agent.LIFELINE_ENV == LIFELINE_ENV  # rooms of one ring do not import each other


def test_a_signal_says_in_the_log_where_the_process_was(launcher: Launcher, tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    child = launcher.launch(ENTRY, spec_for(tmp_path, "segfault", log_path=str(log)), "w#0")
    assert child.wait(WAIT_S) == -signal.SIGSEGV
    lines = tail(str(log))
    assert lines[0] == "Fatal Python error: Segmentation fault"
    assert any("in trivial" in line for line in lines)


@pytest.mark.parametrize(("then", "status"), [(0, 0), (3, 3), ("raise", 1), ("exit", 9)])
def test_exit_status(launcher: Launcher, tmp_path: Path, then: int | str, status: int) -> None:
    log = tmp_path / "child.log"
    child = launcher.launch(ENTRY, spec_for(tmp_path, then, log_path=str(log)), "w#0")
    assert child.wait(WAIT_S) == status
    assert child.poll() == status
    child.kill()  # of a dead one: nothing happens
    assert not launcher._alive  # type: ignore[attr-defined]
    text = log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    assert ("told to raise" in text) == (then == "raise")
    assert ("a line on stdout" in text) == (type(then) is int)
    child.close()
    child.close()


def test_child_is_set_up(launcher: Launcher, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    nested = {"a": [1, [2.5, None]], "b": {"c": True}}
    spec = spec_for(tmp_path, "hang", cores=[core], nested=nested)
    child = launcher.launch(ENTRY, spec, "a-long-worker-name#0")
    facts = report(child, tmp_path)
    assert facts["pid"] == child.pid == facts["sid"]
    assert facts["comm"] == "bf:a-long-wor#0"  # the kernel keeps 15 bytes
    assert facts["cores"] == [core]
    assert facts["omp"] == "1" and facts["mmap_max"] == "0"
    assert facts["default"] == ["SIGCHLD", "SIGHUP", "SIGINT", "SIGTERM"]
    assert facts["ignored"] == ["SIGPIPE"]
    assert facts["stdin"] == os.devnull
    assert facts["threads"] == 1
    assert facts["spec"] == spec
    # stdin, stdout, stderr, the lifeline, and the one that lists the folder
    assert len(facts["fds"]) == 5 and facts["lifeline"] in facts["fds"]
    assert child.poll() is None
    child.kill()
    assert child.wait(WAIT_S) == -signal.SIGKILL


def test_child_gives_up_what_it_does_not_need(launcher: Launcher, tmp_path: Path) -> None:
    child = launcher.launch(ENTRY, spec_for(tmp_path, 0), "a#0")
    facts = report(child, tmp_path)
    assert facts["umask"] == 0o077
    assert facts["core"] == [0, 0]
    assert "NoNewPrivs:\t1\n" in facts["status"]
    sets = dict(re.findall(r"^Cap(\w+):\t(\w+)$", facts["status"], re.MULTILINE))
    assert sets.keys() == {"Inh", "Prm", "Eff", "Bnd", "Amb"}
    if os.geteuid() != 0:  # who has no right to change it, and gains nothing by it
        del sets["Bnd"]
    assert {int(bits, 16) for bits in sets.values()} == {0}
    assert facts["self_is_ours"]  # verified artifacts are opened through /proc/self/fd
    assert child.wait(WAIT_S) == 0


def test_attempts_start_one_process(launcher: Launcher, tmp_path: Path) -> None:
    made: list[Child] = []
    end = time.monotonic() + 3 * WAIT_S
    while not made:
        assert time.monotonic() < end
        made += filter(None, [launcher.attempt(ENTRY, spec_for(tmp_path, "hang"), "w#0")])
        launcher.tend()
        time.sleep(0.01)
    assert report(made[0], tmp_path)["pid"] == made[0].pid
    launcher.close()
    assert made[0].poll() == -signal.SIGKILL
    with pytest.raises(SystemError_):
        launcher.attempt(ENTRY, spec_for(tmp_path, 0), "late")


def test_wait_for_many(launcher: Launcher, tmp_path: Path) -> None:
    children = []
    for i in range(3):
        folder = tmp_path / str(i)
        folder.mkdir()
        children.append(launcher.launch(ENTRY, spec_for(folder, "hang"), f"w#{i}"))
        report(children[-1], folder)
    assert wait_any(children, 0.0) == []
    children[1].kill(signal.SIGTERM)
    assert wait_any(children, WAIT_S) == [children[1]]
    assert children[1].poll() == -signal.SIGTERM
    assert children[0].poll() is None


def test_close_kills_what_runs(launcher: Launcher, tmp_path: Path) -> None:
    child = launcher.launch(ENTRY, spec_for(tmp_path, "hang"), "w#0")
    report(child, tmp_path)
    launcher.close()
    assert child.poll() == -signal.SIGKILL
    launcher.close()
    with pytest.raises(SystemError_):
        launcher.launch(ENTRY, spec_for(tmp_path, 0), "late")


def test_unknown_entry_and_cores(launcher: Launcher, tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = launcher.launch("blockflow.nowhere:run", {"log_path": str(log)}, "w#0")
    assert child.wait(WAIT_S) == 1
    before = log.read_text()
    assert "blockflow.nowhere" in before
    child = launcher.launch(ENTRY, spec_for(tmp_path, 0, cores=[4095], log_path=str(log)), "w#1")
    assert child.wait(WAIT_S) == 0  # on those that there are
    text = log.read_text()
    assert text.startswith(before) and "cores [4095]" in text
    (link := tmp_path / "link").symlink_to(tmp_path / "of-another")
    child = launcher.launch(ENTRY, spec_for(tmp_path, 0, log_path=str(link)), "w#2")
    assert child.wait(WAIT_S) == 1
    assert not (tmp_path / "of-another").exists()


def test_large_orders(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.launch(ENTRY, spec_for(tmp_path, 4), "w#0").wait(WAIT_S) == 4
    template = launcher.template_pid
    for nbytes in (1_100_000, 3_000_000):  # either side of what one message may have
        with pytest.raises(SystemError_, match=f"has {nbytes // 100_000}"):
            launcher.launch(ENTRY, spec_for(tmp_path, 0, padding="x" * nbytes), "w#0")
    if isinstance(launcher, TemplateLauncher):
        end = launcher._connected()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 212_992)  # Linux gives no more
    # and goes on
    child = launcher.launch(ENTRY, spec_for(tmp_path, 5, padding="x" * 1_000_000), "w#1")
    assert child.wait(WAIT_S) == 5 and launcher.template_pid == template


def test_a_process_that_cannot_be_watched_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descendants(os.getpid()).keys()
    launcher = SubprocessLauncher()
    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    with pytest.raises(SystemError_, match="Too many open files"):
        launcher.launch(ENTRY, spec_for(tmp_path, "hang"), "w#0")
    assert descendants(os.getpid()).keys() <= before
    launcher.close()


def test_without_a_descriptor_for_it_no_process_is_left_running(
    launcher: Launcher, tmp_path: Path
) -> None:
    sibling = launcher.launch(ENTRY, spec_for(tmp_path, "hang"), "w#9")
    before = descendants(os.getpid())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        with pytest.raises(SystemError_, match="Too many open files") as caught:
            launcher.launch(ENTRY, spec_for(tmp_path, "hang"), "w#0")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (caught.value.code, caught.value.where) == ("NO_SPACE", "w#0")
    end = time.monotonic() + WAIT_S
    while left := descendants(os.getpid()).keys() - before.keys():
        assert time.monotonic() < end, left
        time.sleep(0.01)
    assert sibling.poll() is None
    assert launcher.launch(ENTRY, spec_for(tmp_path, 3), "w#1").wait(WAIT_S) == 3

"""Small calls that launchers and children share, against a stand-in for the kernel."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from blockflow.core.errors import SystemError_
from blockflow.launch import process
from blockflow.launch.base import Child, wait_any
from blockflow.launch.inherited import Inherited
from blockflow.launch.process import (
    DESCRIPTORS,
    EXIT_UNKNOWN,
    Adoption,
    become_subreaper,
    collect_own_child,
    die_with,
    drop_capabilities,
    ending_signals,
    give_up_privileges,
    kill_process,
    open_process,
    own_what_is_made,
    raise_descriptor_limit,
    readable,
    set_process_name,
    shown_name,
    start_time,
    volunteer,
)
from blockflow.launch.refused import not_started, thread_refused

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("number", "code", "hint"),
    [
        (errno.EAGAIN, "NO_SPACE", "pids.max"),
        (errno.ENOMEM, "NO_SPACE", "pids.max"),
        (errno.EMFILE, "NO_SPACE", "pids.max"),
        (errno.ENFILE, "NO_SPACE", "pids.max"),
        (errno.EPERM, "INTERNAL", "blockflow doctor"),
        (errno.ENOSYS, "INTERNAL", "blockflow doctor"),
        (0, "INTERNAL", ""),
    ],
)
def test_why_a_process_was_not_started(number: int, code: str, hint: str) -> None:
    error = not_started("launch of 'w#0'", "why", number, "w#0")
    assert (error.code, error.where, bool(error.hint)) == (code, "w#0", bool(hint))
    assert hint in error.hint


def test_only_a_refused_thread_is_taken_for_one() -> None:
    assert thread_refused(RuntimeError("can't start new thread")) == errno.EAGAIN
    assert thread_refused(RuntimeError("set changed size")) == 0
    assert thread_refused(OSError("can't start new thread")) == 0


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("trunk#0", b"trunk#0"),
        ("bf:a_long_name_of_a_block#12", b"bf:a_long_na#12"),
        ("a_name_without_a_number", b"a_name_without_"),
        ("worker#1234567890123456", b"#12345678901234"),
        ("#1", b"#1"),
    ],
)
def test_a_shown_name_keeps_its_number(name: str, shown: bytes) -> None:
    assert shown_name(name) == shown and len(shown) <= 15


@pytest.mark.parametrize(("before", "after"), [("0", "100"), ("-50", "50"), ("950", "1000")])
def test_a_worker_goes_before_who_forked_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    score = tmp_path / "oom_score_adj"
    monkeypatch.setattr(process, "_OOM_SCORE", score)
    volunteer()  # where there is none, nothing happens
    assert not score.exists()
    score.write_text(before)
    volunteer()
    assert score.read_text() == after


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, INFINITE), (DESCRIPTORS, INFINITE)),
        ((1024, 10 * DESCRIPTORS), (DESCRIPTORS, 10 * DESCRIPTORS)),
        ((2 * DESCRIPTORS, 10 * DESCRIPTORS), None),
        ((4096, 4096), None),
        ((INFINITE, INFINITE), None),
    ],
)
def test_the_limit_of_descriptors_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: tuple[int, int] | None
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: given.append(pair))
    raise_descriptor_limit()
    assert given == ([] if wanted is None else [wanted])


@pytest.mark.parametrize(("hangup", "ends"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_closed_terminal_ends_it_unless_that_is_ignored(
    monkeypatch: pytest.MonkeyPatch, hangup: signal.Handlers, ends: bool
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: hangup)
    assert (signal.SIGHUP in ending_signals()) == ends
    assert {signal.SIGTERM, signal.SIGINT} <= set(ending_signals())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the kernel was asked by prctl."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(process, "_prctl", lambda option, value: told.append((option, value)))
    return told


def test_an_adoption_is_noticed_once(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[int, int]]
) -> None:
    adoption = Adoption()
    adoption.check()
    assert asked == []
    monkeypatch.setattr(os, "getppid", lambda: 1)
    adoption.check()
    adoption.check()
    assert asked == [(process._PR_SET_PDEATHSIG, signal.SIGKILL)]


@pytest.mark.parametrize(("parent", "killed"), [(7, []), (8, [signal.SIGKILL])])
def test_who_dies_with_its_parent_dies_too_if_that_is_dead(
    monkeypatch: pytest.MonkeyPatch,
    asked: list[tuple[int, int]],
    parent: int,
    killed: list[signal.Signals],
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "getppid", lambda: 7)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    die_with(parent)
    assert asked == [(process._PR_SET_PDEATHSIG, signal.SIGKILL)]
    assert sent == killed


def test_a_kernel_that_refuses_prctl_is_told_and_a_name_is_not_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(option: int, value: int | bytes) -> NoReturn:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(process, "_prctl", refused)
    set_process_name("bf:manager")
    for needed in (become_subreaper, partial(die_with, os.getppid()), give_up_privileges):
        with pytest.raises(SystemError_, match=r"prctl.PR_SET_.* not permitted") as caught:
            needed()
        assert (caught.value.code, caught.value.where) == ("INTERNAL", "prctl")
        assert "seccomp" in caught.value.hint


@pytest.mark.parametrize(("end", "status"), [("exit 7", 7), ("kill -9 $$", -signal.SIGKILL)])
def test_how_a_child_ended_is_collected_once(end: str, status: int) -> None:
    command = ["sh", "-c", f"read line; {end}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        pidfd = os.pidfd_open(child.pid)
        assert collect_own_child(pidfd) is None and start_time(child.pid) > 0
        assert child.stdin is not None
        child.stdin.write(b"go on\n")
        child.stdin.flush()
        assert readable(pidfd, 10)
        assert start_time(child.pid) == 0, "what waits to be collected is no process any more"
        assert [collect_own_child(pidfd) for _ in range(2)] == [status, EXIT_UNKNOWN]
        os.close(pidfd)


def test_of_a_dead_or_closed_child_nothing_is_asked() -> None:
    with subprocess.Popen(["true"]) as process:
        pidfds = [os.pidfd_open(process.pid) for _ in range(2)]
    dead, closed = (Child("w#0", process.pid, pidfd, lambda: None) for pidfd in pidfds)
    dead.kill()
    closed.close()
    closed.close()
    closed.kill()
    assert wait_any([closed], 0.0) == [] and closed.poll() is None
    assert wait_any([closed, dead], 10) == [dead]
    dead.close()


def test_a_template_of_a_former_manager_is_killed_and_waited_for() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        began = start_time(process.pid)
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        assert up_s - 60 < began / os.sysconf("SC_CLK_TCK") < up_s + 1
        another, found = Inherited(process.pid, began + 1), Inherited(process.pid, began)
        try:
            another.kill()
            another.wait(0.0)  # it is gone
            with pytest.raises(subprocess.TimeoutExpired):
                found.wait(0.05)
            before = len(os.listdir("/proc/self/fd"))
            found.kill()
            found.wait(10)
            found.wait(10)
            found.kill()
            assert len(os.listdir("/proc/self/fd")) == before - 1
        finally:
            process.terminate()
    assert process.returncode == -signal.SIGKILL


def test_of_somebody_elses_child_nothing_is_known_while_it_runs() -> None:
    pidfd = os.pidfd_open(os.getppid())
    assert collect_own_child(pidfd) is None
    os.close(pidfd)


@pytest.mark.parametrize(
    "call",
    [
        lambda pid: open_process(pid, 0),
        lambda pid: open_process(pid, start_time(pid) + 1),
        lambda pid: kill_process(pid, start_time(pid)),
    ],
)
def test_no_descriptor_is_left_open(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[int], int | None]
) -> None:
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda pidfd, number: None)
    before = sorted(os.listdir("/proc/self/fd"))
    assert call(os.getpid()) in (-1, None)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("lacks", ["pidfd_open", "read_bytes"])
def test_nobody_is_dead_for_want_of_a_descriptor(
    monkeypatch: pytest.MonkeyPatch, lacks: str, number: int
) -> None:
    """A successor would start others in the place of all that serve, and end these."""

    def fails(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    pid, before = os.getpid(), sorted(os.listdir("/proc/self/fd"))
    began = start_time(pid)
    with monkeypatch.context() as patch:
        patch.setattr(os if lacks == "pidfd_open" else Path, lacks, fails)
        with pytest.raises(OSError, match=os.strerror(number)):
            open_process(pid, began)
        kill_process(pid, began)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("held", [False, True])
def test_who_has_no_capability_asks_for_none_to_be_taken(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[int, int]], held: bool
) -> None:
    """A service's filter of system calls may forbid that."""

    def capget(header: object, found: list[int]) -> int:
        found[0] = int(held)
        return 0

    def capset(header: object, none: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(process, "_LIBC", SimpleNamespace(capget=capget, capset=capset))
    with pytest.raises(PermissionError) if held else nullcontext():
        drop_capabilities()
    assert len(asked) == process._MOST_CAPABILITIES + 1


@pytest.mark.parametrize(("mask", "then"), [(0o777, 0o077), (0o027, 0o027), (0o300, 0)])
def test_what_a_process_makes_it_may_use(mask: int, then: int) -> None:
    before = os.umask(mask)
    try:
        own_what_is_made()
        assert os.umask(mask) == then
    finally:
        os.umask(before)

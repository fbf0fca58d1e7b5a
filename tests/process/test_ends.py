"""How a process ended is known at once, whoever has to reap it, however busy that one is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockflow.launch import local
from blockflow.launch.ends import unreaped_status
from blockflow.launch.local import TemplateLauncher
from blockflow.launch.process import EXIT_UNKNOWN, has_exited
from tests.contract.test_launchers import ENTRY, WAIT_S, report, spec_for


@pytest.fixture
def launcher() -> Iterator[TemplateLauncher]:
    made = TemplateLauncher(preload=["msgpack"])
    yield made
    made.close()


def test_a_template_that_is_held_up_keeps_nobody_waiting(
    launcher: TemplateLauncher, tmp_path: Path
) -> None:
    """It is stopped and so reaps nobody; what it says later of the dead is not kept for ever."""
    folders = [tmp_path / name for name in "ab"]
    children = []
    for folder in folders:
        folder.mkdir()
        children.append(launcher.launch(ENTRY, spec_for(folder, "hang"), folder.name))
        report(children[-1], folder)
    template = launcher.template_pid
    os.kill(template, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        for child, sig in zip(children, (signal.SIGKILL, signal.SIGTERM), strict=True):
            child.kill(sig)
            assert child.wait(WAIT_S) == -sig
        assert time.monotonic() - begin < local._REPORT_S
        assert launcher.template_pid == template  # nor is it replaced for that
    finally:
        os.kill(template, signal.SIGCONT)
    assert launcher.launch(ENTRY, spec_for(tmp_path, 5), "c").wait(WAIT_S) == 5
    assert launcher.template_pid == template
    assert launcher._statuses == {}


def test_a_report_that_is_on_its_way_is_waited_for(
    launcher: TemplateLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template has reaped the child, and is held up before it says so."""
    monkeypatch.setattr(local, "unreaped_status", lambda *_: None)
    child = launcher.launch(ENTRY, spec_for(tmp_path, 5), "w#0")
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    template, launcher._socket = launcher._socket, mine
    assert template is not None

    def relay() -> None:
        report = template.recv(1 << 16)
        time.sleep(1.5)
        theirs.send(report)

    busy = threading.Thread(target=relay)
    busy.start()
    try:
        assert child.wait(WAIT_S) == 5
    finally:
        busy.join()
        launcher._socket = template
        mine.close()
        theirs.close()


@pytest.mark.parametrize("how", ["exit", "signal"])
def test_an_end_is_read_before_it_is_collected(how: str) -> None:
    code = "raise SystemExit(7)" if how == "exit" else "import os; os.kill(os.getpid(), 9)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command) as other, subprocess.Popen(command) as process:
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        pidfd = os.pidfd_open(process.pid)
        try:
            while not has_exited(pidfd):
                time.sleep(0.001)
            assert unreaped_status(process.pid, pidfd) == (7 if how == "exit" else -9)
            assert unreaped_status(other.pid, pidfd) is None  # that is another one
            process.wait()
            assert unreaped_status(process.pid, pidfd) is None
        finally:
            os.close(pidfd)


def test_a_living_process_has_not_ended() -> None:
    pidfd = os.pidfd_open(os.getpid())
    try:
        assert unreaped_status(os.getpid(), pidfd) is None
    finally:
        os.close(pidfd)


@pytest.mark.skipif(os.geteuid() != 0, reason="whoever is not root has the tests above")
def test_who_is_not_root_is_told_how_his_own_processes_ended() -> None:
    pid = os.fork()
    if pid == 0:
        found: int | None = None
        try:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            with subprocess.Popen(["/bin/sh", "-c", "exit 7"]) as process:
                pidfd = os.pidfd_open(process.pid)
                while not has_exited(pidfd):
                    time.sleep(0.001)
                found = unreaped_status(process.pid, pidfd)
        finally:
            os._exit(found != 7)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_what_the_kernel_keeps_to_itself_is_not_taken_for_an_exit_without_an_error() -> None:
    """To whom may not trace a process it says 0, whatever that ended with."""
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]) as process:
        pidfd = os.pidfd_open(process.pid)
        try:
            while not has_exited(pidfd):
                time.sleep(0.001)
            pid = os.fork()
            if pid == 0:
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
                os._exit(unreaped_status(process.pid, pidfd) is not None)
            assert os.waitpid(pid, 0)[1] == 0
        finally:
            os.close(pidfd)


def test_who_cannot_be_known_of_is_said_to_be_unknown(
    launcher: TemplateLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has reaped it who says nothing; what comes in the end all the same is let go."""
    monkeypatch.setattr(local, "_REPORT_S", 0.2)
    monkeypatch.setattr(local, "unreaped_status", lambda *_: None)
    child = launcher.launch(ENTRY, spec_for(tmp_path, "hang"), "w#0")
    report(child, tmp_path)
    monkeypatch.setattr(launcher, "_end_stopped", lambda: None)
    os.kill(launcher.template_pid, signal.SIGSTOP)
    try:
        child.kill()
        assert child.wait(WAIT_S) == EXIT_UNKNOWN
    finally:
        os.kill(launcher.template_pid, signal.SIGCONT)
    assert launcher.launch(ENTRY, spec_for(tmp_path, 5), "w#1").wait(WAIT_S) == 5
    assert launcher._statuses == {}

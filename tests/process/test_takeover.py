"""What outlives a Manager's process: the line to its guardian, the template, and its children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from blockflow.launch.base import Child, Lifeline, wait_any
from blockflow.launch.local import TemplateLauncher
from blockflow.launch.process import (
    EXIT_UNKNOWN,
    INSTANCE_ENV,
    descendants,
    kill_process,
    open_process,
    start_time,
)
from blockflow.launch.ward import TEMPLATE, Kept, Line, Ward
from blockflow.tensormq.janitor import RunDir, data_socket_path, remove_strangers
from tests.contract.test_launchers import ENTRY, WAIT_S, report, spec_for


@pytest.fixture
def lines() -> Iterator[tuple[Line, Line]]:
    """The guardian's end and the Manager's."""
    mine, theirs = Line.pair()
    yield mine, theirs
    mine.close()
    theirs.close()


def test_descriptors_and_words_go_up(lines: tuple[Line, Line], tmp_path: Path) -> None:
    guardian, manager = lines
    with (tmp_path / "file").open("w") as f:
        manager.keep("name", f.fileno(), os.getpid())
    manager.serving(5755)
    manager.stopping()
    manager.anew("torn")
    message, (fd,) = guardian.take()
    assert message == ["keep", "name", os.getpid(), start_time(os.getpid())]
    os.write(fd, b"it is that file")
    os.close(fd)
    assert (tmp_path / "file").read_text() == "it is that file"
    assert guardian.take() == (["serving", 5755], [])
    assert guardian.take() == (["stopping"], [])
    assert guardian.take() == (["anew", "torn"], [])
    manager.close()
    assert guardian.take() == ([], [])
    guardian.tell_reaped(1, 2)  # to nobody: nothing happens


def test_how_orphans_ended_comes_down(lines: tuple[Line, Line]) -> None:
    guardian, manager = lines
    assert manager.reaped(11, 0.0) is None
    guardian.tell_reaped(11, -9)
    guardian.tell_reaped(12, 3)
    assert manager.reaped(12, WAIT_S) == 3
    assert manager.reaped(11, 0.0) == -9
    assert manager.reaped(11, 0.0) is None  # told once
    guardian.close()
    assert manager.reaped(11, WAIT_S) is None  # nobody will say it any more: not waited for


def test_a_full_line_keeps_nobody_waiting(lines: tuple[Line, Line]) -> None:
    guardian, manager = lines
    for pid in range(5_000):
        guardian.tell_reaped(pid, 0)
    manager.pump()
    guardian.tell_reaped(5_000, 5)
    assert manager.reaped(5_000, WAIT_S) == 5


def test_a_process_is_its_number_and_its_start() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        began = start_time(process.pid)
        assert began > 0 and descendants(os.getpid())[process.pid] == began
        fd = open_process(process.pid, began)
        assert fd >= 0
        os.close(fd)
        assert open_process(process.pid, began + 1) == -1
        kill_process(process.pid, began + 1)  # somebody else's
        assert process.poll() is None
        kill_process(process.pid, began)
        assert process.wait(WAIT_S) == -signal.SIGKILL
    assert start_time(process.pid) == 0 and open_process(process.pid, began) == -1
    assert open_process(process.pid, 0) == -1


def test_an_instances_processes_are_those_with_its_mark_and_whoever_is_below_them(
    tmp_path: Path,
) -> None:
    """Others below the same process are not its own."""
    bare = {k: v for k, v in os.environ.items() if k != INSTANCE_ENV}
    grandchild = f"env -u {INSTANCE_ENV} sleep 1000 & echo $!; wait"
    with (
        subprocess.Popen(
            ["sh", "-c", grandchild],
            env={**bare, INSTANCE_ENV: str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        ) as ours,
        subprocess.Popen(["sleep", "1000"], env={**bare, INSTANCE_ENV: f"{tmp_path}2"}) as theirs,
        subprocess.Popen(["sleep", "1000"], env=bare) as nobodys,
    ):
        assert ours.stdout is not None
        below = int(ours.stdout.readline())
        try:
            assert {below, ours.pid, theirs.pid, nobodys.pid} <= descendants(os.getpid()).keys()
            found = descendants(os.getpid(), tmp_path)
            assert found == {pid: start_time(pid) for pid in (below, ours.pid)}
        finally:
            os.kill(below, signal.SIGKILL)
            for process in (ours, theirs, nobodys):
                process.kill()


def test_files_of_strangers_go_and_others_stay() -> None:
    # pytest's own folders are too deep for sockets
    with (
        tempfile.TemporaryDirectory(prefix="bf-") as root,
        RunDir.create(Path(root) / "r") as run_dir,
    ):
        names = ["arena-7", "marks-7", "work-7", "g7.sock", "arena-8", "d8.sock", "work-8"]
        names += [f"arena-{(1 << 63) | 7}", f"arena-{(1 << 63) | 8}", "control.sock", "arena-x"]
        for name in names:
            (run_dir.path / name).touch()
        assert data_socket_path(run_dir.path, 8).exists()
        remove_strangers(run_dir.path, {7})
        left = {p.name for p in run_dir.path.iterdir()}
        gone = {"arena-8", "d8.sock", "work-8", f"arena-{(1 << 63) | 8}"}
        assert left == {*names, "lock"} - gone


def ward_of(manager: Line, lifeline: Lifeline, run_dir: Path) -> Ward:
    """What the first Manager of a guardian gets."""
    return Ward(
        guardian=os.getpid(),
        run_dir=run_dir,
        lifeline_fd=os.dup(lifeline.read_fd),
        line=manager,
        kept={},
        deaths=0,
        adopt=False,
        died_ns=0,
        client_port=0,
        cause="",
        stop_asked=lambda: False,
    )


def test_who_has_got_the_number_of_a_dead_template_is_left_alone(
    lines: tuple[Line, Line], tmp_path: Path
) -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()  # it is dead
    lifeline = Lifeline()
    with subprocess.Popen(["sleep", "1000"]) as innocent:
        kept = Kept(mine.detach(), innocent.pid, start_time(innocent.pid) - 1)
        ward = replace(
            ward_of(lines[1], lifeline, tmp_path), adopt=True, deaths=1, kept={TEMPLATE: kept}
        )
        launcher = TemplateLauncher(preload=["msgpack"], ward=ward)
        try:
            assert launcher.template_pid == 0
            with pytest.raises(subprocess.TimeoutExpired):
                innocent.wait(0.2)
        finally:
            launcher.close()
            lifeline.cut()
            innocent.kill()


def test_another_launcher_goes_on_with_template_and_children(
    lines: tuple[Line, Line], tmp_path: Path
) -> None:
    guardian, manager = lines
    lifeline = Lifeline()
    ward = ward_of(manager, lifeline, tmp_path)
    first = TemplateLauncher(preload=["msgpack"], ward=ward)
    folders = [tmp_path / name for name in ("stays", "ends")]
    children: list[Child] = []
    for folder in folders:
        folder.mkdir()
        children.append(first.launch(ENTRY, spec_for(folder, "hang"), f"{folder.name}#0"))
        report(children[-1], folder)
    stays, ends = children
    began = {c.pid: start_time(c.pid) for c in children}
    (kind, name, pid, since), (fd,) = guardian.take()
    assert (kind, name, pid) == ("keep", TEMPLATE, first.template_pid)
    # From here on the first launcher is dead: what it would have read is read by the second one.
    os.kill(ends.pid, signal.SIGKILL)
    assert wait_any([ends], WAIT_S) == [ends]
    second = TemplateLauncher(
        preload=["msgpack"],
        ward=replace(
            ward,
            lifeline_fd=os.dup(lifeline.read_fd),
            adopt=True,
            kept={TEMPLATE: Kept(socket.dup(fd), pid, since)},
        ),
    )
    try:
        assert second.template_pid == pid
        second.start()
        assert second.template_pid == pid
        assert second.adopt("ends#0", ends.pid, began[ends.pid]) == -signal.SIGKILL
        assert second.adopt("stays#0", stays.pid, began[stays.pid] + 1) == EXIT_UNKNOWN
        again = second.adopt("stays#0", stays.pid, began[stays.pid])
        assert isinstance(again, Child) and again.poll() is None
        third = second.launch(ENTRY, spec_for(tmp_path, 4), "w#1")
        assert third.wait(WAIT_S) == 4 and second.template_pid == pid
        again.kill(signal.SIGTERM)
        assert again.wait(WAIT_S) == -signal.SIGTERM
        for child in (again, third):
            child.close()
    finally:
        second.close()
        first.close()
        lifeline.cut()
        for child in children:
            child.close()
        os.close(fd)

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
from blockflow.wire.codec import decode, encode
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
    assert not os.get_inheritable(fd)
    os.write(fd, b"it is that file")
    os.close(fd)
    assert (tmp_path / "file").read_text() == "it is that file"
    assert guardian.take() == (["serving", 5755], [])
    assert guardian.take() == (["stopping"], [])
    assert guardian.take() == (["anew", "torn"], [])
    manager.close()
    assert guardian.take() == ([], [])
    guardian.tell_reaped(1, 2)  # to nobody: nothing happens


def test_that_a_manager_turns_goes_up_once_a_second(lines: tuple[Line, Line]) -> None:
    guardian, manager = lines
    second = 1_000_000_000
    for now_ns in (0, second - 1, second, second + 1, 2 * second):
        manager.alive(now_ns)
    manager.stopping()
    assert list(iter(lambda: guardian.take()[0], ["stopping"])) == [
        ["alive", now_ns] for now_ns in (0, second, 2 * second)
    ]


def test_how_orphans_ended_comes_down(lines: tuple[Line, Line]) -> None:
    guardian, manager = lines
    assert manager.reaped(11, 0.0) is None
    guardian.tell_reaped(11, -9)
    guardian.tell_reaped(12, 3)
    assert manager.reaped(12, WAIT_S) == 3
    assert manager.reaped(11, 0.0) == -9
    assert manager.reaped(11, 0.0) is None  # told once
    guardian.close()
    assert manager.reaped(11, 1e6) is None  # nobody will say it any more: not waited for


def test_an_end_that_is_told_while_it_is_waited_for_is_heard(
    lines: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    guardian, manager = lines
    told: list[None] = []

    def pump() -> None:
        Line.pump(manager)
        if not told:
            told.append(guardian.tell_reaped(11, -9))

    monkeypatch.setattr(manager, "pump", pump)
    assert manager.reaped(11, WAIT_S) == -9


def test_ends_that_nobody_asks_for_are_forgotten_the_oldest_first(
    lines: tuple[Line, Line],
) -> None:
    guardian, manager = lines
    for pid in range(258):
        guardian.tell_reaped(pid, 7)
        manager.pump()
    assert [manager.reaped(pid, 0.0) for pid in (0, 1, 2, 257)] == [None, None, 7, 7]


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
        names += [f"arena-{(1 << 63) | 7}", f"arena-{(1 << 63) | 8}", "control.sock"]
        names += ["arena-x", "arena-8x"]
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
        began_ns=0,
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
        guardian.tell_reaped(stays.pid, 7)  # an orphan with this number
        assert second.adopt("stays#0", stays.pid, began[stays.pid] + 1) == 7
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


class Former:
    """A template of a former Manager, played by the test, and a child that it has forked."""

    def __init__(self, ward: Ward) -> None:
        self.template, self.child = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
        self.pid, self.began = self.child.pid, start_time(self.child.pid)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = Kept(theirs.detach(), self.template.pid, start_time(self.template.pid))
        self.ward = replace(ward, adopt=True, deaths=1, kept={TEMPLATE: kept})

    def say(self, *message: object, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.socket, [encode(list(message))], fds)

    def end(self) -> None:
        """The child has ended, and is collected by its parent."""
        self.child.kill()
        self.child.wait()

    def close(self) -> None:
        for process in (self.template, self.child):
            process.kill()
            process.wait()
        self.socket.close()


@pytest.fixture
def former(lines: tuple[Line, Line], tmp_path: Path) -> Iterator[Former]:
    lifeline = Lifeline()
    made = Former(ward_of(lines[1], lifeline, tmp_path))
    yield made
    made.close()
    lifeline.cut()


def test_what_was_said_to_the_dead_is_told_apart(former: Former) -> None:
    for process in (os.getpid(), os.getppid()):
        fd = os.pidfd_open(process)
        former.say("launched", 5, process, fds=(fd,))
        os.close(fd)
    former.say("exited", 6, 3, 4711)
    former.say("roll", [[7, former.pid]])
    before = len(os.listdir("/proc/self/fd"))
    launcher = TemplateLauncher(preload=["msgpack"], ward=former.ward)
    try:
        # The template's pidfd has come; the socket was there.
        assert len(os.listdir("/proc/self/fd")) == before + 1
        assert launcher.adopt("gone#0", 4711, 1) == 3
        assert decode(former.socket.recv(1000), max_bytes=1000, what="order") == ["roll"]
        assert launcher.attempt(ENTRY, {"modules": ["json"]}, "w#0") is None
        kind, serial, modules = decode(former.socket.recv(1000), max_bytes=1000, what="order")
        assert (kind, modules) == ("import", ["json"])
        assert serial > 1_000_000, "no answer to the dead bears this number"
    finally:
        former.template.kill()
        launcher.close()


@pytest.mark.parametrize("by", ["template", "guardian"])
def test_how_an_adopted_child_ended_is_said_by_who_collected_it(
    former: Former, lines: tuple[Line, Line], by: str
) -> None:
    former.say("roll", [[7, former.pid]])
    launcher = TemplateLauncher(preload=["msgpack"], ward=former.ward)
    try:
        child = launcher.adopt("w#0", former.pid, former.began)
        assert isinstance(child, Child) and child.poll() is None
        former.end()
        if by == "template":
            former.say("exited", 7, 5, former.pid)
        else:
            former.socket.close()
            lines[0].tell_reaped(former.pid, 5)
        assert child.poll() == 5
        assert not launcher._roll and not launcher._statuses
        child.close()
    finally:
        former.template.kill()
        launcher.close()

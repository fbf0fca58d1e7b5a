"""The Manager's children: launches that have to wait for the launcher."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from blockflow.control import logfiles
from blockflow.control.children import Children
from blockflow.control.events import Exited, Kill, Launch, Launched, LaunchFailed
from blockflow.control.fleet import Life
from blockflow.control.memory import Shortage, starved
from blockflow.core.errors import RepositoryError, SystemError_
from blockflow.core.scarcity import AWAY
from blockflow.launch.base import Child, Launcher
from blockflow.launch.ends import template_died
from blockflow.launch.process import start_time


class Slow(Launcher):
    """Starts nothing; says of every launch that it must wait, or that it was done or refused."""

    def __init__(self) -> None:
        self.ready = False
        self.refused: set[str] = set()
        self.error: Exception = SystemError_("INTERNAL", "the template process died")
        self.launched: list[str] = []
        self.logs: list[str] = []
        self.tended = 0
        self._made: list[Child] = []

    def start(self) -> None: ...

    def tend(self) -> None:
        self.tended += 1

    @property
    def template_pid(self) -> int:
        return 7

    def launch(self, entry: str, spec: Mapping[str, Any], name: str) -> Child:
        raise AssertionError("who calls this waits")

    def attempt(self, entry: str, spec: Mapping[str, Any], name: str) -> Child | None:
        if name in self.refused:
            raise self.error
        if not self.ready:
            return None
        self.launched.append(name)
        self.logs.append(spec.get("log_path", ""))
        self._made.append(Child(name, os.getpid(), os.pidfd_open(os.getpid()), lambda: None))
        return self._made[-1]

    def close(self) -> None:
        for child in self._made:
            child.close()


@pytest.fixture
def launcher() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.close()


@pytest.fixture
def children(launcher: Slow, tmp_path: Path) -> Children:
    return Children(launcher, complete, select.poll(), tmp_path, pytest.fail, no_kill)


def complete(launch: Launch) -> Launch:
    return launch


def no_kill(_now_ns: int) -> None: ...


def order(incarnation: int) -> Launch:
    return Launch(incarnation, "worker", f"w#{incarnation}", "a.module:run", {})


def born(incarnation: int) -> Launched:
    return Launched(incarnation, os.getpid(), start_time(os.getpid()))


def test_a_launch_is_told_at_once_when_nothing_is_to_be_waited_for(
    children: Children, launcher: Slow
) -> None:
    launcher.ready = True
    assert children.launch(order(1)) == born(1)
    assert list(children.go_on()) == []
    assert children.deadline(5) is None


def test_deferred_launches_are_carried_out_in_order(children: Children, launcher: Slow) -> None:
    assert children.launch(order(3)) is None
    assert children.launch(order(1)) is None
    assert list(children.go_on()) == []
    assert len(children) == 2 and children.pids() == set()
    due = children.deadline(5)
    assert due is not None and due > 5
    launcher.ready = True
    assert children.launch(order(2)) is None  # does not overtake
    assert list(children.go_on()) == [born(3), born(1), born(2)]
    assert launcher.launched == ["w#3", "w#1", "w#2"]
    assert children.deadline(5) is None
    assert children.launch(order(4)) == born(4)


def test_a_deferred_process_that_is_killed_ends_once_and_never_starts(
    children: Children, launcher: Slow
) -> None:
    children.launch(order(1))
    children.launch(order(2))
    children.kill(Kill(1))
    children.kill(Kill(1))
    assert children.deadline(5) is not None
    assert list(children.reap([])) == [Exited(1, -signal.SIGKILL)]
    assert list(children.reap([])) == []
    launcher.ready = True
    assert list(children.go_on()) == [born(2)]
    assert launcher.launched == ["w#2"]


def test_what_follows_from_one_launch_reaches_the_next(children: Children, launcher: Slow) -> None:
    """The Manager acts on each event before it asks for the next one."""
    for incarnation in (1, 2, 3):
        children.launch(order(incarnation))
    launcher.ready = True
    told = children.go_on()
    assert next(told) == born(1)
    children.kill(Kill(2))
    assert children.launch(order(4)) is None
    assert list(told) == [born(3), born(4)]
    assert [e.incarnation for e in children.reap([])] == [2]


def test_a_deferred_launch_that_cannot_be_is_told_as_failed(
    children: Children, launcher: Slow
) -> None:
    children.launch(order(1))
    children.launch(order(2))
    launcher.refused = {"w#1"}
    (failed,) = children.go_on()
    assert isinstance(failed, LaunchFailed)
    assert (failed.incarnation, failed.error.code) == (1, "INTERNAL")
    children.kill(Kill(1))
    assert list(children.reap([])) == []  # its end was told
    launcher.ready = True
    assert list(children.go_on()) == [born(2)]


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_defect_in_a_launch_ends_the_life_that_waits_for_it(
    children: Children, launcher: Slow, when: str
) -> None:
    """As an option does that is larger than any number of the messages."""
    launcher.error = OverflowError("Integer value out of range")
    if when == "later":
        assert children.launch(order(1)) is None
    launcher.refused = {"w#1"}
    event = children.launch(order(1)) if when == "at once" else next(children.go_on())
    assert isinstance(event, LaunchFailed)
    assert (event.incarnation, event.error.code) == (1, "INTERNAL")
    assert "OverflowError: Integer value out of range" in event.error.message
    assert len(children) == 0


def test_an_order_that_cannot_be_completed_yet_waits_and_keeps_up_no_other(
    launcher: Slow, tmp_path: Path
) -> None:
    """As while the folder with its profile does not answer: what needs none is launched."""
    lacking = {1, 2, 4}
    asked: list[int] = []

    def completed(launch: Launch) -> Launch | None:
        asked.append(launch.incarnation)
        return None if launch.incarnation in lacking else replace(launch, spec={"log_path": "x"})

    children = Children(launcher, completed, select.poll(), tmp_path, pytest.fail, no_kill)
    launcher.ready = True
    assert [children.launch(order(n)) for n in (1, 2, 4)] == [None] * 3
    assert children.launch(order(3)) == born(3)
    assert list(children.go_on()) == []
    assert len(children) == 4 and children.deadline(5) is not None
    lacking.discard(2)
    assert list(children.go_on()) == []  # one after the other: they wait for the same disk
    children.kill(Kill(4))
    assert list(children.reap([])) == [Exited(4, -signal.SIGKILL)]
    lacking.discard(1)
    launcher.ready = False
    asked.clear()
    assert list(children.go_on()) == [] and asked == [1, 2], "both wait for the launcher now"
    assert list(children.go_on()) == [] and asked == [1, 2], (
        "what is complete is not completed again while it waits"
    )
    launcher.ready = True
    assert list(children.go_on()) == [born(1), born(2)]
    assert launcher.logs == ["x"] * 3 and children.deadline(5) is None


def test_a_defect_while_an_order_is_completed_ends_its_life(launcher: Slow, tmp_path: Path) -> None:
    away = RepositoryError("UNKNOWN_BLOCK", "no block", details={AWAY: True})
    answers: list[Launch | Exception | None] = [None, OSError("a failing disk"), None, away, None]

    def completed(launch: Launch) -> Launch | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    children = Children(launcher, completed, select.poll(), tmp_path, pytest.fail, no_kill)
    assert children.launch(order(1)) is None
    (failed,) = children.go_on()
    assert isinstance(failed, LaunchFailed) and failed.error.code == "INTERNAL"
    assert "OSError: a failing disk" in failed.error.message and len(children) == 0
    assert children.launch(order(1)) is None
    assert list(children.go_on()) == [LaunchFailed(1, away)] and len(children) == 0
    assert children.launch(order(2)) is None
    children.kill_all(1.0)
    assert len(children) == 0


def test_who_was_never_heard_of_ends_when_it_is_killed(children: Children) -> None:
    """Once: who wants its end waits for that, and has nobody else to hear it from."""
    children.kill(Kill(7))
    children.kill(Kill(7))
    assert children.deadline(5) is not None
    assert list(children.reap([])) == [Exited(7, -signal.SIGKILL)]


@pytest.mark.parametrize(
    ("status", "own", "code"),
    [
        (-9, True, "NO_SPACE"),
        (-9, False, "INTERNAL"),
        (-9, None, "INTERNAL"),
        (-11, True, "INTERNAL"),
        (None, True, "INTERNAL"),
    ],
)
def test_a_template_that_the_kernel_has_killed_for_memory_is_want_of_room(
    launcher: Slow, tmp_path: Path, status: int | None, own: bool | None, code: str
) -> None:
    """A crash it would be for good, if it came five times in a minute."""
    shortage = None if own is None else Shortage(150 << 20, own)
    children = Children(
        launcher, complete, select.poll(), tmp_path, pytest.fail, lambda _: shortage
    )
    launcher.refused, launcher.error = {"w#1"}, template_died(status)
    failed = children.launch(order(1))
    assert isinstance(failed, LaunchFailed) and failed.error.code == code
    assert starved(failed.error) == (code == "NO_SPACE")
    if starved(failed.error):
        assert str(failed.error).startswith(
            "NO_SPACE: the template process died: killed by SIGKILL: out of memory (limit 150 MiB)"
        )


def test_no_more_are_launched_than_descriptors_are_enough_for(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32 + 8 + 8 + 7, 99))
    assert [children.launch(order(n)) for n in (1, 2)] == [None, None]
    failed = children.launch(order(3))
    assert isinstance(failed, LaunchFailed) and failed.error.code == "NO_SPACE"
    assert failed.error.message.startswith("2 processes are all that 55 file descriptors")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert children.launch(order(4)) is None


def test_a_process_of_which_nobody_could_say_which_it_is_is_ended_at_once(
    children: Children, launcher: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A successor would end it when it serves: its number may be another one's by then."""
    held: list[int] = []

    def fails(path: Path) -> NoReturn:
        if path.parts[-1] == "stat":
            held.append(int(path.parts[-2]))
        raise OSError(errno.ENFILE, "Too many open files in system")

    with subprocess.Popen(["sleep", "60"]) as process:
        child = Child("w#1", process.pid, os.pidfd_open(process.pid), process.poll)
        monkeypatch.setattr(launcher, "attempt", lambda *_: child)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", fails)
            failed = children.launch(order(1))
        status = process.poll()
        process.kill()
        assert status == -signal.SIGKILL and held == [process.pid]
    assert isinstance(failed, LaunchFailed) and failed.error.code == "NO_SPACE"
    assert len(children) == 0 and child.pidfd == -1 and list(children.reap([])) == []


def test_the_end_of_the_control_plane_forgets_them(children: Children, launcher: Slow) -> None:
    children.launch(order(1))
    children.kill_all(1.0)
    launcher.ready = True
    assert list(children.go_on()) == []
    assert launcher.launched == []


def test_without_a_log_file_it_is_launched_all_the_same(launcher: Slow, tmp_path: Path) -> None:
    """As when the disk takes no new file; a deferred launch as well."""
    told: list[str] = []
    children = Children(launcher, complete, select.poll(), tmp_path / "logs", told.append, no_kill)
    logs = [str(tmp_path / folder / "w.1.log") for folder in ("logs", "none")]
    launches = [Launch(n, "worker", f"w#{n}", "a:run", {"log_path": logs[n % 2]}) for n in (1, 2)]
    assert [children.launch(order) for order in launches] == [None, None]
    launcher.ready = True
    assert list(children.go_on()) == [born(1), born(2)]
    assert launcher.logs == ["", logs[0]]
    assert len(told) == 1 and told[0].startswith("w#1 has no log file: ")
    children.tend(0)


def test_logs_are_bounded_at_each_launch_and_while_processes_run(
    children: Children, launcher: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logfiles, "_MOST_FILES", 2)
    launcher.ready = True
    logs = [tmp_path / f"w.{n}.log" for n in range(1, 7)]
    for path in logs[1:5]:
        path.touch()  # of the dead
    for n in (1, 6):
        assert children.launch(Launch(n, "w", "w", "a:run", {"log_path": str(logs[n - 1])}))
    assert [p for p in logs if p.exists()] == [logs[0], *logs[3:]]
    with logs[0].open("wb") as f:
        f.truncate(logfiles.MOST_BYTES + 1)
    children.tend(0)
    assert logs[0].stat().st_size < logfiles.MOST_BYTES / 2
    assert launcher.tended == 1 and children.template_pid == 7


def test_who_has_ended_is_told_once_and_watched_no_more(
    launcher: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, end = os.pipe()
    os.close(end)  # as the descriptor of a process that is gone it is ready from now on
    killed: list[int] = []
    child = SimpleNamespace(
        pid=os.getpid(),
        pidfd=ended,
        poll=lambda: -9,
        kill=lambda: killed.append(1),
        close=lambda: os.close(ended),
    )
    adopted: list[Any] = [-11, child]
    monkeypatch.setattr(launcher, "adopt", lambda name, pid, started: adopted.pop(0))
    poll = select.poll()
    children = Children(launcher, complete, poll, tmp_path, pytest.fail, no_kill)
    former = [
        cast(Life, SimpleNamespace(name="w", incarnation=n, pid=n, started=0)) for n in (7, 1)
    ]
    assert [children.adopt(life, "") for life in former] == [Exited(7, -11), None]
    children.kill(Kill(7))  # its end was told
    children.kill(Kill(1))
    assert killed == [1] and children.pids() == {os.getpid()} and children.deadline(0) is None
    ready = [-1, *(fd for fd, _ in poll.poll(0))]  # among those of others
    assert list(children.reap(ready)) == [Exited(1, -9)]
    assert poll.poll(0) == [] and len(children) == 0
    with pytest.raises(OSError):
        os.fstat(ended)  # it was given back
    children.kill(Kill(1))
    assert list(children.reap(ready)) == []


def test_what_fails_beside_a_death_does_not_keep_it_from_being_told(
    launcher: Slow, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would replace the process, which everybody takes for one that serves."""
    ended = os.open(os.devnull, os.O_RDONLY)

    def close() -> None:
        os.close(ended)
        raise OSError(errno.EIO, "closed")

    child = SimpleNamespace(pid=1, pidfd=ended, poll=lambda: -9, close=close)
    monkeypatch.setattr(launcher, "adopt", lambda *_: child)
    children.adopt(cast(Life, SimpleNamespace(name="w", incarnation=1, pid=1, started=0)), "")
    monkeypatch.setattr(children._logs, "tail", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        list(children.reap([ended]))
    monkeypatch.undo()
    told = list[Exited]()
    with pytest.raises(OSError, match="closed"):
        told.extend(children.reap([ended]))
    assert told == [Exited(1, -9)] and list(children.reap([ended])) == []

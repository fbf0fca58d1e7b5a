"""The guardian's decisions: who follows on a dead Manager, and what is kept for it."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blockflow.control import guardian, release
from blockflow.control.guardian import ADOPTIONS, Guardian
from blockflow.control.memory import KillWatch
from blockflow.control.numbers import NumbersFile, Span
from blockflow.control.supervision import RestartLedger, RestartPolicy
from blockflow.control.vigil import Vigil
from blockflow.core.errors import SystemError_
from blockflow.launch.cgroup import OomKills
from blockflow.launch.ward import CERTIFICATE, CLIENTS, KEY, REST, TEMPLATE, TOKEN, Line
from blockflow.tensormq.janitor import run_root

S = 1_000_000_000
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Life:
    """How a Manager fared."""

    status: int = KILLED
    serves: bool = True
    anew: str = ""
    hung: str = ""
    spoke_ns: int = 0
    stopping: bool = False
    short: str = ""


class Scripted(Guardian):
    """One whose Managers live as they are told."""

    def __init__(self, *lives: Life) -> None:
        super().__init__(Path("/nowhere"))
        self._lives = list(lives)
        self.forks: list[tuple[bool, str]] = []
        self.deaths: list[int] = []
        self.pauses = self.begun = self.ended = 0

    def _fork(self, adopt: bool, died_ns: int, cause: str) -> None:
        self._anew, self._hung, self._took_over, self._short = "", "", False, None
        self.forks.append((adopt, cause))
        self.deaths.append(died_ns)

    def _watch(self) -> int:
        life = self._lives.pop(0)
        self._served |= life.serves
        self._took_over = life.serves
        self._anew, self._hung, self._spoke_ns = life.anew, life.hung, life.spoke_ns
        self._short = SystemError_(life.short, "no") if life.short else None
        if life.stopping:
            self._stop()
        return life.status

    def _listen(self, wake: int) -> None:
        os.close(wake)
        os.close(self._wake)

    def _pause(self, now_ns: int) -> None:
        self.pauses += 1

    def _begin(self) -> None: ...

    def _begin_anew(self) -> None:
        self.begun += 1
        self._failed = 0

    def _end(self) -> None:
        self.ended += 1


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What concerns the whole process is left alone."""
    monkeypatch.setattr(guardian, "become_subreaper", lambda: None)
    monkeypatch.setattr(guardian, "sweep_stale", lambda root: None)


END = Life(0)
EARLY = Life(serves=False)


def test_a_successor_takes_over_and_learns_why() -> None:
    it = Scripted(Life(), Life(1), Life(hung="hung: asleep"), END)
    assert it.run() == 0
    killed, hung = "killed by SIGKILL", "hung: asleep"
    assert it.forks == [(False, ""), (True, killed), (True, "exit status 1"), (True, hung)]
    assert (it.pauses, it.begun, it.ended) == (3, 0, 1)


def test_the_kernel_may_have_killed_it_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([7, 8, 8, 9, 9, 10])
    monkeypatch.setattr(
        guardian,
        "KillWatch",
        lambda: KillWatch(lambda: OomKills(next(counts), True), lambda: 90 << 20),
    )
    it = Scripted(Life(), Life(), Life(-signal.SIGSEGV), Life(), END)
    assert it.run() == 0
    short, by_hand = "killed by SIGKILL: out of memory (limit 90 MiB)", "killed by SIGKILL"
    assert [c for _, c in it.forks] == ["", short, by_hand, "killed by SIGSEGV", short]
    with pytest.raises(SystemError_, match="SIGKILL while it started: out of memory") as e:
        Scripted(Life(KILLED, serves=False)).run()
    assert e.value.code == "NO_SPACE" and "memory" in e.value.hint


def test_a_kill_that_a_worker_died_of_is_not_the_managers(it: Any) -> None:
    """Somebody has killed that by hand, a moment later."""
    count = 7

    def watch(told: Callable[[], None] = lambda: None) -> KillWatch:
        return KillWatch(lambda: OomKills(count, True), lambda: 90 << 20, told)

    it._kills, managers, by_hand = watch(), watch(it.theirs.claimed), "killed by SIGKILL"
    it._served = True
    for workers, cause in ((1, by_hand), (0, f"{by_hand}: out of memory (limit 90 MiB)")):
        count += 1
        for _ in range(workers):
            assert managers.claim(0) is not None
        assert it._hear() and it._how(KILLED, time.monotonic_ns()) == cause


def test_nobody_was_there_from_the_last_sign_of_life_of_one_that_hung() -> None:
    now = time.monotonic_ns()
    hung = now - 10 * S
    it = Scripted(Life(spoke_ns=hung), EARLY, Life(spoke_ns=now), Life(), END)
    assert it.run() == 0
    first, one, other, promptly, last = it.deaths
    assert first == 0 and one == hung
    assert other == hung  # who never served was not there either
    assert now <= promptly <= last <= time.monotonic_ns()


def test_what_cannot_be_taken_over_is_begun_anew() -> None:
    it = Scripted(Life(), Life(1, serves=False, anew="torn"), END)
    assert it.run() == 0
    assert it.forks[2] == (False, "torn") and it.begun == 1


def test_after_so_many_that_did_not_come_to_take_over_it_is_begun_anew() -> None:
    assert ADOPTIONS == 2
    it = Scripted(Life(), EARLY, Life(), EARLY, EARLY, EARLY, EARLY, END)
    assert it.run() == 0
    # One that took over begins the count anew, and so does what is begun anew.
    adopted = [adopt for adopt, _ in it.forks]
    assert adopted == [False, True, True, True, True, False, True, False]
    assert it.begun == 2


def test_those_that_hang_before_they_take_over_cost_nobody_who_serves_his_life() -> None:
    """On a folder of the network that does not answer, say: as long as that lasts."""
    hung = Life(serves=False, hung="hung: silent for 60 s, and asleep")
    it = Scripted(Life(), *[hung] * 5, EARLY, Life(), END)
    assert it.run() == 0
    assert it.begun == 0 and all(adopt for adopt, _ in it.forks[1:])
    it = Scripted(Life(), hung, EARLY, hung, EARLY, END)
    assert it.run() == 0
    assert it.begun == 1


def test_for_want_of_room_it_gives_up_with_that_name(it: Any) -> None:
    def given_up() -> str:
        it._ledger = RestartLedger(RestartPolicy(crashes=1))
        with pytest.raises(SystemError_, match="is given up: 1 crashes") as e:
            it._pause(0)
        return e.value.code

    assert given_up() == "INTERNAL"
    it.theirs.failing(SystemError_("STATE_UNUSABLE", "no"))
    assert it._hear() and given_up() == "INTERNAL"
    it.theirs.failing(SystemError_("NO_SPACE", "no"))
    assert it._hear() and given_up() == "NO_SPACE"
    it.theirs.serving(4711)
    assert it._hear() and given_up() == "INTERNAL"


def test_one_that_dies_before_anything_served_ends_it() -> None:
    assert Scripted(Life(3, serves=False)).run() == 3
    it = Scripted(Life(-signal.SIGABRT, serves=False))
    with pytest.raises(SystemError_, match="SIGABRT while it started") as e:
        it.run()
    assert "library" in e.value.hint and it.ended == 1
    with pytest.raises(SystemError_, match="INTERNAL") as e:
        Scripted(Life(KILLED, serves=False)).run()
    assert not e.value.hint


def test_a_package_of_another_release_has_no_successor_mixed_of_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = iter(["", "9.1.0"])
    monkeypatch.setattr(release, "replaced_by", lambda: next(found))
    it = Scripted(Life(), Life(), END)
    with pytest.raises(SystemError_, match=r"SIGKILL\).* release 9\.1\.0 by now") as e:
        it.run()
    assert "starts 9.1.0" in e.value.hint
    assert len(it.forks) == 2 and (it.pauses, it.begun, it.ended) == (1, 0, 1)


@pytest.mark.parametrize(("status", "told"), [(0, 0), (2, 2), (KILLED, 1)])
def test_who_was_told_to_end_has_no_successor(status: int, told: int) -> None:
    it = Scripted(Life(), Life(status, stopping=True))
    assert it.run() == told
    assert len(it.forks) == 2 and it.ended == 1


def test_who_is_told_to_end_between_two_managers_starts_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = Scripted(Life(), END)
    monkeypatch.setattr(it, "_pause", lambda now_ns: it._stop())
    assert it.run() == 0 and len(it.forks) == 1


def test_a_signal_that_comes_as_a_manager_is_forked_reaches_it(
    it: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would serve on for a minute, and be killed then."""
    told: list[tuple[int, int]] = []

    def fork() -> int:
        it._stop()  # as the handler does, which knows of no Manager yet
        return 4711

    monkeypatch.setattr(guardian.os, "fork", fork)
    monkeypatch.setattr(guardian.os, "kill", lambda pid, number: told.append((pid, number)))
    it._line.close()
    assert it._fork(False, 0, "") is None
    assert told == [(4711, signal.SIGTERM)]


def refused(*_: Any) -> int:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def test_a_fork_that_is_refused_is_told_as_such(it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guardian.os, "fork", refused)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(SystemError_) as e:
        it._fork(False, 0, "")
    assert e.value.code == "NO_SPACE" and "pids.max" in e.value.hint
    assert sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(SystemError_):  # the first one: nobody is served yet
        it._await_room(e.value)
    it._served = True
    os.write(it.wake, b".")  # who dies makes room
    it._await_room(e.value)
    assert it._no_room
    with pytest.raises(SystemError_):  # another try would be refused likewise
        it._await_room(SystemError_("INTERNAL", "no such call"))


# --- what a Manager says -------------------------------------------------------------------------


@pytest.fixture
def it() -> Iterator[Any]:
    """A guardian and, as ``theirs``, the Manager's end of the line."""
    made: Any = Guardian(run_root())
    made._line, made.theirs = Line.pair()
    made._vigil = Vigil(0)
    made._wake, made.wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    yield made
    for fd in (made._wake, made.wake, *(k.fd for k in made._kept.values())):
        os.close(fd)
    made.theirs.close()
    made._line.close()


def keep(it: Any, name: str, pid: int = 0) -> int:
    """Hand a descriptor up; the number that it has there."""
    fd = os.open(os.devnull, os.O_RDONLY)
    it.theirs.keep(name, fd, pid)
    os.close(fd)
    assert it._hear()
    return int(it._kept[name].fd)


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()


def test_of_a_name_the_latest_descriptor_is_kept(it: Any) -> None:
    keep(it, TEMPLATE, os.getpid())
    assert it._kept[TEMPLATE].pid == os.getpid() and it._kept[TEMPLATE].started
    rest = keep(it, REST)
    assert (it._kept[REST].pid, it._kept[REST].started) == (0, 0)
    fds = len(os.listdir("/proc/self/fd"))
    keep(it, TEMPLATE)
    assert len(os.listdir("/proc/self/fd")) == fds and is_open(rest)


def test_what_is_said_is_noted(it: Any) -> None:
    it._took_over = False
    it.theirs.serving(4711)
    it.theirs.anew("torn")
    before = it._vigil.deadline()
    for when in (1, S, 1 + S):  # of all of them no more than one a second is told
        it.theirs.alive(when)
        assert it._hear() and it._spoke_ns == (when if when != S else 1)
    assert it._hear() and it._served and it._took_over and it._client_port == 4711
    assert it._anew == "torn" and it._vigil.deadline() > before
    door = keep(it, REST)
    it.theirs.stopping()
    assert it._hear() and it._stopping()
    assert REST not in it._kept and not is_open(door)
    it.theirs.close()
    assert not it._hear()


def test_the_dead_are_collected_and_told_of(it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(it, TEMPLATE, os.getpid())
    ends = iter([(76, 0), (0, 0), (os.getpid(), 9), (77, 256), (0, 0), (78, 0), (5, 15), (79, 9)])

    def waitpid(_pid: int, _how: int) -> tuple[int, int]:
        try:
            return next(ends)
        except StopIteration:
            raise ChildProcessError from None

    monkeypatch.setattr(guardian.os, "waitpid", waitpid)
    it._manager = 5
    assert it._reap() is None and TEMPLATE in it._kept and it.theirs.reaped(76, 0) == 0
    assert it._reap() is None and TEMPLATE not in it._kept
    assert [it.theirs.reaped(pid, 0) for pid in (os.getpid(), 77)] == [KILLED, 1]
    assert it._reap() == -signal.SIGTERM and it._manager == 0
    assert it.theirs.reaped(78, 0) == 0
    assert it._reap() is None and it._reaped[79] == KILLED, "nobody may have come to read of it"


def test_how_long_it_waits(it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100 * S
    monkeypatch.setattr(guardian.time, "monotonic_ns", lambda: now)
    assert it._wait_ms() is None  # a Manager that starts has the time that it takes
    it._vigil, it._served = Vigil(now - S // 2 - 1), True
    assert it._wait_ms() == 500
    it._stop()
    assert it._wait_ms() == 60_000
    now += 59 * S + 1
    it._stop()  # once more: it is no reason to begin anew
    assert it._wait_ms() == 1000
    now += 5 * S
    assert it._wait_ms() == 0
    it._hung, it._stop_ns = "hung: asleep", None
    assert it._wait_ms() is None


@pytest.mark.parametrize("stopping", [False, True])
def test_who_hangs_is_killed_before_it_is_said(
    it: Any, monkeypatch: pytest.MonkeyPatch, stopping: bool
) -> None:
    """The log may take nothing, and it may be the same that keeps the Manager waiting."""
    done: list[str] = []
    monkeypatch.setattr(guardian.log, "error", lambda *_: done.append("said"))
    monkeypatch.setattr(guardian.os, "kill", lambda _pid, number: done.append(number))
    monkeypatch.setattr(guardian, "read_vitals", lambda *_, **__: None)
    it._served, it._manager = True, 5
    if stopping:
        monkeypatch.setattr(guardian, "_STOP_S", 0.0)
        it._stop()
    else:
        it._vigil = SimpleNamespace(deadline=lambda: 0, look=lambda *_: "hung: asleep")
    ends = iter([None, KILLED])  # it is still there when it is looked at for the first time
    monkeypatch.setattr(it, "_reap", lambda: next(ends))
    monkeypatch.setattr(it, "_hear", lambda: True)
    it.theirs.alive(1)  # something to wake up for
    assert it._watch() == KILLED
    assert done == [signal.SIGKILL, "said"]


def test_begun_anew_numbers_doors_and_secrets_are_kept(it: Any) -> None:
    it._begin()
    first, left = it._run_dir.path, {"incarnation": Span(5, 9), "stage": Span(1, 3)}
    NumbersFile(first).write(left)
    lasting = (REST, CLIENTS, TOKEN, CERTIFICATE, KEY)
    doors = [keep(it, name) for name in lasting]
    keep(it, TEMPLATE)
    it._failed = 2
    it._begin_anew()
    assert it._run_dir.path != first and not first.exists()
    assert NumbersFile(it._run_dir.path).read() == left
    assert set(it._kept) == set(lasting) and all(map(is_open, doors))
    assert it._failed == 0
    it._end()
    assert not it._run_dir.path.exists()

"""Chaos: what its judge must not miss, and whom it must not blame."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from chaos_rig import ledger, rid
from fake_dispatcher import FakeDispatcher

from blockflow.bench.chaos import load as chaos_load
from blockflow.bench.chaos import logs
from blockflow.bench.chaos import run as chaos
from blockflow.bench.chaos.faults import POISONED, Injected, Injector, Takeover
from blockflow.bench.chaos.findings import GRACE_S, LINGERS_S, Findings
from blockflow.bench.chaos.kills import RECOVERY_S
from blockflow.bench.chaos.ledger import CANCELLED, NO_REPLY, OK, POISON, Ledger
from blockflow.bench.chaos.load import TOLERANCE, Load, Traffic, same_answer, told_apart
from blockflow.bench.chaos.plan import KINDS, Fault
from blockflow.bench.chaos.watch import MARK, Watch, bearers, marked
from blockflow.client.core import GRACE_NS
from blockflow.core.errors import BlockFlowError
from blockflow.repository.zoo.digits import MultiDigits

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # <linux/prctl.h>

# --- wrong answers --------------------------------------------------------------------------------


def test_no_answer_can_pass_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that is another request's is noticed, and so is a row of one in its place."""
    monkeypatch.setattr(chaos, "_INPUTS", 10)
    torch.manual_seed(1)
    model = MultiDigits().eval()
    inputs, answers = chaos.exam(model, 1)
    assert len(inputs) == 10
    for right in answers.values():
        rows = np.concatenate(right)
        for i, row in enumerate(rows):
            same = [same_answer(other, row) for other in rows]
            assert sum(same) == 1 and same[i]
    monkeypatch.setattr(chaos, "told_apart", lambda _: False)
    with pytest.raises(BlockFlowError, match="too much alike"):
        chaos.exam(model, 1)


def test_answers_that_are_nearly_the_same_are_not_asked_for() -> None:
    apart = [np.array([[0.0, 1.0]], np.float32), np.array([[0.5, 1.0], [0.0, 2.0]], np.float32)]
    assert told_apart(apart)
    for near in (0.0, 1.9 * TOLERANCE):
        assert not told_apart([*apart, apart[0] + np.float32(near)])
    assert told_apart([*apart, apart[0] + np.float32(2.1 * TOLERANCE)])


def test_an_answer_of_another_type_or_shape_is_wrong() -> None:
    right = np.ones((2, 4), np.float32)
    assert same_answer(right.copy(), right)
    for value in (right.astype(np.float64), right[:1], right.reshape(4, 2), right * np.nan):
        assert not same_answer(value, right)


# --- clients that fail ----------------------------------------------------------------------------


class Broken:
    """A client that cannot send."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        raise TypeError("a defect")

    def tasks(self, **_: Any) -> list[Any]:
        return []


class Endless(Broken):
    """A client whose requests never end."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        return Future()


def make_load() -> Load:
    x = np.ones((1, 4), np.float32)
    return Load("tcp://x:1", [x], {"a": [x]}, Traffic(1000.0, 0.1, patience_s=0.1))


def test_a_client_that_ends_too_early_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for nothing any more, and nothing can be missing."""
    monkeypatch.setattr(chaos_load, "Client", Broken)
    load = make_load()
    load.start()
    load.stop()
    assert load.failures == ["a client that sends a failed: TypeError('a defect')"]


def test_a_poison_without_an_end_is_missing_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chaos_load, "Client", Endless)
    load = make_load()
    assert load.poison("a", 1.0) == "none"
    assert load.ledger.missing == 1


# --- the wire -------------------------------------------------------------------------------------


def test_who_cancels_after_an_end_of_the_connection_gets_a_reply_again() -> None:
    """The next connection has the same number where it had begun before the end was noticed."""
    book = ledger()
    for number, after in ((500, False), (501, True)):
        book.sent(rid(number), "a", 1.0, 1.0, frozenset({CANCELLED, OK}))
        book.carried(rid(number), 7)
        if not after:
            book.broke(7)
        book.done(rid(number), CANCELLED, 1.1)
    assert book.unanswered == 1
    book.replied(rid(501), 7, 1.2)
    assert book.unanswered == 0


# --- times ----------------------------------------------------------------------------------------


def test_who_waits_for_nobodys_answer_waits_until_its_grace_is_over() -> None:
    """That nobody answered is one thing; that the client waited as long as it must is none."""
    dead = [Injected(0.9, "dispatcher killed", ("a",), "")]
    for more_s, late in ((0.01, 0), (0.3, 1)):
        book = ledger(("a", 0.0, 1.0 + GRACE_NS / 1e9 + more_s, NO_REPLY), ("a", 1.5, 1.6, OK))
        assert len(Findings(book, dead).late) == late
    found = Findings(ledger(("a", 0.0, 1.0 + GRACE_S + 0.01, "WORKER_LOST")))
    assert found.slow() == ["1 requests ended later than their deadline allows"]
    assert found.examples() == ["late: a, due at 1.0 s, WORKER_LOST 0.11 s later"]
    many = Findings(ledger(*[("a", 0.0, 2.0 + i, "OK") for i in range(7)]))
    assert (len(many.late), len(many.examples())) == (7, 5)


# --- blame ----------------------------------------------------------------------------------------

BLAMED = ["1 requests were blamed without two deaths"]
AT_WORK = Injected(50.5, "worker killed", ("a",), "a#0")


@pytest.mark.parametrize(
    ("other", "explains"),
    [
        (Injected(50.2, "worker killed at work", ("a",), ""), True),
        (Injected(49.0, "worker killed", ("a",), ""), False),  # dead before it was sent
        (Injected(51.5, "worker killed", ("a",), ""), False),
        (Injected(45.0, "worker stopped 5 s", ("a",), ""), True),  # and killed when it goes on
        (Injected(49.5 - LINGERS_S, "worker stopped 5 s", ("a",), ""), False),
        (Injected(49.0, POISONED, ("a",), ""), True),
        (Injected(50.2, "manager killed", ("a", "b"), "with a#1", ("a",)), True),
        (Injected(50.2, "manager killed", ("a", "b"), "with b#0", ("b",)), False),
        (Injected(50.2, "manager killed", ("a", "b"), "alone"), False),
        (Injected(50.2, "dispatcher killed", ("a", "b"), ""), False),
    ],
)
def test_two_deaths_are_two_in_which_it_was_under_way(other: Injected, explains: bool) -> None:
    book = ledger(("a", 50.0, 51.0, POISON), ("a", 50.6, 50.9, OK))
    assert Findings(book, [AT_WORK, other]).broken() == ([] if explains else BLAMED)


class Killed:
    """An injector's system of which nobody is really killed."""

    client_endpoint = ""

    def __init__(self, workers: list[str]) -> None:
        self.commands = self
        self.asked = 0
        self._workers = workers

    def status(self) -> dict[str, Any]:
        return {"manager": {"pid": 1, "restarts": 0}}

    def health(self) -> dict[str, Any]:
        return {"manager": {"pid": 2, "restarts": 1, "adopted": ["a#0", "dispatcher"]}}

    def workers(self) -> list[dict[str, Any]]:
        known = {"role": "active", "state": "ready", "crashes": [], "pid": 3}
        return [{**known, "name": f"{w}#0", "stages": [{"block": w}]} for w in self._workers]


@pytest.mark.parametrize(("workers", "beside"), [(["a"], ("t",)), ([], ())])
def test_a_worker_that_dies_with_a_manager_is_noted(
    monkeypatch: pytest.MonkeyPatch, workers: list[str], beside: tuple[str, ...]
) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: None)
    system: Any = Killed(workers)
    injector = Injector(system, {"tasks": {"t": ["a"], "u": ["b"]}}, lambda: 1.0, 1)
    (kind,) = (k for k in KINDS if k.name == "manager killed")
    done = injector.inject(Fault(0.0, kind, 0.9))
    alone = injector.inject(Fault(0.0, kind, 0.5))
    injector.close()
    assert (done.beside, alone.beside) == (beside, ())
    assert [t.adopted for t in injector.takeovers] == [2, 2]


def test_a_manager_without_a_successor_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: None)
    monkeypatch.setattr("blockflow.bench.chaos.faults._TAKEN_OVER_S", 0.05)
    monkeypatch.setattr(Killed, "health", lambda _: {"ready": False})
    system: Any = Killed([])
    injector = Injector(system, {"tasks": {}}, lambda: 1.0, 1)
    (kind,) = (k for k in KINDS if k.name == "manager killed")
    assert injector.inject(Fault(0.0, kind, 0.5)).note == "alone: nobody took over"
    injector.close()
    found = Findings(ledger(), takeovers=injector.takeovers)
    assert found.broken() == ["1 times no new manager took over"]


def test_who_begins_anew_has_not_taken_over() -> None:
    """Its clients may have noticed nothing: they ask again."""
    found = Findings(ledger(), takeovers=[Takeover(1.0, 0.5, 0), Takeover(2.0, 0.5, 3)])
    assert found.broken() == ["1 times a new manager began anew, without what had served"]


# --- what is left behind --------------------------------------------------------------------------


@pytest.fixture
def no_subreaper() -> Iterator[None]:
    """Orphans leave the family, though an earlier test in this process has made it adopt them."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int()
    assert prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) == 0
    assert prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
    yield
    assert prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0) == 0


@pytest.fixture
def orphan(no_subreaper: None, tmp_path: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A process that has left the family at once, and the mark that it bears."""
    code = (
        "import os, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid(); open(sys.argv[1] + '.new', 'w').write(str(os.getpid()))\n"
        "os.rename(sys.argv[1] + '.new', sys.argv[1]); time.sleep(600)\n"
    )
    pid = tmp_path / "pid"
    with marked() as mark:
        subprocess.run([sys.executable, "-c", code, str(pid)], check=True)
    while not pid.exists():
        time.sleep(0.001)
    process = psutil.Process(int(pid.read_text()))
    yield mark, process
    with contextlib.suppress(psutil.NoSuchProcess):  # killed by the test, and reaped by init
        process.kill()


def test_who_has_left_the_family_is_found(
    orphan: tuple[str, psutil.Process], tmp_path: Path
) -> None:
    mark, process = orphan
    assert process not in psutil.Process().children(recursive=True)
    assert bearers(mark) == {process}
    assert Watch(tmp_path, gone_s=0.0).survivors() == []  # by its family nobody is
    (found,) = Watch(tmp_path, gone_s=0.2, mark=mark).survivors()
    assert found.startswith(f"{process.pid} ")
    process.kill()
    assert Watch(tmp_path, gone_s=30.0, mark=mark).survivors() == []
    assert MARK not in os.environ


def test_who_has_ended_is_not_left_though_nobody_reaps_it(tmp_path: Path) -> None:
    code = "import os\nprint(os.fork() or os._exit(0), flush=True)\ninput()"
    command = [sys.executable, "-ISc", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        assert Watch(tmp_path, gone_s=30.0, seen={process.pid: process}).survivors() == []
        assert process.status() == psutil.STATUS_ZOMBIE
        parent.communicate(b"\n")


def test_a_watch_that_ends_too_early_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(_: Watch) -> Any:
        raise ValueError("a defect")

    watch = Watch(tmp_path, interval_s=0.0)
    monkeypatch.setattr(Watch, "sample", sample)
    watch.start()
    while not watch.failure:
        time.sleep(0.001)
    assert "ValueError('a defect')" in watch.failure


def test_logs_tell_of_defects_and_of_who_ended_by_itself(tmp_path: Path) -> None:
    logs_of = tmp_path / "state" / "logs"
    logs_of.mkdir(parents=True)
    (tmp_path / "up.log").write_text(
        "WARNING blockflow.control: a#0 (incarnation 3) ended: status -9\n"
        "WARNING blockflow.control: dispatcher (incarnation 4) ended: status -6\n"
        "WARNING blockflow.control: dispatcher (incarnation 9) ended: status -6\n"
        "INFO blockflow.control: a#0 (incarnation 3) ended: status 0\n"
        "WARNING blockflow.launch: the template ended: status -9\n"
        "WARNING blockflow.launch: the template ended: status -11\n"
        "WARNING blockflow.control: the control plane ended: killed by SIGKILL\n"
        "WARNING blockflow.control: the control plane ended: hung: stopped for 10.0 s\n"
        "WARNING blockflow.control: the control plane ended: killed by SIGSEGV\n"
        "ERROR blockflow.control: defect in the manager's loop\n"
        "Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n'
        "    f()\n"
        "ValueError: a defect\n"
    )
    (logs_of / "a#0.3.log").write_text("all is well\n")
    assert logs.read(tmp_path) == [
        "up.log: ValueError: a defect",
        "up.log: dispatcher ended: status -6 (2 times)",
        "up.log: template ended: status -11",
        "up.log: the control plane ended: killed by SIGSEGV",
    ]


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "said"),
    [((), "nobody could be killed any more"), (("a",), "not everything was ready again")],
)
def test_a_run_of_kills_that_comes_to_no_end_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: tuple[str, ...], said: str
) -> None:
    """Nobody can be killed, or nobody comes after who was killed."""
    now = [0.0]

    def strike(*_: Any) -> tuple[Injected, None]:
        now[0] += 10.0
        return Injected(now[0], "worker killed", tasks, "not done: it is gone"), None

    def perform(_folder: Path, _traffic: Any, _topology: Any, course: Any) -> Findings:
        found = Findings(Ledger())
        load: Any = SimpleNamespace(now=lambda: now[0])
        course(chaos.Stage(load, load, load, found))
        return found

    monkeypatch.setattr(chaos, "strike", strike)
    monkeypatch.setattr(chaos, "perform", perform)
    monkeypatch.setattr(chaos, "_rest", lambda *_: None)
    found = chaos.run_kills(tmp_path, Traffic(), kills=5, quiet_s=0.0)
    (defect,) = found.defects
    assert said in defect and defect in found.broken()
    assert now[0] < 3 * RECOVERY_S


def test_a_client_that_vanishes_says_nothing() -> None:
    """No word that its requests need not be answered: that would be another fault."""
    with FakeDispatcher(share=False) as fake:
        system: Any = SimpleNamespace(client_endpoint=fake.endpoint)
        injector = Injector(system, {"tasks": {"echo": []}}, lambda: 0.0, 1)
        (kind,) = (k for k in KINDS if k.name == "client vanishes")
        done = injector.inject(Fault(0.0, kind, 0.5))
        fake.wait_for(lambda: len(fake.requests) == 32)
        injector.close()
        assert done.note == "32 requests in flight"
        assert fake.cancelled == []

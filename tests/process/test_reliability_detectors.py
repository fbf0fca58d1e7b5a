"""What ``make bench-reliability`` finds is shown to be found: each of its detectors is given a
system that does what it looks for, and one that does not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from fake_dispatcher import FakeDispatcher

from blockflow.bench.reliability import clients, everything, givenup
from blockflow.bench.reliability import figures as names
from blockflow.bench.reliability.clients import Bench, Plan
from blockflow.bench.reliability.peer import BURST, LARGE
from blockflow.bench.reliability.possessions import Possessions, life_of, look, settled
from blockflow.bench.results import Figure
from blockflow.core.errors import BlockFlowError, make_error
from blockflow.tensormq.arena import DEVICE_BIT
from blockflow.wire.client import Reply, Request, TaskResult

pytestmark = pytest.mark.timeout(120)

# --- what the dead leave --------------------------------------------------------------------------

HOLDER = """
import mmap, os, sys
held = []
for line in sys.stdin:
    what, path = line.split()
    fd = os.open(path, os.O_RDWR)
    if what == "segment":
        held.append(mmap.mmap(fd, 4096))
        os.close(fd)
    elif what == "open":
        held.append(fd)
    elif what == "pidfd":
        os.close(fd)
        held.append(os.pidfd_open(os.getpid()))
    elif what == "child":
        os.close(fd)
        if not os.fork():
            open("/proc/self/comm", "w").write("bf:stray")
            print("done", flush=True)
            os.read(0, 1)
            os._exit(0)
        continue
    print("done", flush=True)
"""


class Holder:
    """A survivor: it takes what it is told to, and keeps it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def take(self, what: str, name: str = "arena-7") -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what} {self.run_dir / name}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def see(self, *lives: int) -> Possessions:
        root = psutil.Process(self._process.pid)
        return look(self.run_dir, frozenset(lives), [root, *root.children(recursive=True)])

    def end(self) -> None:
        for child in psutil.Process(self._process.pid).children():
            child.kill()
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    for name in ("lock", "arena-7", "d7.sock", "arena-8"):
        (tmp_path / name).write_bytes(bytes(4096))
    made = Holder(tmp_path)
    made.take("segment", "arena-8")  # it has started
    yield made
    made.end()


def successor(run_dir: Path) -> None:
    """7 has died, 9 is there, and nothing is left of 7."""
    for old, new in (("arena-7", "arena-9"), ("d7.sock", "d9.sock")):
        (run_dir / old).unlink()
        (run_dir / new).touch()


def test_a_successor_takes_as_much_as_who_died_had(holder: Holder) -> None:
    before = holder.see(7, 8)
    successor(holder.run_dir)
    holder.take("open", "arena-9")
    found = settled("died", 1, before, lambda: holder.see(8, 9))
    assert (found.value, found.n) == (0.0, 1)


@pytest.mark.parametrize(
    ("take", "what"),
    [
        ("marks-7", {"files"}),
        ("segment", {"segments", "descriptors"}),  # Python's mmap keeps one of its own
        ("open", {"descriptors"}),
        ("pidfd", {"descriptors"}),
        ("child", {"processes"}),
    ],
)
def test_what_is_left_of_a_death_is_counted(holder: Holder, take: str, what: set[str]) -> None:
    if take in ("segment", "open"):
        holder.take(take)
    before = holder.see(7, 8)
    if take in ("pidfd", "child"):
        holder.take(take)
    successor(holder.run_dir)
    if take == "marks-7":
        (holder.run_dir / take).touch()
    found = settled("died", 1, before, lambda: holder.see(8, 9), gone_s=0.2)
    assert {name for name, many in found.labels.items() if many} == what
    assert found.value == len(what)


def test_a_file_of_nobody_is_left_too(holder: Holder) -> None:
    before = holder.see(7, 8)
    (holder.run_dir / "core.part").touch()
    found = settled("died", 1, before, lambda: holder.see(7, 8), gone_s=0.1)
    assert found.labels["files"] == 1


def test_files_tell_whose_they_are() -> None:
    assert [life_of(n) for n in ("arena-7", "d12.sock", "g3.sock", "work-5")] == [7, 12, 3, 5]
    assert [life_of(n) for n in ("lock", "clients.sock", "journal.json")] == [None] * 3
    assert life_of(f"arena-{7 | DEVICE_BIT}") == 7


# --- everything killed at once --------------------------------------------------------------------


@pytest.mark.parametrize("leaves", ["nothing", "directory", "process", "orphan"])
def test_what_outlives_the_end_of_everything_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    run_dir = tmp_path / "run"
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = [stray := subprocess.Popen(sleeper)]
    process = psutil.Process(stray.pid)

    def kill_all(_server: Any) -> list[psutil.Process]:
        if leaves == "directory":
            run_dir.mkdir()
        if leaves != "process":
            stray.kill()
            stray.wait()
        return [process]

    with FakeDispatcher(share=False) as fake:
        fake.published = (everything.TASK,)
        server = SimpleNamespace(
            rest=SimpleNamespace(post=lambda *_, **__: None),
            client_address=fake.endpoint,
            run_dir=run_dir,
            stop=lambda: None,
        )

        def start(_stack: Any, _folder: Any) -> Any:
            if leaves == "orphan" and not started[1:]:  # nobody has it in a list
                started.append(subprocess.Popen(sleeper))
            return server

        monkeypatch.setattr(everything, "_start", start)
        monkeypatch.setattr(everything, "_kill_all", kill_all)
        try:
            found = everything.measure(tmp_path, 1, lambda _: None)
        finally:
            for one in started:
                one.kill()
                one.wait()
    (left,) = [f for f in found if (f.name, f.mode) == (names.LEFT, names.AFTER_ALL)]
    assert left.value == (leaves != "nothing")


# --- workers that are given up --------------------------------------------------------------------


class Crew:
    """Workers as the control plane tells of them: one that is killed comes back at once, the
    ``patience``-th time it does not, or only after a while."""

    def __init__(self, patience: int, *, returns: bool = False) -> None:
        self.commands = self
        self.deaths = 0
        self._patience = patience
        self._returns = returns
        self._looked = 0

    def kill(self, pid: int, _signal: int) -> None:
        assert pid == self._life
        self.deaths += 1

    @property
    def _life(self) -> int:
        return 10 + self.deaths + (self._returns and self._looked > 1)

    def worker(self, _name: str) -> dict[str, Any]:
        state = "failed" if self.deaths >= self._patience else "ready"
        return {"pid": self._life, "incarnation": self._life, "state": state}

    def status(self) -> dict[str, Any]:
        self._looked += 1
        return {"dispatcher": {"incarnation": 1}, "workers": [self.worker("")]}


@pytest.mark.parametrize(("patience", "found"), [(5, 5), (3, 3), (999, 10)])
def test_how_often_a_worker_died_before_it_was_given_up(
    monkeypatch: pytest.MonkeyPatch, patience: int, found: int
) -> None:
    crew: Any = Crew(patience)
    monkeypatch.setattr(givenup.os, "kill", crew.kill)
    assert givenup.kill_until_given_up(crew, "b") == found


def test_who_comes_back_was_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(givenup, "_QUIET_S", 0.01)
    for crew, found in ((Crew(0), True), (Crew(0, returns=True), False), (Crew(9), False)):
        system: Any = crew
        assert givenup.stays(system, "b") == found


@pytest.mark.parametrize(
    ("code", "found"), [("BLOCK_UNAVAILABLE", True), ("WORKER_LOST", False), ("", False)]
)
def test_what_a_given_up_block_is_asked_is_refused(code: str, found: bool) -> None:
    def infer(*_: Any, **__: Any) -> None:
        if code:
            raise make_error(code, "it was asked to")

    client: Any = SimpleNamespace(infer=infer)
    assert givenup.refused(client, "b") == found


@pytest.mark.parametrize("task", ["echo", "fail"])
def test_a_bystander_counts_what_failed(monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    monkeypatch.setattr(givenup, "OTHER", task)
    with FakeDispatcher(share=False) as fake:
        bystander = givenup.Bystander(fake.endpoint)
        with bystander.asking():
            fake.wait_for(lambda: len(fake.requests) > 2)
    assert bystander.asked > 2
    assert bystander.failed == (bystander.asked if task == "fail" else 0)


# --- clients --------------------------------------------------------------------------------------


class Cancelling(FakeDispatcher):
    """Takes its time for the first request, and for the others only if it ``computes`` what was
    cancelled; ``cuts`` off who asks for large results."""

    def __init__(self, endpoint: str, *, computes: bool = False, cuts: bool = True) -> None:
        super().__init__(endpoint, share=False)
        self.published = (clients.SLOW, clients.SMALL, LARGE)
        self.batches = 0
        self.slow_clients = 0
        self.serves = False
        self._computes = computes
        self._cuts = cuts

    def _request(self, who: bytes, msg: Request, rest: list[bytes]) -> None:
        if LARGE in msg.tasks and self.serves:
            self._later.append((time.monotonic() + self.delay_s, who, msg, rest[0]))
        elif LARGE in msg.tasks:
            self.slow_clients += self._cuts
            self.requests.append(msg)
        else:
            super()._request(who, msg, rest)

    def _answer(self, who: bytes, request: Request, body: Any) -> None:
        gone = request.request_id in self.cancelled
        self.batches += not gone or self._computes
        if not gone:
            super()._answer(who, request, body)
            return
        error = make_error("CANCELLED", "it was asked to")
        result = TaskResult(request.tasks[0], None, error)
        self._send(who, Reply(request.request_id, 1, (result,)), [])

    def worker(self, name: str) -> dict[str, Any]:
        kpi = {"batches": self.batches, "events": {"slow_client": self.slow_clients}}
        return {"kpi": kpi, "stages": [{"kpi": kpi}]}


Watched = Callable[..., tuple[Bench, FakeDispatcher]]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """The bench's experiments with a fake."""
    monkeypatch.setattr(clients, "_IDLE_S", 0.05)
    monkeypatch.setattr(clients, "_PATIENCE_S", 2.0)
    made: list[tuple[Bench, FakeDispatcher]] = []

    def build(**how: Any) -> tuple[Bench, FakeDispatcher]:
        fake = Cancelling(f"ipc://{tmp_path}/c.sock", **how)
        system: Any = SimpleNamespace(client_endpoints=[fake.endpoint], commands=fake)
        plan = Plan(deadlines=6, cancels=1)
        made.append((Bench(system, plan, lambda _: None), fake))
        return made[-1]

    yield build
    for bench, fake in made:
        bench.context.term()
        fake.stop()


def value_of(found: list[Figure], name: str) -> float:
    (figure,) = [f for f in found if name in (f.name, f.mode)]
    return figure.value


@pytest.mark.parametrize("computes", [False, True])
def test_who_computes_what_was_cancelled_is_noticed(watched: Watched, computes: bool) -> None:
    bench, _ = watched(computes=computes)
    found = bench.cancels()
    assert value_of(found, names.IN_VAIN) == (10 if computes else 0)
    assert [f.n for f in found if f.name == names.CANCELLED] == [10]


def test_who_cancels_does_not_wait_for_replies_for_ever(watched: Watched) -> None:
    bench, fake = watched()
    fake._send = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(BlockFlowError, match="11 requests got no reply"):
        bench.cancels()


@pytest.mark.parametrize("cuts", [True, False])
def test_who_is_never_cut_off_is_noticed(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, cuts: bool
) -> None:
    monkeypatch.setattr(clients, "_PATIENCE_S", 0.5 if not cuts else 30.0)
    bench, _ = watched(cuts=cuts)
    took_s = bench._neglect(2, 1)
    assert (took_s is not None) == cuts


@pytest.mark.parametrize("want", [0, 1, 3])
def test_a_neighbour_asks_for_everything_and_reads_its_quota(watched: Watched, want: int) -> None:
    """What it does not want it cancels before it is answered."""
    bench, fake = watched()
    fake.serves, fake.delay_s = True, 0.5
    peer = bench._peer()
    read = peer.heed(BURST, want, 5.0)
    peer.close()
    assert (read, len(fake.cancelled)) == ((want, True), BURST - want)


def test_a_neighbour_that_reads_and_is_cut_off_is_noticed(watched: Watched) -> None:
    """Nothing comes any more: that it was no fair comparison must be known."""
    bench, _ = watched(cuts=True)
    peer = bench._peer()
    assert peer.heed(BURST, 1, 0.2) == (0, False)
    peer.close()


def test_a_result_that_comes_too_late_counts_as_late(watched: Watched) -> None:
    bench, fake = watched()
    fake.delay_s = 0.6  # the longest deadline is 240 ms
    found = bench.deadlines()
    assert value_of(found, names.OVERDUE) == 6
    (overdue,) = [f for f in found if f.mode == names.OVERDUE]
    assert overdue.labels["beyond_lag"] == 6
    assert value_of(found, names.AFTERWARDS) == 6
    assert value_of(found, names.NO_REPLY) == 0
    (lateness,) = [f for f in found if f.name == names.LATENESS]
    assert lateness.n == 6
    assert lateness.labels["max"] > 300


def test_no_reply_at_all_is_counted(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_PATIENCE_S", 0.2)
    bench, fake = watched()
    fake.delay_s = 600.0
    assert value_of(bench.deadlines(), names.NO_REPLY) == 6

"""The judge of ``make chaos`` sees what it shall see: the whole harness, around a Dispatcher that
loses, doubles, withholds, alters or refuses, or a system that leaves something behind.

What it has to catch is planted where it would happen: on the wire and in the file system, behind
the client SDK, which gives every request one end whatever comes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from fake_dispatcher import FakeDispatcher

from blockflow.bench.chaos import run as chaos
from blockflow.bench.chaos.findings import Findings
from blockflow.bench.chaos.ledger import LATE, NO_REPLY, OK, UNHARMED
from blockflow.bench.chaos.load import Traffic
from blockflow.bench.chaos.run import Stage, perform, status_of
from blockflow.bench.chaos.watch import Watch
from blockflow.core.errors import make_error
from blockflow.wire.client import Reply, Request, TaskResult

pytestmark = pytest.mark.timeout(120)

TASK = "echo"
EVERY = 30
"""One request in so many is planted: less than what a run may refuse."""
REQUESTS = 2 * EVERY
TOO_LATE_S = 1.5
INPUTS = [np.full((1, 4), n, np.float32) for n in range(8)]
TRAFFIC = Traffic(rate=300.0, deadline_s=0.5, patience_s=0.2)
PATIENT = Traffic(rate=300.0, deadline_s=10.0)
ODD = Traffic(rate=150.0, deadline_s=0.5, patience_s=0.2, odd=100.0)


class Faulty(FakeDispatcher):
    """Treats one of ``every`` so many requests as the test says, and answers the others."""

    def __init__(
        self, treat: Callable[[Faulty, bytes, Request, Any], None], every: int = EVERY
    ) -> None:
        super().__init__(share=False)
        self._treat = treat
        self._every = every

    def _request(self, who: bytes, msg: Request, rest: list[bytes]) -> None:
        if (len(self.requests) + 1) % self._every:
            super()._request(who, msg, rest)
        else:
            self.requests.append(msg)
            self._treat(self, who, msg, rest[0])

    def answer(self, who: bytes, msg: Request, body: Any) -> None:
        self._answer(who, msg, body)

    def later(self, who: bytes, msg: Request, body: Any) -> None:
        self._later.append((time.monotonic() + TOO_LATE_S, who, msg, body))

    def refuse(self, who: bytes, msg: Request, code: str) -> None:
        results = tuple(TaskResult(t, None, make_error(code, "it was asked to")) for t in msg.tasks)
        self._send(who, Reply(msg.request_id, 1, results), [])


class FakeSystem:
    """A system as :func:`perform` sees it: its Dispatcher is the fake."""

    def __init__(self, dispatcher: FakeDispatcher, run_dir: Path) -> None:
        self._dispatcher = dispatcher
        self.run_dir = run_dir
        self.client_endpoint = dispatcher.endpoint
        self.commands = self
        self.leaves = False
        self.slots = 0
        self.exit_status: int | None = 0

    def apply(self, topology: Any) -> None:
        self.run_dir.mkdir()

    def health(self) -> dict[str, Any]:
        return {"ready": True}

    def workers(self) -> list[dict[str, Any]]:
        return []

    def worker(self, name: str) -> dict[str, Any]:
        return {"name": name, "process": {"slots_used": self.slots}}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._dispatcher.stop()
        if not self.leaves:
            shutil.rmtree(self.run_dir)


Play = Callable[..., Findings]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """A run of some requests around a fake; ``course`` may do something in its middle."""

    def playing(
        dispatcher: FakeDispatcher,
        course: Callable[[Stage, FakeSystem], None] = lambda _stage, _system: None,
        traffic: Traffic = TRAFFIC,
    ) -> Findings:
        system = FakeSystem(dispatcher, tmp_path / "run")
        monkeypatch.setattr(chaos, "RemoteSystem", lambda _folder: system)
        monkeypatch.setattr(chaos, "prepare", lambda _r, _seed: (INPUTS, {TASK: INPUTS}))

        def whole(stage: Stage) -> None:
            course(stage, system)
            end = time.monotonic() + 30.0
            while len(dispatcher.requests) < REQUESTS and time.monotonic() < end:
                time.sleep(0.01)

        found = perform(tmp_path, traffic, {"tasks": {TASK: []}}, whole)
        assert found.ledger.missing == 0
        return found

    return playing


def dropped(fake: Faulty, who: bytes, msg: Request, body: Any) -> None:
    """No reply."""


def doubled(fake: Faulty, who: bytes, msg: Request, body: Any) -> None:
    fake.answer(who, msg, body)
    fake.answer(who, msg, body)


def withheld(fake: Faulty, who: bytes, msg: Request, body: Any) -> None:
    fake.later(who, msg, body)


def withheld_and_doubled(fake: Faulty, who: bytes, msg: Request, body: Any) -> None:
    fake.later(who, msg, body)
    fake.later(who, msg, body)


def altered(fake: Faulty, who: bytes, msg: Request, body: Any) -> None:
    fake.answer(who, msg, bytes(len(body) - 1) + b"\x7f")


def mixed_up(fake: Faulty, who: bytes, msg: Request, body: Any) -> None:
    """It gets another request's answer."""
    fake.answer(who, msg, INPUTS[int(np.frombuffer(body, np.float32)[0] == 0)].tobytes())


def garbled(fake: Faulty, who: bytes, msg: Request, body: Any) -> None:
    fake.answer(who, msg, body)
    fake._socket.send_multipart([who, b"\x93nonsense"])


def to_nobody(fake: Faulty, who: bytes, msg: Request, body: Any) -> None:
    fake.answer(who, msg, body)
    fake.answer(who, Request(bytes(15) + b"\x01", msg.tasks, 1, msg.tensor), body)


def some(found: Findings) -> int:
    """How many were planted."""
    return found.ledger.sent_count // EVERY


def test_a_dispatcher_that_answers_everything_once_is_cleared(play: Play) -> None:
    found = play(FakeDispatcher(share=False), traffic=PATIENT)
    assert found.violations() == []
    assert found.ledger.outcomes() == {OK: found.ledger.sent_count}
    assert found.ledger.sent_count >= REQUESTS
    assert status_of(found) == 0


@pytest.mark.parametrize("plant", [doubled, to_nobody])
def test_a_reply_too_many_is_noticed(play: Play, plant: Any) -> None:
    found = play(Faulty(plant), traffic=PATIENT)
    assert found.broken() == [f"{some(found)} requests ended twice"]
    assert status_of(found) == 1


def test_a_dropped_reply_is_noticed(play: Play) -> None:
    found = play(Faulty(dropped))
    assert found.ledger.outcomes()[NO_REPLY] == some(found)
    said = f"{some(found)} requests got no reply, though somebody was there to reply"
    assert said in found.broken()
    assert status_of(found) == 1


def test_doubled_replies_do_not_make_up_for_lost_ones(play: Play) -> None:
    turns = {"n": 0}

    def either(fake: Faulty, *request: Any) -> None:
        turns["n"] += 1
        (doubled if turns["n"] % 2 else dropped)(fake, *request)

    broken = play(Faulty(either)).broken()
    assert any("ended twice" in said for said in broken)
    assert any("got no reply" in said for said in broken)


def test_a_withheld_reply_is_told_from_a_lost_one(play: Play) -> None:
    found = play(Faulty(withheld), traffic=Traffic(300.0, 0.5, patience_s=10.0))
    assert found.ledger.outcomes()[LATE] == some(found)
    assert found.broken() == []
    assert found.slow() == [f"{some(found)} requests ended later than their deadline allows"]
    assert status_of(found) not in (0, 1)  # time alone: worth another try


def test_a_second_late_reply_is_one_too_many(play: Play) -> None:
    found = play(Faulty(withheld_and_doubled), traffic=Traffic(300.0, 0.5, patience_s=10.0))
    assert found.broken() == [f"{some(found)} requests ended twice"]


def test_a_message_without_sense_is_noticed(play: Play) -> None:
    found = play(Faulty(garbled), traffic=PATIENT)
    assert found.broken() == [f"{some(found)} messages to clients made no sense"]


@pytest.mark.parametrize("plant", [altered, mixed_up])
def test_a_wrong_answer_is_noticed(play: Play, plant: Any) -> None:
    found = play(Faulty(plant), traffic=PATIENT)
    assert found.broken() == [f"{some(found)} requests ended with wrong value"]


@pytest.mark.parametrize("code", ["DEADLINE_EXCEEDED", "NOT_READY", "WORKER_LOST", "OVERLOADED"])
def test_who_refuses_too_much_serves_nobody(play: Play, code: str) -> None:
    def refused(fake: Faulty, who: bytes, msg: Request, body: Any) -> None:
        fake.refuse(who, msg, code)

    found = play(Faulty(refused, every=1), traffic=PATIENT)
    (said,) = found.broken()
    assert said.startswith("only 0.0% of ")
    assert status_of(found) == 1


def test_who_answers_what_cannot_be_answered_is_noticed(play: Play) -> None:
    """The fake takes every shape and value."""
    found = play(FakeDispatcher(share=False), traffic=ODD)
    (said,) = [line for line in found.broken() if UNHARMED in line]
    assert int(said.split()[0]) > 0
    assert any(e.far and e.ok for e in found.ledger.ended)  # through the proxy


def test_a_cancelled_request_without_a_reply_is_noticed(play: Play) -> None:
    found = play(Faulty(dropped, every=1), traffic=ODD)
    assert any("cancelled requests got no reply" in line for line in found.broken())


def test_who_was_there_before_is_not_left_behind(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "Watch", partial(Watch, gone_s=0.2))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE):
        assert play(FakeDispatcher(share=False), traffic=PATIENT).broken() == []


def test_what_a_system_says_and_how_it_ends_is_noticed(play: Play, tmp_path: Path) -> None:
    def plant(_stage: Stage, system: FakeSystem) -> None:
        system.exit_status = None
        text = "Traceback (most recent call last):\n  File ...\nKeyError: 3\n"
        (tmp_path / "up.log").write_text(text)

    assert play(FakeDispatcher(share=False), plant, PATIENT).broken() == [
        "the system did not end in order: status None",
        "up.log: KeyError: 3",
    ]


def test_who_leaves_the_family_at_once_is_found(
    play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Between two looks at it, and so nobody has seen it."""
    monkeypatch.setattr(chaos, "Watch", partial(Watch, gone_s=0.2, interval_s=60.0))
    pid = tmp_path / "pid"
    code = (
        "import os, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    )

    def plant(_stage: Stage, _system: FakeSystem) -> None:
        subprocess.run([sys.executable, "-c", code, str(pid)], check=True)

    try:
        (said,) = play(FakeDispatcher(share=False), plant, PATIENT).broken()
        assert said.startswith(f"left behind: process {pid.read_text()} ")
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_what_is_left_behind_is_found(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "Watch", partial(Watch, gone_s=0.2))
    monkeypatch.setattr(chaos, "SPARE_S", -PATIENT.deadline_s)
    children: list[subprocess.Popen[bytes]] = []

    def plant(stage: Stage, system: FakeSystem) -> None:
        code = "import time; time.sleep(600)"
        children.append(subprocess.Popen([sys.executable, "-c", code]))
        system.leaves, system.slots = True, 2

    try:
        found = play(FakeDispatcher(share=False), plant, PATIENT)
        slots, process, files = found.broken()
        assert slots == "dispatcher has 2 slots in use"
        assert process.startswith(f"left behind: process {children[0].pid} ")
        assert files.startswith("left behind: ")
        assert files.endswith("/run")
        assert status_of(found) == 1
    finally:
        for child in children:
            child.kill()
            child.wait()

"""The Manager's thread and a disk that does not answer."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from control_rig import echo_repository

from blockflow.control import lookups
from blockflow.control.events import Launch, Send
from blockflow.control.fleet import Fleet
from blockflow.control.lookups import Lookups
from blockflow.control.profiles import ProfileShelf
from blockflow.core.errors import BlockFlowError, RepositoryError
from blockflow.core.launchspec import StageSpec
from blockflow.core.scarcity import is_away
from blockflow.wire.control import Ping, SetPolicy

PATIENCE = ("GLANCE_S", "_CHANGE_S")


class Shelf(ProfileShelf):
    """Answers when it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.asked: list[int | str] = []
        self.error: Exception | None = None

    def _answered(self, whose: int | str) -> None:
        self.asked.append(whose)
        self.may.wait()
        if self.error is not None:
            raise self.error

    def attach(self, order: Launch) -> Launch:
        self._answered(order.incarnation)
        return Launch(order.incarnation, "", order.name, "", {"stages": ["known"]})

    def with_points(self, message: SetPolicy, plan: Any) -> SetPolicy:
        self._answered(plan.spec.name)
        return SetPolicy(message.stage, {}, 1, profile={"found": 1})


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    made = Shelf()
    for name in PATIENCE:
        monkeypatch.setattr(lookups, name, 30.0)
    yield made
    made.may.set()
    answered()


@pytest.fixture
def impatient(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PATIENCE:
        monkeypatch.setattr(lookups, name, 0.0)


def answered() -> None:
    for thread in threading.enumerate():
        if thread.name == "bf-disk":
            thread.join()


def order(incarnation: int, **spec: Any) -> Launch:
    return Launch(incarnation, "worker", f"w#{incarnation}", "a:run", spec or {"stages": []})


def fleet() -> Fleet:
    """Of one worker, 7, with one stage, 1."""
    plan = SimpleNamespace(spec=SimpleNamespace(name="block"))
    replica = SimpleNamespace(block_of=lambda stage: plan if stage == 1 else None)
    return cast(Fleet, SimpleNamespace(by_incarnation={7: replica}.get))


def test_an_order_is_completed_at_once_by_a_disk_that_answers(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def awaited(answers: Any, patience_s: float) -> None:
        shelf.may.set()
        futures.wait(answers, patience_s)

    monkeypatch.setattr(lookups, "wait", awaited)
    it = Lookups(shelf)
    for n in (1, 2):
        shelf.may.clear()
        completed = it.launch(order(n))
        assert completed is not None and completed.spec == {"stages": ["known"]}
    assert caplog.messages == []


@pytest.mark.usefixtures("impatient")
def test_a_disk_that_does_not_answer_is_asked_one_thing_once_and_keeps_nobody(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    it = Lookups(shelf)
    assert [it.launch(order(n)) for n in (1, 1, 2, 1)] == [None] * 4
    assert it.launch(order(3, role="dispatcher")) == order(3, role="dispatcher")
    change = SetPolicy(1, {})
    assert it.message(Send(7, change), fleet()) is change
    assert shelf.asked == [1]
    assert caplog.messages == ["w#1 waits for the repository, which does not answer"]
    shelf.may.set()
    answered()
    for n in (1, 1, 2):
        while it.launch(order(n)) is None:
            answered()
    assert shelf.asked == [1, 2]


@pytest.mark.usefixtures("impatient")
def test_the_answer_to_who_is_gone_is_nobody_elses(shelf: Shelf) -> None:
    it = Lookups(shelf)
    assert it.launch(order(1)) is None
    shelf.may.set()
    answered()
    while (completed := it.launch(order(2))) is None:
        answered()
    assert completed.incarnation == 2


def test_what_a_lookup_raises_is_raised(shelf: Shelf) -> None:
    shelf.error = OSError("a failing disk")
    shelf.may.set()
    it = Lookups(shelf)
    with pytest.raises(OSError, match="a failing disk"):
        it.launch(order(1))
    shelf.error = None
    assert it.launch(order(2)) is not None


def test_a_change_of_a_policy_waits_for_who_has_asked_before(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks again for it: the worker would refuse a policy that has a profile."""
    it = Lookups(shelf)
    monkeypatch.setattr(lookups, "GLANCE_S", 0.0)
    assert it.launch(order(1)) is None
    threading.Timer(0.01, shelf.may.set).start()
    assert it.message(Send(7, SetPolicy(1, {})), fleet()) == SetPolicy(1, {}, profile={"found": 1})
    while it.launch(order(1)) is None:
        answered()


def test_many_questions_in_a_row_keep_the_thread_no_longer_than_one(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes nearly as long as is waited for each worker would have the Manager killed
    as one that hangs."""
    now = [100.0]
    asked: list[float] = []

    def waited(_: object, patience_s: float) -> None:
        asked.append(patience_s)
        now[0] += min(patience_s, 20.0)
        if patience_s >= 20.0:
            shelf.may.set()
            answered()

    monkeypatch.setattr(lookups, "wait", waited)
    monkeypatch.setattr(lookups, "time", SimpleNamespace(monotonic=lambda: now[0]))
    it = Lookups(shelf)
    assert it.launch(order(1)) is not None
    shelf.may.clear()
    assert [it.launch(order(n)) for n in (2, 3, 2)] == [None] * 3
    shelf.may.set()
    answered()
    now[0] += 5.0
    assert it.launch(order(2)) is not None
    shelf.may.clear()
    assert it.launch(order(3)) is None
    assert asked == [30.0, 10.0, 5.0]


def test_each_change_of_a_policy_is_asked_for_anew(shelf: Shelf) -> None:
    """The profile may have been measured meanwhile."""
    shelf.may.set()
    it, change = Lookups(shelf), SetPolicy(1, {})
    for _ in range(2):
        assert it.message(Send(7, change), fleet()) == SetPolicy(1, {}, profile={"found": 1})
    assert shelf.asked == ["block", "block"]
    others = [Send(7, SetPolicy(2, {})), Send(8, change), Send(7, Ping(1))]
    others.append(Send(7, SetPolicy(1, {"policy": "none"})))  # it would wait for nothing
    assert [it.message(o, fleet()) for o in others] == [o.message for o in others]
    assert shelf.asked == ["block", "block"]


def test_without_a_further_thread_the_disk_is_asked_here(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    shelf.may.set()
    assert Lookups(shelf).launch(order(1)) is not None


@pytest.mark.parametrize(
    ("lost", "policy", "waits"),
    [(".", "lbci", True), (".", "none", False), ("a", "lbci", False)],
)
def test_a_policy_without_its_profile_waits_where_the_whole_repository_is_away(
    tmp_path: Path, lost: str, policy: str, waits: bool
) -> None:
    """It would be refused, and the worker given up for good. Who has no policy asks for itself."""
    repository = echo_repository(tmp_path / "blocks")
    stage = StageSpec(1, repository.info("a"), policy={"policy": policy}).to_dict()
    asked = order(1, stages=[stage], device="cpu", threads=1)
    shelf = ProfileShelf(tmp_path / "blocks")
    shutil.rmtree(tmp_path / "blocks" / lost)
    if not waits:
        assert shelf.attach(asked) == asked
        return
    with pytest.raises(RepositoryError) as e:
        shelf.attach(asked)
    assert is_away(e.value)


@pytest.mark.parametrize(
    ("number", "times", "code"),
    [
        (errno.ENFILE, 99, "NO_SPACE"),
        (errno.ENFILE, 1, "NO_SPACE"),
        (errno.ESTALE, 1, "UNKNOWN_BLOCK"),
    ],
)
def test_a_policy_without_its_profile_waits_where_it_could_not_be_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, times: int, code: str
) -> None:
    """Also where what comes next can be read again."""
    repository = echo_repository(tmp_path)
    stage = StageSpec(1, repository.info("a"), policy={"policy": "lbci"}).to_dict()
    fails, opened = [OSError(number, os.strerror(number))] * times, os.open

    def open_(*args: Any, **more: Any) -> int:
        if fails:
            raise fails.pop()
        return opened(*args, **more)

    monkeypatch.setattr(os, "open", open_)
    with pytest.raises(BlockFlowError, match=code):
        ProfileShelf(tmp_path).attach(order(1, stages=[stage], device="cpu", threads=1))

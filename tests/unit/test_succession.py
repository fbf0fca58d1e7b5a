"""Whom a new Manager waits for, and whom it ends, before the ordinary course begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from control_rig import AB, TIMING, Counter, World

from blockflow.control import succession
from blockflow.control.adoption import Inheritance
from blockflow.control.brain import Brain
from blockflow.control.events import Exited, Proved, Received
from blockflow.control.fleet import Life, Place
from blockflow.control.settings import ControlSettings
from blockflow.control.succession import PATIENCE_S, Outcome, Succession
from blockflow.launch.vitals import Vitals
from blockflow.tensormq.weights import FOLDER, WeightFiles
from blockflow.wire.control import Ping, Pong

GUARDIAN = 999


class Rig:
    """What a Manager left that had a Dispatcher and two workers, and the ways to reach them.

    Attributes:
        turns: what happens in each turn of the wait; the last goes on. Each takes a tenth of a
            second.
        inbox: what has come; what a turn puts there is found in it.
    """

    def __init__(self, tmp_path: Path) -> None:
        self.before = World().up()
        self.before.apply(*AB)
        self.turns: list[Callable[[], None]] = [lambda: None]
        self.inbox: list[Any] = []
        self.gone: dict[int, Exited] = {}
        self.deaths: list[Exited] = []
        self.admitted: list[int] = []
        self.sent: list[tuple[int, Any]] = []
        self.kills: list[int] = []
        self.states: dict[int, str] = {}
        self.spared: set[int] = set()
        self.clock = 0.0
        self._run_dir = tmp_path

    def incarnation(self, name: str) -> int:
        return self.before.incarnation(name)

    def pid(self, name: str) -> int:
        return 10_000 + self.incarnation(name)

    def hear(self, *names: str) -> None:
        for name in names:
            i = self.incarnation(name)
            self.inbox.append(Received(i, Pong(i, 0, "ready")))

    def die(self, name: str) -> None:
        self.deaths.append(Exited(self.incarnation(name), -9))

    def run(self) -> Outcome:
        """Take over."""
        settings = ControlSettings(
            repository=Path("/blocks"), state_dir=Path("/state"), cores=(0, 1), timing=TIMING
        )
        self.brain = Brain(settings, Place("/run", "ipc:///c.sock", "/logs"), Counter())
        epoch, stored = self.before.stored
        inheritance: Any = Inheritance(self.before.journal(), epoch, stored, {"posted": 1})
        children: Any = SimpleNamespace(
            adopt=self._adopt,
            kill=lambda order: self.kills.append(order.incarnation),
            reap=lambda ready: [self.deaths.pop(0) for _ in list(self.deaths)],
            pids=lambda: {self.pid(n) for n in self.before.names()},
            template_pid=5,
        )
        controller: Any = SimpleNamespace(
            admit=self.admitted.append, send=lambda i, message: self.sent.append((i, message))
        )
        health: Any = SimpleNamespace(loaded=lambda i: None)
        run_dir: Any = SimpleNamespace(path=self._run_dir)
        poll: Any = SimpleNamespace(poll=self._turn)
        inbox: Any = SimpleNamespace(drain=self._drain, put=self.inbox.append)
        it = Succession(inheritance, self.brain, children, controller, health, run_dir)
        return it.run(poll, inbox, GUARDIAN, {4711})

    def life(self, name: str) -> Life:
        life = self.brain.crew.find(self.incarnation(name))
        assert life is not None
        return life

    def vitals(self, pid: int) -> Vitals:
        return Vitals(self.states.get(pid, "S"), 0, 0, False)

    def _adopt(self, life: Life, log_path: str) -> Exited | None:
        assert log_path == f"/logs/{life.name}.{life.incarnation}.log"
        return self.gone.get(life.incarnation)

    def _turn(self, _ms: int) -> list[tuple[int, int]]:
        self.clock += 0.1
        self.turns[0]()
        if len(self.turns) > 1:
            del self.turns[0]
        return []

    def _drain(self) -> list[Any]:
        found, self.inbox[:] = list(self.inbox), []
        return found


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    made = Rig(tmp_path)

    def strangers(_run_dir: Path, spared: set[int]) -> None:
        made.spared = spared

    monkeypatch.setattr(succession, "time", SimpleNamespace(monotonic=lambda: made.clock))
    monkeypatch.setattr(succession, "read_vitals", made.vitals)
    monkeypatch.setattr(succession, "remove_strangers", strangers)
    monkeypatch.setattr(succession, "descendants", lambda pid, run_dir=None: {})
    return made


def test_who_is_heard_is_taken_over_and_other_work_waits(rig: Rig) -> None:
    later = [Proved(7, None, 1.0), lambda: None]

    def first() -> None:
        rig.inbox += later
        rig.hear("b#0", "dispatcher")

    rig.turns = [first, lambda: rig.hear("a#0")]
    outcome = rig.run()
    assert outcome.adopted == ("a#0", "b#0", "dispatcher") and outcome.dead == ()
    assert rig.inbox == later and rig.kills == []
    everybody = {rig.incarnation(n) for n in rig.before.names()}
    assert set(rig.admitted) == everybody and rig.spared == everybody | {4711}
    a = rig.incarnation("a#0")
    assert [i for i, m in rig.sent if m == Ping(0)][3:] == [a]  # who was heard is not asked again
    assert rig.clock == pytest.approx(0.2)


def test_the_dead_are_not_waited_for(rig: Rig) -> None:
    gone = Exited(rig.incarnation("b#0"), 1)
    rig.gone[gone.incarnation] = gone

    def dies_after_all() -> None:
        rig.die("dispatcher")

    rig.turns = [lambda: rig.hear("dispatcher"), dies_after_all, lambda: rig.die("a#0")]
    outcome = rig.run()
    assert outcome.adopted == ()
    named = [rig.incarnation(n) for n in ("dispatcher", "a#0")]
    assert [d.incarnation for d in outcome.dead] == [gone.incarnation, *named]
    assert gone.incarnation not in {i for i, _ in rig.sent}


def test_who_is_stopped_is_ended_and_not_for_a_moment(rig: Rig) -> None:
    a, b = rig.pid("a#0"), rig.pid("b#0")
    rig.states = {a: "T", b: "T"}

    def b_goes_on() -> None:
        rig.states[b] = "S"

    def b_again() -> None:
        rig.states[b] = "T"

    rig.turns = [lambda: rig.hear("dispatcher"), b_goes_on, b_again, lambda: None, lambda: None]
    rig.turns.append(lambda: (rig.die("a#0"), rig.hear("b#0"))[0])  # type: ignore[func-returns-value]
    outcome = rig.run()
    assert outcome.adopted == ("b#0", "dispatcher")
    assert set(rig.kills) == {rig.incarnation("a#0")}
    life = rig.life("a#0")
    assert (life.condemned, life.innocent) == ("hung: it is stopped", True)


def test_who_says_nothing_for_so_long_is_replaced(rig: Rig) -> None:
    rig.turns = [lambda: rig.hear("a#0", "dispatcher"), lambda: None]
    assert rig.run().adopted == ("a#0", "dispatcher")
    assert rig.kills == [rig.incarnation("b#0")]
    assert rig.life("b#0").condemned.startswith("it did not answer") and rig.life("b#0").innocent
    assert PATIENCE_S <= rig.clock < PATIENCE_S + 0.2


def test_of_the_condemned_only_the_end_is_waited_for(rig: Rig) -> None:
    """It had not proved itself; what it says now is no reason to keep it."""
    rig.before.hold_ready.add("a#1")
    rig.before.apply(["a", "b"], {"t": ["a", "b"]}, digests={"a": "new"})
    rig.turns = [
        lambda: rig.hear("a#0", "a#1", "b#0", "dispatcher"),
        lambda: None,
        lambda: rig.die("a#1"),
    ]
    outcome = rig.run()
    assert outcome.adopted == ("a#0", "b#0", "dispatcher")
    assert rig.kills == [rig.incarnation("a#1")]
    assert [d.incarnation for d in outcome.dead] == rig.kills


def test_what_is_in_no_journal_is_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, ended = 4242, []
    known = {5, rig.pid("a#0"), succession.os.getpid(), mine}

    def descendants(pid: int, run_dir: Path | None = None) -> dict[int, int]:
        return {mine: 1} if run_dir is None else dict.fromkeys({*known, 77}, 3)

    monkeypatch.setattr(succession, "descendants", descendants)
    monkeypatch.setattr(
        succession, "kill_process", lambda pid, started: ended.append((pid, started))
    )
    rig.turns = [lambda: rig.hear(*rig.before.names())]
    rig.run()
    assert ended == [(77, 3)]


def test_weights_that_nobody_maps_any_more_are_removed(rig: Rig, tmp_path: Path) -> None:
    """Their workers died together with the Manager."""
    files = WeightFiles(tmp_path)
    kept = files.hold("used", 4096, [])
    files.hold("unused", 4096, [])
    rig.turns[0] = lambda: rig.hear("dispatcher", "a#0", "b#0")
    rig.run()
    assert [p.name for p in (tmp_path / FOLDER).iterdir()] == ["used"] and kept is not None


def test_who_was_condemned_keeps_the_reason(rig: Rig) -> None:
    rig.before.hold_ready.add("a#1")
    rig.before.apply(["a", "b"], {"t": ["a", "b"]}, digests={"a": "new"})
    rig.turns = [lambda: rig.hear("a#0", "b#0", "dispatcher"), lambda: None]
    rig.run()
    assert "not committed" in rig.life("a#1").condemned
    assert rig.kills == [rig.incarnation("a#1")] * 2  # once more when the time was up

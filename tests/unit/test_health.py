"""Who is asked, what is shown of the answers, and who hangs by its work or its socket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from control_rig import AB, MS, TIMING, S, World

from blockflow.control import health
from blockflow.control.controller import Controller
from blockflow.control.health import UNBOUNDED_MS, Health
from blockflow.core.errors import SystemError_
from blockflow.launch.vitals import Vitals
from blockflow.tensormq.atwork import Work
from blockflow.wire.control import Ping, Pong


class Wire:
    """A Controller that sends nothing, and proves at once that it turns."""

    def __init__(self) -> None:
        self.pings: list[tuple[int, int]] = []

    def send(self, incarnation: int, message: Ping) -> None:
        self.pings.append((incarnation, message.seq))

    def echo(self, done: Callable[[], None]) -> None:
        done()


class Rig:
    """Two workers and the Dispatcher, with a Health whose clock is :attr:`now`."""

    def __init__(self, run_dir: Path) -> None:
        self.world = World().up()
        self.world.apply(*AB)
        for life in self.world.brain.crew.lives():
            life.endpoint = ""
        self.wire = Wire()
        crew, soon = self.world.brain.crew, lambda run: run()
        self.health = Health(crew, cast(Controller, self.wire), run_dir, TIMING, soon)
        self.now = 5000 * S
        self.works: list[Work] = []
        self.vitals = Vitals("S", 0, 0, False)
        self.closely: list[bool] = []
        self.asked_by_then: list[int] = []

    def look(self, pid: int, *, every_thread: bool) -> Vitals:
        self.closely.append(every_thread)
        self.asked_by_then.append(len(self.wire.pings))
        return self.vitals

    def life(self, name: str) -> Any:
        (life,) = (x for x in self.world.brain.crew.lives() if x.name == name)
        return life

    def tick(self, seconds: float = 0.0) -> list[tuple[int, str, bool]]:
        self.now += int(seconds * S)
        hangs = self.health.tick(self.now)
        return [(h.incarnation, h.cause, h.outside) for h in hangs]

    def answer(self, name: str, seq: int) -> None:
        i = self.life(name).incarnation
        self.health.pong(i, Pong(i, seq, "ready", seq), self.now + 2 * MS)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    made = Rig(tmp_path)
    reader = SimpleNamespace(open=lambda *_: SimpleNamespace(read=lambda: made.works))
    monkeypatch.setattr(health, "AtWorkReader", reader)
    monkeypatch.setattr(health, "read_vitals", made.look)
    monkeypatch.setattr(health.time, "monotonic_ns", lambda: made.now)
    return made


def test_only_who_serves_is_asked_unless_somebody_wants_to_know(rig: Rig) -> None:
    rig.world.hold_ready.add("c#0")
    rig.world.apply(["a", "b", "c"], {"t": ["a", "b", "c"]})
    rig.tick()
    asked = {i for i, _ in rig.wire.pings}
    assert asked == {rig.life(n).incarnation for n in ("dispatcher", "a#0", "b#0")}
    assert rig.health.heartbeat.suspects() == asked
    rig.answer("a#0", rig.wire.pings[0][1])
    rig.health.died(rig.life("b#0").incarnation)
    assert rig.health.heartbeat.suspects() == {rig.life("dispatcher").incarnation}
    rig.wire.pings.clear()
    rig.tick(TIMING.health - 0.1)
    assert not rig.wire.pings
    rig.tick(0.1)
    assert rig.wire.pings
    rig.wire.pings.clear()
    rig.health.ask({"c#0"})
    assert [i for i, _ in rig.wire.pings] == [rig.life("c#0").incarnation]
    rig.wire.pings.clear()
    rig.health.ask(None)
    assert len(rig.wire.pings) == 4
    assert rig.health.ask({"nobody"}).result(0).to_dict() == []


def test_the_look_at_all_processes_is_over_when_they_are_asked(rig: Rig) -> None:
    """It keeps the interpreter busy, and would count as theirs."""
    rig.tick()
    assert rig.asked_by_then == [0, 0, 0] and len(rig.wire.pings) == 3


def test_who_asks_is_told_when_all_have_answered_or_died_or_were_late(rig: Rig) -> None:
    names = {"a#0", "b#0"}
    futures = [rig.health.ask(names) for _ in range(4)]
    seqs = [seq for _, seq in rig.wire.pings[::2]]
    rig.answer("a#0", seqs[0])
    rig.answer("b#0", seqs[0])
    rig.answer("a#0", seqs[1])
    assert [e["rtt_ms"] for e in futures[0].result(0).to_dict()] == [2.0, 2.0]
    a, b = (rig.life(n).incarnation for n in ("a#0", "b#0"))
    assert rig.health.ping_ms == {a: 2.0, b: 2.0}
    assert rig.health.died(b) == ()
    assert [e["ok"] for e in futures[1].result(0).to_dict()] == [True, False]
    assert rig.health.ping_ms == {a: 2.0}  # what is gone has no round trip
    assert not futures[2].done() and rig.health.deadline() <= rig.now + int(TIMING.ping * S)
    rig.tick(TIMING.ping)
    assert futures[2].result(0).to_dict()[0]["ok"] is False
    assert rig.health.ping_ms == {}  # nor has who is late
    late = rig.health.ask(names)
    rig.health.close()
    with pytest.raises(SystemError_, match="ended"):
        late.result(0)


def test_of_one_that_died_before_the_others_had_answered_nothing_is_kept(rig: Rig) -> None:
    rig.health.ask({"a#0", "b#0"})
    (a, seq), _ = rig.wire.pings
    rig.answer("a#0", seq)
    rig.health.died(a)
    rig.world.die("a#0")
    rig.answer("b#0", seq)
    assert rig.health.ping_ms == {rig.life("b#0").incarnation: 2.0}


def test_an_answer_to_a_former_manager_is_none_to_this_one(rig: Rig, tmp_path: Path) -> None:
    before = rig.health
    before.ask({"a#0"})
    rig.now += 1 * S
    after = Rig(tmp_path).health
    after.ask({"a#0"})
    assert after is not before and len({seq for _, seq in rig.wire.pings}) == 1
    rig.health = Health(
        rig.world.brain.crew, cast(Controller, rig.wire), tmp_path, TIMING, lambda run: run()
    )
    future = rig.health.ask({"a#0"})
    rig.answer("a#0", rig.wire.pings[0][1])
    assert not future.done()


@pytest.mark.parametrize("limit_ms", [0, 300])
def test_a_forward_that_does_not_end_is_a_hang(rig: Rig, limit_ms: int) -> None:
    blocks = [{"name": "a", "timeout_ms": limit_ms}, "b"]
    rig.world.apply(blocks, {"t": ["a", "b"]})
    life = rig.life(rig.world.names()[0])
    life.endpoint = ""
    rig.tick()
    rig.health.loaded(life.incarnation)
    rig.works = [Work(life.stages["a"], rig.now, 1, ()), Work(life.stages["a"], rig.now, 1, ())]
    allowed_s = (limit_ms or UNBOUNDED_MS) / 1e3
    assert rig.tick(allowed_s + 0.4) == []
    ((incarnation, cause, outside),) = rig.tick(0.4)
    assert (incarnation, outside) == (life.incarnation, False)
    assert cause == f"hung: a forward of a has not ended in {allowed_s + 0.8:.1f} s"
    assert rig.health.died(life.incarnation) == tuple(rig.works)
    assert rig.health.died(life.incarnation) == () and rig.tick(1) == []


def test_a_socket_file_that_was_removed_is_missed_after_a_second(rig: Rig, tmp_path: Path) -> None:
    files = {}
    for name in ("a#0", "b#0"):
        files[name] = tmp_path / name
        files[name].touch()
        rig.life(name).endpoint = f"ipc://{files[name]}"
    assert rig.tick() == []
    files["a#0"].unlink()
    assert rig.tick(0.5) == [] and rig.tick(0.9) == []
    files["a#0"].touch()
    assert rig.tick(0.5) == []  # it is there again
    files["a#0"].unlink()
    assert rig.tick(0.5) == [] and rig.tick(0.9) == []
    ((incarnation, cause, outside),) = rig.tick(0.2)
    assert (incarnation, outside) == (rig.life("a#0").incarnation, True)
    assert "socket file" in cause
    rig.life("b#0").endpoint = f"ipc://{tmp_path}/gone/x.sock"  # a successor would fare no better
    rig.tick(2)
    assert [i for i, *_ in rig.tick(2)] == [incarnation]
    rig.life("a#0").endpoint, b = "", rig.life("b#0")
    b.endpoint = f"ipc://{tmp_path}/removed"
    rig.tick(2)
    assert [i for i, *_ in rig.tick(2)] == [b.incarnation]
    b.reaped = True
    assert rig.tick(2) == []


def test_who_has_no_process_yet_or_is_told_to_end_is_not_judged(rig: Rig) -> None:
    rig.vitals = Vitals("T", 0, 0, False)
    a, b, d = (rig.life(n) for n in ("a#0", "b#0", "dispatcher"))
    a.pid = 0
    rig.world.mute.add("b#0")
    rig.world.brain.crew.stop(b, rig.world.now)
    rig.tick()
    assert [i for i, *_ in rig.tick(TIMING.beat)] == [d.incarnation]
    assert rig.closely == [False, True]  # it owes an answer by then

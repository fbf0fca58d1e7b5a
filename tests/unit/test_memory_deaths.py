"""Deaths for want of memory: who is told so, and what becomes of block and request. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import control_rig
import pytest
from control_rig import AB, World
from recovery_rig import World as Requests
from recovery_rig import codes, done, message

from blockflow.control.adoption import Adoption
from blockflow.control.brain import Brain
from blockflow.control.events import Kill
from blockflow.control.fleet import Replica
from blockflow.control.kpis import KpiBook
from blockflow.control.memory import FRESH_NS, LOOK_NS, KillWatch, Shortage, aside, is_aside
from blockflow.control.supervision import (
    ASIDE_S,
    DISPATCHER_POLICY,
    WORKER_POLICY,
    RestartAt,
    RestartLedger,
    SetAside,
)
from blockflow.control.update import Phase, Update
from blockflow.control.views import Views
from blockflow.dispatcher.entry import Entry, SendAgain
from blockflow.dispatcher.recovery import Death
from blockflow.launch.cgroup import OomKills
from blockflow.tensormq.atwork import Work
from blockflow.wire.control import OUT_OF_MEMORY, PeerGone, Routes

S = 1_000_000_000
MIB = 1 << 20
SHORT = Shortage(600 * MIB, True)

world = control_rig.world


class Kernel:
    """Its count."""

    def __init__(self, total: int = 7, own: bool = True) -> None:
        self.now = OomKills(total, own)

    def kill(self, number: int = 1) -> None:
        self.now = OomKills(self.now.total + number, self.now.own)

    def watch(self) -> KillWatch:
        return KillWatch(lambda: self.now, lambda: 600 * MIB)


class TestKillWatch:
    def test_what_was_counted_before_is_nobodys(self) -> None:
        assert Kernel().watch().claim(0) is None

    def test_each_kill_explains_one_death(self) -> None:
        kernel = Kernel()
        watch = kernel.watch()
        kernel.kill(2)
        assert [watch.claim(S) for _ in range(3)] == [SHORT, SHORT, None]

    @pytest.mark.parametrize(("at", "found"), [(FRESH_NS - 1, SHORT), (FRESH_NS, None)])
    def test_a_kill_that_was_seen_explains_a_death_for_a_while(
        self, at: int, found: Shortage | None
    ) -> None:
        """Who is killed by hand later has not died of that."""
        kernel = Kernel()
        watch = kernel.watch()
        kernel.kill()
        watch.look(0)
        assert watch.claim(at) == found

    def test_it_looks_once_a_second(self) -> None:
        looks: list[int] = []
        watch = KillWatch(lambda: OomKills(len(looks), bool(looks.append(0)) or True), lambda: 0)
        for ms in range(0, 3000, 100):
            watch.look(ms * 1_000_000)
        assert LOOK_NS == S and len(looks) == 1 + 3

    def test_another_group_has_its_own_count(self) -> None:
        kernel = Kernel()
        watch = kernel.watch()
        kernel.now = OomKills(3, True)
        assert watch.claim(0) is None
        kernel.now = OomKills(1000, False)
        assert watch.claim(0) is None
        kernel.kill()
        assert watch.claim(0) == Shortage(600 * MIB, False)

    def test_words(self) -> None:
        assert str(SHORT) == "out of memory (limit 600 MiB)"
        assert str(Shortage(0, True)) == "out of memory"
        assert str(Shortage(0, False)).startswith("perhaps out of memory")


class TestLedger:
    def test_the_fifth_kill_sets_it_aside_and_the_next_one_again(self) -> None:
        ledger = RestartLedger(WORKER_POLICY)
        verdicts = [ledger.starved(0) for _ in range(5)]
        assert verdicts[:4] == [RestartAt(n * S // 10) for n in (1, 2, 4, 8)]
        back = 30 * S
        assert verdicts[4] == SetAside(back)
        assert ledger.starved(back + S) == SetAside(2 * back + S)
        assert ledger.starved(back + 62 * S) == SetAside(2 * back + 62 * S)
        assert ledger.starved(3 * back, chance=1.0) == SetAside(3 * back + back // 2)
        assert ledger.total == 8

    def test_who_has_lived_for_a_minute_begins_anew(self) -> None:
        ledger = RestartLedger(WORKER_POLICY)
        for _ in range(5):
            ledger.starved(0)
        later = int((ASIDE_S + WORKER_POLICY.window_s) * S)
        assert ledger.starved(later) == RestartAt(later + S // 10)
        assert ledger.crashed(later) == RestartAt(later + S // 10), "and they are no crashes"

    def test_the_dispatcher_is_never_set_aside(self) -> None:
        ledger = RestartLedger(DISPATCHER_POLICY)
        assert [ledger.starved(0) for _ in range(20)][-1] == RestartAt(30 * S)

    def test_words(self) -> None:
        assert is_aside(aside(None, ASIDE_S))
        assert not is_aside("5 crashes within 60 s")


def claim(shortage: Shortage | None) -> Callable[[], Shortage | None]:
    return lambda: shortage


def starve(world: World, name: str, *works: Work, shortage: Shortage = SHORT) -> None:
    life = world.brain.crew.find(world.incarnation(name))
    assert life is not None
    world.brain.crew.killed(life, claim(shortage))
    world.die(name, work=works)


def replica(world: World, name: str) -> Replica:
    return next(r for r in world.brain.crew.fleet if r.name == name)


def set_aside(world: World, name: str = "a#0") -> str:
    for _ in range(5):
        starve(world, name)
        world.pass_time(1)
    return replica(world, name).given_up


def work(world: World, name: str) -> Work:
    stage = world.alive[world.incarnation(name)].spec["stages"][0]["stage"]
    return Work(stage, world.now, 1, (bytes(16) + b"\1\0",))


def test_the_cause_names_the_memory_and_the_dispatcher_is_told(world: World) -> None:
    world.apply(*AB)
    since = len(world.log)
    starve(world, "a#0", work(world, "a#0"))
    crash = replica(world, "a#0").crash
    assert crash is not None and crash.error is not None
    assert crash.cause == "killed by SIGKILL: out of memory (limit 600 MiB)"
    assert crash.error.code == "NO_SPACE" and "max_rows" in crash.error.hint
    assert crash.error.details["limit_bytes"] == 600 * MIB
    told = [m.message.at_work for m in world.sent(PeerGone, since) if m.message.at_work]
    assert told == [[bytes(16) + b"\1\0", OUT_OF_MEMORY]]
    world.pass_time(1)
    assert world.admitted_blocks() == {"a": 1, "b": 1}


def test_after_too_many_it_rests_says_why_and_comes_back(world: World) -> None:
    world.apply(*AB)
    why = set_aside(world)
    assert "out of memory" in why and "600 MiB" in why and "max_rows" in why
    assert world.admitted_blocks() == {"b": 1}
    assert world.sent(Routes)[-1].message.table["down"]["a"] == f"it was given up: {why}"
    shown = Views(world.brain, KpiBook(), {}, world.now).worker("a#0")
    assert shown is not None and shown["given_up"] == why
    world.pass_time(ASIDE_S)
    assert world.admitted_blocks() == {"a": 1, "b": 1}
    assert replica(world, "a#0").given_up == ""
    starve(world, "a#0")
    assert replica(world, "a#0").given_up == why, "at once, so shortly after"


def test_one_that_is_killed_while_it_starts_counts_likewise(world: World) -> None:
    world.apply(*AB)
    world.mute.add("a#0")
    set_aside(world)
    crash = replica(world, "a#0").crash
    assert crash is not None and "SIGKILL while it started: out of memory" in crash.cause
    world.mute.discard("a#0")
    world.pass_time(ASIDE_S)
    assert world.admitted_blocks() == {"a": 1, "b": 1}


def test_an_update_that_finds_too_little_says_what_it_needs(world: World) -> None:
    world.apply(["a"], {"t": ["a"]})
    world.mute.add("b#0")
    update = world.apply(*AB)
    starve(world, "b#0")
    assert update.phase is Phase.FAILED and update.error is not None
    assert "out of memory" in update.error.message and "larger limit" in update.error.hint


def test_what_was_ordered_has_its_own_reason(world: World) -> None:
    world.apply(*AB)
    crew = world.brain.crew
    life = crew.find(world.incarnation("a#0"))
    assert life is not None
    life.condemned = "hung"
    crew.killed(life, lambda: pytest.fail("nobody asks"))
    world.die("a#0")
    crash = replica(world, "a#0").crash
    assert crash is not None and crash.cause == "hung"


def test_a_guess_is_called_one_and_decides_nothing(world: World) -> None:
    world.apply(*AB)
    since = len(world.log)
    for _ in range(5):
        starve(world, "a#0", work(world, "a#0"), shortage=Shortage(0, False))
        world.pass_time(2)
    found = replica(world, "a#0")
    assert found.crash is not None and "perhaps out of memory" in found.crash.cause
    assert found.crash.error is None and "5 crashes" in found.given_up
    assert all(len(r) == 18 for m in world.sent(PeerGone, since) for r in m.message.at_work)


def test_a_restart_by_hand_and_an_end_do_not_wait(world: World) -> None:
    world.apply(*AB)
    set_aside(world)
    update = world.do(lambda now: world.brain.restart("a", now))
    assert update.phase is Phase.DONE
    assert world.admitted_blocks() == {"a": 1, "b": 1}
    world.pass_time(2 * ASIDE_S)
    assert len([n for n in world.names() if n.startswith("a#")]) == 1


def test_an_update_that_replaces_one_that_is_set_aside_gives_its_name_to_nobody_else(
    world: World,
) -> None:
    """It may be tried again before the other one is ready; of two of one name the crash book would
    keep what the wrong one died of."""
    world.apply(*AB)
    set_aside(world)
    world.hold_ready |= {"a#0", "a#1"}
    update = world.apply(*AB)
    world.pass_time(29)
    assert world.names() == ["a#0", "a#1", "b#0", "dispatcher"]
    world.make_ready("a#1")
    assert update.phase is Phase.DONE and world.names() == ["a#1", "b#0", "dispatcher"]


def test_a_successor_of_the_manager_tries_it_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know until when the dead one had set it aside. What was given up stays so."""
    world.apply(*AB)
    for _ in range(5):
        world.die("b#0", status=1)
        world.pass_time(2)
    set_aside(world)
    readopt = Brain.readopt

    def as_the_manager(brain: Brain, adoption: Adoption, now_ns: int) -> Update:
        brain.crew.take_back()
        return readopt(brain, adoption, now_ns)

    monkeypatch.setattr(Brain, "readopt", as_the_manager)
    assert world.succeed().phase is Phase.DONE
    assert replica(world, "a#0").given_up == "" != replica(world, "b#0").given_up
    world.pass_time(1)
    assert world.admitted_blocks() == {"a": 1}


def test_a_signal_from_outside_is_called_so(world: World) -> None:
    world.apply(*AB)
    world.die("a#0", status=0)
    crash = replica(world, "a#0").crash
    assert crash is not None
    assert crash.cause == "ended by a signal from outside, SIGTERM or SIGINT (exit status 0)"
    assert Kill(crash.incarnation) not in world.log


# --- the request ---------------------------------------------------------------------------------


def dies(w: Requests, incarnation: int, *at_work: Entry, starved: bool) -> list[object]:
    records = [e.ticket + bytes([e.attempt, 0]) for e in at_work] + [OUT_OF_MEMORY] * starved
    return w.rest(w.table.peer_gone(Death.of(incarnation, records), 0))


@pytest.mark.parametrize("starved", [(True, True), (True, False), (False, True)])
def test_a_request_is_not_blamed_for_want_of_memory(starved: tuple[bool, bool]) -> None:
    """Its workers are two again, and no third one is tried."""
    w = Requests(trunk=[1], head_a=[9])
    entry = w.admit("a")
    assert dies(w, 1, entry, starved=starved[0]) == []
    assert w.publish(trunk=[2], head_a=[9]) == [SendAgain(entry)]
    assert entry.item(0).alone
    assert dies(w, 2, entry, starved=starved[1]) == done(entry)
    assert codes(entry) == ["WORKER_LOST"]
    (end,) = entry.results()
    assert end.outcome.retryable  # type: ignore[union-attr]
    assert "memory" in message(entry) and "max_rows" in message(entry)
    counted = w.table.gauges()
    assert (counted["poisoned"], counted["attempts_spent"]) == (0, 1)
    assert not w.table._starved, "nothing stays behind"


def test_a_block_that_must_not_run_twice_says_so_all_the_same() -> None:
    w = Requests(once=["trunk"], trunk=[1], head_a=[9])
    entry = w.admit("a")
    assert dies(w, 1, entry, starved=True) == done(entry)
    (end,) = entry.results()
    assert not end.outcome.retryable  # type: ignore[union-attr]


def test_who_waited_there_hears_of_the_memory_too() -> None:
    """It was not at work, so nothing suspects it."""
    w = Requests(trunk=[1], head_a=[9])
    entry = w.admit("a")
    for life in (1, 2):
        assert dies(w, life, starved=True) == []
        assert w.publish(trunk=[life + 1], head_a=[9]) == [SendAgain(entry)]
    assert dies(w, 3, starved=True) == done(entry)
    assert "3 times" in message(entry) and "max_rows" in message(entry)


@pytest.mark.parametrize("cause", [b"", b"\0", b"\2", b"\1\1", "1", 1, None])
def test_an_unknown_cause_is_nonsense(cause: Any) -> None:
    death = Death.of(1, [cause])
    assert (death.at_work, death.starved) == ({}, False)

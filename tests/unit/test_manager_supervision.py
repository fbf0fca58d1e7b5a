"""What the Brain makes of deaths, hangs and failed readiness probes, and what is kept of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import control_rig
import pytest
from control_rig import AB, MS, World

from blockflow.control.crashes import CrashBook
from blockflow.control.events import Commit, Kill, Prove
from blockflow.control.fleet import TICKETS_SHOWN
from blockflow.control.heartbeat import Hang
from blockflow.control.kpis import KpiBook
from blockflow.control.update import Phase
from blockflow.control.views import Views
from blockflow.core.errors import (
    BlockError,
    BlockFlowError,
    RepositoryError,
    RequestError,
    SystemError_,
    TopologyError,
)
from blockflow.core.scarcity import AWAY
from blockflow.launch.ends import template_died
from blockflow.tensormq.atwork import Work
from blockflow.wire.control import Monitor, PeerGone

A = (["a"], {"t": ["a"]})

world = control_rig.world


def work(world: World, name: str, *requests: int) -> Work:
    """A forward of 3 ms so far."""
    order = world.alive[world.incarnation(name)]
    records = tuple(n.to_bytes(16, "big") + b"\1\0" for n in requests)
    stage = order.spec["stages"][0]["stage"]
    return Work(stage, world.now - 3 * MS, len(records), records)


def view(world: World, name: str) -> dict[str, Any]:
    found = Views(world.brain, KpiBook(), {}, world.now).worker(name)
    assert found is not None
    return found


def hang(world: World, name: str, *, outside: bool = False) -> None:
    """What the Manager's Health would have found."""
    world.brain.condemn(Hang(world.incarnation(name), "hung: so and so", outside), world.now)
    world.settle()


# --- readiness -----------------------------------------------------------------------------------


def test_a_worker_is_published_when_its_probe_has_come_back(world: World) -> None:
    world.apply(*AB)
    probes = [i for i in world.log if isinstance(i, Prove)]
    assert [[b.name for _, b in p.blocks] for p in probes] == [["a"], ["b"]]
    assert {p.endpoint for p in probes} == {f"ipc:///run/d{p.incarnation}.sock" for p in probes}
    assert view(world, "a#0")["probe_ms"] == 1.0


def test_a_failed_probe_fails_the_update(world: World) -> None:
    world.apply(*A)
    world.probe_fails["b#0"] = BlockError("OUTPUT_MISMATCH", "five, not four", where="b")
    update = world.apply(*AB)
    assert update.phase is Phase.FAILED
    assert isinstance(update.error, TopologyError)
    assert "readiness probe failed: OUTPUT_MISMATCH" in update.error.message
    assert update.error.details["cause"]["code"] == "OUTPUT_MISMATCH"
    assert world.names() == ["a#0", "dispatcher"]
    assert world.admitted_blocks() == {"a": 1}
    assert [i.epoch for i in world.log if isinstance(i, Commit)] == [1], "nothing is stored"


def test_a_successor_that_fails_its_probe_is_never_published(world: World) -> None:
    world.apply(*AB)
    world.probe_fails["a#0"] = BlockError("BLOCK_FAILED", "no")
    world.die("a#0")
    world.pass_time(60)
    assert world.admitted_blocks() == {"b": 1}
    assert view(world, "a#0")["state"] == "failed"  # the same block would fail the same way
    assert world.launched().count("a#0") == 2


def test_a_probe_that_was_only_late_is_tried_again(world: World) -> None:
    world.apply(*AB)
    world.probe_fails["a#0"] = RequestError("DEADLINE_EXCEEDED", "slow")
    world.die("a#0")
    world.pass_time(0.15)
    world.probe_fails.clear()
    world.pass_time(1)
    assert world.admitted_blocks() == {"a": 1, "b": 1}


# --- hangs ---------------------------------------------------------------------------------------


def test_a_worker_that_hangs_is_killed_and_replaced(world: World) -> None:
    world.apply(*AB)
    old = world.incarnation("a#0")
    hang(world, "a#0")
    assert Kill(old) in world.log
    assert world.admitted_blocks() == {"b": 1}
    world.pass_time(0.2)
    assert world.admitted_blocks() == {"a": 1, "b": 1}
    assert view(world, "a#0")["crash"]["cause"] == "hung: so and so"


def test_a_process_is_condemned_once_and_not_while_it_stops(world: World) -> None:
    world.apply(*AB)
    crew = world.brain.crew
    for _ in range(3):
        crew.condemn(Hang(world.incarnation("a#0"), "x"))
    assert sum(isinstance(i, Kill) for i in crew.out) == 1
    world.settle()
    world.pass_time(1)
    world.mute.add("b#0")
    world.apply(*A)
    world.pass_time(2.5)  # its acknowledgement is not waited for any longer
    assert view(world, "b#0")["state"] == "stopping"
    crew.condemn(Hang(world.incarnation("b#0"), "x"))
    crew.condemn(Hang(4711, "x"))
    assert not crew.out


# --- causes --------------------------------------------------------------------------------------


def test_the_dispatcher_is_told_what_a_dead_worker_was_executing(world: World) -> None:
    world.apply(*AB)
    old = world.incarnation("a#0")
    world.die("a#0", work=(work(world, "a#0", 1, 2), work(world, "a#0", 3)))
    told = {s.incarnation: s.message for s in world.sent(PeerGone)}
    records = [n.to_bytes(16, "big") + b"\1\0" for n in (1, 2, 3)]
    assert told[world.incarnation("dispatcher")] == PeerGone(old, records)
    assert told[world.incarnation("b#0")] == PeerGone(old)


def test_what_was_at_work_is_not_blamed_for_what_came_from_outside(world: World) -> None:
    """A worker that somebody has stopped, and one that was told to end."""
    world.apply(*AB)
    old = world.incarnation("a#0")
    life = world.brain.crew.find(old)
    assert life is not None
    world.brain.crew.condemn(Hang(old, "stopped", outside=True))
    world.brain.take()  # the order to kill it, carried out here
    world.die("a#0", work=(work(world, "a#0", 1),))
    world.mute.add("b#0")
    world.apply(*A)
    world.pass_time(2.5)  # its acknowledgement is not waited for any longer
    gone = world.incarnation("b#0")
    world.die("b#0", work=(work(world, "b#0", 1),))
    assert {s.message.incarnation for s in world.sent(PeerGone)} == {old, gone}
    assert all(not s.message.at_work for s in world.sent(PeerGone))
    assert view(world, "a#0")["crash"]["work"][0]["requests"] == 1


def test_a_crash_says_what_was_at_work(world: World) -> None:
    world.apply(*AB)
    many = tuple(range(20))
    large = replace(work(world, "a#0", *many), count=200)  # more than there are records of
    world.die("a#0", tail=("first", "last"), work=(large,))
    crash = view(world, "a#0")["crash"]
    assert crash["cause"] == "killed by SIGKILL"
    assert crash["log"] == ["first", "last"]
    (at,) = crash["work"]
    assert (at["block"], at["took_ms"], at["requests"]) == ("a", 3.0, 200)
    assert at["tickets"] == [n.to_bytes(16, "big").hex() for n in many[:TICKETS_SHOWN]]


def test_an_exception_is_named_by_its_last_line(world: World) -> None:
    world.apply(*AB)
    world.die("a#0", status=1, tail=("Traceback ...", "ValueError: odd"))
    assert view(world, "a#0")["crash"]["cause"] == "exit status 1: ValueError: odd"


def test_crashes_under_an_earlier_control_plane_come_after_its_own(
    world: World, tmp_path: Path
) -> None:
    world.apply(*AB)
    for status in (101, 102):
        dead = world.incarnation("a#0")
        world.die("a#0", status=status)
        CrashBook(tmp_path).take(world.brain.crew, dead, world.now)
        world.pass_time(61)
    after = World().up()
    after.apply(*AB)

    book = CrashBook(tmp_path)

    def shown() -> dict[str, Any]:
        found = Views(after.brain, KpiBook(), {}, after.now, book).worker("a#0")
        assert found is not None
        return found

    assert shown()["crash"] is None  # what is told unasked is of this control plane
    assert [c["cause"] for c in shown()["crashes"]] == ["exit status 102", "exit status 101"]
    dead = after.incarnation("a#0")
    after.die("a#0", status=103)
    book.take(after.brain.crew, dead, after.now)
    assert shown()["crash"] == shown()["crashes"][0]
    assert [c["cause"][-3:] for c in shown()["crashes"]] == ["103", "102", "101"]
    assert {frozenset(c) for c in shown()["crashes"]} == {frozenset(shown()["crash"])}


def test_a_defect_at_start_is_tried_again_but_not_for_ever(world: World) -> None:
    world.apply(*AB)
    world.start_fails["a#0"] = SystemError_("INTERNAL", "OSError at start: too many open files")
    world.die("a#0")
    world.pass_time(60)
    shown = view(world, "a#0")
    assert "too many open files" in shown["crash"]["cause"]
    assert "5 crashes" in shown["given_up"]


@pytest.mark.parametrize(
    "away",
    [
        SystemError_("NO_SPACE", "full", hint="free some"),
        RepositoryError("UNKNOWN_BLOCK", "no block 'a'", details={AWAY: True}),
        template_died(1),
    ],
)
def test_who_finds_no_room_no_repository_or_no_template_is_tried_again_until_it_is_there(
    world: World, away: BlockFlowError
) -> None:
    world.apply(*AB)
    world.start_fails["a#0"] = away
    world.die("a#0", status=101)
    world.pass_time(120)
    shown = view(world, "a#0")
    assert shown["given_up"] is None and shown["restarts"] > 20
    causes = [c["cause"] for c in shown["crashes"]]
    assert causes == [f"{away.code}: {away.message}", "exit status 101"], "what it began with"
    del world.start_fails["a#0"]
    world.pass_time(6)
    assert world.admitted_blocks() == {"a": 1, "b": 1}


def test_who_finds_his_block_gone_is_given_up(world: World) -> None:
    world.apply(*AB)
    world.start_fails["a#0"] = RepositoryError("UNKNOWN_BLOCK", "no block 'a'")
    world.die("a#0", status=101)
    world.pass_time(60)
    assert view(world, "a#0")["given_up"]


def test_an_update_without_room_says_what_to_make_room_in(world: World) -> None:
    world.apply(*A)
    world.start_fails["b#0"] = SystemError_("NO_SPACE", "full", hint="free some")
    update = world.apply(*AB)
    assert update.error is not None
    assert update.error.hint == "the old epoch keeps serving; free some, then send the update again"


def test_a_restart_brings_back_what_was_given_up(world: World) -> None:
    world.apply(*AB)
    for _ in range(5):
        world.die("a#0")
        world.pass_time(2)
    assert world.admitted_blocks() == {"b": 1}
    update = world.do(lambda now: world.brain.restart("a", now))
    assert update.phase is Phase.DONE
    assert world.admitted_blocks() == {"a": 1, "b": 1}


def test_who_loads_while_the_monitor_is_switched_is_told_when_it_is_ready(world: World) -> None:
    """It would go on as its launch order said: for as long as it lives."""
    world.hold_ready.add("b#0")
    world.apply(*AB)
    world.brain.monitor(0.0)
    world.settle()
    assert {s.incarnation for s in world.sent(Monitor)} == set(world.alive), "who can hear it"
    at = len(world.log)
    world.make_ready("b#0")
    world.apply([*AB[0], "c"], {**AB[1], "u": ["c"]})  # whom its order has told the same
    told = [(s.incarnation, s.message.hz) for s in world.sent(Monitor, at)]
    assert told == [(world.incarnation("b#0"), 0.0)]

"""Which seats a Manager keeps that follows on a dead one, where several would fit, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from control_rig import AB, Counter, World, topology

from blockflow.control.adoption import (
    Inheritance,
    install,
    plan_adoption,
    running_lookup,
    spec_of,
)
from blockflow.control.brain import Brain
from blockflow.control.events import Exited
from blockflow.control.fleet import Role
from blockflow.control.journal import Journal
from blockflow.control.update import Kind, Phase
from blockflow.core.placement import desired_workers
from blockflow.wire.control import Monitor, PeerGone, Undrain

DESIRED = desired_workers(topology(*AB), (0, 1))


@pytest.fixture
def world() -> World:
    made = World().up()
    made.apply(*AB)
    return made


def test_a_successor_starts_the_dispatcher_that_was_never_started() -> None:
    world = World()
    assert world.succeed().phase is Phase.DONE
    world.pass_time(1.0)
    assert world.names() == ["dispatcher"]


def test_a_ready_successor_goes_before_who_was_given_up(world: World) -> None:
    for _ in range(5):
        world.die("b#0")
        world.pass_time(3.0)
    world.hold_ready.add("b#1")
    world.do(lambda now: world.brain.restart("b", now))
    world.make_ready_quietly("b#1")
    new = world.incarnation("b#1")
    world.succeed()
    assert world.incarnation("b#1") == new
    assert world.admitted_blocks() == {"a": 1, "b": 1}


def test_who_is_in_force_goes_before_who_would_have_replaced_it(world: World) -> None:
    world.apply([{"name": "a", "replicas": 2}, "b"], AB[1])
    world.hold_ready.add("a#3")
    world.do(lambda now: world.brain.restart("a", now))
    assert "a#2" in world.names(), "it is ready, and waits for the other one"
    world.succeed()
    assert world.names() == ["a#0", "a#1", "b#0", "dispatcher"]


def test_of_more_than_are_wanted_those_who_serve_are_kept(world: World) -> None:
    """The committed epoch has one replica less; the first of them was about to be replaced."""
    world.apply([{"name": "a", "replicas": 2}, "b"], AB[1])
    world.die("a#0")
    journal, served = world.journal(), world.incarnation("a#1")
    world.stored = (3, topology(*AB))
    world.succeed(journal=journal)
    assert world.incarnation("a#1") == served and world.names() == ["a#1", "b#0", "dispatcher"]
    assert world.admitted_blocks() == {"a": 1, "b": 1}


def test_nobody_waits_for_the_end_of_the_dead(world: World) -> None:
    """Of a worker that the epoch does not need any more."""
    world.die("b#0")
    plan = plan_adoption(world.journal(), 2, DESIRED[:1])
    assert [s.name for s, _ in plan.keep] == ["a#0"] and not plan.retire + plan.end


def test_who_is_ready_for_an_update_that_was_not_committed_does_not_retire(world: World) -> None:
    world.hold_ready.add("d#0")
    world.apply(["a", "b", "c", "d"], {**AB[1], "u": ["c"], "v": ["d"]})
    plan = plan_adoption(world.journal(), 1, DESIRED)
    assert [s.name for s in plan.end] == ["c#0", "d#0"] and not plan.retire


def test_all_are_told_again_how_often_to_sample(world: World) -> None:
    world.brain.monitor(0.5)
    world.settle()
    since = len(world.log)
    world.succeed()
    told = {(s.incarnation, s.message) for s in world.sent(Monitor, since)}
    assert told == {(i, Monitor(0.5)) for i in world.alive}


def test_who_retires_is_not_called_back(world: World) -> None:
    journal = world.journal()
    a, b = journal.seats
    retiring = replace(journal, seats=(a, replace(b, role=str(Role.RETIRING))))
    plan = plan_adoption(retiring, 1, DESIRED)
    assert [s.name for s, _ in plan.keep] == ["a#0"]
    assert [s.name for s in plan.retire] == ["b#0"]
    assert [s.replica for s in plan.start] == ["b#1"]  # its name is taken still


@pytest.mark.parametrize("empty", [{"stopped": True}, {"given_up": "5 crashes"}])
def test_an_update_starts_what_was_empty_before_it(world: World, empty: dict[str, object]) -> None:
    """It was committed; the journal is of the epoch before."""
    journal = world.journal()
    a, b = journal.seats
    left = replace(journal, seats=(a, replace(b, **empty, life=replace(b.life, reaped=True))))
    assert [s.worker for s, _ in plan_adoption(left, 1, DESIRED).keep] == ["a", "b"]
    plan = plan_adoption(left, 2, DESIRED)
    assert [s.worker for s, _ in plan.keep] == ["a"]
    assert [s.replica for s in plan.start] == ["b#0"]


def test_an_update_that_was_committed_has_opened_what_was_closed(world: World) -> None:
    world.do(lambda now: world.brain.close("b", Kind.DRAIN, now))
    journal = world.journal()
    world.stored = (2, topology(*AB))
    world.succeed(journal=journal)
    assert world.brain.realm.epoch == 2 and world.brain.realm.closed == {}
    assert world.admitted_blocks() == {"a": 1, "b": 1}


def test_a_successor_that_dies_at_once_does_not_close_what_was_opened(world: World) -> None:
    """Before it takes over it writes down who has died."""
    world.do(lambda now: world.brain.close("b", Kind.DRAIN, now))
    inheritance = Inheritance(world.journal(), 2, topology(*AB), {"posted": 1})
    again = Brain(world.brain.realm.settings, world.brain.crew.place, Counter())
    install(again.realm, inheritance)
    world.stored = (2, topology(*AB))
    world.succeed(journal=Journal.of(again.realm))
    assert world.brain.realm.closed == {} and world.admitted_blocks() == {"a": 1, "b": 1}


def test_what_was_stopped_is_not_started_for_a_moment(world: World) -> None:
    world.do(lambda now: world.brain.close("b", Kind.STOP, now))
    world.busy = True  # so that the succession takes its time
    since = len(world.launched())
    world.succeed()
    world.pass_time(5.0)
    assert world.launched()[since:] == []


def test_the_name_of_one_that_is_started_again_is_given_to_no_other(world: World) -> None:
    world.die("a#0")
    desired = desired_workers(topology([{"name": "a", "replicas": 2}, "b"], AB[1]), (0, 1))
    plan = plan_adoption(world.journal(), world.brain.realm.epoch, desired)
    assert [s.name for s, _ in plan.keep] == ["a#0", "b#0"]
    assert [s.replica for s in plan.start] == ["a#1"]


def test_what_the_epoch_means_and_its_notes_are_inherited(world: World) -> None:
    epoch, stored = world.stored
    digests, notes = {"a": "a-digest"}, ("b: another version",)
    again = Brain(world.brain.realm.settings, world.brain.crew.place, Counter())
    adoption = install(
        again.realm, Inheritance(world.journal(), epoch, stored, {"posted": 1}, digests, notes)
    )
    again.readopt(adoption, world.now)
    assert (again.realm.stored, again.realm.notes) == (digests, notes)


def test_a_birth_certificate_says_all_that_concerns_the_end_of_a_worker(world: World) -> None:
    pair = {"worker": "w", "cores": [1, 0], "lanes": 2, "threads": 1}
    blocks = [{"name": "a", "timeout_ms": 1234, **pair}, {"name": "b", **pair}]
    world.apply(blocks, AB[1])
    (seat,) = world.journal().seats
    (real,) = (r.spec for r in world.brain.crew.fleet)
    spec = spec_of(seat)
    assert [s.spec.timeout_ms for s in spec.stages] == [1234, 0]
    assert (spec.cores, spec.lanes, spec.threads) == (real.cores, 2, 1)


def test_a_block_that_is_named_with_its_version_is_found_where_it_runs(world: World) -> None:
    lookup = running_lookup(world.journal(), {"a@1": "a-digest"}, pytest.fail)
    assert lookup("a@1").name == "a"


def test_a_worker_named_after_a_version_is_ended_with_the_update_that_was_not_committed(
    world: World,
) -> None:
    world.apply(["a", "b@1"], {"t": ["a", "b@1"]})
    world.hold_ready.add("b@2#0")
    assert world.apply(["a", "b@2"], {"t": ["a", "b@2"]}).phase is Phase.PREPARING
    world.succeed()
    assert world.names() == ["a#0", "b@1#0", "dispatcher"]
    assert world.admitted_blocks() == {"a": 1, "b@1": 1}


def test_a_worker_named_after_a_version_retires_in_order(world: World) -> None:
    world.apply(["a", "b@1"], {"t": ["a", "b@1"]})
    world.busy = True
    assert world.apply(["a", "b@2"], {"t": ["a", "b@2"]}).phase is Phase.DRAINING
    update = world.succeed()
    assert world.names() == ["a#0", "b@1#0", "b@2#0", "dispatcher"]
    world.let_drain()
    assert update.phase is Phase.DONE and world.names() == ["a#0", "b@2#0", "dispatcher"]


@pytest.mark.parametrize("name", ["b#0", "dispatcher"])
def test_who_died_and_was_only_written_down_is_told(world: World, name: str) -> None:
    """The Manager dies of the same blow: the journal has the death, and nobody was told of it."""
    dead = world.incarnation(name)
    del world.alive[dead]
    survivors, since = set(world.alive), len(world.log)
    world.brain.handle(Exited(dead, -9), world.now)
    world.succeed()  # what the former one was about to say went with it
    told = [s for s in world.sent(PeerGone, since) if s.message == PeerGone(dead, [])]
    assert {s.incarnation for s in told} == survivors


def test_the_number_of_who_died_is_given_to_nobody(world: World) -> None:
    """One of an update that failed has left its seat, and everybody takes its number for dead."""
    world.hold_ready.add("c#0")
    world.apply(["a", "c"], {"t": ["a", "c"]})
    dead = world.incarnation("c#0")
    world.die("c#0")
    journal = world.journal()
    assert dead not in {s.life.incarnation for s in journal.seats}
    assert journal.highest()["incarnation"] >= dead


def test_threads_that_were_only_written_down_are_told() -> None:
    """The last one of an update ends, which leaves its cores to others, and the Manager with it."""
    world = World(4).up()
    world.apply(*AB)
    world.mute.add("b#0")
    world.apply(["a"], {"t": ["a"]})
    world.pass_time(3.0)  # it does not say that it has the routes, and is told to stop
    dead = world.incarnation("b#0")
    del world.alive[dead]
    world.brain.handle(Exited(dead, 0), world.now)
    world.succeed()
    assert world.computing() == {"a#0": 4}


def test_a_block_that_was_opened_again_is_told_so(world: World) -> None:
    """Its worker would call itself draining for ever, and serve."""
    world.do(lambda now: world.brain.close("b", Kind.DRAIN, now))
    world.brain.close("b", Kind.UNDRAIN, world.now)
    since = len(world.log)
    world.succeed()  # what the former one was about to say went with it
    assert world.incarnation("b#0") in {s.incarnation for s in world.sent(Undrain, since)}

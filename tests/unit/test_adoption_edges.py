"""Which seats a Manager keeps that follows on a dead one, where several would fit, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from control_rig import AB, World, topology

from blockflow.control.adoption import plan_adoption
from blockflow.control.fleet import Role
from blockflow.control.update import Kind
from blockflow.core.placement import desired_workers

DESIRED = desired_workers(topology(*AB), (0, 1))


@pytest.fixture
def world() -> World:
    made = World().up()
    made.apply(*AB)
    return made


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


def test_what_was_stopped_is_not_started_for_a_moment(world: World) -> None:
    world.do(lambda now: world.brain.close("b", Kind.STOP, now))
    world.busy = True  # so that the succession takes its time
    since = len(world.launched())
    world.succeed()
    world.pass_time(5.0)
    assert world.launched()[since:] == []

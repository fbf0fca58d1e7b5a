"""Processes that were told to end, or said that they will, and do not."""

from __future__ import annotations

import control_rig
from control_rig import AB, TIMING, World

from blockflow.control.events import Kill, Launch, Proved, Received
from blockflow.core.errors import BlockError
from blockflow.wire.control import StartFailed

world = control_rig.world


def test_who_cannot_start_and_does_not_end_is_killed_soon(world: World) -> None:
    world.hold_ready.add("a#0")
    world.apply(["a"], {"t": ["a"]})
    a = world.incarnation("a#0")
    assert TIMING.stop < TIMING.start
    error = BlockError("BLOCK_FAILED", "no such layer")
    world.tell(Received(a, StartFailed(a, error.to_dict())))
    assert Kill(a) not in world.log
    world.pass_time(TIMING.stop)
    assert Kill(a) in world.log


def test_a_kill_that_nobody_could_carry_out_is_ordered_again(world: World) -> None:
    """Its launch was still under way, say."""
    world.mute.add("a#0")
    world.apply(["a"], {"t": ["a"]})
    a = world.incarnation("a#0")
    del world.alive[a]
    world.pass_time(TIMING.start + 3 * TIMING.stop)
    assert world.log.count(Kill(a)) >= 3


def test_a_late_proof_does_not_save_who_was_told_to_stop(world: World) -> None:
    world.hold_ready.add("b#0")
    world.apply(*AB)
    b = world.incarnation("b#0")
    world.mute.add("b#0")
    world.brain.shutdown(world.now)
    world.tell(Proved(b, None, 1.0))
    assert Kill(b) not in world.log
    world.pass_time(TIMING.stop)
    assert Kill(b) in world.log
    assert world.gone


def test_a_dispatcher_that_is_down_stays_down_when_the_system_ends(world: World) -> None:
    world.apply(["a"], {"t": ["a"]})
    world.die("dispatcher")
    world.brain.shutdown(world.now)
    world.settle()
    world.pass_time(60)
    assert world.gone
    assert sum(isinstance(i, Launch) and i.role == "dispatcher" for i in world.log) == 1

"""Processes that were told to end, or said that they will, and do not."""

from __future__ import annotations

import signal

import control_rig
import pytest
from control_rig import AB, TIMING, World

from blockflow import __version__
from blockflow.control.events import Exited, Kill, Launch, Prove, Proved, Received
from blockflow.core.errors import BlockError, SystemError_
from blockflow.wire.control import Hello, StartFailed, Stop

world = control_rig.world


def test_who_cannot_start_and_does_not_end_is_killed_soon(world: World) -> None:
    world.hold_ready.add("a#0")
    world.apply(["a"], {"t": ["a"]})
    a = world.incarnation("a#0")
    assert TIMING.stop < TIMING.start
    error = BlockError("BLOCK_FAILED", "no such layer")
    world.tell(Received(a, StartFailed(a, error.to_dict())))
    world.pass_time(TIMING.stop - 1)
    assert Kill(a) not in world.log
    world.pass_time(1)
    assert Kill(a) in world.log


def test_who_fails_its_probe_and_does_not_end_is_killed_for_that(world: World) -> None:
    world.hold_ready.add("a#0")
    update = world.apply(["a"], {"t": ["a"]})
    a = world.incarnation("a#0")
    world.probe_fails["a#0"] = BlockError("OUTPUT_MISMATCH", "five, not four")
    world.mute.add("a#0")
    world.make_ready("a#0")
    world.pass_time(TIMING.stop - 1)
    assert Kill(a) not in world.log
    world.pass_time(1)
    assert Kill(a) in world.log and update.error is not None
    assert update.error.details["cause"]["code"] == "OUTPUT_MISMATCH"


def test_of_what_is_no_blocks_fault_the_update_says_what_else_to_mend(world: World) -> None:
    """The key of the links between processes is gone, say."""
    hint = "end it, and start it again"
    world.probe_fails["a#0"] = SystemError_("UNAUTHORIZED", "no key", hint=hint)
    error = world.apply(["a"], {"t": ["a"]}).error
    assert error is not None
    assert error.hint == f"the old epoch keeps serving; {hint}, then send the update again"


def test_a_kill_that_nobody_could_carry_out_is_ordered_again(world: World) -> None:
    """Its launch was still under way, say."""
    world.mute.add("a#0")
    world.apply(["a"], {"t": ["a"]})
    a = world.incarnation("a#0")
    life = world.brain.crew.find(a)
    assert life is not None and life.pid == 10_000 + a, "as it was launched, with nothing heard"
    del world.alive[a]
    world.pass_time(TIMING.start + 3 * TIMING.stop)
    assert world.log.count(Kill(a)) >= 3
    world.brain.shutdown(world.now)
    world.settle()
    at = len(world.log)
    world.tell(Received(a, Hello("worker", "a#0", a, 1, __version__)))
    assert [s.incarnation for s in world.sent(Stop, at)] == [a], "now it can hear"


def test_a_late_proof_does_not_save_who_was_told_to_stop(world: World) -> None:
    world.hold_ready.add("b#0")
    world.apply(*AB)
    b = world.incarnation("b#0")
    world.mute.add("b#0")
    world.brain.shutdown(world.now)
    world.make_ready("b#0")
    assert not any(isinstance(i, Prove) and i.incarnation == b for i in world.log)
    world.tell(Proved(b, None, 1.0))
    assert Kill(b) not in world.log
    world.pass_time(TIMING.stop)
    assert Kill(b) in world.log
    assert world.gone


def test_a_dispatcher_that_is_ready_too_late_is_ended_like_others() -> None:
    world = World()
    world.hold_ready.add("dispatcher")
    world.up()
    dispatcher = world.incarnation("dispatcher")
    world.mute.add("dispatcher")
    world.brain.shutdown(world.now)
    world.make_ready("dispatcher")
    world.pass_time(TIMING.stop)
    assert Kill(dispatcher) in world.log and world.gone


def test_a_dispatcher_that_is_down_stays_down_when_the_system_ends(world: World) -> None:
    world.apply(["a"], {"t": ["a"]})
    world.die("dispatcher")
    world.brain.shutdown(world.now)
    world.settle()
    world.pass_time(60)
    assert world.gone
    assert sum(isinstance(i, Launch) and i.role == "dispatcher" for i in world.log) == 1


@pytest.mark.parametrize("name", ["a#0", "dispatcher"])
def test_who_dies_while_the_system_ends_is_not_replaced(world: World, name: str) -> None:
    world.apply(["a"], {"t": ["a"]})
    world.busy = True
    world.brain.shutdown(world.now)
    world.settle()
    world.die(name)
    world.pass_time(TIMING.grace)
    assert world.gone and world.launched() == ["dispatcher", "a#0"]


def test_who_was_told_to_end_is_not_given_its_time_once_more(world: World) -> None:
    world.apply(*AB)
    b = world.incarnation("b#0")
    world.mute.add("b#0")
    world.apply(["a"], {"t": ["a"]})
    world.pass_time(TIMING.ack + TIMING.stop - 1)
    world.brain.shutdown(world.now)
    world.settle()
    assert Kill(b) not in world.log
    world.pass_time(1)
    assert Kill(b) in world.log


ABORTED = "Fatal Python error: Aborted"


@pytest.mark.parametrize(
    ("status", "tail", "scarce"),
    [
        (1, ("Traceback", "RuntimeError: can't start new thread"), True),
        (-signal.SIGABRT, ("Resource temporarily unavailable (x.cpp:1)", ABORTED, "Stack"), True),
        (1, ("MemoryError", "KeyError: 'x'"), False),
        (-signal.SIGABRT, ("Assertion failed (x.cpp:1)", ABORTED, "Stack"), False),
        (-signal.SIGSEGV, ("MemoryError",), False),
        (-signal.SIGABRT, ("MemoryError",), False),
    ],
)
def test_who_had_no_room_even_to_say_so(
    world: World, status: int, tail: tuple[str, ...], scarce: bool
) -> None:
    """It could not get its first threads, say."""
    world.mute.add("a#0")
    update = world.apply(["a"], {"t": ["a"]})
    a = world.incarnation("a#0")
    del world.alive[a]
    world.tell(Exited(a, status, tail))
    assert update.error is not None
    assert ("pids.max" in update.error.hint) is scarce
    assert ("mend the block" in update.error.hint) is not scarce
    if tail[0].startswith("Resource"):
        assert f"SIGABRT while it started: {tail[0]}" in update.error.message


def test_want_of_room_while_it_serves_is_a_crash(world: World) -> None:
    """What it was executing may have been the reason."""
    world.apply(["a"], {"t": ["a"]})
    a = world.incarnation("a#0")
    del world.alive[a]
    world.tell(Exited(a, 1, ("MemoryError",)))
    (replica,) = world.brain.crew.fleet
    assert replica.crash is not None and not replica.crash.no_room

"""The Brain in a virtual world: what comes at an odd moment, or after many updates."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import control_rig
import pytest
from control_rig import AB, TIMING, Counter, World, topology

from blockflow import __version__
from blockflow.control.events import CommitFailed, Committed, LaunchFailed
from blockflow.control.supervision import SCARCE_CAP_S
from blockflow.control.update import Kind, Phase
from blockflow.core.errors import BlockError, SystemError_
from blockflow.wire.control import Routes, Undrain

world = control_rig.world


def admission(world: World) -> dict[str, Any]:
    """The routes that the Dispatcher was sent last."""
    dispatcher = world.incarnation("dispatcher")
    tables = [s.message.table for s in world.sent(Routes) if s.incarnation == dispatcher]
    latest: dict[str, Any] = tables[-1]
    return latest


def test_a_block_that_is_stopped_while_it_waits_for_its_restart_stays_down(world: World) -> None:
    world.apply(*AB)
    world.die("a#0")
    assert world.brain.crew.fleet.hosting("a")[0].state == "restarting"
    world.do(lambda now: world.brain.close("a", Kind.STOP, now))
    world.pass_time(60)
    assert world.names() == ["b#0", "dispatcher"]
    world.do(lambda now: world.brain.restart("a", now))
    assert world.admitted_blocks() == {"a": 1, "b": 1}


def test_who_is_given_up_in_its_restart_is_told_the_dispatcher(world: World) -> None:
    """Requests for it are answered at once then, with the reason."""
    world.apply(*AB)
    world.start_fails["b#0"] = BlockError("DIGEST_MISMATCH", "altered")
    world.die("b#0")
    assert admission(world)["down"] == {}  # it may come back
    world.pass_time(60)
    assert list(admission(world)["down"]) == ["b"]


def test_to_reopen_one_block_leaves_another_drained(world: World) -> None:
    world.apply(*AB)
    world.do(lambda now: world.brain.close("a", Kind.DRAIN, now))
    world.do(lambda now: world.brain.close("b", Kind.DRAIN, now))
    world.do(lambda now: world.brain.close("b", Kind.UNDRAIN, now))
    assert [s.incarnation for s in world.sent(Undrain)] == [world.incarnation("b#0")]
    assert {r.name: r.state for r in world.brain.crew.fleet} == {"a#0": "draining", "b#0": "ready"}


def test_no_update_is_done_while_no_dispatcher_knows_its_routes(world: World) -> None:
    world.apply(*AB)
    world.hold_ready.add("dispatcher")
    world.die("dispatcher")
    update = world.apply(["a", "c"], {"t": ["a", "c"]})
    assert update.phase is Phase.PUBLISHING
    world.pass_time(5)
    world.make_ready("dispatcher")
    assert str(update.phase) == Phase.DONE
    assert world.admitted_blocks() == {"a": 1, "c": 1}


def test_a_block_is_not_down_while_one_of_its_replicas_comes_back(world: World) -> None:
    world.apply(["a", {"name": "b", "replicas": 2}], {"t": ["a", "b"]})
    world.start_fails["b#0"] = BlockError("DIGEST_MISMATCH", "altered")
    world.die("b#0")
    world.pass_time(60)
    assert world.brain.crew.fleet.hosting("b")[0].given_up
    world.die("b#1")
    assert admission(world)["down"] == {} and world.admitted_blocks() == {"a": 1}
    world.pass_time(60)
    assert world.admitted_blocks() == {"a": 1, "b": 1}


def test_a_drained_worker_keeps_its_address_for_what_is_late(world: World) -> None:
    """Time was up before the last request had passed it."""
    world.apply(*AB)
    world.busy = True
    update = world.do(lambda now: world.brain.close("b", Kind.DRAIN, now))
    world.pass_time(TIMING.drain)
    assert update.phase is Phase.DONE and update.notes
    since = len(world.log)
    world.busy = False
    world.do(lambda now: world.brain.restart("a", now))
    told = [
        s.message for s in world.sent(Routes, since) if s.incarnation == world.incarnation("a#1")
    ]
    assert {s["block"] for s in told[-1].table["stages"]} == {"", "a", "b"}


def test_a_block_whose_new_worker_dies_before_the_flip_is_served_by_the_old_one(
    world: World,
) -> None:
    world.apply(*AB)
    world.mute.add("dispatcher")
    update = world.do(lambda now: world.brain.restart("a", now))
    world.die("a#1")
    assert update.phase is Phase.PUBLISHING
    assert world.brain.realm.reasons_not_ready() == []


def test_what_the_routes_give_to_the_dead_is_not_ready(world: World) -> None:
    world.apply(*AB)
    world.mute.add("dispatcher")
    world.die("a#0")
    assert world.brain.realm.reasons_not_ready() == ["block a has no ready worker (restarting)"]
    world.die("dispatcher")
    assert "the dispatcher is not ready" in world.brain.realm.reasons_not_ready()


def test_a_new_dispatcher_makes_nothing_ready_before_it_has_the_routes(world: World) -> None:
    world.apply(*AB)
    world.hold_ready.add("dispatcher")
    world.die("dispatcher")
    world.pass_time(5)
    world.mute.add("dispatcher")
    world.make_ready("dispatcher")
    assert world.brain.crew.dispatcher_ready
    assert world.brain.realm.reasons_not_ready() == ["the routes are being published"]
    world.flip()
    assert world.brain.realm.reasons_not_ready() == []


def test_fewer_replicas_are_those_that_work(world: World) -> None:
    world.apply([{"name": "a", "replicas": 2}], {"t": ["a"]})
    world.hold_ready.add("a#0")
    world.die("a#0")
    world.pass_time(1.0)
    world.die("a#1")  # younger than the first one's successor, which loads still
    world.pass_time(1.0)
    assert world.incarnation("a#0") < world.incarnation("a#1")
    assert world.apply(["a"], {"t": ["a"]}).phase is Phase.DONE
    assert world.names() == ["a#1", "dispatcher"]


def test_who_could_not_be_launched_is_tried_again_whatever_the_reason(world: World) -> None:
    """It says nothing of the block."""
    world.apply(*AB)
    world.mute.add("b#0")
    world.die("b#0")
    world.pass_time(0.2)
    error = BlockError("LOAD_FAILED", "of the launcher's")
    assert not error.retryable
    world.tell(LaunchFailed(world.incarnation("b#0"), error))
    world.mute.clear()
    world.pass_time(5.0)
    assert world.admitted_blocks() == {"a": 1, "b": 1}


def test_the_dispatcher_is_never_given_up(world: World) -> None:
    """Whatever it ends with: without it nothing is served."""
    world.apply(*AB)
    world.start_fails["dispatcher"] = BlockError("LOAD_FAILED", "no")
    world.die("dispatcher")
    world.pass_time(90.0)
    assert "dispatcher" not in world.names()
    world.start_fails.clear()
    world.pass_time(60.0)
    assert world.names() == ["a#0", "b#0", "dispatcher"]
    assert world.brain.realm.reasons_not_ready() == []


def test_a_process_of_another_release_is_ended_and_told_of(world: World) -> None:
    """The template may be a new interpreter by now, and the package on disk another one."""
    world.apply(*AB)
    world.release = "9.1.0"
    update = world.apply(["a", "b", "c"], {"t": ["a", "b"], "u": ["a", "c"]})
    assert update.phase is Phase.FAILED and update.error is not None
    assert update.error.details["cause"]["code"] == "UNSUPPORTED_VERSION"
    assert world.names() == ["a#0", "b#0", "dispatcher"]  # the old epoch serves
    world.die("a#0")
    world.pass_time(60)
    (replica,) = world.brain.crew.fleet.hosting("a")
    assert replica.state == "failed" and world.launched().count("a#0") == 2
    crash = replica.crashes[-1]
    assert "9.1.0" in crash.cause and __version__ in crash.cause
    world.die("dispatcher")
    world.pass_time(90.0)
    assert "dispatcher" not in world.names()
    world.release = __version__
    world.pass_time(60.0)
    assert world.names() == ["b#0", "dispatcher"]


def test_the_latest_updates_are_remembered(world: World) -> None:
    world.apply(*AB)
    made = []
    for _ in range(40):
        drain = world.do(lambda now: world.brain.close("a", Kind.DRAIN, now))
        undrain = world.do(lambda now: world.brain.close("a", Kind.UNDRAIN, now))
        made += [drain.update_id, undrain.update_id]
    kept = list(world.brain.runner.updates)
    assert 10 < len(kept) < len(made)
    assert kept == made[-len(kept) :]


@pytest.mark.parametrize("outcome", ["stored", "full"])
def test_what_was_stored_for_another_update_is_not_this_ones(world: World, outcome: str) -> None:
    past = world.apply(*AB)
    world.hold_ready.add("c#0")
    update = world.apply(["a", "c"], {"t": ["a", "c"]})
    old = past.update_id
    full = SystemError_("NO_SPACE", "full")
    world.tell(Committed(old) if outcome == "stored" else CommitFailed(old, full))
    assert update.phase is Phase.PREPARING
    assert world.admitted_blocks() == {"a": 1, "b": 1}
    world.make_ready("c#0")
    assert str(update.phase) == Phase.DONE
    assert world.admitted_blocks() == {"a": 1, "c": 1}


def test_once_the_old_routes_are_empty_their_deadline_concerns_nobody(world: World) -> None:
    """One that is told to stop has a deadline of its own."""
    world.apply(["a"], {"t": ["a"]})
    world.mute.add("a#0")
    update = world.apply(["a"], {"t": ["a"]}, digests={"a": "new"})
    world.pass_time(TIMING.ack)
    assert update.phase is Phase.DRAINING and update.retiring
    assert update.drain_deadline_ns is None


class Few(Counter):
    """A disk that has filled up: one stage is left."""

    full = True

    def take_stage(self) -> int:
        if self.full and self.stage:
            raise SystemError_("NO_SPACE", "full")
        return super().take_stage()


def test_a_start_that_has_no_numbers_for_all_goes_on_with_those_that_it_has() -> None:
    """What is missing comes with the next update."""
    numbers = Few()
    world = World(numbers=numbers).up()
    update = world.do(lambda now: world.brain.restore(topology(*AB), 3, {}, now))
    assert update.phase is Phase.DONE and ["b#0" in n for n in update.notes] == [True]
    world.pass_time(1)
    assert world.names() == ["a#0", "dispatcher"] and world.admitted_blocks() == {"a": 1}
    numbers.full = False
    assert world.apply(*AB).phase is Phase.DONE
    assert world.names() == ["a#0", "b#0", "dispatcher"]


@pytest.mark.parametrize("stages", [0, 1])
@pytest.mark.parametrize("error", [MemoryError(), ValueError("a defect")])
def test_an_update_whose_workers_cannot_begin_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, world: World, stages: int, error: Exception
) -> None:
    """It would keep out all others, and go on without workers at the next event."""
    numbers = world._numbers
    take = numbers.take_stage

    def some() -> int:
        if numbers.stage >= stages:
            raise error
        return take()

    with monkeypatch.context() as patch:
        patch.setattr(numbers, "take_stage", some)
        with nullcontext() if isinstance(error, MemoryError) else pytest.raises(ValueError):
            world.apply(*AB)
    (update,) = world.brain.runner.updates.values()
    assert update.phase is Phase.FAILED and update.error is not None
    assert update.error.code == ("NO_SPACE" if isinstance(error, MemoryError) else "INTERNAL")
    assert world.names() == ["dispatcher"]
    assert world.apply(*AB).phase is Phase.DONE


def test_a_worker_for_which_no_number_is_left_keeps_nobody_else_from_coming_back() -> None:
    numbers = Few()
    numbers.full = False
    world = World(numbers=numbers).up()
    world.apply(*AB)
    numbers.full = True  # for long: all stages that had been reserved are used up
    world.die("b#0")
    world.die("dispatcher")
    world.pass_time(60)
    assert world.names() == ["a#0", "dispatcher"] and world.admitted_blocks() == {"a": 1}
    assert world.brain.crew.fleet.hosting("b")[0].state == "restarting"
    numbers.full = False
    world.pass_time(SCARCE_CAP_S)
    assert world.names() == ["a#0", "b#0", "dispatcher"]


def test_a_dispatcher_for_which_no_number_is_left_is_tried_again_now_and_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn of the Manager's loop would try, and do nothing of what comes after it."""
    world.apply(*AB)
    world.die("dispatcher")
    with monkeypatch.context() as patch:
        patch.setattr(world.brain.crew._numbers, "take_incarnation", _full)
        with pytest.raises(SystemError_):
            world.pass_time(1)
        world.pass_time(SCARCE_CAP_S - 0.1)
    world.pass_time(1)
    assert world.admitted_blocks() == {"a": 1, "b": 1}


def _full() -> int:
    raise SystemError_("NO_SPACE", "full")

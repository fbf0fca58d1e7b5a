"""The Brain in a virtual world: which updates begin, and what a shutdown makes of one under way."""

from __future__ import annotations

import control_rig
import pytest
from control_rig import AB, World, topology

from blockflow.control.beginning import cut_short
from blockflow.control.events import Finished
from blockflow.control.update import Kind, Phase, Update
from blockflow.core.errors import (
    BlockError,
    BlockFlowError,
    RepositoryError,
    SystemError_,
    TopologyError,
)
from blockflow.core.scarcity import AWAY
from blockflow.launch.ends import template_died

world = control_rig.world
AC = (["a", "c"], {"t": ["a", "c"]})


def apply_if(world: World, epoch: int | None, kind: Kind = Kind.SYSTEM) -> Update:
    made = topology(*AC)
    return world.do(lambda now: world.brain.apply(made, {"posted": 1}, now, kind, epoch))


# --- if_epoch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.SYSTEM, Kind.ROLLBACK])
def test_an_update_of_another_epoch_changes_nothing(world: World, kind: Kind) -> None:
    world.apply(*AB)
    for other in (0, 2):
        with pytest.raises(TopologyError) as e:
            apply_if(world, other, kind)
        assert (e.value.code, e.value.details) == ("EPOCH_MISMATCH", {"epoch": 1})
        assert e.value.info.http == 409 and not e.value.retryable
    with pytest.raises(TopologyError, match="EPOCH_MISMATCH"):
        world.brain.preview(topology(*AC), 2)
    assert world.names() == ["a#0", "b#0", "dispatcher"] and world.brain.realm.epoch == 1
    assert world.brain.preview(topology(*AC), 1)["changed"]
    assert apply_if(world, 1, kind).phase is Phase.DONE
    assert world.brain.realm.epoch == 2


def test_the_first_update_may_ask_for_epoch_0(world: World) -> None:
    assert apply_if(world, 0).epoch == 1


def test_of_two_that_have_read_the_same_epoch_one_changes_something(world: World) -> None:
    world.apply(*AB)
    world.hold_ready.add("c#0")
    assert apply_if(world, 1).phase is Phase.PREPARING
    with pytest.raises(TopologyError) as e:
        apply_if(world, 1)
    assert e.value.code == "UPDATE_IN_PROGRESS"
    assert e.value.retry_after_ms and e.value.to_dict()["retry_after_ms"] > 0
    world.make_ready("c#0")
    with pytest.raises(TopologyError, match="EPOCH_MISMATCH"):
        apply_if(world, 1)


def test_the_epoch_has_changed_as_soon_as_the_new_one_is_stored(world: World) -> None:
    """Though the update that did it still drains: to wait for that would be of no use."""
    world.apply(*AB)
    world.busy = True
    assert apply_if(world, 1).phase is Phase.DRAINING
    with pytest.raises(TopologyError) as e:
        apply_if(world, 1)
    assert (e.value.code, e.value.details) == ("EPOCH_MISMATCH", {"epoch": 2})


# --- shutdown -------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.PUBLISHING, Phase.DRAINING])
def test_what_is_in_force_at_a_shutdown_is_done(world: World, phase: Phase) -> None:
    world.apply(*AB)
    world.busy = True
    if phase is Phase.PUBLISHING:
        world.mute.add("dispatcher")
    update = world.apply(*AC)
    assert update.phase is phase and world.stored[0] == 2
    world.brain.shutdown(world.now)
    assert str(update.phase) == Phase.DONE and update.error is None
    assert any("shut down" in note for note in update.notes)
    assert Finished(update.update_id) in world.brain.crew.out and world.brain.runner.settled
    world.pass_time(10)
    assert world.gone


def test_what_is_prepared_at_a_shutdown_fails_and_says_what_comes_back(world: World) -> None:
    world.apply(*AB)
    world.hold_ready.add("c#0")
    update = world.apply(*AC)
    world.brain.shutdown(world.now)
    error = update.error
    assert error is not None and (update.phase, error.code) == (Phase.FAILED, "UPDATE_FAILED")
    assert "nothing was stored, and epoch 1 comes back" in error.message and error.hint
    assert error.retryable and world.stored[0] == 1


def test_a_shutdown_says_nothing_of_storing_to_who_stores_nothing() -> None:
    first = cut_short(Update(1, Kind.SYSTEM, 1, 0), 0)
    assert first.message.endswith("nothing was stored, and the next start has none")
    assert "stored" not in cut_short(Update(2, Kind.RESTART, 3, 0), 3).message


# --- why it did not start -------------------------------------------------------------------------


def failed(world: World, cause: BlockFlowError | int) -> BlockFlowError:
    """The error of an update whose new worker says ``cause``, or ends with that status."""
    world.apply(*AB)
    if isinstance(cause, int):
        world.hold_ready.add("c#0")
    else:
        world.start_fails["c#0"] = cause
    update = world.apply(*AC)
    if isinstance(cause, int):
        world.die("c#0", cause)
    if update.error is None:
        raise AssertionError(update)
    return update.error


@pytest.mark.parametrize(
    ("cause", "again"),
    [
        (-9, True),
        (-15, True),
        (0, True),  # it has ended itself, as it was told to from outside
        (-11, False),
        (1, False),
        (SystemError_("NO_SPACE", "full", hint="free some"), True),
        (SystemError_("START_TIMEOUT", "slow"), True),
        (RepositoryError("UNKNOWN_BLOCK", "no block 'c'", details={AWAY: True}), True),
        (RepositoryError("UNKNOWN_BLOCK", "no block 'c'"), False),
        (BlockError("LOAD_FAILED", "bad", hint="export it anew"), False),
        (BlockError("DIGEST_MISMATCH", "altered"), False),
    ],
    ids=str,
)
def test_an_update_may_be_sent_again_where_no_block_is_at_fault(
    world: World, cause: BlockFlowError | int, again: bool
) -> None:
    error = failed(world, cause)
    assert (error.code, error.retryable) == ("UPDATE_FAILED", again)
    assert ("mend the block" in error.hint) is not again
    assert "send the update again" in error.hint
    assert error.details.get("log") == (None if isinstance(cause, int) else ["last words"])


@pytest.mark.parametrize(
    "cause",
    [
        BlockError("UNSUPPORTED_ENGINE", "no int8", hint="use another engine"),
        SystemError_("MISSING_EXTRA", "cannot import the package", hint="pip install it"),
    ],
    ids=str,
)
def test_a_block_that_was_asked_for_what_is_not_here_needs_no_mending(
    world: World, cause: BlockFlowError
) -> None:
    error = failed(world, cause)
    assert error.hint.endswith(f"; {cause.hint}, then send the update again")
    assert not error.retryable


def test_no_block_is_blamed_for_a_template_that_cannot_start(world: World) -> None:
    """Files of the package were replaced while it runs, say."""
    error = failed(world, template_died(1))
    assert "exit status 1; the output of `blockflow up` has its last words" in error.message
    assert "mend the installation, then send the update again" in error.hint
    assert error.retryable


def test_a_worker_that_is_not_ready_in_time_may_be_so_next_time(world: World) -> None:
    world.apply(*AB)
    world.hold_ready.add("c#0")
    update = world.apply(*AC)
    world.pass_time(control_rig.TIMING.start + 1)
    assert update.error is not None and update.error.retryable
    assert update.error.details["cause"]["code"] == "START_TIMEOUT"

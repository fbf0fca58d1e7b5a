"""The Brain in a virtual world: updates while a long request is on the routes of an earlier one."""

from __future__ import annotations

from typing import Any

import control_rig
import pytest
from control_rig import AB, World

from blockflow.control.update import Kind, Phase
from blockflow.core.errors import TopologyError

world = control_rig.world
BLOCKS = AB[0]


@pytest.fixture
def long(world: World) -> World:
    """A request of the first epoch is in flight."""
    world.apply(*AB)
    world.busy = True
    return world


def index(world: World, task: str) -> int:
    return world.brain.realm.shares.index(task)


def test_where_nothing_retires_the_next_update_may_follow_at_once(long: World) -> None:
    for n in range(3):
        tasks: dict[str, Any] = {"t": ["a", "b"], f"u{n}": ["a"]}
        update = long.apply(BLOCKS, tasks)
        assert (update.phase, update.epoch, update.notes) == (Phase.DONE, n + 2, [])
    assert long.brain.realm.publication.drained < long.brain.realm.version


def test_what_retires_waits_for_the_requests_of_all_older_routes(long: World) -> None:
    long.apply(BLOCKS, {"t": ["a", "b"], "u": ["a"]})
    update = long.apply(["a", "c"], {"t": ["a", "c"]})
    assert update.phase is Phase.DRAINING and "b#0" in long.names()
    with pytest.raises(TopologyError, match="UPDATE_IN_PROGRESS"):
        long.apply(*AB)
    long.let_drain()
    assert str(update.phase) == Phase.DONE and "b#0" not in long.names()


def test_an_operator_who_drains_a_block_is_told_when_it_is_drained(long: World) -> None:
    drain = long.do(lambda now: long.brain.close("a", Kind.DRAIN, now))
    assert drain.phase is Phase.DRAINING
    long.let_drain()
    assert str(drain.phase) == Phase.DONE
    long.busy = True
    undrain = long.do(lambda now: long.brain.close("a", Kind.UNDRAIN, now))
    assert undrain.phase is Phase.DONE


def test_a_tasks_index_is_nobody_elses_while_its_requests_go_on(long: World) -> None:
    old = index(long, "t")
    long.apply(BLOCKS, {"u": ["a", "b"]})
    long.apply(BLOCKS, {"u": ["a", "b"], "v": ["b"]})
    assert old not in (index(long, "u"), index(long, "v"))
    # Nor does another Manager give it out.
    update = long.succeed()
    assert update.phase is Phase.DRAINING  # it waits for all that it does not know
    long.let_drain()
    assert str(update.phase) == Phase.DONE
    long.apply(BLOCKS, {"u": ["a", "b"], "v": ["b"], "w": ["b"]})
    assert index(long, "w") == old


def test_a_committed_update_that_a_successor_carries_through_holds_it_too(long: World) -> None:
    old = index(long, "t")
    long.apply(BLOCKS, {"u": ["a", "b"]})
    journal = long.journal()
    long.stored = (3, control_rig.topology(BLOCKS, {"u": ["a", "b"], "v": ["b"]}))
    long.succeed(journal=journal)
    assert long.brain.realm.epoch == 3 and index(long, "v") not in (0, old)


def test_with_too_few_indices_left_the_next_update_waits(
    long: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(long.brain.realm.shares), "roomy", False)
    update = long.apply(BLOCKS, {"t": ["a", "b"], "u": ["a"]})
    assert update.phase is Phase.DRAINING
    long.let_drain()
    assert str(update.phase) == Phase.DONE

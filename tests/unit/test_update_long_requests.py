"""The Brain in a virtual world: updates while a long request is on the routes of an earlier one."""

from __future__ import annotations

from typing import Any

import control_rig
import pytest
from control_rig import AB, TIMING, World

from blockflow.control.threads import ThreadBook
from blockflow.control.update import Kind, Phase
from blockflow.core.errors import BlockError, TopologyError

world = control_rig.world
BLOCKS = AB[0]


@pytest.fixture
def long(world: World) -> World:
    """A request of the first epoch is in flight."""
    world.apply(*AB)
    world.busy = True
    return world


AC = ["a", "c"], {"t": ["a", "c"]}


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
    # Nor does another Manager give it out, which may be asked for an update at once.
    assert long.succeed().phase is Phase.DONE
    long.apply(BLOCKS, {"u": ["a", "b"], "v": ["b"], "w": ["b"]})
    assert index(long, "w") not in (0, old)
    long.let_drain()
    long.apply(BLOCKS, {"u": ["a", "b"], "v": ["b"], "w": ["b"], "x": ["b"]})
    assert index(long, "x") == old


@pytest.mark.parametrize("kind", [Kind.DRAIN, Kind.STOP])
def test_a_successor_that_has_something_to_close_waits(long: World, kind: Kind) -> None:
    long.do(lambda now: long.brain.close("b", kind, now))
    update = long.succeed()
    assert update.phase is Phase.DRAINING and "b#0" in long.names()
    long.let_drain()
    assert str(update.phase) == Phase.DONE and ("b#0" in long.names()) is (kind is Kind.DRAIN)


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


# --- one that drains is set aside -----------------------------------------------------------------


def test_the_way_back_does_not_wait_for_requests_of_the_epoch_before(long: World) -> None:
    bad = long.apply(*AC)
    back = long.apply(*AB)
    runner = long.brain.runner
    assert (runner.aside, runner.current) == (bad, back)
    assert long.brain.realm.epoch == back.epoch == 3
    assert long.admitted_blocks() == {"a": 1, "b": 1}
    assert {bad.phase, back.phase} == {Phase.DRAINING}
    assert len(long.names()) == 5  # the Dispatcher, a, b of old, c, and another b
    long.let_drain()
    assert {str(bad.phase), str(back.phase)} == {Phase.DONE} and runner.settled
    assert len(long.names()) == 3
    assert not [*bad.notes, *back.notes]


def test_what_an_update_has_replaced_goes_while_the_next_ones_requests_go_on(long: World) -> None:
    bad = long.apply(*AC)
    back = long.apply(*AB)
    long.drained_below(bad.version)
    assert bad.phase is Phase.DONE and "b#0" not in long.names()
    assert back.phase is Phase.DRAINING and "c#0" in long.names()
    long.drained_below(back.version)
    assert str(back.phase) == Phase.DONE and "c#0" not in long.names()


def test_it_is_drained_also_while_the_next_one_is_prepared(long: World) -> None:
    bad = long.apply(*AC)
    long.hold_ready.add("b#1")
    back = long.apply(*AB)
    assert back.phase is Phase.PREPARING
    long.drained_below(bad.version)
    assert bad.phase is Phase.DONE and back.phase is Phase.PREPARING
    assert long.brain.runner.aside is None


def test_what_replaces_nobody_waits_for_nothing_that_another_one_has_replaced(long: World) -> None:
    first = long.apply(*AC)
    second = long.apply(["a", "c"], {"t": ["a", "c"], "u": ["a"]})
    assert (first.phase, second.phase) == (Phase.DRAINING, Phase.DONE) and not second.retiring
    assert "b#0" in long.names()


def test_only_one_is_set_aside(long: World) -> None:
    first = long.apply(*AC)
    second = long.apply(*AB)
    with pytest.raises(TopologyError, match="UPDATE_IN_PROGRESS") as e:
        long.apply(*AC)
    assert e.value.details == {"update": second.update_id}
    long.drained_below(first.version)
    third = long.apply(*AC)  # the second takes the place of the first
    assert long.brain.runner.aside is second and third.epoch == 4


def test_it_outlives_one_that_fails_and_one_that_changes_nothing(long: World) -> None:
    first = long.apply(*AC)
    long.start_fails["d#0"] = BlockError("LOAD_FAILED", "no")
    failed = long.apply(["a", "d"], {"t": ["a", "d"]})
    assert failed.phase is Phase.FAILED and first.phase is Phase.DRAINING
    assert long.apply(*AC).phase is Phase.UNCHANGED
    assert long.brain.runner.under_way is first
    long.let_drain()
    assert str(first.phase) == Phase.DONE and long.brain.runner.settled


def test_its_time_is_limited_all_the_same(long: World) -> None:
    first = long.apply(*AC)
    long.pass_time(TIMING.drain - 1)
    second = long.apply(*AB)
    long.pass_time(1)
    assert (first.phase, second.phase) == (Phase.DONE, Phase.DRAINING), "each has a time of its own"
    long.pass_time(3600)
    assert {first.phase, second.phase} == {Phase.DONE}
    assert all("time was up" in u.notes[-1] for u in (first, second))


def test_one_that_waits_to_close_a_block_is_waited_for(long: World) -> None:
    stop = long.do(lambda now: long.brain.close("b", Kind.STOP, now))
    assert stop.phase is Phase.DRAINING
    with pytest.raises(TopologyError, match="UPDATE_IN_PROGRESS"):
        long.apply(*AC)


def test_a_block_that_is_restarted_with_a_long_request_on_it_keeps_nobody_waiting(
    long: World,
) -> None:
    restart = long.do(lambda now: long.brain.restart("b", now))
    assert restart.phase is Phase.DRAINING
    again = long.do(lambda now: long.brain.restart("b", now))
    assert again.phase is Phase.DRAINING and long.admitted_blocks() == {"a": 1, "b": 1}
    long.let_drain()
    assert {str(restart.phase), str(again.phase)} == {Phase.DONE} and len(long.names()) == 3


def test_a_shutdown_ends_both(long: World) -> None:
    first, second = long.apply(*AC), long.apply(*AB)
    long.brain.shutdown(long.now)
    assert {first.phase, second.phase} == {Phase.DONE}
    assert all("shut down" in u.notes[-1] for u in (first, second))


def test_a_successor_stops_what_both_have_left(long: World) -> None:
    long.apply(*AC)
    long.apply(*AB)
    update = long.succeed()
    assert len(long.names()) == 5
    long.let_drain()
    assert update.phase is Phase.DONE and len(long.names()) == 3


def test_threads_of_what_retires_are_planned_by_what_each_epoch_asked_for(world: World) -> None:
    wide = [{"name": "a", "threads": 2}], {"t": ["a"]}
    world.apply([{"name": "a", "threads": 1}], {"t": ["a"]})
    world.busy = True
    world.apply(*wide, digests={"a": "y"})
    world.apply([{"name": "a", "threads": 1}], {"t": ["a"]}, digests={"a": "z"})
    demands = [group[0].spec.threads for group in ThreadBook(world.brain.crew, 2)._groups()]
    assert sorted(demands) == [1, 1, 2]


def test_an_update_that_is_under_way_is_not_forgotten_for_many_that_change_nothing(
    long: World,
) -> None:
    """Whoever posts the same topology every second, say: who waits for its end would never be told,
    and the note that it is under way would stay."""
    draining = long.apply(*AC)
    for _ in range(70):
        assert long.apply(*AC).phase is Phase.UNCHANGED
    assert draining.phase is Phase.DRAINING
    long.let_drain()
    assert str(draining.phase) == Phase.DONE
    known = long.brain.runner.updates
    assert known[draining.update_id] is draining and len(known) <= 64

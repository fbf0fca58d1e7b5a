"""The Brain in a virtual world: updates, what fails during them, and who is replaced."""

from __future__ import annotations

import control_rig
import pytest
from control_rig import AB, MS, S, World, topology

from blockflow import __version__
from blockflow.control.events import Commit, Kill, Send
from blockflow.control.update import Phase
from blockflow.core.errors import BlockError, TopologyError
from blockflow.wire.control import Hello, PeerGone, Routes, SetPolicy

world = control_rig.world


def test_the_first_update_starts_all_and_publishes_workers_first(world: World) -> None:
    update = world.apply(*AB)
    assert update.phase is Phase.DONE
    assert world.brain.realm.epoch == 1
    assert world.names() == ["a#0", "b#0", "dispatcher"]
    assert world.admitted_blocks() == {"a": 1, "b": 1}
    order = [i.incarnation for i in world.sent(Routes)]
    assert order[-1] == world.incarnation("dispatcher")
    assert set(order[:-1]) == {world.incarnation("a#0"), world.incarnation("b#0")}


def test_the_epoch_is_stored_before_the_flip(world: World) -> None:
    world.apply(*AB)
    kinds = [type(i) if not isinstance(i, Send) else type(i.message) for i in world.log]
    assert kinds.index(Commit) < kinds.index(Routes)


def test_an_update_is_a_diff(world: World) -> None:
    world.apply(["a", "b", "c"], {"t1": ["a", "b"], "t2": ["a", "c"]})
    kept = {world.incarnation("a#0"), world.incarnation("b#0")}
    update = world.apply(["a", "b", "d"], {"t1": ["a", "b"], "t3": ["a", "d"]})
    assert update.plan["start"] == [{"replica": "d#0", "blocks": ["d"]}]
    assert update.plan["keep"] == ["a#0", "b#0"]
    assert update.plan["stop"] == ["c#0"]
    assert update.plan["tasks"] == {"add": ["t3"], "remove": ["t2"], "change": []}
    assert {world.incarnation("a#0"), world.incarnation("b#0")} == kept
    assert world.names() == ["a#0", "b#0", "d#0", "dispatcher"]


def test_an_identical_update_is_a_no_op(world: World) -> None:
    world.apply(*AB)
    before = len(world.log)
    update = world.apply(*AB)
    assert update.phase is Phase.UNCHANGED
    assert world.brain.realm.epoch == 1
    assert not [i for i in world.log[before:] if isinstance(i, Send | Commit)]


def test_a_changed_artifact_restarts_its_block_alone(world: World) -> None:
    world.apply(*AB)
    old = world.incarnation("b#0")
    world.apply(*AB, digests={"b": "other"})
    assert world.names() == ["a#0", "b#1", "dispatcher"]
    assert old not in world.alive
    assert world.brain.realm.epoch == 2


def test_tasks_alone_can_change(world: World) -> None:
    world.apply(*AB)
    update = world.apply(["a", "b"], {"t": ["a", "b"], "u": ["b"]})
    assert update.phase is Phase.DONE
    assert update.plan["start"] == update.plan["stop"] == []
    assert world.brain.realm.epoch == 2


def test_a_policy_changes_in_the_running_process(world: World) -> None:
    world.apply(*AB)
    before = set(world.alive)
    blocks = [{"name": "a", "batching": {"policy": "window", "max_rows": 4}}, "b"]
    world.apply(blocks, {"t": ["a", "b"]})
    (change,) = world.sent(SetPolicy)
    assert change.message.policy == {"policy": "window", "max_rows": 4}
    assert set(world.alive) == before


def test_a_failed_load_leaves_the_old_epoch_serving(world: World) -> None:
    world.apply(*AB)
    world.start_fails["c#0"] = BlockError("LOAD_FAILED", "no such tensor")
    update = world.apply(["a", "c", "d"], {"t": ["a", "c"], "u": ["d"]})
    assert update.phase is Phase.FAILED
    assert update.error is not None and update.error.code == "UPDATE_FAILED"
    assert update.error.details["cause"]["code"] == "LOAD_FAILED"
    assert update.error.details["log"] == ["last words"]
    assert world.brain.realm.epoch == 1
    assert world.names() == ["a#0", "b#0", "dispatcher"]
    assert world.admitted_blocks() == {"a": 1, "b": 1}
    assert world.apply(*AB).phase is Phase.UNCHANGED


def test_a_candidate_that_dies_fails_the_update(world: World) -> None:
    world.hold_ready.add("a#0")
    update = world.apply(*AB)
    assert update.phase is Phase.PREPARING
    world.die("a#0", -11, ("Fatal Python error",))
    assert update.phase is Phase.FAILED
    assert "SIGSEGV" in str(update.error)
    assert world.names() == ["dispatcher"]


def test_a_worker_that_never_gets_ready_is_killed(world: World) -> None:
    world.mute.add("b#0")
    update = world.apply(*AB)
    world.pass_time(31)
    assert update.phase is Phase.FAILED
    assert update.error is not None and update.error.details["cause"]["code"] == "START_TIMEOUT"
    assert world.names() == ["dispatcher"]


def test_a_name_is_free_when_its_process_has_ended(world: World) -> None:
    """What a failed update leaves behind may take its time to stop."""
    world.hold_ready |= {"b#0"}
    update = world.apply(*AB)
    world.mute.add("a#0")
    world.die("b#0")
    assert update.phase is Phase.FAILED and "a#0" in world.names()
    assert world.apply(["a"], {"t": ["a"]}).phase is Phase.DONE
    assert [r.name for r in world.brain.crew.fleet.active()] == ["a#1"]


def test_a_full_disk_fails_the_update_before_anything_changed(world: World) -> None:
    world.apply(*AB)
    world.disk_full = True
    update = world.apply(["a", "c"], {"t": ["a", "c"]})
    assert update.phase is Phase.FAILED
    assert update.error is not None and update.error.code == "NO_SPACE"
    assert world.names() == ["a#0", "b#0", "dispatcher"]
    assert world.brain.realm.epoch == 1


def test_one_update_at_a_time(world: World) -> None:
    world.hold_ready.add("a#0")
    world.apply(*AB)
    with pytest.raises(TopologyError) as e:
        world.apply(*AB)
    assert e.value.code == "UPDATE_IN_PROGRESS"
    world.make_ready("a#0")
    assert world.apply(*AB).phase is Phase.UNCHANGED


def test_old_workers_stay_until_requests_have_drained(world: World) -> None:
    world.apply(*AB)
    world.busy = True
    update = world.apply(["a", "c"], {"t": ["a", "c"]})
    assert update.phase is Phase.DRAINING
    assert "b#0" in world.names()
    assert world.admitted_blocks() == {"a": 1, "c": 1}
    worker_tables = [
        i.message.table for i in world.sent(Routes) if i.incarnation == world.incarnation("a#0")
    ]
    assert {s["block"] for s in worker_tables[-1]["stages"]} == {"", "a", "b", "c"}
    world.let_drain()
    assert update.phase is Phase.DONE
    assert "b#0" not in world.names()


def test_a_drain_has_a_time_limit(world: World) -> None:
    world.apply(*AB)
    world.busy = True
    update = world.apply(["a", "c"], {"t": ["a", "c"]})
    world.pass_time(21)
    assert update.phase is Phase.DONE
    assert update.notes
    assert "b#0" not in world.names()


def test_a_worker_that_does_not_stop_is_killed(world: World) -> None:
    world.apply(*AB)
    world.mute.add("b#0")
    update = world.apply(["a"], {"t": ["a"]})
    world.pass_time(10)
    assert update.phase is Phase.DONE
    assert any(isinstance(i, Kill) for i in world.log)


def test_a_dead_worker_is_replaced_and_everybody_is_told(world: World) -> None:
    world.apply(*AB)
    old = world.incarnation("a#0")
    world.die("a#0", -9, ("boom",))
    assert {s.message.incarnation for s in world.sent(PeerGone)} == {old}
    assert len(world.sent(PeerGone)) == 2
    assert world.admitted_blocks() == {"b": 1}
    world.pass_time(0.2)
    assert world.incarnation("a#0") > old
    assert world.admitted_blocks() == {"a": 1, "b": 1}
    (replica,) = world.brain.crew.fleet.hosting("a")
    assert replica.crash is not None
    assert replica.crash.cause == "killed by SIGKILL"
    assert replica.crash.log_tail == ("boom",)


def test_a_crash_loop_ends_in_failed_and_leaves_the_others_alone(world: World) -> None:
    world.apply(*AB)
    for _ in range(5):
        world.die("a#0")
        world.pass_time(2)
    (replica,) = world.brain.crew.fleet.hosting("a")
    assert replica.state == "failed"
    assert "5 crashes" in replica.given_up
    world.pass_time(120)
    assert world.names() == ["b#0", "dispatcher"]
    assert world.admitted_blocks() == {"b": 1}


def test_a_load_failure_is_not_retried(world: World) -> None:
    world.apply(*AB)
    world.start_fails["a#0"] = BlockError("LOAD_FAILED", "gone")
    world.die("a#0")
    world.pass_time(60)
    (replica,) = world.brain.crew.fleet.hosting("a")
    assert replica.state == "failed"
    assert world.launched().count("a#0") == 2


def test_an_update_restarts_what_was_given_up(world: World) -> None:
    world.apply(*AB)
    for _ in range(5):
        world.die("a#0")
        world.pass_time(2)
    update = world.apply(*AB)
    assert update.phase is Phase.DONE
    assert [s["replica"] for s in update.plan["start"]] == ["a#0"]
    assert [r.state for r in world.brain.crew.fleet] == ["ready", "ready"]


def test_a_worker_that_dies_during_an_update_is_replaced_once(world: World) -> None:
    world.apply(*AB)
    world.hold_ready.add("c#0")
    update = world.apply(["a", "c"], {"t": ["a", "c"]})
    world.die("a#0")
    world.die("b#0")
    world.pass_time(0.5)
    world.make_ready("c#0")
    assert update.phase is Phase.DONE
    assert world.names() == ["a#0", "c#0", "dispatcher"]


def test_the_dispatcher_is_replaced_on_its_addresses_and_gets_routes(world: World) -> None:
    world.apply(*AB)
    world.die("dispatcher")
    assert not world.brain.crew.dispatcher_ready
    world.pass_time(1)
    order = world.alive[world.incarnation("dispatcher")]
    assert order.spec["client_endpoints"] == ["tcp://127.0.0.1:5755"]
    assert world.admitted_blocks() == {"a": 1, "b": 1}
    assert not world.brain.realm.reasons_not_ready()


def test_a_dispatcher_that_dies_in_mid_update_does_not_fail_it(world: World) -> None:
    world.apply(*AB)
    world.mute.add("dispatcher")
    update = world.apply(["a", "c"], {"t": ["a", "c"]})
    assert update.phase is Phase.PUBLISHING
    world.mute.clear()
    world.die("dispatcher")
    world.pass_time(1)
    assert update.phase is Phase.DONE
    assert world.names() == ["a#0", "c#0", "dispatcher"]


def test_a_hung_dispatcher_is_killed_and_replaced(world: World) -> None:
    world.apply(*AB)
    old = world.incarnation("dispatcher")
    world.mute.add("dispatcher")
    update = world.apply(["a", "c"], {"t": ["a", "c"]})
    world.pass_time(9.9)
    world.mute.clear()
    world.pass_time(2)
    assert world.incarnation("dispatcher") > old
    assert update.phase is Phase.DONE
    crash = world.brain.crew.dispatcher_crash
    assert crash is not None and not crash.outside
    assert crash.cause == "hung: it did not take new routes within 10 s"


def test_a_worker_that_ignores_routes_does_not_hold_up_the_flip(world: World) -> None:
    world.apply(*AB)
    world.mute.add("a#0")
    update = world.apply(["a", "b", "c"], {"t": ["a", "b"], "u": ["c"]})
    assert update.phase is Phase.PUBLISHING
    world.pass_time(2.1)
    assert update.phase is Phase.DONE
    assert world.brain.realm.publication.late == 1


def test_fewer_replicas_are_those_that_serve(world: World) -> None:
    """The oldest may be down, or crash again and again."""
    for starts in (False, True):
        world.apply([{"name": "a", "replicas": 2}], {"t": ["a"]})
        first, second = sorted(set(world.names()) - {"dispatcher"})
        world.die(first)
        if starts:  # its successor does
            world.hold_ready.add(first)
            world.pass_time(1)
        update = world.apply([{"name": "a", "replicas": 1}], {"t": ["a"]})
        assert (update.plan["keep"], update.plan["stop"]) == ([second], [first])
        assert world.admitted_blocks() == {"a": 1}
        assert world.names() == [second, "dispatcher"]


def test_replicas(world: World) -> None:
    world.apply([{"name": "a", "replicas": 3}], {"t": ["a"]})
    assert world.admitted_blocks() == {"a": 3}
    world.die("a#1")
    assert world.admitted_blocks() == {"a": 2}
    world.pass_time(1)
    assert world.admitted_blocks() == {"a": 3}
    world.apply([{"name": "a", "replicas": 1}], {"t": ["a"]})
    assert world.names() == ["a#0", "dispatcher"]


def test_a_preview_refuses_what_an_update_would(world: World) -> None:
    blocks = [f"b{i:02}" + "x" * 60 for i in range(64)]
    made = topology(blocks, {f"t{i}": blocks for i in range(300)})
    with pytest.raises(TopologyError, match="too large for one route table"):
        world.brain.preview(made)


def test_preview_changes_nothing(world: World) -> None:
    world.apply(*AB)
    before = len(world.log)
    told = world.brain.preview(topology(["a", "c"], {"t": ["a", "c"]}))
    assert told["changed"] and told["epoch"] == 2
    assert [s["replica"] for s in told["plan"]["start"]] == ["c#0"]
    same = world.brain.preview(topology(*AB))
    assert (same["changed"], same["epoch"]) == (False, 1)
    world.settle()
    assert len(world.log) == before


def test_messages_from_the_dead_and_nonsense_are_counted(world: World) -> None:
    from blockflow.control.events import Exited, Received

    world.apply(*AB)
    old = world.incarnation("a#0")
    world.die("a#0")
    world.tell(Received(old, Hello("worker", "a#0", old, 1, __version__)))
    world.tell(Exited(9999, 0))
    b = world.incarnation("b#0")
    world.tell(Received(b, Hello("worker", "b#0", b, 1, __version__)))
    assert world.brain.crew.strays == 3


def test_the_clock_drives_nothing_when_all_is_quiet(world: World) -> None:
    world.apply(*AB)
    assert world.brain.deadline() is None
    before = len(world.log)
    world.pass_time(3600)
    assert len(world.log) == before


def test_durations_are_told(world: World) -> None:
    world.hold_ready.add("a#0")
    update = world.apply(*AB)
    world.now += 250 * MS
    world.make_ready("a#0")
    told = update.to_dict(world.now + 5 * S)
    assert told["duration_ms"] == 250.0
    assert told["state"] == "done"

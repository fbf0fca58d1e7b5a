"""The Brain in a virtual world: restarts, closing and reopening of blocks, restore, shutdown."""

from __future__ import annotations

from collections import Counter
from typing import Any

import control_rig
import pytest
from control_rig import AB, TIMING, World, topology

from blockflow.control.events import Commit, Received
from blockflow.control.kpis import KpiBook
from blockflow.control.update import Kind, Phase
from blockflow.control.views import Views
from blockflow.core.errors import BlockError, BlockFlowError, Problem, TopologyError
from blockflow.core.lifecycle import State
from blockflow.core.placement import WorkerSpec
from blockflow.core.specs import TaskSpec
from blockflow.wire.control import Drain, Drained, Routes, Stop, Undrain

world = control_rig.world


def test_restart_replaces_before_it_stops(world: World) -> None:
    world.apply(*AB)
    old = world.incarnation("a#0")
    since = len(world.log)
    update = world.do(lambda now: world.brain.restart("a", now))
    assert update.phase is Phase.DONE
    assert world.names() == ["a#1", "b#0", "dispatcher"]
    assert old not in world.alive
    flips = world.sent(Routes, since)
    (stop,) = world.sent(Stop, since)
    assert world.log.index(flips[-1]) < world.log.index(stop)
    assert world.brain.realm.epoch == 1


def test_a_failed_restart_keeps_the_old_one(world: World) -> None:
    world.apply(*AB)
    world.start_fails["a#1"] = BlockError("LOAD_FAILED", "no")
    update = world.do(lambda now: world.brain.restart("a", now))
    assert update.phase is Phase.FAILED
    assert world.names() == ["a#0", "b#0", "dispatcher"]


def test_restart_of_a_replica_that_dies_meanwhile(world: World) -> None:
    world.apply(*AB)
    world.hold_ready.add("a#1")
    update = world.do(lambda now: world.brain.restart("a", now))
    world.die("a#0")
    world.pass_time(0.5)
    world.make_ready("a#1")
    assert update.phase is Phase.DONE
    assert world.names() == ["a#1", "b#0", "dispatcher"]


def test_drain_and_undrain(world: World) -> None:
    world.apply(*AB)
    update = world.do(lambda now: world.brain.close("a", Kind.DRAIN, now))
    assert update.phase is Phase.DONE and update.notes == []
    assert world.admitted_blocks() == {"b": 1}
    assert world.brain.realm.reasons_not_ready() == ["block a is closed (drain)"]
    assert [s.incarnation for s in world.sent(Drain)] == [world.incarnation("a#0")]
    again = world.do(lambda now: world.brain.close("a", Kind.DRAIN, now))
    assert again.phase is Phase.UNCHANGED
    update = world.do(lambda now: world.brain.close("a", Kind.UNDRAIN, now))
    assert update.phase is Phase.DONE
    assert world.admitted_blocks() == {"a": 1, "b": 1}
    assert len(world.sent(Undrain)) == 1


def test_only_who_serves_is_told_to_drain(world: World) -> None:
    """The block is closed all the same to those that load or wait for their restart."""
    world.apply([{"name": "a", "replicas": 3}], {"t": ["a"]})
    world.hold_ready.add("a#1")
    world.die("a#1")
    world.pass_time(1.0)
    world.die("a#2")
    world.do(lambda now: world.brain.close("a", Kind.DRAIN, now))
    assert [s.incarnation for s in world.sent(Drain)] == [world.incarnation("a#0")]
    world.make_ready("a#1")
    world.pass_time(1.0)
    assert world.names() == ["a#0", "a#1", "a#2", "dispatcher"]
    assert world.admitted_blocks() == {}


@pytest.mark.parametrize("told", [False, True])
def test_a_drain_that_a_manager_began_is_ended_by_the_next(world: World, told: bool) -> None:
    world.apply(*AB)
    world.busy = not told  # the worker was to be told when nothing is in flight
    world.do(lambda now: world.brain.close("a", Kind.DRAIN, now))
    since = len(world.log)  # what the dead one sent last may not have left it
    update = world.succeed()
    world.let_drain()
    assert update.phase is Phase.DONE
    assert [s.incarnation for s in world.sent(Drain, since)] == [world.incarnation("a#0")]
    (life, _) = [r.life for r in world.brain.crew.fleet]
    assert life.state == State.DRAINING
    world.do(lambda now: world.brain.close("a", Kind.UNDRAIN, now))
    assert str(life.state) == State.READY


def test_stop_terminates_until_restart(world: World) -> None:
    world.apply(*AB)
    update = world.do(lambda now: world.brain.close("a", Kind.STOP, now))
    assert update.phase is Phase.DONE and update.notes == []
    assert world.names() == ["b#0", "dispatcher"]
    world.pass_time(60)
    assert world.names() == ["b#0", "dispatcher"]
    with pytest.raises(BlockFlowError) as e:
        world.brain.close("a", Kind.UNDRAIN, world.now)
    assert e.value.code == "INVALID_REQUEST"
    again = world.do(lambda now: world.brain.close("a", Kind.STOP, now))
    assert again.phase is Phase.UNCHANGED
    world.do(lambda now: world.brain.restart("a", now))
    assert world.admitted_blocks() == {"a": 1, "b": 1}
    assert [r.role for r in world.brain.crew.fleet] == ["active", "active"]


def test_an_update_reopens_stopped_and_drained_blocks(world: World) -> None:
    world.apply(["a", "b", "c"], {"t": ["a", "b", "c"]})
    world.do(lambda now: world.brain.close("a", Kind.STOP, now))
    world.do(lambda now: world.brain.close("b", Kind.DRAIN, now))
    update = world.apply(["a", "b", "c"], {"t": ["a", "b", "c"]})
    assert update.phase is Phase.DONE
    assert world.admitted_blocks() == {"a": 1, "b": 1, "c": 1}


def test_stopping_one_of_two_colocated_blocks_keeps_the_worker(world: World) -> None:
    blocks = [{"name": "a", "worker": "w"}, {"name": "b", "worker": "w"}]
    world.apply(blocks, {"t": ["a"], "u": ["b"]})
    update = world.do(lambda now: world.brain.close("a", Kind.STOP, now))
    assert update.phase is Phase.DONE and update.notes
    assert world.admitted_blocks() == {"b": 1}
    assert world.names() == ["dispatcher", "w#0"]
    world.do(lambda now: world.brain.close("b", Kind.STOP, now))
    assert world.names() == ["dispatcher"]


def test_a_stop_that_a_manager_did_not_live_to_end_is_ended_by_the_next_one(world: World) -> None:
    world.apply([*AB[0], "c"], {**AB[1], "u": ["c"]})
    world.busy = True
    update = world.do(lambda now: world.brain.close("b", Kind.STOP, now))
    assert update.phase is Phase.DRAINING
    update = world.succeed()
    assert "b#0" in world.names()  # requests are in flight
    world.let_drain()
    world.pass_time(5)
    assert update.phase is Phase.DONE
    assert world.names() == ["a#0", "c#0", "dispatcher"]
    world.pass_time(60)
    assert world.names() == ["a#0", "c#0", "dispatcher"]
    assert [r.name for r in world.brain.crew.fleet if r.stopped] == ["b#0"]
    world.do(lambda now: world.brain.restart("b", now))
    assert world.admitted_blocks() == {"a": 1, "b": 1, "c": 1}


def test_unknown_block(world: World) -> None:
    world.apply(*AB)
    brain = world.brain
    for operation in (brain.restart, lambda block, now: brain.close(block, Kind.DRAIN, now)):
        with pytest.raises(BlockFlowError) as e:
            operation("aa", world.now)
        assert e.value.code == "UNKNOWN_BLOCK"
        assert "a" in e.value.hint
    with pytest.raises(BlockFlowError) as e:
        brain.restart("head_digit", world.now)
    assert e.value.hint == "deployed: a, b"
    assert brain.runner.settled and not brain.realm.closed


def test_restore_deploys_without_committing(world: World) -> None:
    of_no_digests: dict[str, str] = {}  # a state of an older format
    update = world.brain.restore(topology(*AB), 7, None, world.now, of_no_digests)
    world.settle()
    assert update.phase is Phase.DONE
    assert [start["replica"] for start in update.plan["start"]] == ["a#0", "b#0"]
    assert world.brain.realm.epoch == 7
    assert world.admitted_blocks() == {"a": 1, "b": 1}
    assert not any(isinstance(i, Commit) for i in world.log)
    assert world.apply(*AB).phase is Phase.UNCHANGED


def test_what_runs_in_the_place_of_the_stored_is_meant_once_it_is_applied(world: World) -> None:
    world.brain.restore(topology(*AB), 7, None, world.now, {"a": "gone", "b": "gone"}, ["told"])
    world.settle()
    assert world.brain.realm.notes == ("told",)
    assert world.apply(*AB).phase is Phase.DONE
    assert (world.brain.realm.epoch, world.brain.realm.notes) == (8, ())
    assert world.apply(*AB).phase is Phase.UNCHANGED


def test_an_update_makes_nothing_unready_that_is_served(world: World) -> None:
    """While its routes are on their way the former ones are in force, with workers that live."""
    world.apply(*AB)
    realm = world.brain.realm
    world.mute.add("dispatcher")
    restart = world.do(lambda now: world.brain.restart("a", now))
    assert restart.phase is Phase.PUBLISHING and realm.publication.flipped < realm.version
    assert realm.reasons_not_ready() == []
    assert Views(world.brain, KpiBook(), {}, world.now).state() == "ready"
    world.die("a#0")
    assert realm.reasons_not_ready() == ["the routes are being published"]
    world.flip()
    assert restart.phase is Phase.DONE and realm.reasons_not_ready() == []


@pytest.mark.parametrize(
    "target",
    [
        pytest.param((["a", "b", "c"], {"t": ["a", "b"], "u": ["a", "c"]}), id="new block"),
        pytest.param((["a", "b"], {"t": ["a", "b"], "u": ["a"]}), id="new task"),
    ],
)
def test_what_is_new_is_ready_when_requests_are_admitted(world: World, target: Any) -> None:
    world.apply(*AB)
    world.mute.add("dispatcher")
    update = world.apply(*target)
    assert update.phase is Phase.PUBLISHING
    assert world.brain.realm.reasons_not_ready() == ["the routes are being published"]
    world.flip()
    assert update.phase is Phase.DONE
    assert world.brain.realm.reasons_not_ready() == []


def test_restore_serves_what_it_can(world: World) -> None:
    world.start_fails["b#0"] = BlockError("DIGEST_MISMATCH", "altered")
    update = world.brain.restore(topology(*AB), 7, None, world.now)
    world.settle()
    assert update.phase is Phase.DONE and "b#0" in update.notes[0]
    assert world.admitted_blocks() == {"a": 1}
    assert any("block b" in r for r in world.brain.realm.reasons_not_ready())


def test_a_restore_that_does_not_fit_waits_for_an_update(world: World) -> None:
    gone = Problem("$.blocks[1]", "UNKNOWN_BLOCK: no block 'b'", "export it")
    error = TopologyError("INVALID_TOPOLOGY", "1 problem", problems=[gone])
    update = world.brain.restore_failed(7, error, world.now)
    assert update.phase is Phase.FAILED
    assert world.brain.realm.reasons_not_ready() == [
        "the stored topology (epoch 7) cannot be deployed: INVALID_TOPOLOGY: 1 problem",
        "$.blocks[1]: UNKNOWN_BLOCK: no block 'b' -- export it",
        "no topology is in force: post a system update",
    ]
    assert Views(world.brain, KpiBook(), {}, world.now).state() == "degraded"
    with pytest.raises(BlockFlowError) as e:
        world.brain.restart("a", world.now)
    assert e.value.hint == "deployed: none"
    assert world.apply(*AB).phase is Phase.DONE
    assert Views(world.brain, KpiBook(), {}, world.now).state() == "ready"
    assert world.brain.realm.epoch == 8 and world.brain.realm.reasons_not_ready() == []


def test_no_update_gets_the_number_of_another_one(world: World) -> None:
    """Nor does one of a Manager that follows on a dead one."""
    first = world.apply(*AB).update_id
    second = world.do(lambda now: world.brain.restart("a", now)).update_id
    third = world.succeed().update_id
    assert first < second < third
    assert list(world.brain.runner.updates) == [third]


def test_shutdown_drains_then_stops_all(world: World) -> None:
    world.apply(*AB)
    world.busy = True
    world.brain.shutdown(world.now)
    world.settle()
    world.pass_time(TIMING.grace - 0.1)
    assert world.names() == ["a#0", "b#0", "dispatcher"]
    world.pass_time(0.1)
    assert world.gone
    assert world.names() == []


def test_what_the_old_routes_end_with_is_not_the_end_of_all(world: World) -> None:
    """Shut down in mid-update: requests are in flight on the new routes still."""
    world.apply(*AB)
    world.busy = True
    world.apply(["a", "c"], {"t": ["a", "c"]})
    since = len(world.log)
    world.brain.shutdown(world.now)
    world.settle()
    world.let_drain()
    a = world.incarnation("a#0")
    world.tell(Received(a, Drained(a)))  # a worker knows of its own requests alone
    assert world.sent(Stop, since) == []
    dispatcher = world.incarnation("dispatcher")
    world.tell(Received(dispatcher, Drained(dispatcher)))  # now nothing is
    assert len(world.sent(Stop, since)) == 4
    assert world.gone


def test_shutdown_where_nobody_is_left_ends_at_once(world: World) -> None:
    world.die("dispatcher")
    world.brain.shutdown(world.now)
    world.settle()
    assert world.gone


def test_shutdown_in_mid_update_and_mid_restart(world: World) -> None:
    world.apply(*AB)
    world.hold_ready.add("c#0")
    update = world.apply(["a", "c"], {"t": ["a", "c"]})
    world.die("a#0")
    world.brain.shutdown(world.now)
    world.settle()
    assert update.phase is Phase.FAILED
    assert world.gone
    assert world.names() == []
    with pytest.raises(BlockFlowError) as e:
        world.apply(*AB)
    assert e.value.code == "NOT_RUNNING"


def test_documents_of_many_blocks_look_at_each_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of hundreds of blocks and thousands of tasks, which the Manager's thread tells of."""
    n = 60
    names = [f"b{i}" for i in range(n)]
    blocks = [{"name": name, "worker": f"w{i % 3}"} for i, name in enumerate(names)]
    world.apply(blocks, {f"t{name}": [name] for name in names} | {"all": [names[0], names[-1]]})
    looks: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def look(it: Any) -> Any:
            looks[name] += 1
            return real.fget(it)

        monkeypatch.setattr(owner, name, property(look))

    counted(WorkerSpec, "blocks")
    counted(TaskSpec, "paths")
    views = Views(world.brain, KpiBook(), {}, world.now)
    found = {b["name"]: b for b in views.blocks()}
    assert found["b0"]["tasks"] == ["tb0", "all"] and found["b1"]["tasks"] == ["tb1"]
    assert [b["workers"] for b in found.values()] == [[f"w{i % 3}#0"] for i in range(n)]
    assert all(t["available"] for t in views.tasks()) and views.health()["ready"]
    assert looks["blocks"] <= 4 * 3 and looks["paths"] <= 4 * (n + 1)

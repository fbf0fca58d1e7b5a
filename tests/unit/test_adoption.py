"""What a Manager does that follows on a dead one: pure, in the virtual world."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from control_rig import Counter, World, info

from blockflow.control.adoption import plan_adoption, running_lookup, spec_of
from blockflow.control.events import Kill, Launch, Send
from blockflow.control.fleet import Role
from blockflow.control.journal import Journal, JournalFile
from blockflow.control.settings import ControlSettings
from blockflow.control.stewardship import inherit
from blockflow.control.store import CURRENT, StateStore
from blockflow.control.update import Kind, Phase
from blockflow.core.errors import RepositoryError
from blockflow.core.lifecycle import State
from blockflow.core.model import BlockInfo
from blockflow.core.placement import desired_workers
from blockflow.launch.ward import Ward
from blockflow.wire.control import PeerGone, Routes, SetPolicy, Stop

AB = {"t": ["a", "b"]}
AC = {"t": ["a", "c"]}


@pytest.fixture
def world() -> World:
    made = World().up()
    made.apply(["a", "b"], AB)
    return made


def lives(world: World) -> dict[str, int]:
    return {life.name: life.incarnation for life in world.brain.crew.lives()}


def test_who_serves_serves_on(world: World) -> None:
    before, version = lives(world), world.brain.realm.version
    since = len(world.log)
    update = world.succeed()
    assert (update.kind, update.phase) == (Kind.READOPTION, Phase.DONE)
    assert lives(world) == before
    assert not any(isinstance(i, Launch | Kill) for i in world.log[since:])
    assert world.brain.realm.version > version
    assert world.brain.realm.epoch == 1 and world.brain.realm.reasons_not_ready() == []
    # and again, as often as it may be
    world.succeed()
    assert lives(world) == before and world.brain.realm.reasons_not_ready() == []


def test_after_it_everything_goes_its_ordinary_way(world: World) -> None:
    world.succeed()
    old = world.incarnation("b#0")
    world.die("b#0")
    world.pass_time(1.0)
    assert world.incarnation("b#0") > old
    assert world.apply(["a", "c"], AC).phase is Phase.DONE
    assert world.names() == ["a#0", "c#0", "dispatcher"]
    assert world.brain.realm.epoch == 2


def test_who_died_meanwhile_is_told_and_replaced(world: World) -> None:
    dead, since = world.incarnation("b#0"), len(world.log)
    world.succeed(killed=["b#0"])
    told = {s.incarnation for s in world.sent(PeerGone, since)}
    assert {world.incarnation("a#0"), world.incarnation("dispatcher")} <= told
    world.pass_time(1.0)
    assert world.incarnation("b#0") > dead
    assert world.brain.realm.reasons_not_ready() == []


def test_a_dispatcher_that_died_meanwhile_comes_back_on_its_addresses(world: World) -> None:
    since = len(world.log)
    world.succeed(killed=["dispatcher"])
    world.pass_time(1.0)
    (launch,) = [i for i in world.log[since:] if isinstance(i, Launch)]
    assert launch.spec["client_endpoints"] == ["tcp://127.0.0.1:5755"]
    assert world.brain.realm.reasons_not_ready() == []


def test_everybody_died_meanwhile(world: World) -> None:
    world.succeed(killed=["a#0", "b#0", "dispatcher"])
    world.pass_time(2.0)
    assert world.names() == ["a#0", "b#0", "dispatcher"]
    assert world.brain.realm.reasons_not_ready() == []


def test_what_belongs_to_an_uncommitted_update_is_ended(world: World) -> None:
    before = lives(world)
    world.hold_ready.add("c#0")
    assert world.apply(["a", "c"], AC).phase is Phase.PREPARING
    world.succeed()
    assert lives(world) == before
    assert world.names() == ["a#0", "b#0", "dispatcher"]
    assert world.admitted_blocks() == {"a": 1, "b": 1} and world.brain.realm.epoch == 1


def test_ready_workers_of_an_uncommitted_update_are_ended_too(world: World) -> None:
    world.hold_ready.add("d#0")
    world.apply(["c", "d"], {"t": ["c", "d"]})
    assert world.brain.crew.fleet.replicas[2].life.state is State.READY
    world.succeed()
    assert world.names() == ["a#0", "b#0", "dispatcher"]


def test_a_committed_update_is_carried_through(world: World) -> None:
    """Killed between the disk and the first routes: the journal still says the old epoch."""
    world.hold_ready.add("c#0")
    update = world.apply(["a", "c"], AC)
    world.make_ready_quietly("c#0")
    journal = world.journal()
    world.stored = (2, update.target)
    world.busy = True
    again = world.succeed(journal=journal)
    assert world.brain.realm.epoch == 2
    assert world.admitted_blocks() == {"a": 1, "c": 1}
    # What requests in flight may still visit stays until they have ended.
    assert again.phase is Phase.DRAINING and "b#0" in world.names()
    world.let_drain()
    assert again.phase is Phase.DONE and world.names() == ["a#0", "c#0", "dispatcher"]


def test_workers_that_retire_do_so_in_order(world: World) -> None:
    world.busy = True
    assert world.apply(["a", "c"], AC).phase is Phase.DRAINING
    update = world.succeed()
    assert update.phase is Phase.DRAINING
    assert world.names() == ["a#0", "b#0", "c#0", "dispatcher"]
    assert world.admitted_blocks() == {"a": 1, "c": 1}
    world.let_drain()
    assert update.phase is Phase.DONE and world.names() == ["a#0", "c#0", "dispatcher"]


def test_who_had_been_told_to_stop_is_told_again(world: World) -> None:
    world.apply(["a", "c"], AC)
    (replica,) = [r for r in world.brain.crew.fleet if r.name == "c#0"]
    world.brain.crew.stop(replica.life, world.now)
    world.brain.take()  # it has not been carried out
    replica.role = Role.RETIRING
    since = len(world.log)
    world.succeed()
    assert len(world.sent(Stop, since)) == 1


def test_a_worker_that_was_starting_is_started_again(world: World) -> None:
    world.hold_ready.add("b#0")
    world.die("b#0")
    world.pass_time(0.2)
    young = world.incarnation("b#0")
    world.hold_ready.clear()
    world.succeed()
    world.pass_time(1.0)
    assert world.incarnation("b#0") > young
    assert world.brain.realm.reasons_not_ready() == []


@pytest.mark.parametrize("name", ["b#0", "dispatcher"])
def test_a_pause_before_a_restart_is_not_forgotten(world: World, name: str) -> None:
    world.die(name)
    world.succeed()
    world.pass_time(1.0)
    assert world.brain.realm.reasons_not_ready() == []


def test_what_was_given_up_stays_so(world: World) -> None:
    for _ in range(5):
        world.die("b#0")
        world.pass_time(3.0)
    assert world.brain.crew.fleet.replicas[1].given_up
    world.succeed()
    world.pass_time(60.0)
    assert world.brain.crew.fleet.replicas[1].given_up
    assert world.names() == ["a#0", "dispatcher"]


@pytest.mark.parametrize(("kind", "names"), [(Kind.DRAIN, ["a#0", "b#0"]), (Kind.STOP, ["a#0"])])
def test_what_an_operator_closed_stays_closed(world: World, kind: Kind, names: list[str]) -> None:
    world.do(lambda now: world.brain.close("b", kind, now))
    world.succeed()
    world.pass_time(5.0)
    assert world.names() == [*names, "dispatcher"]
    assert world.brain.realm.closed == {"b": str(kind)}
    assert world.admitted_blocks() == {"a": 1}
    if kind is Kind.DRAIN:
        world.do(lambda now: world.brain.close("b", Kind.UNDRAIN, now))
    else:
        world.do(lambda now: world.brain.restart("b", now))
    world.pass_time(1.0)
    assert world.admitted_blocks() == {"a": 1, "b": 1}


def test_of_twins_the_one_that_serves_is_kept(world: World) -> None:
    """A restart was under way: the old worker and the new one are what the epoch asks for."""
    old = world.incarnation("b#0")
    world.hold_ready.add("b#1")
    world.do(lambda now: world.brain.restart("b", now))
    world.succeed()
    assert world.names() == ["a#0", "b#0", "dispatcher"] and world.incarnation("b#0") == old


def test_after_a_restart_its_new_worker_is_kept(world: World) -> None:
    world.busy = True
    world.do(lambda now: world.brain.restart("b", now))
    new = world.incarnation("b#1")
    world.succeed()
    world.let_drain()
    assert world.names() == ["a#0", "b#1", "dispatcher"] and world.incarnation("b#1") == new


def test_policies_of_a_committed_update_are_sent(world: World) -> None:
    journal = world.journal()
    policy = {"policy": "window", "max_rows": 4}
    world.apply([{"name": "a", "batching": policy}, "b"], AB)
    since = len(world.log)
    world.succeed(journal=journal)
    sent = {s.incarnation: s.message for s in world.sent(SetPolicy, since)}
    assert sent[world.incarnation("a#0")].policy == policy
    # The others, too: what a Manager has noted as told may have died with it on the way.
    assert sent[world.incarnation("b#0")].policy == {"policy": "none"}


def test_before_the_first_update_there_is_the_dispatcher() -> None:
    world = World().up()
    before = lives(world)
    assert world.succeed().phase is Phase.DONE
    assert lives(world) == before
    assert world.apply(["a"], {"t": ["a"]}).phase is Phase.DONE


def test_requests_in_flight_keep_the_index_of_their_share() -> None:
    world = World().up()
    world.apply(["a", "b"], {"t": ["a"], "u": ["b"]})
    world.apply(["a", "b"], {"u": ["b"]})
    before = world.brain.realm.shares.index("u")
    world.succeed()
    assert before == 2 == world.brain.realm.shares.index("u")


def test_routes_go_to_the_workers_before_the_dispatcher(world: World) -> None:
    since = len(world.log)
    world.succeed()
    order = [s.incarnation for s in world.sent(Routes, since)]
    assert order[-1] == world.incarnation("dispatcher") and len(order) == 3


def test_the_dead_are_mourned_before_new_routes_are_sent(world: World) -> None:
    since = len(world.log)
    world.succeed(killed=["b#0"])
    kinds = [type(i.message) for i in world.log[since:] if isinstance(i, Send)]
    assert kinds.index(PeerGone) < kinds.index(Routes)


# --- numbers --------------------------------------------------------------------------------------


class Torn(Counter):
    """Numbers of a real store, whose current state is torn whenever a Manager dies."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._store = StateStore(root)

    def take_incarnation(self) -> int:
        return self._store.take_incarnation()

    def take_stage(self) -> int:
        return self._store.take_stage()

    def epoch_after(self, epoch: int) -> int:
        return self._store.epoch_after(epoch)

    def succeed(self, journal: Journal) -> None:
        self._store.close()
        (self._store.root / CURRENT).write_bytes(b"torn")
        self._store = StateStore(self._store.root)
        self._store.skip(**journal.highest())

    def close(self) -> None:
        self._store.close()


def test_no_number_is_given_twice_though_the_state_is_torn(tmp_path: Path) -> None:
    numbers = Torn(tmp_path)
    world = World(numbers=numbers).up()
    world.apply(["a", "b"], AB)
    first = world.stored
    for tasks in (AC, AB, AC):
        world.succeed(killed=["a#0"])
        world.pass_time(1.0)
        world.apply(["a", *tasks["t"][1:]], tasks)
    launches = [i for i in world.log if isinstance(i, Launch)]
    stages = [s["stage"] for i in launches for s in i.spec.get("stages", ())]
    incarnations = [i.incarnation for i in launches]
    assert len(stages) == 8 and stages == sorted(set(stages))
    assert len(incarnations) == 9 and incarnations == sorted(set(incarnations))
    # The last update is lost with the state: what it was called is not used again.
    assert world.brain.realm.epoch == 4
    world.stored = first
    world.succeed()
    assert world.brain.realm.epoch == 1
    world.apply(["a", "b", "d"], {**AB, "u": ["d"]})
    assert world.brain.realm.epoch == 5
    numbers.close()


def test_what_runs_has_its_numbers_whatever_the_state_says(world: World, tmp_path: Path) -> None:
    """The folder was put back from an old backup while nobody was there."""
    high = replace(world.journal(), epoch=7)
    life = replace(high.seats[0].life, incarnation=90_000, stages={"a": 80_000})
    high = replace(high, seats=(replace(high.seats[0], life=life),))
    JournalFile(tmp_path).write(json.dumps(asdict(high)))
    settings = ControlSettings(repository=tmp_path, state_dir=tmp_path / "state")
    with StateStore(settings.state_dir) as store:
        inherit(settings, store, cast(Ward, SimpleNamespace(run_dir=tmp_path)))
        assert store.take_incarnation() == 90_001
        assert store.take_stage() == 80_001
        assert store.epoch_after(store.state.epoch) == 8


def test_where_no_state_is_left_who_serves_serves_on_until_an_update(world: World) -> None:
    """The state directory was removed, and then the Manager died."""
    before, since = lives(world), len(world.log)
    world.stored = (0, None)
    for _ in range(2):  # and the next Manager as well
        update = world.succeed()
        assert update.phase is Phase.FAILED and update.error is not None
        assert update.error.code == "STATE_UNUSABLE"
        assert lives(world) == before and world.brain.realm.epoch == 1
        assert not any(isinstance(i, Launch | Kill) for i in world.log[since:])
        assert world.sent(Stop, since) == []
        assert any("STATE_UNUSABLE" in r for r in world.brain.realm.reasons_not_ready())
    done = world.apply(["a", "b"], AB)
    assert done.phase is Phase.DONE and done.epoch == 2
    assert world.names() == ["a#1", "b#1", "dispatcher"]
    assert lives(world)["dispatcher"] == before["dispatcher"]
    assert world.brain.realm.reasons_not_ready() == []


# --- the decisions alone --------------------------------------------------------------------------


def test_another_artifact_is_another_worker(world: World) -> None:
    world.hold_ready.add("b#1")
    update = world.apply(["a", "b"], AB, digests={"b": "other"})
    assert update.target is not None
    plan = plan_adoption(world.journal(), 2, desired_workers(update.target, (0, 1)))
    assert [s.name for s, _ in plan.keep] == ["a#0"]
    assert [s.name for s in plan.retire] == ["b#0"] and [s.name for s in plan.end] == ["b#1"]
    assert [s.replica for s in plan.start] == ["b#2"]


def test_of_replicas_the_oldest_are_kept(world: World) -> None:
    world.apply([{"name": "a", "replicas": 2}, "b"], AB)
    assert world.brain.realm.topology is not None
    _, one = 1, World().up()
    one.apply(["a", "b"], AB)
    assert one.brain.realm.topology is not None
    plan = plan_adoption(world.journal(), 3, desired_workers(one.brain.realm.topology, (0, 1)))
    assert [s.name for s, _ in plan.keep] == ["a#0", "b#0"]
    assert [s.name for s in plan.retire] == ["a#1"]


def test_a_birth_certificate_says_what_a_worker_is(world: World) -> None:
    seat = world.journal().seats[0]
    spec, real = spec_of(seat), world.brain.crew.fleet.replicas[0].spec
    assert (spec.name, spec.blocks, spec.mode, spec.slots) == (
        real.name,
        real.blocks,
        real.mode,
        real.slots,
    )
    assert spec.stages[0].info == real.stages[0].info


def test_what_runs_is_found_where_it_runs(world: World) -> None:
    journal = world.journal()

    def stored(name: str) -> BlockInfo:
        if name == "b":
            raise RepositoryError("UNKNOWN_BLOCK", "gone")
        return info(name, "newer")

    lookup = running_lookup(journal, {"a": "a-digest", "b": "b-digest", "c": "c-digest"}, stored)
    assert lookup("a").digest == "a-digest" and lookup("b").digest == "b-digest"
    assert lookup("c").digest == "newer"


def test_an_empty_journal_means_that_all_is_started(world: World) -> None:
    assert world.brain.realm.topology is not None
    empty = Journal(1, 7, 4.0, {}, ("tcp://127.0.0.1:1",), {}, (), (), None, None, ())
    plan = plan_adoption(empty, 1, desired_workers(world.brain.realm.topology, (0, 1)))
    assert [s.replica for s in plan.start] == ["a#0", "b#0"]
    assert plan.keep == plan.retire == plan.end == ()

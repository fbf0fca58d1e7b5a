"""Threads over the whole system: who is launched with how many, and who is told when."""

from __future__ import annotations

from typing import Any

import pytest
from control_rig import World, topology

from blockflow import __version__
from blockflow.batching.registry import with_overlap
from blockflow.control.events import Launch, Received, Send
from blockflow.control.kpis import KpiBook
from blockflow.control.update import Kind, Phase
from blockflow.control.views import Views
from blockflow.core.errors import BlockError, TopologyError
from blockflow.core.placement import WorkerSpec
from blockflow.wire.control import Hello, Routes, RoutesApplied, SetThreads, Stats


@pytest.fixture
def world() -> World:
    return World(cores=4).up()


def apply(world: World, *blocks: Any, **more: Any) -> Any:
    names = [b if isinstance(b, str) else b["name"] for b in blocks]
    return world.apply(blocks, {f"t-{n}": [n] for n in names}, **more)


def told(world: World, since: int = 0) -> list[tuple[str, int]]:
    """SetThreads messages, in order."""
    names = {i.incarnation: i.name for i in world.log if isinstance(i, Launch)}
    return [
        (names[s.incarnation], s.message.threads)
        for s in world.sent(SetThreads, since)
        if isinstance(s.message, SetThreads)
    ]


def test_the_first_workers_are_launched_with_the_plan(world: World) -> None:
    update = apply(world, "a", "b", {"name": "c", "threads": 1})
    assert world.computing() == {"a#0": 2, "b#0": 1, "c#0": 1}
    assert update.plan["threads"] == {"a": 2, "b": 1, "c": 1}
    assert told(world) == []


def test_an_added_worker_restarts_nobody_and_the_others_make_room(world: World) -> None:
    apply(world, "a", "b")
    before = dict(world.alive)
    at = len(world.log)
    update = apply(world, "a", "b", "c", "d")
    assert update.plan["keep"] == ["a#0", "b#0"]
    assert {i: o for i, o in world.alive.items() if i in before} == before
    assert world.computing() == dict.fromkeys(["a#0", "b#0", "c#0", "d#0"], 1)
    assert told(world, at) == [("a#0", 1), ("b#0", 1)]


def test_what_changes_no_seat_and_no_life_makes_nobody_count(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a death each of hundreds acknowledges its new routes."""
    apply(world, "a", "b")
    with monkeypatch.context() as patched:
        patched.setattr(WorkerSpec, "demand", None)
        i = world.incarnation("a#0")
        world.tell(Received(i, RoutesApplied(i, world.brain.realm.version)))
    world.die("a#0")
    world.pass_time(1)
    assert world.computing() == {"a#0": 2, "b#0": 2}


def test_who_shrinks_is_told_before_the_new_ones_get_work(world: World) -> None:
    apply(world, "a")
    at = len(world.log)
    apply(world, "a", "b")
    kinds = [type(i.message) for i in world.log[at:] if isinstance(i, Send)]
    assert kinds.index(SetThreads) < kinds.index(Routes)


def test_who_shrinks_is_told_first_whatever_was_heard_before_the_epoch_was_stored(
    world: World,
) -> None:
    apply(world, "a", "b")
    at, brain = len(world.log), world.brain
    wanted = topology([{"name": "a", "threads": 3}, "b"], {"t-a": ["a"], "t-b": ["b"]})
    brain.apply(wanted, {}, world.now)
    i = world.incarnation("a#0")
    brain.handle(Received(i, RoutesApplied(i, brain.realm.version)), world.now)
    world.settle()
    kinds = [type(i.message) for i in world.log[at:] if isinstance(i, Send)]
    assert kinds.index(SetThreads) < kinds.index(Routes)
    assert told(world, at) == [("b#0", 1), ("a#0", 3)]


def test_two_generations_of_a_worker_are_planned_apart(world: World) -> None:
    apply(world, {"name": "a", "threads": 1})
    world.busy = True
    apply(world, {"name": "a", "threads": 3}, digests={"a": "new"})
    assert world.computing() == {"a#0": 1, "a#1": 3}


def test_a_further_replica_is_launched_with_what_it_will_keep(world: World) -> None:
    apply(world, "a")
    at = len(world.log)
    apply(world, {"name": "a", "replicas": 2})
    assert [i.spec["threads"] for i in world.log[at:] if isinstance(i, Launch)] == [2]
    world.busy = True
    apply(world, "a")
    assert world.computing() == {"a#0": 2, "a#1": 2}  # one of them is left of those that retire


@pytest.mark.parametrize("lives", [True, False])
def test_who_could_not_hear_how_many_it_has_learns_it(world: World, lives: bool) -> None:
    """By its Hello, or its successor by its birth."""
    apply(world, "a", "b")
    world.mute.add("a#0")
    world.die("a#0")
    world.pass_time(1)
    i = world.incarnation("a#0")
    apply(world, "a", "b", "c", "d")
    assert world.computing()["a#0"] == 2
    world.mute.clear()
    if lives:
        world.tell(Received(i, Hello("worker", "a#0", i, 1, __version__)))
    else:
        world.die("a#0")
        world.pass_time(1)
        assert world.alive[world.incarnation("a#0")].spec["threads"] == 1
    assert world.computing()["a#0"] == 1


def test_while_the_new_ones_load_the_old_keep_theirs(world: World) -> None:
    apply(world, "a")
    world.hold_ready.add("b#0")
    at = len(world.log)
    apply(world, "a", "b")
    assert world.computing() == {"a#0": 4, "b#0": 2}
    world.make_ready("b#0")
    assert told(world, at) == [("a#0", 2)]


def test_what_the_old_ones_leave_is_given_out_when_they_are_gone(world: World) -> None:
    apply(world, "a", "b")
    at = len(world.log)
    world.busy = True  # requests on the old routes are in flight
    update = apply(world, "a")
    assert update.phase is Phase.DRAINING
    assert told(world, at) == []
    world.let_drain()
    assert update.phase is Phase.DONE
    assert told(world, at) == [("a#0", 4)]


def test_what_was_asked_for_waits_for_the_cores_of_the_old_ones(world: World) -> None:
    apply(world, *({"name": name, "threads": 1} for name in "abc"))
    world.busy = True
    at = len(world.log)
    apply(world, {"name": "a", "threads": 3}, {"name": "b", "threads": 1})
    assert "c#0" in world.names() and told(world, at) == []
    world.let_drain()
    assert told(world, at) == [("a#0", 3)]


def test_lanes_count_with_the_threads_of_each(world: World) -> None:
    def pair(threads: int, lanes: int) -> list[Any]:
        return [{"name": n, "worker": "w", "threads": threads, "lanes": lanes} for n in "ab"]

    def shares(since: int) -> list[tuple[int, int]]:
        messages = [s.message for s in world.sent(SetThreads, since)]
        return [(m.threads, m.lanes) for m in messages if isinstance(m, SetThreads)]

    for before, after, grows in (((1, 1), (1, 2), True), ((1, 2), (2, 1), False)):
        world.busy = False
        apply(world, *pair(*before), {"name": "d", "threads": 1})
        world.busy, at = True, len(world.log)
        assert apply(world, *pair(*after)).phase is Phase.DRAINING
        assert shares(at) == ([] if grows else [after])
        world.let_drain()
        assert shares(at) == [after]


def test_two_generations_share_the_cores(world: World) -> None:
    apply(world, "a", digests={"a": "old"})
    assert world.computing() == {"a#0": 4}
    world.busy = True
    apply(world, "a", digests={"a": "new"})
    assert world.computing() == {"a#0": 2, "a#1": 2}
    world.let_drain()
    assert world.computing() == {"a#1": 4}


def test_a_failed_update_changes_nothing(world: World) -> None:
    apply(world, "a", "b")
    world.start_fails["c#0"] = BlockError("LOAD_FAILED", "no")
    at = len(world.log)
    assert apply(world, "a", "b", "c").phase is Phase.FAILED
    assert world.computing() == {"a#0": 2, "b#0": 2}
    assert told(world, at) == []


def test_replicas_count_and_have_one_number(world: World) -> None:
    apply(world, "a", "b")
    apply(world, {"name": "a", "replicas": 2}, "b")
    assert world.computing() == {"a#0": 1, "a#1": 1, "b#0": 2}
    apply(world, "a", "b")
    assert world.computing() == {"a#0": 2, "b#0": 2}


def test_crashes_drains_and_stops_change_nobody_elses_threads(world: World) -> None:
    apply(world, "a", "b")
    at = len(world.log)
    world.die("a#0")
    assert world.computing() == {"b#0": 2}
    world.pass_time(1)
    assert world.computing() == {"a#0": 2, "b#0": 2}
    for kind in (Kind.DRAIN, Kind.UNDRAIN, Kind.STOP):
        world.do(lambda now, kind=kind: world.brain.close("b", kind, now))
    assert world.computing() == {"a#0": 2}
    assert told(world, at) == []


def test_a_restart_of_a_block_ends_with_the_same_threads(world: World) -> None:
    apply(world, "a", "b")
    world.do(lambda now: world.brain.restart("a", now))
    assert world.computing() == {"a#1": 2, "b#0": 2}


def test_a_change_that_a_dead_worker_missed_is_its_successors(world: World) -> None:
    apply(world, "a", "b")
    world.die("a#0")
    apply(world, {"name": "a", "threads": 1}, {"name": "b", "threads": 3})
    world.pass_time(1)
    assert world.computing() == {"a#0": 1, "b#0": 3}


def test_who_is_loading_is_told_once_it_listens(world: World) -> None:
    apply(world, "a")
    world.mute.add("a#0")
    world.die("a#0")
    world.pass_time(1)  # the successor runs and has not said Hello
    silent = world.incarnation("a#0")
    world.mute.clear()
    apply(world, "a", "b")
    assert world.threads[silent] == 4
    world.pass_time(60)  # it is replaced: its start took too long
    assert world.computing() == {"a#0": 2, "b#0": 2}


def test_asked_threads_change_in_the_running_process(world: World) -> None:
    apply(world, "a", "b")
    before = set(world.alive)
    update = apply(world, {"name": "a", "threads": 3}, "b")
    assert update.phase is Phase.DONE
    assert set(world.alive) == before
    assert world.computing() == {"a#0": 3, "b#0": 1}
    apply(world, "a", "b")
    assert set(world.alive) == before
    assert world.computing() == {"a#0": 2, "b#0": 2}


PAIR = [{"name": n, "worker": "w"} for n in "ab"]


def in_lanes(count: int) -> list[dict[str, Any]]:
    return [{**b, "lanes": count} for b in PAIR]


def shares(world: World) -> dict[str, tuple[int, int]]:
    """Living worker -> threads and lanes that it was told last."""
    found = {
        i.name: (i.spec["threads"], i.spec["lanes"])
        for i in world.log
        if isinstance(i, Launch) and i.name in world.names() and "lanes" in i.spec
    }
    names = {i.incarnation: i.name for i in world.log if isinstance(i, Launch)}
    for send in world.sent(SetThreads):
        if isinstance(send.message, SetThreads) and names[send.incarnation] in found:
            found[names[send.incarnation]] = (send.message.threads, send.message.lanes)
    return found


def test_lanes_are_planned_with_the_threads_and_change_in_the_running_process(
    world: World,
) -> None:
    update = apply(world, *in_lanes(2))
    assert (update.plan["threads"], update.plan["lanes"]) == ({"w": 2}, {"w": 2})
    assert shares(world) == {"w#0": (2, 2)}
    before = set(world.alive)
    apply(world, *in_lanes(1))
    assert shares(world) == {"w#0": (4, 1)}
    apply(world, *in_lanes(2), "c", "d")
    assert shares(world) == {"w#0": (1, 2), "c#0": (1, 1), "d#0": (1, 1)}
    assert before <= set(world.alive)
    # A successor starts with what its predecessor was told.
    world.die("w#0")
    world.pass_time(1)
    assert shares(world)["w#0"] == (1, 2)


def test_a_policy_that_overlaps_gets_the_cores_that_are_left(world: World) -> None:
    def post(policy: Any, threads: Any) -> tuple[int, int]:
        blocks = [{**b, "batching": policy, "threads": threads} for b in PAIR]
        made = with_overlap(topology(blocks, {"t": ["a", "b"]}))
        world.do(lambda now: world.brain.apply(made, {}, now))
        return shares(world)["w#0"]

    assert post("dvabatch", 1) == (1, 2)
    before = set(world.alive)
    assert post({"policy": "dvabatch", "buffer_pairs": 1}, 1) == (1, 1)
    assert post({"policy": "dvabatch", "buffer_pairs": 4}, 2) == (2, 2)
    assert post("dvabatch", "auto") == (4, 1)
    assert post("window", 1) == (1, 1)
    assert set(world.alive) == before


def test_lanes_that_do_not_fit_are_refused(world: World) -> None:
    with pytest.raises(TopologyError) as caught:
        apply(world, *[{**b, "threads": 3, "lanes": 2} for b in PAIR])
    (problem,) = caught.value.problems
    assert problem.path == "$.blocks[0].threads"
    assert "3 threads x 1 x 2 lanes of 'w': 6 threads may compute at once on 4" in problem.message
    with pytest.raises(TopologyError) as caught:
        apply(world, *[{**b, "lanes": 2, "cores": [1]} for b in PAIR])
    assert [p.path for p in caught.value.problems] == ["$.blocks[0].lanes"]
    for wrong, path in (
        ([{"name": "a", "lanes": 2}], "$.blocks[0].lanes"),  # one block runs one batch at a time
        ([{"name": "a", "lanes": 0}], "$.blocks[0].lanes"),
        ([{**b, "lanes": 2, "device": "cuda:0"} for b in PAIR], "$.blocks[0].lanes"),
        ([{**PAIR[0], "lanes": 2}, PAIR[1]], "$.blocks[1].lanes"),
    ):
        with pytest.raises(TopologyError) as caught:
            apply(world, *wrong)
        assert [p.path for p in caught.value.problems] == [path]


def test_too_many_are_refused_unless_they_are_meant(world: World) -> None:
    crowd = [{"name": "a", "threads": 4}, {"name": "b", "threads": 4}]
    with pytest.raises(TopologyError) as caught:
        apply(world, *crowd)
    paths = [p.path for p in caught.value.problems]
    assert paths == ["$.blocks[0].threads", "$.blocks[1].threads"]
    update = apply(world, *crowd, oversubscribe=True)
    note = "oversubscribed: 8 threads may compute at once on 4 cores; asked for by a, b"
    assert update.notes == [note]
    views = Views(world.brain, KpiBook(), {}, world.now)
    assert views.warnings("", "torn") == ["torn", note]
    apply(world, "a", "b")
    assert views.warnings() == []


def test_a_restored_topology_is_planned_as_well(world: World) -> None:
    apply(world, "a", "b")
    topology = world.brain.realm.topology
    assert topology is not None
    again = World(cores=4).up()
    again.do(lambda now: again.brain.restore(topology, 1, None, now))
    assert again.computing() == {"a#0": 2, "b#0": 2}


def test_views_show_what_was_asked_told_and_is_in_use(world: World) -> None:
    apply(world, {"name": "a", "threads": 3}, "b")
    book = KpiBook()
    incarnation = world.incarnation("a#0")
    figures = {"threads": 2, "lanes": 1}
    book.add(incarnation, "a#0", Stats(incarnation, 1, [], {}, figures), 0.0)
    found = {w["name"]: w for w in Views(world.brain, book, {}, world.now).workers()}

    def shown(name: str, what: str = "threads") -> list[Any]:
        return [found[name][k] for k in (f"{what}_asked", what, f"{what}_now")]

    assert shown("a#0") == [3, 3, 2]
    assert shown("b#0") == ["auto", 1, None]
    assert shown("a#0", "lanes") == ["auto", 1, 1]
    assert shown("b#0", "lanes") == ["auto", 1, None]

"""What is told of a system in each of its states; all of it fits the served document."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_rig import AB, MS, S, World, topology

from blockflow.control.crashes import CrashBook
from blockflow.control.fleet import CRASHES_KEPT
from blockflow.control.update import Kind
from blockflow.control.views import Views
from blockflow.core.errors import make_error
from blockflow.core.model import Variant
from tests.views_rig import Told, fits


@pytest.fixture
def told() -> Told:
    return Told(World().up())


def test_the_states_of_the_whole() -> None:
    told = Told(World())
    assert told.state() == "starting"
    assert told.dispatcher() == {"name": "dispatcher", "role": "dispatcher", "state": "missing"}
    told.world.mute.add("dispatcher")
    told.world.up()
    assert told.state() == "starting"
    told.world.die("dispatcher")
    assert told.state() == "degraded"  # it has not even begun and has to begin again
    told = Told(World().up())
    assert told.state() == "empty"
    told.world.brain.realm.unrestored = make_error("STATE_UNUSABLE", "torn")
    assert told.state() == "degraded"
    told.world.apply(*AB)
    assert told.state() == "ready" and told.views.health() == {"ready": True, "reasons": []}
    told.world.mute.add("a#0")
    told.world.die("a#0")
    assert told.state() == "degraded"
    told.world.hold_ready.add("c#0")
    told.world.apply(["a", "b", "c"], AB[1])  # is under way, and no first one, which were a start
    assert told.world.brain.runner.current is not None and told.state() == "degraded"
    told.world.brain.shutdown(told.world.now)
    assert told.state() == "stopping"
    assert told.views.health()["reasons"][0] == "the system is shutting down"


def test_a_restored_topology_is_starting(told: Told) -> None:
    world = told.world
    world.hold_ready.add("a#0")
    world.do(lambda now: world.brain.restore(topology(*AB), 3, None, now))
    assert told.state() == "starting" and told.views.epoch()["epoch"] == 3
    assert (told.block("a")["state"], told.block("b")["state"]) == ("starting", "ready")
    world.make_ready("a#0")
    assert told.state() == "ready"


def test_the_states_of_a_block(told: Told) -> None:
    world = told.world
    world.hold_ready |= {"a#0", "a#1"}
    blocks = [{"name": "a", "replicas": 2}, "b"]
    world.apply(blocks, {"t": ["a", "b"]})
    assert told.views.blocks() == []  # not in force before all are ready
    assert {w["role"] for w in map(told.worker, ("a#0", "b#0"))} != {"active"}
    world.make_ready("a#0")
    world.make_ready("a#1")
    assert (told.block("a")["state"], told.block("a")["ready"]) == ("ready", 2)
    assert told.block("a")["workers"] == ["a#0", "a#1"] and told.block("a")["closed"] is None
    world.mute.add("a#1")
    world.die("a#1")
    assert (told.block("a")["state"], told.block("a")["ready"]) == ("degraded", 1)
    assert told.worker("a#1")["state"] == "restarting"
    assert told.task("t")["available"] and told.task("t")["missing"] == []
    world.mute.add("a#0")
    world.die("a#0")
    assert told.block("a")["state"] == "restarting"
    assert not told.task("t")["available"] and told.task("t")["missing"] == ["a"]
    world.pass_time(1.0)
    assert told.block("a")["state"] == "starting"


def test_a_block_that_is_not_tried_any_more_has_failed(told: Told) -> None:
    told.world.apply(*AB)
    told.world.start_fails["a#0"] = make_error("LOAD_FAILED", "bad artifact")
    told.world.die("a#0")
    told.world.pass_time(60.0)
    assert told.worker("a#0")["given_up"] and told.worker("a#0")["state"] == "failed"
    assert told.block("a")["state"] == "failed"


def test_a_block_of_which_one_is_given_up_and_one_will_be_tried(told: Told) -> None:
    world = told.world
    world.apply([{"name": "a", "replicas": 2}, "b"], AB[1])
    world.start_fails["a#0"] = make_error("LOAD_FAILED", "bad artifact")
    world.die("a#0")
    world.pass_time(60.0)
    assert told.block("a")["state"] == "degraded"
    world.mute.add("a#1")
    world.die("a#1")
    assert told.block("a")["state"] == "restarting"


def test_blocks_of_a_system_that_ends(told: Told) -> None:
    world = told.world
    world.apply(*AB)
    world.mute |= {"a#0", "b#0"}
    world.brain.shutdown(world.now)
    world.settle()
    world.pass_time(1.0)
    assert told.block("a")["state"] == told.worker("a#0")["state"] == "stopping"
    world.pass_time(10.0)
    assert told.block("a")["state"] == told.worker("a#0")["state"] == "stopped"


def test_a_drain_that_took_too_long_goes_on(told: Told) -> None:
    world = told.world
    world.apply(*AB)
    world.busy = True
    update = world.do(lambda now: world.brain.close("a", Kind.DRAIN, now))
    world.pass_time(60.0)
    assert update.final and update.notes and told.block("a")["state"] == "draining"
    world.let_drain()
    assert told.block("a")["state"] == "drained"


@pytest.mark.parametrize(
    ("kind", "under_way", "settled"),
    [(Kind.DRAIN, "draining", "drained"), (Kind.STOP, "stopping", "stopped")],
)
def test_a_block_that_is_closed(told: Told, kind: Kind, under_way: str, settled: str) -> None:
    world = told.world
    world.apply(*AB)
    world.busy = True
    world.do(lambda now: world.brain.close("a", kind, now))
    assert told.block("a")["state"] == under_way
    assert told.block("a")["closed"] == str(kind)
    assert told.block("b")["state"] == "ready"
    assert told.task("t")["missing"] == ["a"]
    world.let_drain()
    world.pass_time(1.0)
    assert told.block("a")["state"] == settled


def test_one_block_is_closed_while_another_is_being(told: Told) -> None:
    world = told.world
    world.apply(*AB)
    world.do(lambda now: world.brain.close("a", Kind.DRAIN, now))
    assert told.block("a")["state"] == "drained"
    world.hold_ready.add("b#1")
    world.do(lambda now: world.brain.restart("b", now))
    assert world.brain.runner.current is not None
    assert told.block("a")["state"] == "drained"


def test_what_runs_a_block_is_said_by_its_worker(told: Told) -> None:
    block = {"name": "a", "worker": "w", "threads": 1, "max_rows": 3}
    tasks = {"t": ["a", "b"], "u": {"path": ["a"], "max_rows": 2}}
    told.world.apply([block, {"name": "b", "worker": "w", "threads": 1}], tasks)
    a = told.block("a")
    assert (a["engine"], a["engine_asked"]) == ("auto", "auto")
    assert (a["precision"], a["precision_asked"]) == ("auto", "auto")
    assert a["kpi"] == {} and a["tasks"] == ["t", "u"] and a["max_rows"] == 3
    told.says("w#0", threads=5, lanes=6)
    for name in ("a", "b"):
        found = told.block(name)
        assert (found["engine"], found["precision"]) == (f"e-{name}", f"p-{name}")
        assert (found["engine_asked"], found["precision_asked"]) == ("auto", "auto")
        assert found["kpi"]["rows"] == 7
    worker = told.worker("w#0")
    assert (worker["threads_asked"], worker["threads_now"]) == (1, 5)
    assert (worker["lanes_asked"], worker["lanes_now"]) == ("auto", 6)
    assert worker["blocks"] == ["a", "b"] and worker["worker"] == "w"
    assert [s["block"] for s in worker["stages"]] == ["a", "b"]
    assert [s["kpi"]["engine"] for s in worker["stages"]] == ["e-a", "e-b"]
    assert [s["digest"] for s in worker["stages"]] == ["a-digest", "b-digest"]
    assert told.views.totals()["cpu_percent"] == 2.5
    assert (told.task("t")["max_rows"], told.task("u")["max_rows"]) == (3, 2)


def test_who_has_not_said_what_it_runs_is_passed_over(told: Told) -> None:
    told.world.apply([{"name": "a", "replicas": 2}], {"t": ["a"]})
    for name, engine in (("a#0", ""), ("a#1", "openvino")):
        told.says(name)
        sample = told.kpis.latest(told.world.incarnation(name))
        assert sample is not None
        sample.stages[0]["engine"] = engine
    assert told.block("a")["engine"] == "openvino"


def test_times_of_a_life(told: Told) -> None:
    world = told.world
    world.hold_ready.add("a#0")
    world.apply(*AB)
    young = told.worker("a#0")
    assert young["start_ms"] is None and young["uptime_s"] is None and young["ping_ms"] is None
    assert young["kpi_age_s"] is None and young["process"] is None
    world.now += 1500 * MS
    world.make_ready("a#0")
    world.now += S
    told.says("a#0")
    told.pings[world.incarnation("a#0")] = 0.25
    world.now += S
    grown = told.worker("a#0")
    assert (grown["start_ms"], grown["uptime_s"], grown["kpi_age_s"]) == (1500.0, 2.0, 1.0)
    assert (grown["load_ms"], grown["warm_ms"], grown["probe_ms"]) == (1.0, 1.0, 1.0)
    assert (grown["ping_ms"], grown["process"]["pss"]) == (0.25, 5)
    assert (grown["threads_asked"], grown["threads_now"]) == ("auto", None)
    assert grown["pid"] == 10_000 + world.incarnation("a#0") and grown["endpoint"]
    world.mute.add("a#0")
    world.die("a#0")
    dead = told.worker("a#0")
    assert dead["pid"] is None and dead["uptime_s"] is None


def test_crashes_newest_first(told: Told) -> None:
    world = told.world
    world.apply(*AB)
    for n in range(CRASHES_KEPT + 1):
        if n:
            world.pass_time(600.0)
        world.die("a#0", status=100 + n)
    world.now += S
    worker = told.worker("a#0")
    assert worker["restarts"] == CRASHES_KEPT + 1
    causes = [f"exit status {100 + n}" for n in range(CRASHES_KEPT, 0, -1)]
    assert [c["cause"] for c in worker["crashes"]] == causes
    assert worker["crash"] == worker["crashes"][0] and worker["crash"]["age_s"] == 1.0


def test_crashes_are_the_books_also_of_replicas_that_were_replaced(
    told: Told, tmp_path: Path
) -> None:
    world, book = told.world, CrashBook(tmp_path)

    def shown(book: CrashBook) -> dict[str, Any]:
        return fits("Worker", Views(world.brain, told.kpis, {}, world.now, book).worker("a#0"))

    world.apply(*AB)
    killed = world.incarnation("a#0")
    world.die("a#0")
    book.take(world.brain.crew, killed, world.now)
    assert shown(book)["crash"] == shown(book)["crashes"][0]
    world.pass_time(600.0)
    replica = world.brain.crew.fleet.by_incarnation(world.incarnation("a#0"))
    assert replica is not None
    replica.crashes.clear()  # as another one under its name has none
    assert shown(book)["crash"] is None
    for one in (book, CrashBook(tmp_path)):  # this control plane, and the next one
        assert [c["incarnation"] for c in shown(one)["crashes"]] == [killed]


def test_the_forms_of_an_artifact(told: Told) -> None:
    told.world.apply(*AB)
    held = told.world.brain.realm.topology
    assert held is not None
    refused = Variant("f", "d", 1, refused={"openvino": "differs by 3"})
    variants = {"onnx": refused, "aoti": Variant("g", "e", 1)}
    infos = {**held.infos, "a": replace(held.infos["a"], variants=variants)}
    told.world.brain.realm.topology = replace(held, infos=infos)
    assert told.block("a")["variants"] == ["aoti", "onnx"]
    assert told.block("a")["refused_engines"] == {"onnx": {"openvino": "differs by 3"}}


def test_a_task_lacks_what_is_missing_anywhere_on_its_path(told: Told) -> None:
    world = told.world
    world.apply(*AB)
    assert told.task("t")["available"]
    world.mute |= {"a#0", "b#0"}
    world.die("b#0")
    assert (told.task("t")["available"], told.task("t")["missing"]) == (False, ["b"])
    world.die("a#0")
    assert told.task("t")["missing"] == ["a", "b"]


def test_a_dispatcher_that_is_started_again(told: Told) -> None:
    world = told.world
    world.apply(*AB)
    for _ in range(CRASHES_KEPT + 1):
        world.pass_time(600.0)
        world.die("dispatcher")
    found = told.dispatcher()
    assert (found["state"], found["restarts"]) == ("restarting", CRASHES_KEPT + 1)
    assert len(found["crashes"]) == CRASHES_KEPT and found["kpi"] == {}
    world.pass_time(30.0)
    told.says("dispatcher", tasks={"t": {"ok": 3}}, inflight=1)
    found = told.dispatcher()
    assert (found["state"], found["clients"]) == ("ready", ["tcp://127.0.0.1:5755"])
    assert found["kpi"]["inflight"] == 1
    assert told.task("t")["kpi"] == {"ok": 3}
    told.says("dispatcher", tasks={})  # a sample need not have all of them
    assert told.dispatcher()["kpi"]["tasks"] == {"t": {"ok": 3}}
    for nonsense in ({"t": [1]}, [], ["t"]):
        told.says("dispatcher", tasks=nonsense)
        assert told.task("t")["kpi"] == {}


def test_a_worker_that_is_being_replaced_and_the_one_that_comes(told: Told) -> None:
    world = told.world
    world.apply(*AB)
    world.hold_ready.add("a#1")
    world.apply(*AB, digests={"a": "another"})
    old, new = told.worker("a#0"), told.worker("a#1")
    assert old["role"] == "active" != new["role"]
    assert [w["stages"][0]["digest"] for w in (old, new)] == ["a-digest", "another"]
    assert told.block("a")["workers"] == ["a#0"] and told.views.worker("nobody") is None


def test_updates_latest_first_and_epochs(told: Told) -> None:
    world = told.world
    world.apply(*AB)
    world.mute.add("dispatcher")
    world.apply(["a"], {"t": ["a"]})
    ids = [fits("Update", u)["id"] for u in told.views.updates()]
    assert ids == sorted(ids, reverse=True) and len(ids) == 2
    epoch = fits("Epoch", told.views.epoch())
    assert (epoch["epoch"], epoch["routes"]) == (2, world.brain.realm.version)
    assert epoch["routes_in_force"] == epoch["routes"] - 1
    world.flip()
    assert told.views.epoch()["routes_in_force"] == epoch["routes"]
    world.busy = True
    digests = {"a": "a" * 64, "b": "b" * 64}
    # requests on the former ones are still in flight
    world.apply(["a", "b"], {"t": ["a"]}, digests=digests)
    assert told.views.epoch()["routes_in_force"] == epoch["routes"] + 1
    found = fits("Topology", told.views.topology())
    assert found["posted"] == {"posted": 1}
    assert [b["digest"] for b in found["topology"]["blocks"]] == list(digests.values())


def test_a_canarys_blocks_are_visited_too(told: Told) -> None:
    task = {"path": ["a", "b"], "canary": {"path": ["a", "c"], "share": 0.1}}
    told.world.apply(["a", "b", "c"], {"t": task})
    assert [told.block(n)["tasks"] for n in "abc"] == [["t"]] * 3
    assert told.task("t")["canary"]["path"] == ["a", "c"]

"""The published tasks of a topology, which are worked out once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockflow.control import routes
from blockflow.control.fleet import Role
from blockflow.control.routes import build_tables, served_contract, task_routes
from blockflow.control.shares import ShareBook
from blockflow.core.lifecycle import State
from blockflow.core.routing import RouteTable
from tests.control_rig import World, topology

TASKS = {"t": ["a", "b"], "u": ["a", "b"], "v": ["a", "c"]}


def book(*names: str) -> ShareBook:
    """Indices in this order."""
    made = ShareBook()
    made.recall({name: n for n, name in enumerate(names, 1)})
    return made


def test_a_task_has_its_index_of_now() -> None:
    """An update is measured with one book and published with another."""
    made = topology("abc", TASKS)
    for names in ("tuv", "vut", "uvt"):
        found = task_routes(made, book(*names))
        assert {n: r.share for n, r in found.items()} == {n: names.index(n) + 1 for n in TASKS}
        assert [(r.name, r.path) for r in found.values()] == [
            (name, tuple(path)) for name, path in TASKS.items()
        ]


def test_what_was_given_stays_as_it_was() -> None:
    made = topology("abc", TASKS)
    first = task_routes(made, book("t"))
    task_routes(made, book("u"))
    assert (first["t"].share, first["u"].share) == (1, 0)


def test_each_way_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[tuple[tuple[str, ...], ...]] = []
    real = routes.within_classes
    monkeypatch.setattr(
        routes, "within_classes", lambda *args: (ways.append(args[1]), real(*args))[1]
    )
    canary = {"path": ["a", "b"], "canary": {"path": ["a", "c"], "share": 0.1}}
    made = topology("abc", {**TASKS, "w": canary})
    for _ in range(2):
        task_routes(made, book("t"))
        served_contract(made, "u")
    ab, ac = ("a", "b"), ("a", "c")
    assert sorted(ways) == [(ab,), (ab, ac), (ac,)]


def test_another_topology_has_its_own() -> None:
    made = topology("abc", TASKS)
    task_routes(made, book("t"))
    other = replace(made, tasks={"t": made.tasks["v"]})
    assert [r.path for r in task_routes(other, book("t")).values()] == [("a", "c")]
    assert made == replace(made), "what was worked out is no part of it"


def tables(world: World) -> tuple[RouteTable, RouteTable]:
    crew, made = world.brain.crew, world.brain.realm.topology
    assert crew.dispatcher is not None and made is not None
    return build_tables(1, 9, made, crew.fleet, crew.dispatcher, {}, ShareBook())


def workers(table: RouteTable) -> set[str]:
    return {r.worker for r in table.stages.values()}


def test_who_is_to_come_is_nowhere_and_who_retires_takes_nothing_new() -> None:
    world = World(cores=4).up()
    blocks = [{"name": "a", "replicas": 3}, {"name": "b", "mode": "zeromq"}]
    world.apply(blocks, {"t": ["a", "b"]})
    first, second, third = (r for r in world.brain.crew.fleet if r.spec.name == "a")
    second.role, third.role = Role.CANDIDATE, Role.RETIRING
    transit, admission = tables(world)
    assert workers(transit) == {"dispatcher", "a#0", "a#2", "b#0"}
    assert workers(admission) == {"dispatcher", "a#0", "b#0"}
    slots = {r.worker: r.slots for r in admission.stages.values()}
    assert slots["b#0"] == 0 < slots["a#0"] == first.spec.full_slots
    assert admission.down == {}
    # One that retires brings nothing back.
    first.life.state, first.given_up = State.FAILED, "5 crashes"
    assert tables(world)[1].down == {"a": "it was given up: 5 crashes"}

"""The published tasks of a topology, which are worked out once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockflow.control import routes
from blockflow.control.routes import served_contract, task_routes
from blockflow.control.shares import ShareBook
from tests.control_rig import topology

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

"""Which replicas a request visits, and what is said when there is no way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from blockflow.core.errors import RequestError
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import RouteTable, StageRoute, TaskRoute
from blockflow.dispatcher import plan as made_by
from blockflow.dispatcher.plan import Plan, Planner

CONTRACT = Contract(TensorSpec("float32", ("rows", 4)), TensorSpec("float32", ("rows", 2)))


def table(
    stages: Mapping[int, tuple[str, int]], version: int = 1, **tasks: tuple[str, ...]
) -> RouteTable:
    """``stages``: number -> (block, incarnation)."""
    return RouteTable(
        version,
        version,
        {
            s: StageRoute(s, b, f"{b}#{i}", i, f"ipc://{i}", "tensormq")
            for s, (b, i) in stages.items()
        },
        {n: TaskRoute(n, p, CONTRACT) for n, p in tasks.items()},
    )


def planner(stages: Mapping[int, tuple[str, int]], **tasks: tuple[str, ...]) -> Planner:
    made = Planner()
    made.replace(table(stages, **tasks))
    return made


def plan(p: Planner, *tasks: str) -> Plan:
    return p.plan([p.task(t) for t in tasks])


def stages_of(made: Plan) -> list[int]:
    return [n.stage for n in made.tree.nodes]


def code_of(call: object, *args: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(*args)  # type: ignore[operator]
    return caught.value


def test_nothing_is_ready_before_the_first_routes() -> None:
    assert code_of(Planner().task, "t").code == "NOT_READY"


def test_an_unknown_task_gets_near_names() -> None:
    p = planner({1: ("b", 11)}, digit=("b",), parity=("b",))
    error = code_of(p.task, "digits")
    assert error.code == "UNKNOWN_TASK"
    assert "'digit'" in error.hint
    assert code_of(p.task, "zzz").hint == "deployed: digit, parity"
    p = planner({1: ("b", 11)}, **{f"t{n}": ("b",) for n in range(9)})
    assert code_of(p.task, "zzz").hint == "deployed: t0, t1, t2, t3, t4, t5, t6, t7 ..."


def test_a_plan_knows_its_way() -> None:
    p = planner(
        {1: ("trunk", 11), 2: ("a", 12), 3: ("b", 12)}, ta=("trunk", "a"), tb=("trunk", "b")
    )
    made = plan(p, "ta", "tb")
    assert stages_of(made) == [1, 2, 3]
    assert made.ends == (1, 2)
    assert made.blocks == ("trunk", "a", "b")
    assert made.incarnations == (11, 12, 12)
    assert made.below == (frozenset({1, 2}), frozenset({1}), frozenset({2}))
    assert made.lost_with == {11: {1, 2}, 12: {1, 2}}
    assert made.lineage == {1: (0, 1), 2: (0, 2)}
    assert made.root.incarnation == 11
    assert plan(p, "ta", "tb") is made


def test_tasks_that_start_apart_cannot_share_an_input() -> None:
    p = planner({1: ("a", 11), 2: ("b", 12)}, ta=("a",), tb=("b",))
    error = code_of(plan, p, "ta", "tb")
    assert error.code == "INVALID_REQUEST"
    assert "tb: b" in error.message


def test_a_tree_that_is_too_large_is_refused() -> None:
    p = planner({1: ("a", 11)}, t=("a",) * 65)
    assert code_of(plan, p, "t").code == "INVALID_REQUEST"


def test_the_least_loaded_replica_is_chosen_in_turn() -> None:
    p = planner({1: ("b", 11), 2: ("b", 12), 3: ("b", 13)}, t=("b",))
    chosen = []
    for _ in range(6):
        made = plan(p, "t")
        p.take(made)
        chosen.append(stages_of(made)[0])
    assert chosen == [1, 2, 3, 1, 2, 3]
    for _ in range(2):
        p.give_back(plan_of(p, 2))
    assert p.outstanding(2) == 0
    assert stages_of(plan(p, "t")) == [2]


def plan_of(p: Planner, stage: int) -> Plan:
    """A plan through this very replica."""
    for made in p._cache.values():
        if stages_of(made) == [stage]:
            return made
    raise AssertionError(stage)


def test_equal_replicas_take_turns_when_nothing_is_outstanding() -> None:
    p = planner({1: ("b", 11), 2: ("b", 12)}, t=("b",))
    assert {tuple(stages_of(plan(p, "t"))) for _ in range(4)} == {(1,), (2,)}


def test_all_tasks_of_a_request_use_the_same_replica() -> None:
    p = planner(
        {1: ("trunk", 11), 2: ("trunk", 12), 3: ("a", 13), 4: ("b", 14)},
        ta=("trunk", "a"),
        tb=("trunk", "b"),
    )
    ways = [stages_of(plan(p, "ta", "tb")) for _ in range(4)]
    assert ways == [[1, 3, 4], [2, 3, 4]] * 2  # and each takes one turn


def test_the_next_block_is_taken_in_the_same_worker() -> None:
    stages = {1: ("a", 11), 2: ("b", 11), 3: ("a", 12), 4: ("b", 12)}
    p = planner(stages, t=("a", "b"), late=("b",))
    plan(p, "late")  # or a's replicas and b's would be next in turn together
    ways = set()
    for _ in range(4):
        made = plan(p, "t")
        p.take(made)
        ways.add(tuple(stages_of(made)))
    assert ways == {(1, 2), (3, 4)}


def test_a_dead_worker_is_avoided_also_by_a_table_that_names_it() -> None:
    p = Planner()
    p.peer_gone(11)  # it may be known before the first routes are
    p.replace(table({1: ("b", 11), 2: ("b", 12)}, t=("b",)))
    assert {stages_of(plan(p, "t"))[0] for _ in range(4)} == {2}
    p.replace(table({1: ("b", 11)}, 2, t=("b",)))
    error = code_of(plan, p, "t")
    assert error.code == "BLOCK_UNAVAILABLE"
    assert error.where == "b"
    assert error.message == "block 'b' has no worker that runs"
    p.replace(table({5: ("b", 15)}, 3, t=("b",)))
    assert stages_of(plan(p, "t")) == [5]
    assert p.version == 3


def test_the_order_of_the_tasks_is_that_of_their_answers() -> None:
    p = planner({1: ("trunk", 11), 2: ("a", 12)}, t=("trunk",), ta=("trunk", "a"))
    assert plan(p, "t", "ta").ends == (0, 1)
    assert plan(p, "ta", "t").ends == (1, 0)


def test_new_routes_make_new_plans_also_where_no_stage_is_new() -> None:
    stages = {1: ("b", 11)}
    p = planner(stages, t=("b",))
    assert plan(p, "t").version == 1
    p.replace(table(stages, 2, t=("b",)))
    assert (plan(p, "t").version, plan(p, "t").epoch) == (2, 2)


@pytest.mark.parametrize("most", [{"priority": 1, "weight": 0.5}, {"weight": 2.0}])
def test_a_request_has_the_share_of_its_task_that_may_claim_most(most: dict[str, float]) -> None:
    """In whatever order it names them."""
    routes = table({1: ("b", 11)}, low=("b",), high=("b",))
    tasks = {n: replace(routes.tasks[n], share=i) for i, n in enumerate(("low", "high"))}
    p = Planner()
    p.replace(replace(routes, tasks=tasks, shares=({}, most)))
    assert [plan(p, *names).share for names in (("low",), ("low", "high"), ("high", "low"))] == [
        0,
        1,
        1,
    ]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_by, "_CACHE_LIMIT", 2)
    p = planner({n: ("b", 10 + n) for n in range(1, 7)}, t=("b",))
    for _ in range(6):
        plan(p, "t")
        assert len(p._cache) <= 2
    assert p._turn
    names = [f"t{n}" for n in range(6)]
    p.replace(table({7: ("c", 17)}, 2, **dict.fromkeys(names, ("c",))))
    assert not p._turn
    for name in names:
        assert plan(p, name) is plan(p, name)
        assert len(p._cache) <= 2 and len(p._only) <= 2


def test_of_long_ways_fewer_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each order of the same tasks is a plan of its own."""
    monkeypatch.setattr(made_by, "_CACHE_NODES", 8)
    numbers = {"a": 1, "b": 2, "c": 3}
    p = planner({n: (b, 10 + n) for b, n in numbers.items()}, t=("a", "b"), u=("a", "c"))
    for _ in range(2):
        kept = [plan(p, *names) for names in (("t", "u"), ("u", "t"), ("t",), ("u",))]
        assert [len(made.tree.nodes) for made in kept] == [3, 3, 2, 2]
        assert list(p._cache.values()) == list(p._only.values()) == kept[3:]
        p.replace(
            table({n: (b, 10 + n) for b, n in numbers.items()}, 2, t=("a", "b"), u=("a", "c"))
        )


def test_each_tasks_own_way_is_remembered_however_large_the_topology_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after the other they would throw each other out, and each be planned anew."""
    monkeypatch.setattr(made_by, "_CACHE_NODES", 4)
    p = planner(
        {n: (b, 10 + n) for n, b in enumerate("abcd", 1)}, t=("a", "b"), u=("a", "c"), v=("a", "d")
    )
    first = [plan(p, name) for name in "tuv"]
    assert all(plan(p, name) is made for name, made in zip("tuv", first, strict=True))


def test_a_plan_without_a_choice_holds_until_there_is_one() -> None:
    p = planner({1: ("b", 11)}, t=("b",))
    assert plan(p, "t") is plan(p, "t")
    p.replace(table({1: ("b", 11), 2: ("b", 12)}, 2, t=("b",)))
    assert {stages_of(plan(p, "t"))[0] for _ in range(2)} == {1, 2}
    p.peer_gone(12)
    assert stages_of(plan(p, "t")) == stages_of(plan(p, "t")) == [1]
    p.peer_gone(11)
    assert code_of(plan, p, "t").code == "BLOCK_UNAVAILABLE"


def test_a_load_outlives_the_routes_that_it_came_with() -> None:
    p = planner({1: ("b", 11)}, t=("b",))
    made = plan(p, "t")
    p.take(made)
    p.replace(table({2: ("b", 12)}, 2, t=("b",)))
    assert p.outstanding(1) == 1
    p.give_back(made)
    assert p.outstanding(1) == 0
    assert not p._load

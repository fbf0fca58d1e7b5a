"""Slots between workers: opposed paths can never hold all of them, others are not held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import CanaryRoute, RouteTable, StageRoute, TaskRoute
from blockflow.dispatcher.edges import EdgeBook, group_of
from blockflow.dispatcher.plan import Plan, Planner

ANY = TensorSpec("float32", ("rows", 4))


def table(
    workers: Mapping[str, Sequence[str]],
    tasks: Mapping[str, Sequence[str]],
    *,
    slots: int = 4,
    replicas: int = 1,
    mode: str = "tensormq",
    canary: Sequence[str] = (),
) -> RouteTable:
    """Workers with their blocks, tasks with their paths; ``canary`` is that of the first task."""
    stages: dict[int, StageRoute] = {}
    incarnation = 10
    for worker, blocks in workers.items():
        for replica in range(replicas):
            incarnation += 1
            for block in blocks:
                n = len(stages) + 1
                name = f"{worker}#{replica}"
                stages[n] = StageRoute(n, block, name, incarnation, "ipc://x", mode, slots=slots)
    routes = {n: TaskRoute(n, tuple(p), Contract(ANY, ANY)) for n, p in tasks.items()}
    if canary:
        first = next(iter(routes))
        route = CanaryRoute(tuple(canary), 0.5)
        routes[first] = TaskRoute(first, routes[first].path, Contract(ANY, ANY), canary=route)
    return RouteTable(1, 1, stages, routes)


def plan(planner: Planner, *names: str) -> Plan:
    return planner.plan([planner.task(n) for n in names])


def planner_of(*args: Any, **kw: Any) -> Planner:
    made = Planner()
    made.replace(table(*args, **kw))
    return made


OPPOSED = ({"A": ["a"], "B": ["b"]}, {"there": ["a", "b"], "back": ["b", "a"]})


def test_paths_in_one_direction_are_never_held_back() -> None:
    workers = {"A": ["a"], "B": ["b"], "C": ["c"]}
    planner = planner_of(workers, {"x": ["a", "b", "c"], "y": ["b", "c"], "z": ["a", "c"]})
    for name in ("x", "y", "z"):
        for _ in range(100):
            found = plan(planner, name)
            assert found.guards == ()
            planner.take(found)
            assert planner.edges.full(found.guards) == ""


def test_of_opposed_paths_one_keeps_a_slot_free() -> None:
    planner = planner_of(*OPPOSED)
    there, back = plan(planner, "there"), plan(planner, "back")
    guarded = [p for p in (there, back) if p.guards]
    assert len(guarded) == 1
    for _ in range(3):  # of four slots
        assert planner.edges.full(guarded[0].guards) == ""
        planner.take(guarded[0])
    assert planner.edges.full(guarded[0].guards) in ("A#0", "B#0")
    planner.give_back(guarded[0])
    assert planner.edges.full(guarded[0].guards) == ""
    assert planner.edges.full(2 * guarded[0].guards)  # there is one left, and it would need two


def test_what_holds_no_slot_of_another_worker_is_not_counted() -> None:
    same = planner_of({"W": ["a", "b"]}, OPPOSED[1])
    whole = planner_of(*OPPOSED, mode="zeromq")
    for planner in (same, whole):
        assert plan(planner, "there").guards == plan(planner, "back").guards == ()


def test_a_canary_path_counts_like_any_other() -> None:
    planner = planner_of(OPPOSED[0], {"there": ["a", "b"]}, canary=["b", "a"])
    plans = {plan(planner, "there").guards for _ in range(4)}
    assert len(plans) == 2
    workers = {"A": ["a"], "B": ["b"], "C": ["c"]}  # no task's own path leads to C
    planner = planner_of(workers, {"there": ["a", "b"]}, canary=["a", "c", "b"])
    assert {plan(planner, "there").guards for _ in range(4)} == {()}


def test_a_worker_with_one_slot_still_serves_one_at_a_time() -> None:
    planner = planner_of(*OPPOSED, slots=1)
    guarded = next(p for p in (plan(planner, "there"), plan(planner, "back")) if p.guards)
    assert planner.edges.full(guarded.guards) == ""
    assert planner.edges.full(2 * guarded.guards) == ""  # more than there are goes alone
    planner.take(guarded)
    assert planner.edges.full(guarded.guards)


def test_unknown_slots_are_no_bound() -> None:
    planner = planner_of(*OPPOSED, slots=0)
    for name in ("there", "back"):
        found = plan(planner, name)
        for _ in range(50):
            planner.take(found)
        assert planner.edges.full(found.guards) == ""


def test_replicas_are_one_worker() -> None:
    route = StageRoute(1, "a", "trunk#1", 2, "", "tensormq")
    assert group_of(route) == "trunk"
    # From one to the other nothing goes forward: the other's requests may do the same.
    stages = {
        n: StageRoute(n, block, f"W#{n}", n, "", "tensormq", slots=4)
        for n, block in ((1, "a"), (2, "b"))
    }
    contract = Contract(ANY, ANY)
    paths = {"there": ("a", "b"), "back": ("b", "a")}
    planner = Planner()
    planner.replace(
        RouteTable(1, 1, stages, {n: TaskRoute(n, p, contract) for n, p in paths.items()})
    )
    assert (plan(planner, "there").guards, plan(planner, "back").guards) == ((1,), (2,))
    assert group_of(StageRoute(1, "a", "plain", 2, "", "tensormq")) == "plain"
    book = EdgeBook()
    book.take((5, 5, 6))
    book.give_back((5, 6))
    book.give_back((5,))
    assert book._held == {}


@st.composite
def systems(draw: st.DrawFn) -> tuple[RouteTable, list[str]]:
    count = draw(st.integers(2, 5))
    blocks = [f"b{i}" for i in range(count)]
    workers = {f"W{i}": [b] for i, b in enumerate(blocks)}
    tasks = {
        f"t{i}": draw(st.permutations(blocks))[: draw(st.integers(1, count))]
        for i in range(draw(st.integers(1, 4)))
    }
    slots, replicas = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    return table(workers, tasks, slots=slots, replicas=replicas), list(tasks)


class World:
    """Workers that do one thing at a time, first come first served, and need a slot for the output
    before they begin; ``guarded``: admission asks the book."""

    def __init__(self, routes: RouteTable, guarded: bool) -> None:
        self.planner = Planner()
        self.planner.replace(routes)
        self.guarded = guarded
        self.free = {r.incarnation: r.slots for r in routes.stages.values()}
        self.queues: dict[int, deque[tuple[Plan, int, int]]] = {i: deque() for i in self.free}
        self.under_way = 0

    def admit(self, name: str) -> None:
        chosen = plan(self.planner, name)
        if not (self.guarded and self.planner.edges.full(chosen.guards)):
            self.planner.take(chosen)
            self.queues[chosen.incarnations[0]].append((chosen, 0, 0))
            self.under_way += 1

    def work(self, worker: int) -> bool:
        """Run the first in the queue, if there is a slot for its output."""
        if not self.queues[worker] or not self.free[worker]:
            return False
        chosen, node, holder = self.queues[worker].popleft()
        if holder:
            self.free[holder] += 1
        nexts = chosen.tree.children(node)
        if nexts:
            self.free[worker] -= 1
            self.queues[chosen.incarnations[nexts[0]]].append((chosen, nexts[0], worker))
        else:  # the Dispatcher copies it at once
            self.planner.give_back(chosen)
            self.under_way -= 1
        return True

    def end(self) -> bool:
        """All requests come to their end; False when all wait for each other."""
        while self.under_way:
            if not any(self.work(w) for w in self.queues):
                return False
        return True


@settings(max_examples=100, deadline=None)
@given(systems(), st.randoms(use_true_random=True))  # each draw of its own would be the dearest
def test_nothing_is_ever_stuck(system: tuple[RouteTable, list[str]], rng: Any) -> None:
    routes, names = system
    world = World(routes, guarded=True)
    for _ in range(120):
        if rng.random() < 0.7:
            world.admit(rng.choice(names))
        else:
            world.work(rng.choice(sorted(world.queues)))
    assert world.end()
    assert world.planner.edges._held == {}


@pytest.mark.parametrize("guarded", [True, False])
def test_without_the_guard_two_workers_can_wait_for_each_other(guarded: bool) -> None:
    world = World(table(*OPPOSED, slots=2), guarded)
    for name in ("there", "back"):
        for _ in range(4):
            world.admit(name)
    for worker in sorted(world.queues) * 2:  # each fills its slots for the other
        world.work(worker)
    assert world.end() is guarded


@pytest.mark.parametrize("deep", [1500])
def test_a_long_path_is_ordered_without_recursion(deep: int) -> None:
    blocks = [f"b{i}" for i in range(deep)]
    EdgeBook().publish(table({f"W{i}": [b] for i, b in enumerate(blocks)}, {"t": blocks}))

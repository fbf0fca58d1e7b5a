"""A task's share on its way: topology, index, header, policy; and its bound at the door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockflow.batching.shares import TaskShare
from blockflow.control.shares import ShareBook
from blockflow.core import limits
from blockflow.core.errors import RequestError
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import RouteTable, StageRoute, TaskRoute
from blockflow.core.specs import TaskSpec
from blockflow.dispatcher.admission import Admission
from blockflow.dispatcher.plan import Planner

SPEC = TensorSpec("float32", ("rows", 4))
CONTRACT = Contract(SPEC, SPEC)


def tasks(**more: Mapping[str, Any]) -> dict[str, TaskSpec]:
    return {name: TaskSpec(path=["a"], **fields) for name, fields in more.items()}


def test_a_deployed_task_keeps_its_index() -> None:
    book = ShareBook()
    assert book.table() == ({},) and book.index("x") == 0
    book.follow(tasks(x={"weight": 2}, y={}))
    first = book.index("x"), book.index("y")
    assert 0 not in first and len(set(first)) == 2
    book.follow(tasks(y={"priority": 3}, z={}))
    assert book.index("y") == first[1]
    assert book.index("z") not in first  # requests of x may still be under way
    assert TaskShare.from_dict(book.table()[first[1]]).priority == 3
    assert book.table()[first[0]] == {} if first[0] < len(book.table()) else True
    book.follow(tasks(y={}, z={}, new={}))
    assert book.index("new") == first[0]  # by now nobody speaks of x


def test_an_index_is_held_until_nobody_speaks_of_it() -> None:
    book = ShareBook()
    book.follow(tasks(x={}, y={}), version=1)
    gone = book.index("x")
    book.follow(tasks(y={}), version=2)
    assert book.held() == (gone,)
    book.follow(tasks(y={}, z={}), version=3, drained=1)
    assert book.index("z") != gone
    heir = ShareBook()
    heir.recall(book.indices(), book.held(), version=3)
    heir.follow(tasks(y={}, z={}, new={}), version=4)
    book.follow(tasks(y={}, z={}, new={}), version=4, drained=2)
    assert book.index("new") == gone and book.held() == ()
    assert heir.index("new") != gone == heir.held()[0]
    heir.follow(tasks(y={}, z={}, new={}, late={}), version=5, drained=3)
    assert heir.index("late") != gone == heir.held()[0]  # those of the last routes are left
    heir.follow(tasks(y={}, z={}, new={}, late={}, last={}), version=6, drained=4)
    assert heir.index("last") == gone


def test_there_is_always_room_for_another_update() -> None:
    book = ShareBook()
    many = [tasks(**{f"{c}{i}": {} for i in range(limits.MAX_TASKS // 2)}) for c in "abc"]
    book.follow(many[0], version=1)
    book.follow(many[1], version=2)
    assert book.roomy
    book.follow(many[2], version=3)
    assert not book.roomy  # with as many tasks as there may be it would have too many indices
    book.follow(many[2], version=4, drained=3)
    assert book.roomy and book.held() == ()


@given(st.lists(st.sets(st.sampled_from("abcdefgh")), max_size=12))
def test_indices_stay_few_and_apart(epochs: list[set[str]]) -> None:
    book = ShareBook()
    before: dict[str, int] = {}
    for names in epochs:
        book.follow(tasks(**{n: {} for n in names}))
        now = {n: book.index(n) for n in names}
        assert len(set(now.values())) == len(now) and 0 not in now.values()
        assert all(now[n] == before[n] for n in names & before.keys())
        gone = {before[n] for n in before.keys() - names}
        assert not gone & {now[n] for n in names - before.keys()}
        assert len(book.table()) <= 2 * 8 + 1
        before = now


@pytest.mark.parametrize(
    "bad",
    [{"weight": 0}, {"weight": -1}, {"weight": 1001}, {"priority": 10}, {"priority": 0.5},
     {"max_batch_rows": -1}, {"max_inflight_rows": -1}],
)  # fmt: skip
def test_shares_outside_their_limits(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        TaskSpec(path=["a"], **bad)


def test_every_topology_share_is_one_for_the_policies() -> None:
    spec = TaskSpec(path=["a"], weight=2, priority=9, max_batch_rows=7)
    assert TaskShare.from_dict(spec.share()) == TaskShare(2.0, 9, 7)


def test_a_request_of_several_tasks_has_the_most_urgent_share() -> None:
    planner = Planner()
    shares = ({}, {"priority": 1}, {"priority": 5}, {})
    planner.replace(
        RouteTable(
            1,
            1,
            {1: StageRoute(1, "a", "a#0", 11, "ipc://x", "tensormq")},
            {n: TaskRoute(n, ("a",), CONTRACT, share=i) for i, n in enumerate("wxyz")},
            shares,
        )
    )
    for names, share in (("w", 0), ("x", 1), ("xyz", 2), ("zx", 1)):
        assert planner.plan([planner.task(n) for n in names]).share == share
    again = RouteTable.from_dict(planner.table.to_dict()) if planner.table else None
    assert again == planner.table


def test_a_task_may_fill_its_bound_and_no_more() -> None:
    admission = Admission(10, 10, 1 << 20)
    bounded = TaskRoute("t", ("a",), CONTRACT, max_inflight_rows=8)
    free = TaskRoute("u", ("a",), CONTRACT)
    there = {"t": 5, "u": 500}
    admission.check_tasks([bounded, free], there.__getitem__, 3, 2, 0)
    with pytest.raises(RequestError) as e:
        admission.check_tasks([free, bounded], there.__getitem__, 4, 2, 0)
    assert e.value.code == "OVERLOADED" and "'t' has 5 of 8 rows" in e.value.message
    assert e.value.retry_after_ms
    admission.check_tasks([bounded], {"t": 0}.__getitem__, 9, 0, 0)  # alone it runs

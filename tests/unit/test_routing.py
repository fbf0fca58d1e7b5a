"""Path trees and the route table."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from math import inf
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockflow.batching.shares import TaskShare, read_shares
from blockflow.core import limits
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import (
    CanaryRoute,
    PathNode,
    PathTree,
    RouteTable,
    StageRoute,
    TaskRoute,
    merge_paths,
)

CONTRACT = Contract(TensorSpec("float32", ("rows", 4)), TensorSpec("float32", ("rows", 2)))


def test_one_task_is_a_chain() -> None:
    tree, ends = merge_paths([[3, 1, 2]])
    assert ends == (2,)
    assert [n.stage for n in tree.nodes] == [3, 1, 2]
    assert [n.parent for n in tree.nodes] == [-1, 0, 1]
    assert [n.terminal for n in tree.nodes] == [False, False, True]
    assert tree.children(0) == (1,)


def test_a_common_prefix_runs_once() -> None:
    tree, ends = merge_paths([[1, 2, 3], [1, 2, 4], [1]])
    assert [n.stage for n in tree.nodes] == [1, 2, 3, 4]
    assert ends == (2, 3, 0)
    assert tree.children(1) == (2, 3)
    assert tree.nodes[0].terminal
    assert not tree.nodes[1].terminal


def test_what_parts_is_not_joined_again() -> None:
    tree, _ = merge_paths([[1, 2, 9], [1, 3, 9]])
    assert [n.stage for n in tree.nodes] == [1, 2, 9, 3, 9]


def test_tasks_with_one_path_have_one_end() -> None:
    tree, ends = merge_paths([[1, 2], [1, 2]])
    assert ends == (1, 1)
    assert len(tree.nodes) == 2


@pytest.mark.parametrize("paths", [[[]], [[1], []], [[1, 2], [2, 1]], [list(range(1, 66))], []])
def test_what_cannot_be_a_tree(paths: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"a path has|paths on one input must start"):
        merge_paths(paths)  # whoever sent such a request is told so


@given(
    st.lists(st.lists(st.integers(2, 4), max_size=4), min_size=1, max_size=6).map(
        lambda tails: [[1, *t] for t in tails]
    )
)
def test_every_path_is_found_in_its_tree(paths: list[list[int]]) -> None:
    tree, ends = merge_paths(paths)
    for path, end in zip(paths, ends, strict=True):
        assert tree.nodes[end].terminal
        way, node = [], end
        while node != -1:
            way.append(tree.nodes[node].stage)
            node = tree.nodes[node].parent
        assert way[::-1] == path
    prefixes = {tuple(p[: i + 1]) for p in paths for i in range(len(p))}
    assert len(tree.nodes) == len(prefixes)
    assert PathTree.from_wire(tree.wire) == tree


@pytest.mark.parametrize(
    "nodes",
    [
        (),
        (PathNode(1, 0, True),),
        (PathNode(1, -1, False), PathNode(2, -1, True)),
        (PathNode(1, -1, False), PathNode(2, 1, True)),
        (PathNode(0, -1, True),),
        (PathNode(2**64, -1, True),),
        tuple(PathNode(1, i - 1, True) for i in range(limits.MAX_PATH_NODES + 1)),
    ],
)
def test_a_broken_tree_is_refused(nodes: tuple[PathNode, ...]) -> None:
    with pytest.raises(ValueError):
        PathTree(nodes)


def test_a_packed_path_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="10-byte nodes"):
        PathTree.from_wire(merge_paths([[1, 2]])[0].wire + b"\1")


def test_as_many_nodes_as_a_path_may_have() -> None:
    most = limits.MAX_PATH_NODES
    tree = PathTree(tuple(PathNode(2**64 - 1, i - 1, True) for i in range(most)))
    assert PathTree.from_wire(tree.wire) == tree


def whole_table() -> RouteTable:
    """Nothing in it is as it would be by default."""
    canary = CanaryRoute(("b", "c"), 0.25)
    table = RouteTable(
        3,
        9,
        {1: StageRoute(1, "b", "b#0", 11, "ipc://x", "tensormq", "cuda:0", False, 16)},
        {"t": TaskRoute("t", ("b",), CONTRACT, 8, 500, False, 1, 64, canary, 4, 20)},
        ({}, {"priority": 1}),
        {"c": "it was given up"},
    )
    for part in (table, *table.stages.values(), *table.tasks.values()):
        assert all(getattr(part, f.name) != f.default for f in fields(part))
    return table


def test_the_table_survives_its_json_form() -> None:
    table = whole_table()
    again = RouteTable.from_dict(json.loads(json.dumps(table.to_dict())))
    assert again == table
    for task in table.tasks.values():
        assert TaskRoute.from_dict(task.to_dict()) == task
        with pytest.raises(ValueError, match="a deadline of more than 0"):
            TaskRoute.from_dict({**task.to_dict(), "deadline_ms": 0})


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": inf},
        {"version": None},
        {"stages": [{}]},
        {"stages": 3},
        {"tasks": [[]]},
        {"down": ["c"]},
        {"shares": 3},
        {"share_of": [2]},
        {"share_of": [-1]},
    ],
)
def test_nonsense_is_no_table(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        RouteTable.from_dict({**whole_table().to_dict(), **change})


def test_a_contract_that_tasks_have_in_common_is_written_once() -> None:
    """Thousands of tasks may go a dozen ways."""
    one, other = (TensorSpec("float32", ("rows", n)) for n in (4, 5))
    common, equal, else_ = Contract(one, one), Contract(one, one), Contract(one, other)
    given = {"a": common, "b": else_, "c": common, "d": equal}
    tasks = {name: TaskRoute(name, ("x",), contract) for name, contract in given.items()}
    table = RouteTable(1, 1, {}, tasks)
    written = json.loads(json.dumps(table.to_dict()))
    assert written["contracts"] == [c.to_dict() for c in (common, else_, equal)]
    assert [t["contract"] for t in written["tasks"]] == [0, 1, 0, 2]
    read = RouteTable.from_dict(written)
    assert read == table
    assert read.tasks["a"].contract is read.tasks["c"].contract


def test_shares_that_tasks_have_in_common_are_written_and_read_once() -> None:
    """Each worker is sent those of all tasks, at each publication."""
    given = ({}, *[{"weight": 1.0 + n % 3, "priority": 0} for n in range(3000)])
    table = RouteTable(1, 1, {}, {}, given)
    written = json.loads(json.dumps(table.to_dict()))
    assert written["shares"] == [{}, *map(dict, sorted(s.items() for s in given[1:4]))]
    assert written["share_of"][:6] == [0, 1, 2, 3, 1, 2]
    read = RouteTable.from_dict(written)
    assert read == table
    with patch.object(TaskShare, "from_dict", side_effect=TaskShare.from_dict) as parsed:
        assert read_shares(read.shares) == [TaskShare(**s) for s in given]
    assert parsed.call_count == 4


@pytest.mark.parametrize("number", [1, -1, None, "0", {"input": {}, "output": {}}])
def test_a_task_whose_contract_is_not_there_makes_no_table(number: Any) -> None:
    written = whole_table().to_dict()
    assert len(written["contracts"]) == 1
    written["tasks"][0]["contract"] = number
    with pytest.raises(ValueError, match="not a route table"):
        RouteTable.from_dict(written)


def test_a_table_without_the_stages_of_the_dead() -> None:
    table = whole_table()
    assert table.without({1, 12}) is table  # a stage's number is no incarnation
    assert table.without({11}) == replace(table, stages={})

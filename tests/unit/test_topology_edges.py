"""Findings of a topology that hide behind what is right: a later edge, one direction, one field."""

from __future__ import annotations

from typing import Any

import pytest

from blockflow.core import limits
from blockflow.core.errors import TopologyError
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.topology import parse_topology


def text(low: int, high: int) -> TensorSpec:
    return TensorSpec("float32", ("rows", "n"), {"n": (low, high)})


FEW, MANY = text(1, 8), text(1, 16)
FOUR, TWO = TensorSpec("float32", ("rows", 4)), TensorSpec("float32", ("rows", 2))
CONTRACTS = {
    "a": (FOUR, FOUR),
    "b": (FOUR, FOUR),
    "c": (TWO, FOUR),
    "few": (FEW, FOUR),
    "many": (MANY, FOUR),
    "alike": (MANY, FOUR),
    "other": (MANY, TWO),
    "open": (MANY, MANY),
}


def lookup(name: str) -> BlockInfo:
    return BlockInfo(name, "1", f"digest-of-{name}", "pt2", Contract(*CONTRACTS[name]), 0, 0)


def found(blocks: list[Any], tasks: dict[str, Any]) -> list[str]:
    try:
        parse_topology({"blocks": blocks, "tasks": tasks}, lookup)
    except TopologyError as e:
        return [p.path for p in e.problems]
    return []


def said(update: Any, cores: Any = None) -> list[str]:
    with pytest.raises(TopologyError) as e:
        parse_topology(update, lookup, cores=cores)
    return [p.message for p in e.value.problems]


def test_what_is_wrong_is_said_in_the_words_of_json_and_in_good_number() -> None:
    assert said(None) == ["expected a JSON object, got null"]
    assert said({"blocks": [None], "tasks": {}}) == ["a block is a name or an object, not null"]
    blocks: list[Any] = [{"name": "a", "threads": 3, "cores": [0]}]
    task = {"blocks": blocks, "tasks": {"t": True}}
    one, wrong = "3 threads on 1 core would fight for them", "a task is a path or an object, not "
    assert said(task, [0, 1]) == [wrong + "boolean", one]
    blocks[0]["cores"] = [0, 1]
    assert said(task, [0, 1]) == [wrong + "boolean", one.replace("1 core", "2 cores")]


def test_every_edge_of_a_path_is_checked() -> None:
    assert found(["a", "b", "c"], {"t": ["a", "b"]}) == []
    assert found(["a", "b", "c"], {"t": ["a", "b", "c"]}) == ["$.tasks.t[2]"]


@pytest.mark.parametrize(
    ("stable", "canary", "fits"),
    [
        ("many", "alike", True),
        ("few", "many", True),  # takes more
        ("many", "few", False),
        ("many", "other", False),
        ("many", "open", False),  # gives what the task may not
        ("open", "many", False),  # gives less than the task may
    ],
)
def test_a_canary_takes_and_gives_what_its_task_does(stable: str, canary: str, fits: bool) -> None:
    task = {"path": [stable], "canary": {"path": [canary], "share": 0.5}}
    assert found([stable, canary], {"t": task}) == ([] if fits else ["$.tasks.t.canary.path"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device", "cuda:0"),
        ("replicas", 2),
        ("threads", 2),
        ("lanes", 2),
        ("cores", [0]),
        ("mode", "zeromq"),
    ],
)
def test_blocks_of_one_worker_agree_in_what_a_process_has_once(key: str, value: Any) -> None:
    first, second = {"name": "a", "worker": "w"}, {"name": "b", "worker": "w"}
    assert found([{**first, key: value}, {**second, key: value}], {}) == []
    assert found([first, {**second, key: value}], {}) == [f"$.blocks[1].{key}"]


@pytest.mark.parametrize(
    ("one", "other"), [({"mode": "tensormq"}, {}), ({"cores": [0, 1]}, {"cores": [1, 0]})]
)
def test_blocks_of_one_worker_agree_however_it_is_written(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    blocks = [{"name": "a", "worker": "w", **one}, {"name": "b", "worker": "w", **other}]
    assert found(blocks, {}) == []
    assert found([blocks[1], blocks[0]], {}) == []


def test_what_was_got_instead_is_told_where_it_is_short() -> None:
    told = {}
    for value in (["n"] * 1000, 5):
        with pytest.raises(TopologyError) as e:
            parse_topology({"blocks": [{"name": value}], "tasks": {}}, lookup)
        told[str(value)] = e.value.problems[0].message
    assert "(got 5)" in told.pop("5")
    assert not any("got" in message for message in told.values())


def test_blocks_and_tasks_have_a_number_and_what_is_more_is_one_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_BLOCKS", 2)
    monkeypatch.setattr(limits, "MAX_TASKS", 2)
    assert found(["a", "b"], {"t": ["a"], "u": ["b"]}) == []
    assert found(["a", "b", "c"], {"t": ["a", "b"]}) == ["$.blocks"]
    assert found(["a", "b"], {"t": ["a"], "u": ["b"], "v": ["a"]}) == ["$.tasks"]

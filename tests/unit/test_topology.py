"""System updates: both forms, and every kind of finding with its JSON path."""

from __future__ import annotations

from typing import Any

import pytest

from blockflow.batching.registry import policy_problems
from blockflow.core.errors import BlockFlowError, Problem, RepositoryError, TopologyError
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.specs import BlockSpec
from blockflow.core.topology import Topology, parse_topology
from blockflow.launch.child import Order

SPECS = {
    "block1": (("rows", 3, 8, 8), ("rows", 4, 4, 4)),
    "block2": (("rows", 4, 4, 4), ("rows", 8, 2, 2)),
    "block3": (("rows", 8, 2, 2), ("rows", 16)),
    "block4_class": (("rows", 16), ("rows", 10)),
    "other_head": (("rows", 16), ("rows", 2)),
}


def info(
    name: str, given: tuple[Any, ...], out: tuple[Any, ...], dtype: str = "float32"
) -> BlockInfo:
    return BlockInfo(
        name,
        "1",
        f"digest-of-{name}",
        "pt2",
        Contract(TensorSpec(dtype, given), TensorSpec("float32", out)),
        10,
        40,
    )


def lookup(name: str) -> BlockInfo:
    if name not in SPECS:
        raise RepositoryError("UNKNOWN_BLOCK", f"no block {name!r}", where=name)
    return info(name, *SPECS[name])


THESIS = {
    "blocks": ["block1", "block2", "block3", "block4_class"],
    "tasks": {"task1": ["block1", "block2", "block3", "block4_class"]},
}


def problems(data: Any, look: Any = lookup) -> dict[str, str]:
    with pytest.raises(TopologyError) as caught:
        parse_topology(data, look)
    assert caught.value.code == "INVALID_TOPOLOGY"
    return {p.path: p.message for p in caught.value.problems}


def test_thesis_body_as_it_stands() -> None:
    topology = parse_topology(THESIS, lookup)
    assert topology.tasks["task1"].path == THESIS["blocks"]
    assert all(b.threads == "auto" and b.replicas == 1 for b in topology.blocks.values())
    assert not topology.oversubscribe
    assert topology.mode == "tensormq"


def test_extended_form_round_trips() -> None:
    data = {
        "blocks": [
            {"name": "block1", "threads": 2, "mode": "zeromq"},
            {"name": "trunk", "block": "block2", "worker": "fused"},
            {"name": "block3", "worker": "fused", "batching": "none", "max_rows": 4},
            "block4_class",
        ],
        "tasks": {
            "t": {"path": ["block1", "trunk", "block3", "block4_class"], "deadline_ms": 500},
        },
        "transport": "tcp",
        "limits": {"max_rows": 8},
        "oversubscribe": True,
    }
    first = parse_topology(data, lookup)
    again = parse_topology(first.to_dict(), lookup)
    assert first == again
    assert first.mode_of("block1") == "zeromq"
    assert first.mode_of("trunk") == "tensormq"
    assert first.task_rows("t") == 4
    assert first.infos["trunk"].name == "block2"


@pytest.mark.parametrize(
    ("task", "path"),
    [
        ("x.pathology", "$.tasks['x.pathology'][0]"),
        ("path", "$.tasks.path[0]"),
        ("pathology", "$.tasks.pathology[0]"),
    ],
)
def test_the_path_of_a_short_task_keeps_its_name(task: str, path: str) -> None:
    assert list(problems({"blocks": ["block1"], "tasks": {task: [5]}})) == [path]
    assert list(problems({"blocks": ["block1"], "tasks": {task: []}})) == [path.removesuffix("[0]")]


def test_all_findings_at_once() -> None:
    found = problems(
        {
            "blocks": [
                "block1",
                "block1",
                "nope",
                {"name": "block2", "thread": 2, "replicas": 0},
                "../x",
                5,
                "block3",
            ],
            "tasks": {
                "good": ["block1"],
                "unknown": ["block1", "blok3"],
                "bad/id": ["block1"],
                "wrong": 3,
                "empty": [],
                "weight": {"path": ["block1"], "weight": 0},
                "quoted": {"path": ["block1"], "weight": "3"},
                "true": {"path": ["block1"], "weight": True},
                "huge": {"path": ["block1"], "weight": 10**400},
                "unfit": ["block1", "block3"],
                "loop": ["block1", "block1"],
            },
            "mod": "tensormq",
        }
    )
    assert set(found) == {
        "$.mod",
        "$.blocks[1]",
        "$.blocks[2]",
        "$.blocks[3].thread",
        "$.blocks[3].replicas",
        "$.blocks[4]",
        "$.blocks[5]",
        "$.tasks.unknown[1]",
        "$.tasks['bad/id']",
        "$.tasks.wrong",
        "$.tasks.empty",
        "$.tasks.weight.weight",
        "$.tasks.quoted.weight",
        "$.tasks.true.weight",
        "$.tasks.huge.weight",
        "$.tasks.unfit[1]",
        "$.tasks.loop[1]",
    } | {p for p in found if p.startswith("$.tasks.loop[1]")}


def test_unfit_contracts_show_both_sides() -> None:
    found = problems({"blocks": ["block1", "block3"], "tasks": {"t": ["block1", "block3"]}})
    text = found["$.tasks.t[1]"]
    assert "float32[rows, 4, 4, 4]" in text
    assert "float32[rows, 8, 2, 2]" in text


def test_unfit_dtype() -> None:
    def look(name: str) -> BlockInfo:
        return info(name, *SPECS[name], dtype="int64" if name == "block2" else "float32")

    found = problems({"blocks": ["block1", "block2"], "tasks": {"t": ["block1", "block2"]}}, look)
    assert "dtype float32 into int64" in found["$.tasks.t[1]"]


def test_path_in_an_object_has_its_own_json_path() -> None:
    found = problems({"blocks": ["block1"], "tasks": {"t": {"path": ["block1", "x"]}}})
    assert "$.tasks.t.path[1]" in found


@pytest.mark.parametrize("data", [None, [], 7, "x", True])
def test_not_an_object(data: Any) -> None:
    assert list(problems(data)) == ["$"]


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({}, "$.blocks"),
        ({"blocks": "block1", "tasks": {}}, "$.blocks"),
        ({"blocks": [], "tasks": []}, "$.tasks"),
        ({"blocks": [], "tasks": {}, "mode": "pickle"}, "$.mode"),
        ({"blocks": [], "tasks": {}, "limits": {"max_rows": 0}}, "$.limits.max_rows"),
        ({"blocks": [{"name": "block1", "device": "tpu"}], "tasks": {}}, "$.blocks[0].device"),
        (
            {"blocks": [{"name": "block1", "device": "cuda:\u0661"}], "tasks": {}},
            "$.blocks[0].device",
        ),
        ({"blocks": [{"name": "block1", "device": "cuda:00"}], "tasks": {}}, "$.blocks[0].device"),
        ({"blocks": [{"name": "block1", "threads": "2"}], "tasks": {}}, "$.blocks[0].threads"),
        ({"blocks": [{}], "tasks": {}}, "$.blocks[0].name"),
    ],
)
def test_wrong_types_and_values(data: Any, path: str) -> None:
    assert path in problems(data)


def test_members_of_a_worker_must_agree() -> None:
    found = problems(
        {
            "blocks": [
                {"name": "block1", "worker": "w", "threads": 1, "mode": "zeromq"},
                {"name": "block2", "worker": "w", "threads": 2, "cores": [0, 1]},
            ],
            "tasks": {},
        }
    )
    said = {path: found[f"$.blocks[1].{path}"] for path in ("threads", "mode", "cores")}
    assert {key: text.partition(": ")[2] for key, text in said.items()} == {
        "threads": "block1 has 1, block2 has 2",
        "mode": "block1 has zeromq, block2 says no mode",
        "cores": "block1 says no cores, block2 has [0, 1]",
    }


def test_contract_of_a_task_follows_dynamic_dims() -> None:
    ranges = {"n": (1, 64)}
    tokens = TensorSpec("int64", ("rows", "n"), ranges)
    embedded = TensorSpec("float32", ("rows", "n", 8), ranges)
    other = {"length": (1, 64)}
    wide = TensorSpec("float32", ("rows", "length", 8), other)
    narrow = TensorSpec("float32", ("rows", "length", 4), other)
    blocks = {
        "a": BlockInfo("a", "1", "d", "pt2", Contract(tokens, embedded), 0, 0),
        "b": BlockInfo("b", "1", "d", "pt2", Contract(wide, narrow), 0, 0),
    }
    topology = parse_topology(
        {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}, blocks.__getitem__
    )
    contract = topology.contract_of("t")
    assert contract.input == blocks["a"].contract.input
    assert (contract.output.dtype, contract.output.dims) == ("float32", ("rows", "n", 4))
    assert contract.output.ranges == ranges


def test_empty_topology_is_valid() -> None:
    topology = parse_topology({"blocks": [], "tasks": {}}, lookup)
    assert isinstance(topology, Topology)
    assert not topology.blocks


def test_policies_are_checked_with_the_rest() -> None:
    body = {
        "blocks": [
            "block1",
            {"name": "block2", "batching": {"policy": "nonee", "rows": 3}},
            "nope",
        ],
        "tasks": {},
    }
    with pytest.raises(TopologyError) as caught:
        parse_topology(body, lookup, policy_problems)
    assert {p.path for p in caught.value.problems} == {"$.blocks[1].batching.policy", "$.blocks[2]"}


@pytest.mark.parametrize(
    ("option", "value"),
    [("engine", "no engine"), ("engine", 7), ("precision", "int3"), ("replayable", "no")],
)
def test_what_would_have_no_effect_is_refused(option: str, value: object) -> None:
    body = {"blocks": [{"name": "block1", option: value}], "tasks": {}}
    assert f"$.blocks[0].{option}" in problems(body)


def test_engines_are_checked_with_the_rest() -> None:
    def check(spec: BlockSpec, info: BlockInfo, path: str) -> list[Problem]:
        return [Problem(f"{path}.engine", f"{info.name} by {spec.engine} in {spec.precision}")]

    body = {
        "blocks": ["block1", {"name": "block2", "engine": "openvino", "precision": "int8"}, "nope"],
        "tasks": {},
    }
    with pytest.raises(TopologyError) as caught:
        parse_topology(body, lookup, check_engine=check)
    found = {p.path: p.message for p in caught.value.problems}
    assert found["$.blocks[0].engine"] == "block1 by auto in auto"
    assert found["$.blocks[1].engine"] == "block2 by openvino in int8"
    assert "$.blocks[2]" in found


@pytest.mark.parametrize("field", ["options", "batching"])
def test_what_no_message_can_carry_is_refused(field: str) -> None:
    """Whatever engine or policy it is for, and however far from what either can take."""

    def body(value: object) -> dict[str, Any]:
        block = {"name": "block1", field: {"policy": "none", "x": value}}
        return {"blocks": ["block2", block], "tasks": {}}

    deepest: list[Any] = []
    for _ in range(6):
        deepest = [deepest]
    for fits in (deepest, (1 << 64) - 1):
        assert "block1" in parse_topology(body(fits), lookup).blocks
    order = {"stages": [{"options": {"x": deepest}}]}
    assert Order.from_bytes(Order("a:b", order, "c").to_bytes()).spec == order
    deep = [deepest]
    with pytest.raises(BlockFlowError):
        Order.from_bytes(Order("a:b", {"stages": [{"options": {"x": deep}}]}, "c").to_bytes())
    for _ in range(600):
        too = "is nested more than 8 levels deep"
        assert problems(body(deep)) == {f"$.blocks[1].{field}": too}
        deep = [{"y": deep}]
    large = "a number in it has more than 64 bits"
    assert problems(body([10**30])) == {f"$.blocks[1].{field}": large}

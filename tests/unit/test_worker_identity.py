"""What a running process cannot change makes another worker of it; what it can, does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blockflow.core.errors import TopologyError
from blockflow.core.model import Contract, Padding, TensorSpec
from blockflow.core.placement import WorkerSpec, desired_workers
from blockflow.core.topology import parse_topology
from tests.unit.test_topology import lookup


def worker(**block: Any) -> WorkerSpec:
    body = {"blocks": [{"name": "block1", **block}], "tasks": {}}
    (one,) = desired_workers(parse_topology(body, lookup), (0, 1))
    return one


def with_info(**changed: Any) -> WorkerSpec:
    one = worker()
    (stage,) = one.stages
    return replace(one, stages=(replace(stage, info=replace(stage.info, **changed)),))


def with_rows(rows: int) -> WorkerSpec:
    """The same arena, another largest batch."""
    one = worker()
    return replace(one, stages=tuple(replace(s, max_rows=rows) for s in one.stages))


LONG = TensorSpec("float32", ("rows", "n"), {"n": (1, 8)})

OTHERS = {
    "name": worker(worker="another"),
    "artifact": with_info(digest="another"),
    "contract": with_info(contract=Contract(LONG, LONG)),
    "padding": with_info(padding=Padding("n")),
    "rows": with_rows(7),
    "device": replace(worker(), device="cuda:0"),
    "cores": replace(worker(), cores=(0,)),
    "mode": replace(worker(), mode="zeromq"),
    "transport": replace(worker(), transport="tcp"),
    "arena": replace(worker(), arena_bytes=1 << 30),
    "slots": replace(worker(), slots=3),
    "engine": worker(engine="other"),
    "precision": worker(precision="int8"),
    "options": worker(options={"x": 1}),
    "time-out": worker(timeout_ms=5000),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_cannot_change_in_a_process(what: str) -> None:
    assert OTHERS[what].identity() != worker().identity()


@pytest.mark.parametrize(
    "block",
    [{"replicas": 2}, {"threads": 2}, {"batching": {"policy": "window"}}, {"replayable": False}],
)
def test_what_a_process_takes_up_while_it_runs(block: dict[str, Any]) -> None:
    assert worker(**block).identity() == worker().identity()


@pytest.mark.parametrize(
    "block",
    [
        {"mode": "tensormq"},
        {"max_rows": 32},
        {"cores": [0, 1]},
        {"cores": [1, 0, 1]},
        {"slots": 16},
        {"device": "cpu"},
    ],
)
def test_a_default_that_is_named_is_no_change(block: dict[str, Any]) -> None:
    assert worker(**block).identity() == worker().identity()


def test_options_are_the_same_in_any_order() -> None:
    assert (
        worker(options={"x": 1, "y": 2}).identity() == worker(options={"y": 2, "x": 1}).identity()
    )


def test_a_core_that_is_named_twice_is_one() -> None:
    assert worker(cores=[0, 0]).cores == (0,)
    with pytest.raises(TopologyError, match="does not fit"):
        worker(cores=[0, 0], threads=2)

"""Entries of a system update by themselves: bounds of their numbers, what others hear of them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from blockflow.core.specs import BlockSpec, TaskSpec

BLOCK: dict[str, Any] = {"name": "b"}
TASK: dict[str, Any] = {"path": ["b"]}


@pytest.mark.parametrize(
    ("kind", "given", "field", "least", "most"),
    [
        (BlockSpec, BLOCK, "threads", 1, 1024),
        (BlockSpec, BLOCK, "lanes", 1, 16),
        (BlockSpec, BLOCK, "replicas", 1, 256),
        (BlockSpec, BLOCK, "max_rows", 1, 65_536),
        (BlockSpec, BLOCK, "slots", 1, 4096),
        (BlockSpec, BLOCK, "timeout_ms", 0, 3_600_000),
        (TaskSpec, TASK, "deadline_ms", 1, 60_000),
        (TaskSpec, TASK, "max_rows", 1, 65_536),
        (TaskSpec, TASK, "priority", 0, 9),
        (TaskSpec, TASK, "max_batch_rows", 0, 65_536),
        (TaskSpec, TASK, "max_inflight_rows", 0, 65_536),
        (TaskSpec, TASK, "cpu_latency_us", 0, 10_000),
    ],
)
def test_numbers_have_bounds(
    kind: type[BaseModel], given: dict[str, Any], field: str, least: int, most: int
) -> None:
    for value in (least, most):
        assert getattr(kind.model_validate({**given, field: value}), field) == value
    for value in (least - 1, most + 1, True, float(most), str(least)):
        with pytest.raises(ValidationError):
            kind.model_validate({**given, field: value})


def test_a_block_has_one_version() -> None:
    for two in ({"name": "b@1"}, {"name": "b", "block": "x@1"}):
        with pytest.raises(ValidationError, match="a version of its own"):
            BlockSpec.model_validate({**two, "version": "2"})
    other = BlockSpec.model_validate({"name": "b@1", "block": "x", "version": "2"})
    assert other.artifact == "x@2"
    assert BlockSpec.model_validate({"name": "b", "block": "x"}).artifact == "x"


@pytest.mark.parametrize(
    "block", [{"block": "b"}, {"block": "b@2"}, {"block": "b", "version": "2"}]
)
def test_a_name_with_a_version_is_no_other_version(block: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="not the version that it names"):
        BlockSpec.model_validate({"name": "b@1", **block})


@pytest.mark.parametrize("block", [{}, {"block": "b@1"}, {"block": "b", "version": "1"}])
def test_a_name_with_a_version_is_that_version(block: dict[str, str]) -> None:
    assert BlockSpec.model_validate({"name": "b@1", **block}).artifact == "b@1"


def test_what_policies_hear_of_a_task() -> None:
    asked = {"weight": 2.0, "priority": 3, "max_batch_rows": 4}
    assert TaskSpec.model_validate({**TASK, **asked, "max_inflight_rows": 5}).share() == asked

"""What values a policy's options take: at the bounds, and nothing that only looks like one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from blockflow.batching.options import (
    Ascending,
    Counts,
    Either,
    Integer,
    Kind,
    Number,
    OneOf,
    SomeOf,
    option_problems,
    shown,
)
from blockflow.core.errors import MOST_FINDINGS

NAN, INF = float("nan"), float("inf")
WORDS = ("a", "b")


@pytest.mark.parametrize(
    ("kind", "takes", "refuses"),
    [
        (Integer(2, 4), [2, 3, 4], [1, 5, 3.0, True, "3", None, [3]]),
        (Number(2, 4), [2, 2.5, 4], [1.9, 4.1, True, "3", None, NAN, INF]),
        (Number(2, 4, above=True), [2.1, 4], [2, 2.0, 4.1]),
        (OneOf(WORDS), ["a", "b"], ["c", "", None, 1, ["a"]]),
        (SomeOf(WORDS), [["a"], ("b", "a")], [[], "a", {"a": 1}, ["a", "a"], ["a", "c"], [["a"]]]),
        (Ascending(9), [[1], [1, 9], (2, 3)], [[], [0], [10], [2, 2], [1, 3, 2], [True, 2], [1.0]]),
        (Ascending(9), [], ["19", 5, None, {1: 2}, {1, 2}]),
        (Counts(9), [[1], [9, 1], (2, 2)], [[], [0], [10], [1, True], [1.0], "1", 5, None, {1: 2}]),
        (Either((Integer(2, 4), OneOf(WORDS))), [2, "a"], [5, "c", None]),
    ],
    ids=str,
)
def test_what_a_kind_takes(kind: Kind, takes: Sequence[Any], refuses: Sequence[Any]) -> None:
    assert [value for value in takes if kind.takes(value) is not True] == []
    assert [value for value in refuses if kind.takes(value) is not False] == []


def test_of_many_unknown_options_the_first_are_told_and_all_that_is_wrong_with_others() -> None:
    known: dict[str, Kind] = {"depth": Integer(1, 9)}
    options = {f"x{i}": 1 for i in range(MOST_FINDINGS + 3)} | {"depth": 10}
    found = option_problems("it", options, known, "$.b")
    assert [p.path for p in found[:MOST_FINDINGS]] == [f"$.b.x{i}" for i in range(MOST_FINDINGS)]
    assert [p.path for p in found[MOST_FINDINGS:]] == ["$.b.depth", "$.b"]
    assert "3" in found[-1].message


def test_what_is_hinted_at_for_an_unknown_option() -> None:
    known: dict[str, Kind] = {"depth": Integer(1, 9), "width": Integer(1, 9)}
    hints = [option_problems("it", {name: 1}, known, "$")[0].hint for name in ("depht", "zzzzzz")]
    assert "depth" in hints[0] and "width" not in hints[0] and hints[1] == "known: depth, width"
    assert option_problems("it", {"depth": 1}, {}, "$")[0].hint == "leave it out"
    assert len(shown("x" * 99)) < 70 and shown("xyz") == "'xyz'"

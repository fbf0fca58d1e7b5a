"""Refusals are small, whatever the request had in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blockflow.control.rest.body import fields, parse_json, read_update
from blockflow.control.rest.refusals import MOST_BYTES, error_text
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, Problem, SystemError_, TopologyError
from blockflow.core.topology import parse_topology

LONG = "k" * 900_000
TWICE = '{"a": 1, "a": 1}'
BODIES = {
    "duplicates below a long name": f'{{"{LONG}": [{", ".join([TWICE] * 110)}]}}',
    "a long name twice": f'{{"{LONG[:450_000]}": 1, "{LONG[:450_000]}": 1}}',
    "many names twice": "{" + ", ".join(f'"n{n}": 1, "n{n}": 1' for n in range(40_000)) + "}",
    "many unknown fields": "{" + ", ".join(f'"n{n}": 1' for n in range(60_000)) + "}",
    "long unknown fields": "{" + ", ".join(f'"{n}{LONG[:9000]}": 1' for n in range(100)) + "}",
    "depth": f'{{"{LONG[:900]}": ' * 300 + f"[{', '.join([TWICE] * 110)}]" + "}" * 300,
    "characters that JSON writes with twelve bytes": '{"\N{GRINNING FACE}'
    + "\N{GRINNING FACE}" * 200_000
    + f'": [{", ".join([TWICE] * 110)}]}}',
}


def refusals(raw: str) -> list[BlockFlowError]:
    """What a small body and a system update say to it."""
    body, duplicates = parse_json(raw.encode())
    out = []
    with pytest.raises(BlockFlowError) as e:
        fields(body, duplicates, {"on": (bool,)}, {})
    out.append(e.value)
    with pytest.raises(BlockFlowError) as e:
        parse_topology(body, lambda name: pytest.fail(name))
    found = e.value.problems  # type: ignore[attr-defined]
    out.append(TopologyError("INVALID_TOPOLOGY", "as told", problems=[*duplicates, *found]))
    return out


@pytest.mark.parametrize("case", BODIES)
def test_no_body_makes_a_large_answer(case: str) -> None:
    assert len(BODIES[case]) < 1024 * 1024
    for error in refusals(BODIES[case]):
        assert len(error_text(error)) <= MOST_BYTES
        assert len(str(error.to_dict())) < 64 << 20  # nor is it large before that


def test_what_was_found_takes_no_more_memory_than_the_body() -> None:
    for raw in BODIES.values():
        _, duplicates = parse_json(raw.encode())
        assert len(duplicates) <= 100
        assert sum(len(p.path) + len(p.message) for p in duplicates) < MOST_BYTES


def test_unknown_fields_are_counted_beyond_some() -> None:
    with pytest.raises(SystemError_) as e:
        fields(dict.fromkeys(map(str, range(1000))), [], {}, {})
    problems = e.value.details["problems"]
    assert len(problems) == 21 and problems[-1]["message"] == "and 980 more unknown fields"
    assert problems[0] == {"path": "$['0']", "message": "unknown field '0'"}


def test_all_that_is_wrong_with_a_small_body_is_told() -> None:
    required, optional = {"on": (bool,), "name": (str,)}, {"n": (int,), "x": (str,)}
    with pytest.raises(SystemError_) as e:
        fields([], [], required, optional)
    assert (e.value.message, e.value.where) == ("expected a JSON object, got array", "$")
    with pytest.raises(SystemError_) as e:
        fields({"on": 1, "n": True, "x": None}, [], required, optional)
    assert [(p["path"], p["message"]) for p in e.value.details["problems"]] == [
        ("$.name", "required field is missing"),
        ("$.on", "wrong type: number"),
        ("$.n", "wrong type: boolean"),
        ("$.x", "wrong type: null"),
    ]
    right = {"on": False, "name": "", "n": 0}
    assert fields(right, [], required, optional) is right


def test_a_file_is_read_as_what_is_posted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.json"
    monkeypatch.setattr(limits, "MAX_REST_BODY_BYTES", 16)
    for text, told in (
        (None, "INVALID_REQUEST: cannot be read: No such file or directory"),
        (TWICE, "BAD_BODY: $.a: 'a' stands twice"),
        (TWICE + " ", "TOO_LARGE: more than 16 bytes"),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(BlockFlowError) as e:
            read_update(file)
        assert str(e.value) == f"{told} (at {file})"
    file.write_text('\ufeff{"a": 1}')
    assert read_update(file) == {"a": 1}


def test_what_is_left_out_is_counted_and_of_the_same_form() -> None:
    problems = [Problem(f"$.blocks[{n}]", "x" * 100) for n in range(5000)]
    error = TopologyError("INVALID_TOPOLOGY", "5000 problems", problems=problems)
    told = json.loads(error_text(error))["error"]["problems"]
    assert told[-1] == {"path": "$", "message": f"and {5000 - len(told) + 1} more"}
    assert told[:-1] == [p.to_dict() for p in problems[: len(told) - 1]]
    reasons: list[Any] = ["r" * 1000] * 1000
    listed = SystemError_("NOT_RUNNING", "n", details={"reasons": reasons})
    assert json.loads(error_text(listed))["error"]["details"]["reasons"][-1].startswith("and ")


def test_an_object_of_any_size_is_bounded() -> None:
    details = {f"{n}": {"a": ["b" * 10_000] * 10} for n in range(1000)}
    assert len(error_text(SystemError_("INTERNAL", "m", details=details))) <= MOST_BYTES


def test_what_is_of_a_usual_size_is_told_as_it_is() -> None:
    problems = [Problem(f"$.blocks[{n}]", "no block 'a'", "did you mean b?") for n in range(300)]
    error = TopologyError("INVALID_TOPOLOGY", "m", problems=problems, details={"n": [1, None]})
    assert json.loads(error_text(error)) == {"error": error.to_dict()}


@pytest.mark.parametrize("depth", [900, 2000, 5000, 100_000])
def test_nesting_beyond_what_is_walked_is_refused_as_such(depth: int) -> None:
    """How deep the decoder goes differs by Python's version; what walks its result goes less."""
    told = "nested too deeply"
    try:
        parse_json(b"[" * depth + b"]" * depth)
    except SystemError_ as e:
        told = e.message
    assert told == "nested too deeply"

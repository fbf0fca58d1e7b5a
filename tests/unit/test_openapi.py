"""The resource table, the OpenAPI document made from it, and JSON bodies."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from blockflow.control.commands import Commands
from blockflow.control.rest.body import check_content_type, parse_json, read_body, refuse_duplicates
from blockflow.control.rest.openapi import openapi_document
from blockflow.control.rest.resources import Handlers, Resource, resources
from blockflow.control.rest.schemas import components
from blockflow.core import limits
from blockflow.core.errors import CODES, BlockFlowError
from blockflow.core.metrics import ProcessKpi, StageKpi

THESIS = {
    "blocks": ["block1", "block2", "block3", "block4_class"],
    "tasks": {"task1": ["block1", "block2", "block3", "block4_class"]},
}


@pytest.fixture(scope="module")
def table() -> tuple[Resource, ...]:
    return resources(Handlers(cast(Commands, None), "blocks", lambda: None))


@pytest.fixture(scope="module")
def document(table: tuple[Resource, ...]) -> dict[str, Any]:
    return openapi_document(table)


def test_the_document_is_valid_openapi(document: dict[str, Any]) -> None:
    assert not list(OpenAPIV31SpecValidator(document).iter_errors())
    json.dumps(document, allow_nan=False)


def test_every_resource_is_in_it_once(
    document: dict[str, Any], table: tuple[Resource, ...]
) -> None:
    there = {(m.upper(), p) for p, ops in document["paths"].items() for m in ops}
    assert there == {(r.method, r.path) for r in table}
    assert len({r.operation for r in table}) == len(table)


def test_who_calls_what_needs_no_body_is_asked_for_none(
    document: dict[str, Any], table: tuple[Resource, ...]
) -> None:
    """Of a body that may be left out or null, generators make what sends neither."""
    for r in table:
        body = document["paths"][r.path][r.method.lower()].get("requestBody")
        assert (body is not None and body["required"]) if r.body else body is None


def test_the_reference_page_lists_every_resource(table: tuple[Resource, ...]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rest.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([A-Z]+ \S+)` \|", page, re.MULTILINE))
    assert listed == {f"{r.method} {r.path}" for r in table}


def test_every_named_schema_exists_and_is_used(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    for name in document["components"]["schemas"]:
        assert f'"#/components/schemas/{name}"' in text, name


def undescribed(schemas: dict[str, Any]) -> set[str]:
    """Paths of the properties without a description, their own or that of what they refer to."""
    found: set[str] = set()

    def look(node: Any, path: str) -> None:
        if isinstance(node, list):
            for part in node:
                look(part, path)
        elif isinstance(node, dict):
            for name, schema in node.get("properties", {}).items():
                target = schemas.get(schema.get("$ref", "").rpartition("/")[2], {})
                if not (schema.get("description") or target.get("description")):
                    found.add(f"{path}.{name}")
                look(schema, f"{path}.{name}")
            for key in ("items", "anyOf", "additionalProperties"):
                look(node.get(key), path)

    for name, schema in schemas.items():
        look(schema, name)
    return found


def test_every_field_is_described() -> None:
    assert undescribed(components()) == set()
    # the planted failure
    nested = {"type": "array", "items": {"type": "object", "properties": {"b": {"type": "number"}}}}
    bare = {"properties": {"a": {"description": "an a", **nested}}}
    assert undescribed({"X": bare}) == {"X.a.b"}


def test_every_figure_of_a_record_is_in_it() -> None:
    schemas = components()
    for record, name in ((StageKpi, "StageKpi"), (ProcessKpi, "ProcessKpi")):
        assert schemas[name]["properties"].keys() == {f.name for f in dataclasses.fields(record)}


def test_every_error_code_has_its_status(
    document: dict[str, Any], table: tuple[Resource, ...]
) -> None:
    for resource in table:
        answers = document["paths"][resource.path][resource.method.lower()]["responses"]
        for code in resource.errors:
            assert str(CODES[code].http) in answers


@pytest.mark.parametrize(
    "body",
    [
        THESIS,
        {"blocks": [], "tasks": {}},
        {
            "blocks": [{"name": "a", "replicas": 2, "batching": "none", "device": "cuda:1"}, "b"],
            "tasks": {"t": {"path": ["a", "b"], "deadline_ms": 100}},
            "mode": "zeromq",
            "limits": {"max_rows": 4},
        },
    ],
)
def test_system_updates_that_the_document_accepts(body: Any) -> None:
    Draft202012Validator(components()["SystemUpdate"]).validate(body)


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"blocks": []},
        {"blocks": [1], "tasks": {}},
        {"blocks": [{"name": "a", "extra": 1}], "tasks": {}},
        {"blocks": [], "tasks": {"t": "a"}},
        {"blocks": [], "tasks": {}, "mode": "carrier pigeon"},
        {"blocks": ["../a"], "tasks": {}},
    ],
)
def test_system_updates_that_it_does_not(body: Any) -> None:
    assert not Draft202012Validator(components()["SystemUpdate"]).is_valid(body)


@pytest.mark.parametrize(
    ("schema", "body", "taken"),
    [
        ("StoreOrder", {"file": "run1.jsonl"}, True),
        ("StoreOrder", {"file": ""}, False),
        ("StoreOrder", {"file": "../run1.jsonl"}, False),
        ("StoreOrder", {"file": "run1.json"}, False),
    ],
)
def test_the_document_takes_what_the_resources_take(schema: str, body: Any, taken: bool) -> None:
    assert Draft202012Validator(components()[schema]).is_valid(body) is taken


class TestBody:
    def test_duplicates_are_found_with_their_paths(self) -> None:
        value, problems = parse_json(
            b'{"tasks": {"t": ["a"], "u": {"x": 1, "x": 2}, "t": ["b"]}, "l": [{"k": 1, "k": 1}]}'
        )
        assert value["tasks"]["t"] == ["b"]
        assert {p.path for p in problems} == {"$.tasks.t", "$.tasks.u.x", "$.l[0].k"}
        with pytest.raises(BlockFlowError) as e:
            refuse_duplicates(problems)
        assert len(e.value.details["problems"]) == 3

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"{",
            b"\xff\xfe",
            b"[1,]",
            b"NaN",
            b"[Infinity]",
            b"1e999",
            b"[" * 100_000,
            b"1" * 5000,
            b'{"a": 1} x',
        ],
    )
    def test_what_is_no_json_is_refused(self, raw: bytes) -> None:
        with pytest.raises(BlockFlowError) as e:
            parse_json(raw)
        assert e.value.code == "BAD_BODY"

    def test_a_mark_that_editors_put_in_front_is_no_matter(self) -> None:
        assert parse_json(b'\xef\xbb\xbf{"a": 1}') == ({"a": 1}, [])

    def test_the_position_is_told(self) -> None:
        with pytest.raises(BlockFlowError) as e:
            parse_json(b'{\n  "a": x}')
        assert "line 2, column 8" in e.value.message
        assert e.value.details["position"] == 9

    @given(st.binary(max_size=200))
    def test_any_bytes_give_a_value_or_a_typed_error(self, raw: bytes) -> None:
        try:
            parse_json(raw)
        except BlockFlowError as e:
            if e.code != "BAD_BODY":
                raise

    def test_sizes(self) -> None:
        limit = limits.MAX_REST_BODY_BYTES
        assert read_body(io.BytesIO(b"abc"), "3") == b"abc"
        assert len(read_body(io.BytesIO(b"x" * limit), str(limit))) == limit
        for stream, length, code in (
            (io.BytesIO(b""), str(limit + 1), "BODY_TOO_LARGE"),
            (io.BytesIO(b"ab"), "3", "BAD_BODY"),
            (io.BytesIO(b"ab"), "-3", "BAD_BODY"),
        ):
            with pytest.raises(BlockFlowError) as e:
                read_body(stream, length)
            assert e.value.code == code

    @pytest.mark.parametrize("value", ["application/json", "Application/JSON; charset=utf-8"])
    def test_json_types(self, value: str) -> None:
        check_content_type(value)

    @pytest.mark.parametrize("value", [None, "", "text/plain", "application/json; charset=latin-1"])
    def test_other_types(self, value: str | None) -> None:
        with pytest.raises(BlockFlowError) as e:
            check_content_type(value)
        assert e.value.code == "UNSUPPORTED_MEDIA"

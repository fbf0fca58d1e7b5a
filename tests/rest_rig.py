"""A rig around REST of a running system, and what every answer of it has to fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from control_rig import echo_repository
from jsonschema import Draft202012Validator
from system_rig import idle_system

from blockflow.control.auth import API, API_HEADER
from blockflow.control.system import System
from blockflow.core.errors import CODES
from blockflow.launch.base import Launcher

BODY = {"blocks": ["a", "b", "c"], "tasks": {"t1": ["a", "b"], "t2": ["a", "c"]}}

VALIDATORS: dict[tuple[int, str, str, int], tuple[Any, Draft202012Validator]] = {}
"""Of the answers of a document (which is kept, and with it its id) that were looked at so far."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[System]:
    root = tmp_path_factory.mktemp("rest")
    echo_repository(root / "blocks", broken={"fail_on_load": 1})
    with idle_system(root / "blocks", root / "state", launcher) as running:
        yield running


@pytest.fixture(scope="module")
def http(system: System) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=system.rest_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    return http.get("/openapi.json").json()


@pytest.fixture
def deployed(system: System) -> System:
    system.apply(BODY)
    return system


def fits(document: dict[str, Any], answer: httpx.Response, method: str, path: str) -> Any:
    """The answer is JSON and of the form that the document promises for its status: it has no field
    that the document does not describe."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers[API_HEADER] == API
    place = (id(document), path, method, answer.status_code)
    if place not in VALIDATORS:
        promised = document["paths"][path][method]["responses"][str(answer.status_code)]
        schema = promised["content"]["application/json"]["schema"]
        whole = closed({**schema, "components": document["components"]})
        VALIDATORS[place] = document, Draft202012Validator(whole)
    VALIDATORS[place][1].validate(answer.json())
    return answer.json()


def closed(schema: Any) -> Any:
    """``schema`` without leave for properties that it does not describe: a later release may add
    some, this one has none."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    # A dict of schemas by name may have an entry "properties" too: then it is no list of them.
    of_object = schema.get("type") == "object" and "properties" in schema
    shut = {"additionalProperties": False} if of_object else {}
    return {**shut, **{k: closed(v) for k, v in schema.items()}}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers[API_HEADER] == API
    error = answer.json()["error"]
    assert CODES[error["code"]].http == answer.status_code
    return error

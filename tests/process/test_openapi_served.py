"""The served OpenAPI document is true: schemathesis reads it, makes requests of it, right and wrong
ones, and judges every answer of a running control plane by it.

The examples are derived from the document alone (no chance): a failure repeats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from control_rig import echo_repository
from hypothesis import HealthCheck, Phase, given, settings
from rest_rig import closed
from schemathesis import GenerationMode
from schemathesis.checks import CheckContext
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from system_rig import served

from blockflow.control.rest.shapes import TEXT
from blockflow.core.errors import CODES
from blockflow.launch.base import Launcher

EXAMPLES = 6
TOPOLOGY = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[str]:
    root = tmp_path_factory.mktemp("served")
    echo_repository(root / "blocks")
    with served(root, TOPOLOGY, launcher) as system:
        yield system.rest_url


def is_no_defect(_ctx: CheckContext, response: Any, _case: Any) -> None:
    """The answer is JSON; an error has a known code with its own status, and is no defect."""
    document = response.json()
    if response.status_code >= 400:
        error = document["error"]
        assert error["code"] != "INTERNAL", error
        assert response.status_code == CODES[error["code"]].http


CHECKS: list[Any] = [
    is_no_defect,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def can_be_wrong(operation: Any) -> bool:
    """Whether there are requests that the document forbids; hypothesis would look for them long."""
    definition = operation.definition.raw
    free = [p["schema"] == TEXT for p in definition.get("parameters", ())]
    return "requestBody" in definition or not all(free)


def judge(operation: Any, mode: GenerationMode, url: str) -> None:
    """Ask for ``operation`` in many ways and check every answer."""
    definition = operation.definition.raw
    # A generated update that is valid would start processes: let them be planned only.
    dry = any(p["name"] == "dry_run" for p in definition.get("parameters", ()))

    with requests.Session() as session:

        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            if dry:
                case.query = {**(case.query or {}), "dry_run": "true"}
            response = case.call(base_url=url, session=session, timeout=30)
            case.validate_response(response, checks=CHECKS)

        ask()


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda m: str(m.value))
def test_every_answer_is_as_the_document_says(url: str, mode: GenerationMode) -> None:
    document = requests.get(f"{url}/openapi.json", timeout=30).json()
    schema = schemathesis.openapi.from_dict(closed(document))
    judged = 0
    for result in schema.get_all_operations():
        # /v1/shutdown is among them: it asks for an end, and nobody here heeds it.
        operation = result.ok()
        if mode is GenerationMode.POSITIVE or can_be_wrong(operation):
            judge(operation, mode, url)
            judged += 1
    assert judged >= 10
    assert requests.get(f"{url}/v1/health/live", timeout=30).status_code == 200


def test_an_answer_that_is_not_in_the_document_is_found(url: str) -> None:
    """The planted failure: a document that promises something else."""
    document = requests.get(f"{url}/openapi.json", timeout=30).json()
    epoch = document["components"]["schemas"]["Epoch"]
    epoch["properties"]["epoch"] = {"type": "string"}
    schema = schemathesis.openapi.from_dict(document)
    with pytest.raises(BaseException) as e:  # hypothesis may group it
        judge(schema["/v1/epoch"]["GET"], GenerationMode.POSITIVE, url)
    assert "string" in repr(e.value) + str(e.value)


def test_a_field_that_the_document_does_not_describe_is_found(url: str) -> None:
    document = requests.get(f"{url}/openapi.json", timeout=30).json()
    epoch = document["components"]["schemas"]["Epoch"]
    del epoch["properties"]["routes"]
    epoch["required"].remove("routes")
    schema = schemathesis.openapi.from_dict(closed(document))
    with pytest.raises(BaseException) as e:  # hypothesis may group it
        judge(schema["/v1/epoch"]["GET"], GenerationMode.POSITIVE, url)
    assert "routes" in repr(e.value) + str(e.value)

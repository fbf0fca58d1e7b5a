"""The OpenAPI 3.1 document, made from the resource table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from blockflow import __version__
from blockflow.control.auth import API, API_HEADER
from blockflow.control.rest.resources import Resource
from blockflow.control.rest.schemas import components
from blockflow.control.rest.shapes import BLOCK, TEXT, Schema, ref
from blockflow.core.errors import CODES

OPENAPI_VERSION = "3.1.0"

_COMMON = ("METHOD_NOT_ALLOWED", "NOT_FOUND", "UNAUTHORIZED", "TIMEOUT", "INTERNAL", "BAD_BODY")
_OF_POST = ("BODY_TOO_LARGE", "UNSUPPORTED_MEDIA", "FOREIGN_ORIGIN")
_PARAMETER = re.compile(r"\{(\w+)\}")


def openapi_document(table: Sequence[Resource]) -> dict[str, Any]:
    """The document of all resources in ``table``."""
    paths: dict[str, dict[str, Any]] = {}
    for resource in table:
        paths.setdefault(resource.path, {})[resource.method.lower()] = _operation(resource)
    schemas = components()
    schemas["OutcomeOrPreview"] = {"anyOf": [ref("Outcome"), ref("Preview")]}
    schemas["OpenApi"] = {"type": "object"}
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "BlockFlow control plane",
            "version": __version__,
            "description": "Serves many DNN tasks from shared blocks. Every error has the form "
            '{"error": {...}} with a stable code.',
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "headers": {
                API_HEADER: {
                    "description": "in every answer of this service, and of no other",
                    "required": True,
                    "schema": {"type": "string", "const": API},
                }
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        # {}: without a token file, none is needed.
        "security": [{}, {"token": []}],
    }


def _operation(resource: Resource) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            # a worker's name has a '#' in it (trunk1#0)
            "schema": BLOCK if name == "name" and "blocks" in resource.path else TEXT,
        }
        for name in _PARAMETER.findall(resource.path)
    ]
    parameters += [
        {
            "name": flag.name,
            "in": "query",
            "required": False,
            "description": flag.meaning,
            "schema": {"type": "boolean", "default": flag.default},
        }
        for flag in resource.flags
    ]
    parameters += [
        {
            "name": number.name,
            "in": "query",
            "required": False,
            "description": number.meaning,
            "schema": {"type": "integer", "minimum": 0},
        }
        for number in resource.numbers
    ]
    out: dict[str, Any] = {
        "operationId": resource.operation,
        "summary": resource.summary,
        "tags": [resource.tag],
        "responses": _responses(resource),
    }
    if parameters:
        out["parameters"] = parameters
    if resource.body:
        out["requestBody"] = {"required": True, "content": _json(resource.body)}
    return out


def _responses(resource: Resource) -> dict[str, Any]:
    out: dict[str, Any] = {
        str(status): _answer(when, schema) for status, (schema, when) in resource.answers.items()
    }
    codes = [*_COMMON, *resource.errors]
    if resource.method == "POST":
        codes += _OF_POST
    by_status: dict[int, list[str]] = {}
    for code in dict.fromkeys(codes):
        by_status.setdefault(CODES[code].http, []).append(code)
    for status in sorted(by_status):
        described = "; ".join(f"{c}: {CODES[c].meaning}" for c in by_status[status])
        out.setdefault(str(status), _answer(described, "Error"))
    return out


def _answer(when: str, schema: str) -> Schema:
    known_by = {API_HEADER: {"$ref": f"#/components/headers/{API_HEADER}"}}
    return {"description": when, "headers": known_by, "content": _json(schema)}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": ref(schema)}}

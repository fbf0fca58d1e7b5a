"""JSON schemas of what REST takes and gives: the components of the OpenAPI document.

Request bodies are described in full. Answers name their fixed parts; figures may gain fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockflow.control.commands import MAX_HZ
from blockflow.core import limits
from blockflow.core.errors import CODES
from blockflow.core.specs import BlockSpec, LimitSpec, TaskSpec

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
NAME: Schema = {"type": "string", "pattern": limits.NAME_PATTERN}
BLOCK: Schema = {
    "type": "string",
    "pattern": limits.BLOCK_PATTERN,
    "maxLength": limits.MAX_NAME_CHARS,
}
FREE: Schema = {"type": "object", "additionalProperties": True}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def listing(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def obj(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **more: Any
) -> Schema:
    """An object with these properties; further ones are allowed unless ``more`` says otherwise."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        **more,
    }


def components() -> dict[str, Schema]:
    """All named schemas."""
    error = obj(
        {
            "code": {"type": "string", "enum": sorted(CODES)},
            "message": TEXT,
            "fault": {"type": "string", "enum": ["client", "block", "system"]},
            "retryable": FLAG,
        },
        {
            "where": TEXT,
            "hint": TEXT,
            "details": FREE,
            "retry_after_ms": COUNT,
            "problems": listing(obj({"path": TEXT, "message": TEXT}, {"hint": TEXT})),
        },
    )
    update = obj(
        {"id": COUNT, "kind": TEXT, "state": TEXT, "epoch": COUNT, "plan": FREE},
        {
            "block": BLOCK,
            "duration_ms": NUMBER,
            "phases_ms": FREE,
            "notes": listing(TEXT),
            "error": ref("ErrorObject"),
        },
    )
    block = obj(
        {"name": BLOCK, "state": TEXT, "digest": TEXT, "contract": FREE, "kpi": FREE},
        {
            "artifact": {"type": "string", "pattern": limits.BLOCK_PATTERN},
            "closed": maybe(TEXT),
            "replicas": COUNT,
            "ready": COUNT,
            "workers": listing(TEXT),
            "tasks": listing(NAME),
            "profile": FREE,
        },
    )
    process = {"name": TEXT, "role": TEXT, "state": TEXT}
    worker = obj(
        {**process, "incarnation": COUNT, "blocks": listing(BLOCK), "stages": listing(FREE)},
        {
            "pid": maybe(COUNT),
            "process": maybe(FREE),
            "restarts": COUNT,
            "given_up": maybe(TEXT),
            "probe_ms": NUMBER,
            "crash": maybe(ref("Crash")),
            "crashes": listing(ref("Crash")),
        },
    )
    crash = obj(
        {"incarnation": COUNT, "age_s": NUMBER, "cause": TEXT, "log": listing(TEXT)},
        {
            "error": maybe(ref("ErrorObject")),
            "work": listing(
                obj({"block": TEXT, "took_ms": NUMBER, "requests": COUNT, "tickets": listing(TEXT)})
            ),
        },
    )
    task = obj(
        {"name": NAME, "path": listing(BLOCK), "available": FLAG, "contract": FREE, "kpi": FREE},
        {
            "missing": listing(BLOCK),
            "max_rows": COUNT,
            "deadline_ms": COUNT,
            "canary": maybe(obj({"path": listing(BLOCK), "share": NUMBER})),
        },
    )
    schemas: dict[str, Schema] = {
        "ErrorObject": error,
        "Error": obj({"error": ref("ErrorObject")}),
        "SystemUpdate": _system_update(),
        "Update": update,
        "Outcome": obj({"epoch": COUNT, "update": ref("Update")}),
        "Preview": obj({"changed": FLAG, "epoch": COUNT, "plan": FREE}),
        "Updates": obj({"updates": listing(ref("Update"))}),
        "RollbackOrder": obj(
            {}, {"to": {"type": "integer", "minimum": 1}}, additionalProperties=False
        ),
        "PastEpoch": obj(
            {
                "epoch": COUNT,
                "how": TEXT,
                "when": TEXT,
                "in_force": FLAG,
                "posted": FREE,
                "digests": FREE,
                "missing": listing(TEXT),
            }
        ),
        "History": obj({"epochs": listing(ref("PastEpoch"))}),
        "Epoch": obj({"epoch": COUNT, "routes": COUNT, "routes_in_force": COUNT}),
        "Topology": obj({"epoch": COUNT, "topology": maybe(FREE), "posted": maybe(FREE)}),
        "Task": task,
        "Tasks": obj({"tasks": listing(ref("Task"))}),
        "Block": block,
        "Blocks": obj({"blocks": listing(ref("Block"))}),
        "Worker": worker,
        "Crash": crash,
        "Dispatcher": obj(
            process,
            {
                "incarnation": COUNT,
                "clients": listing(TEXT),
                "kpi": FREE,
                "restarts": COUNT,
                "crash": maybe(ref("Crash")),
                "crashes": listing(ref("Crash")),
            },
        ),
        "Process": {"anyOf": [ref("Worker"), ref("Dispatcher")]},
        "Workers": obj({"workers": listing(ref("Worker")), "dispatcher": ref("Dispatcher")}),
        "Pings": obj(
            {
                "ok": FLAG,
                "pings": listing(
                    obj(
                        {"worker": TEXT, "incarnation": maybe(COUNT), "ok": FLAG},
                        {"rtt_ms": NUMBER, "state": TEXT},
                    )
                ),
            }
        ),
        "MonitorOrder": obj(
            {"on": FLAG},
            {"hz": {"type": "number", "minimum": 0, "maximum": MAX_HZ}},
            additionalProperties=False,
        ),
        "Monitor": obj({"on": FLAG, "hz": NUMBER}),
        "StoreOrder": obj({"file": TEXT}, additionalProperties=False),
        "Stored": obj({"path": TEXT, "count": COUNT}),
        "Kpis": obj(
            {
                "epoch": COUNT,
                "blocks": listing(FREE),
                "tasks": listing(FREE),
                "workers": listing(FREE),
                "dispatcher": FREE,
                "totals": FREE,
                "control": FREE,
            }
        ),
        "Live": obj({"live": FLAG}),
        "Ready": obj({"ready": FLAG, "reasons": listing(TEXT)}, {"error": ref("ErrorObject")}),
        "Status": obj(
            {
                "state": TEXT,
                "ready": FLAG,
                "reasons": listing(TEXT),
                "epoch": COUNT,
                "release": TEXT,
                "tasks": listing(ref("Task")),
                "blocks": listing(ref("Block")),
                "workers": listing(ref("Worker")),
                "dispatcher": ref("Dispatcher"),
                "totals": FREE,
            }
        ),
        "Repository": obj({"repository": TEXT, "blocks": listing(FREE)}),
        "Accepted": obj({"accepted": FLAG}),
        "Nothing": obj({}, additionalProperties=False),
    }
    return schemas


def _system_update() -> Schema:
    """Both forms of a system update, from the very models that validate it."""
    block, task = _inlined(BlockSpec.model_json_schema()), _inlined(TaskSpec.model_json_schema())
    batching = block["properties"]["batching"]
    # A policy may be given by its name alone.
    block["properties"]["batching"] = {"anyOf": [batching, NAME]}
    path = task["properties"]["path"]
    return obj(
        {
            "blocks": {"type": "array", "items": {"anyOf": [BLOCK, block]}},
            "tasks": {"type": "object", "additionalProperties": {"anyOf": [path, task]}},
        },
        {
            "mode": {"type": "string", "enum": ["tensormq", "zeromq"]},
            "transport": {"type": "string", "enum": ["ipc", "tcp"]},
            "limits": _inlined(LimitSpec.model_json_schema()),
            "oversubscribe": FLAG,
        },
        additionalProperties=False,
        examples=[
            {
                "blocks": ["block1", "block2", "block3", "block4_class"],
                "tasks": {"task1": ["block1", "block2", "block3", "block4_class"]},
            }
        ],
    )


def _inlined(schema: Schema) -> Schema:
    """``schema`` with its local definitions put where they are referred to."""
    definitions = schema.pop("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            target = node.get("$ref")
            if isinstance(target, str):
                rest = {k: walk(v) for k, v in node.items() if k != "$ref"}
                return {**walk(definitions[target.rsplit("/", 1)[1]]), **rest}
            return {k: walk(v) for k, v in node.items()}
        if isinstance(node, list):
            return [walk(v) for v in node]
        return node

    out: Schema = walk(schema)
    return out

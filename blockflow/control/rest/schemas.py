"""JSON schemas of what REST takes and gives: the components of the OpenAPI document.

Request bodies take what is described and nothing else. Answers have what is described, which a test
holds; a later release may add fields.
"""

from __future__ import annotations

from typing import get_args

from blockflow.control.commands import MAX_HZ
from blockflow.control.rest.answers import answers, epoch_fields, health_fields
from blockflow.control.rest.figures import figures
from blockflow.control.rest.shapes import (
    BLOCK,
    COUNT,
    FREE,
    NAME,
    NUMBER,
    TEXT,
    Schema,
    count,
    flag,
    inlined,
    listing,
    mapping,
    maybe,
    number,
    obj,
    one_of,
    ref,
    said,
    text,
)
from blockflow.control.samples import FILE_PATTERN
from blockflow.control.update import Kind, Phase
from blockflow.core.errors import CODES, Fault
from blockflow.core.specs import BlockSpec, LimitSpec, Mode, TaskSpec, Transport


def components() -> dict[str, Schema]:
    """All named schemas."""
    return {**_errors(), **_updates(), **answers(), **figures(), **_orders()}


def _errors() -> dict[str, Schema]:
    problem = obj(
        {
            "path": text("JSON path of the offending value"),
            "message": text("what is wrong with it"),
        },
        {
            "hint": text("what to do"),
            "code": one_of("of the error that it comes from, where there was one", CODES),
        },
    )
    error = obj(
        {
            "code": one_of("stable; the table of codes is in docs/errors.md", CODES),
            "message": text("what was wrong"),
            "fault": one_of("who should act", Fault),
            "retryable": flag("whether the same call may succeed later"),
        },
        {
            "where": text("a JSON path, block, request, file or address"),
            "hint": text("what to do"),
            "details": said("further facts, which differ by code", FREE),
            "retry_after_ms": count("when a retry makes sense, ms"),
            "problems": listing(problem, "every finding of a validation"),
        },
        description="What was wrong, where, and what to do.",
    )
    return {"ErrorObject": error, "Error": obj({"error": ref("ErrorObject")})}


def _updates() -> dict[str, Schema]:
    return {
        "SystemUpdate": _system_update(),
        "Plan": _plan(),
        "Update": obj(
            {
                "id": count("increasing, with gaps; never that of another update"),
                "kind": one_of("what was asked", Kind),
                "state": one_of("how far it is; done, unchanged and failed are final", Phase),
                "epoch": count("the epoch once it is done"),
                "plan": ref("Plan"),
                "duration_ms": number("from its acceptance to its end, or until now, ms"),
                "phases_ms": mapping(NUMBER, "how long each state took that it has left, ms"),
            },
            {
                "block": said("the block, where it concerns one", BLOCK),
                "notes": listing(TEXT, "what did not go as hoped, and what was decided for you"),
                "error": ref("ErrorObject", "why it failed"),
            },
            description="A change of what runs.",
        ),
        "Outcome": obj({"epoch": count("the epoch in force"), "update": ref("Update")}),
        "Preview": obj(
            {
                "changed": flag("whether anything would change"),
                "epoch": count("the epoch that it would be"),
                "plan": ref("Plan"),
            }
        ),
        "Updates": obj({"updates": listing(ref("Update"), "the latest, newest first")}),
        "PastEpoch": obj(
            {
                "epoch": count("its number"),
                "how": text("kind of the update that put it in force"),
                "when": text("when that was, UTC, ISO 8601; empty = not known"),
                "in_force": flag("whether it is in force"),
                "posted": said("the system update as it was posted", FREE),
                "digests": mapping(TEXT, "block -> sha256 of its artifact then"),
                "missing": maybe(
                    listing(
                        TEXT,
                        "blocks whose artifact of then is not stored any more; null: not known, "
                        "the repository is away",
                    )
                ),
            },
            description="A topology that was put in force.",
        ),
        "History": obj({"epochs": listing(ref("PastEpoch"), "the latest, newest first")}),
        "Epoch": obj(epoch_fields()),
        "Topology": obj(
            {
                "epoch": count("the epoch in force"),
                "topology": maybe(
                    ref("SystemUpdate", "with all defaults and digests; null: none is in force")
                ),
                "posted": maybe(
                    said(
                        "as it was posted, also of a stored one that could not be deployed, where "
                        "`topology` is null; null before the first one",
                        FREE,
                    )
                ),
            }
        ),
    }


def _plan() -> Schema:
    start = obj({"replica": text("its name"), "blocks": listing(BLOCK, "what it hosts")})
    policy = obj(
        {
            "replica": text("its name"),
            "block": said("the block", BLOCK),
            "policy": said("the batching policy that it gets", FREE),
        }
    )
    tasks = obj(
        {
            "add": listing(NAME, "new ones"),
            "remove": listing(NAME, "those that go"),
            "change": listing(NAME, "those that differ"),
        }
    )
    return obj(
        {},
        {
            "start": listing(start, "processes that start"),
            "keep": listing(TEXT, "processes that run on"),
            "stop": listing(TEXT, "processes that stop"),
            "policies": listing(policy, "batching policies that change in place"),
            "threads": mapping(COUNT, "threads of a forward, by worker"),
            "lanes": mapping(COUNT, "forwards at once, by worker"),
            "tasks": said("published tasks", tasks),
        },
        description="The difference to what runs; what an operation on one block does not touch is "
        "left out.",
    )


def _orders() -> dict[str, Schema]:
    """Small request bodies and their answers."""
    ping = obj(
        {
            "worker": text("the process"),
            "incarnation": maybe(count("its life; null when there is no process")),
            "ok": flag("whether it answered in time"),
        },
        {"rtt_ms": number("round trip, ms"), "state": text("its state, in its own words")},
    )
    rate = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_HZ}
    to = {"type": "integer", "minimum": 1}
    return {
        "RollbackOrder": obj(
            {}, {"to": said("the epoch; default: the one before", to)}, additionalProperties=False
        ),
        "Pings": obj(
            {"ok": flag("whether all answered"), "pings": listing(ping, "one per process")}
        ),
        "MonitorOrder": obj(
            {"on": flag("whether to sample")},
            {"hz": said("samples per second of every process; default 4", rate)},
            additionalProperties=False,
        ),
        "Monitor": obj(
            {"on": flag("whether it samples"), "hz": number("samples per second; 0 = off")}
        ),
        "StoreOrder": obj(
            {"file": {**text("name below the state directory's kpis"), "pattern": FILE_PATTERN}},
            {"force": flag("true replaces a file of that name; else it is FILE_EXISTS")},
            additionalProperties=False,
        ),
        "Stored": obj({"path": text("the file"), "count": count("samples in it")}),
        "Live": obj({"live": flag("always true: the Manager's thread turns")}),
        "Ready": obj(
            health_fields(), {"error": ref("ErrorObject", "NOT_READY, with the same reasons")}
        ),
        "Accepted": obj({"accepted": flag("always true")}),
    }


def _system_update() -> Schema:
    """Both forms of a system update, from the very models that validate it."""
    block, task = inlined(BlockSpec.model_json_schema()), inlined(TaskSpec.model_json_schema())
    batching = block["properties"]["batching"]
    # A policy may be given by its name alone.
    about = batching.pop("description")
    block["properties"]["batching"] = {"anyOf": [batching, NAME], "description": about}
    path = task["properties"]["path"]
    return obj(
        {
            "blocks": listing({"anyOf": [BLOCK, block]}, "each a name, or an object with options"),
            "tasks": mapping(
                {"anyOf": [path, task]}, "task id -> its path, or an object with options"
            ),
        },
        {
            "mode": one_of("how tensors travel between processes", get_args(Mode)),
            "transport": one_of("of the workers' sockets", get_args(Transport)),
            "limits": said("of the whole system", inlined(LimitSpec.model_json_schema())),
            "oversubscribe": flag("allow explicit threads beyond the cores"),
        },
        additionalProperties=False,
        examples=[
            {
                "blocks": ["block1", "block2", "block3", "block4_class"],
                "tasks": {"task1": ["block1", "block2", "block3", "block4_class"]},
            }
        ],
    )

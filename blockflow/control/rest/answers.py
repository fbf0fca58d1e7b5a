"""Answers: schemas of what ``views.py`` and ``commands.py`` tell of tasks, blocks, processes."""

from __future__ import annotations

from blockflow.control.fleet import Role
from blockflow.control.rest.lives import crash, crashes, life, manager
from blockflow.control.rest.shapes import (
    BLOCK,
    COUNT,
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
from blockflow.core.lifecycle import State
from blockflow.core.specs import CanarySpec
from blockflow.repository.manifest import Choice

_WORKER_STATES = (*State, "restarting")
_BLOCK_STATES = (
    *("ready", "degraded", "starting", "restarting", "failed", "missing"),
    *("draining", "drained", "stopping", "stopped"),
)
_AUTO: Schema = {"anyOf": [COUNT, {"const": "auto"}]}
_SYSTEM_STATES = ("starting", "empty", "ready", "degraded", "stopping")


def answers() -> dict[str, Schema]:
    """Named schemas of these answers and of their parts."""
    return {
        "TensorSpec": _tensor(),
        "Contract": obj(
            {"input": ref("TensorSpec"), "output": ref("TensorSpec")},
            description="What is taken and given.",
        ),
        "Task": _task(),
        "Tasks": obj({"tasks": listing(ref("Task"), "the published tasks")}),
        "Block": _block(),
        "Blocks": obj({"blocks": listing(ref("Block"), "the blocks of the topology in force")}),
        "Crash": crash(),
        "StageView": _stage(),
        "Worker": _worker(),
        "Dispatcher": _dispatcher(),
        "Process": {"anyOf": [ref("Worker"), ref("Dispatcher")]},
        "Workers": obj(
            {"workers": listing(ref("Worker"), "all workers"), "dispatcher": ref("Dispatcher")}
        ),
        "StoredBlock": _stored_block(),
        "Repository": obj(
            {
                "repository": text("path of the block repository"),
                "blocks": listing(ref("StoredBlock"), "the stored blocks, each at its current one"),
            }
        ),
        "Manager": manager(),
        "Status": _status(),
    }


def _tensor() -> Schema:
    return obj(
        {
            "dtype": text("type of the elements, as numpy names it"),
            "dims": listing(
                {"anyOf": [COUNT, TEXT]}, "sizes; names, and formulas of them: the request decides"
            ),
        },
        {"ranges": mapping(listing(COUNT), "least and largest size of a named dim, where bounded")},
        description="A tensor's type and dims; dim 0 is rows.",
    )


def _contract_texts() -> dict[str, Schema]:
    return {
        "contract": ref("Contract"),
        "input": text("the contract's input for people"),
        "output": text("the contract's output for people"),
    }


def _task() -> Schema:
    canary = inlined(CanarySpec.model_json_schema())
    return obj(
        {
            "name": said("its id", NAME),
            "path": listing(BLOCK, "its blocks, in order"),
            "canary": maybe(said("another path that is tried; null without one", canary)),
            "available": flag("whether every block of its path can serve"),
            "missing": listing(BLOCK, "blocks of its path that cannot"),
            **_contract_texts(),
            "max_rows": count("largest request, rows"),
            "deadline_ms": count("how long a request may take that names no deadline, ms"),
            "kpi": ref("TaskKpi"),
        },
        description="A published task.",
    )


def _stored(one: str) -> dict[str, Schema]:
    return {
        "version": text(f"the maker's label of {one}"),
        "digest": text("sha256 of the artifact, hex: what identifies it"),
        "format": text("format of the artifact"),
        "parameters": count("parameters of the model's piece"),
        "state_bytes": count("bytes of its parameters and buffers"),
    }


def _block() -> Schema:
    return obj(
        {
            "name": said("its name in the topology", BLOCK),
            "artifact": said("its name in the repository, with @version if pinned", BLOCK),
            **_stored("the artifact"),
            "state": one_of("ready where all replicas are; degraded where some are", _BLOCK_STATES),
            "closed": maybe(
                one_of("how an operator closed it; null when it is open", ("drain", "stop"))
            ),
            **_contract_texts(),
            "device": text("cpu or cuda:N"),
            "mode": one_of("handles (tensormq) or whole tensors (zeromq)", ("tensormq", "zeromq")),
            "engine": text("the engine that really runs; until a first sample what was asked for"),
            "engine_asked": text("the engine that the topology asks for; auto = chosen"),
            "precision": text("the precision of that engine; until a first sample what was asked"),
            "precision_asked": text("the precision that the topology asks for; auto = chosen"),
            "variants": listing(TEXT, "further forms of its artifact that are stored"),
            "refused_engines": mapping(
                _REFUSED, "of these, by form, the engines that may not run it"
            ),
            "batching": said(
                "its batching policy, with the policy's options",
                obj({"policy": text("its name")}, additionalProperties=True),
            ),
            "threads": said(
                "threads of a forward that the topology asks for; auto = planned", _AUTO
            ),
            "lanes": said("forwards at once that the topology asks for; auto = planned", _AUTO),
            "max_rows": count("largest batch, rows"),
            "replicas": count("processes that it shall have"),
            "ready": count("processes that are ready"),
            "workers": listing(TEXT, "its processes"),
            "tasks": listing(NAME, "tasks on whose path, or canary's path, it lies"),
            "kpi": ref("BlockKpi"),
        },
        {"profile": said("of one block only: whether a profile of it holds", _profile())},
        description="A block of the topology in force.",
    )


def _profile() -> Schema:
    return obj(
        {"fresh": flag("a profile of this artifact, engine and machine is stored")},
        {
            "reason": text("why none holds"),
            "command": text("what would measure one; empty where nothing would"),
            "engine": text("the engine that was measured"),
            "precision": text("the precision that was measured"),
            "when": text("when it was, UTC, ISO 8601"),
            "threads": listing(COUNT, "numbers of threads that were measured"),
            "points": count("cells of the table"),
        },
    )


def _stage() -> Schema:
    return obj(
        {
            "block": said("its block", BLOCK),
            "stage": count("its number; never used again"),
            "digest": text("sha256 of the artifact that it has loaded"),
            "batching": obj(
                {},
                {"policy": text("its name")},
                additionalProperties=True,
                description="the batching policy in force, with its options; empty where none is "
                "known",
            ),
            "kpi": ref("StageKpi"),
        },
        description="A block at work in a worker.",
    )


def _worker() -> Schema:
    return obj(
        {
            "name": text("the replica: the worker's name, # and a number"),
            "role": one_of("how it stands to the topology in force", Role),
            "state": one_of("where in its life it is", _WORKER_STATES),
            **life(),
            "worker": text("the worker's name in the topology"),
            "blocks": listing(BLOCK, "the blocks that it hosts"),
            "device": text("cpu or cuda:N"),
            "mode": one_of("handles (tensormq) or whole tensors (zeromq)", ("tensormq", "zeromq")),
            "transport": one_of("of its sockets", ("ipc", "tcp")),
            "threads": count("threads of a forward that it was told to use"),
            "threads_asked": said("threads that the topology asks for; auto = planned", _AUTO),
            "threads_now": maybe(count("threads that it says it uses; null without a sample")),
            "lanes": count("forwards at once that it was told"),
            "lanes_asked": said("lanes that the topology asks for; auto = planned", _AUTO),
            "lanes_now": maybe(count("lanes that it says it uses; null without a sample")),
            "cores": listing(COUNT, "cpu numbers that it may use; empty = all of the system's"),
            **crashes(),
            "given_up": maybe(text("why it is not started again, or not for a while; else null")),
            "stages": listing(ref("StageView"), "its blocks at work"),
        },
        description="A worker process.",
    )


def _dispatcher() -> Schema:
    return obj(
        {
            "name": {"const": "dispatcher", "description": "always the same"},
            "role": {"const": "dispatcher", "description": "always the same"},
            "state": one_of("where in its life it is", (*_WORKER_STATES, "missing")),
        },
        {
            **life(),
            "clients": listing(TEXT, "addresses for clients"),
            **crashes(),
            "kpi": ref("DispatcherKpi"),
        },
        description="The Dispatcher's process; only name, role and state while it is missing.",
    )


_REFUSED = mapping(TEXT, "engine -> what was found when the form was made")


def _stored_block() -> Schema:
    variant = obj(
        {
            "file": text("its name in the block's folder"),
            "digest": text("sha256, hex"),
            "bytes": count("size of the file"),
            "machine": text("fingerprint of the only machine that it runs on; empty = any"),
            "refused": _REFUSED,
        }
    )
    padding = obj({"dim": text("the dim"), "value": number("what it is padded with")})
    return obj(
        {"name": text("its name in the repository")},
        {
            **_stored("the current version"),
            "contract": ref("Contract"),
            "variants": mapping(variant, "further forms of the artifact, by kind"),
            "choices": mapping(
                inlined(Choice.model_json_schema()),
                "what engine auto means, by the machine's fingerprint",
            ),
            "padding": maybe(
                said("the promise that padding a dim changes no result; null without", padding)
            ),
            "int_below": maybe(
                count("integers of its input are smaller; null: not known, or there are none")
            ),
            "versions": listing(TEXT, "labels of the stored versions, the current one first"),
            "error": ref("ErrorObject", "why its manifest cannot be read; then nothing else is"),
        },
        description="A stored block.",
    )


def epoch_fields() -> dict[str, Schema]:
    return {
        "epoch": count("the epoch in force"),
        "routes": count("version of the latest routes"),
        "routes_in_force": count("version of the routes that the Dispatcher uses"),
    }


def health_fields() -> dict[str, Schema]:
    return {
        "ready": flag("whether every task can be served"),
        "reasons": listing(TEXT, "why not"),
    }


def _status() -> Schema:
    return obj(
        {
            "release": text("version of BlockFlow"),
            "pid": count("the process to signal, which ends last"),
            "manager": ref("Manager"),
            "uptime_s": number(
                "since the system was started, or begun anew with all that runs, seconds: control "
                "planes that are replaced do not end it"
            ),
            "rest": text("address of REST"),
            "clients": listing(TEXT, "addresses for clients"),
            "run_dir": text("private directory of this instance: sockets, shared memory"),
            "state_dir": text("directory of what is stored"),
            "repository": text("path of the block repository"),
            "cores": listing(COUNT, "cpu numbers that the system may use"),
            "cores_at_once": count("threads that are planned for: a control group may limit time"),
            "state": one_of("of the whole", _SYSTEM_STATES),
            **health_fields(),
            **epoch_fields(),
            "tasks": listing(ref("Task"), "the published tasks"),
            "blocks": listing(ref("Block"), "the blocks of the topology in force"),
            "workers": listing(
                ref("Worker"), "all workers, of an update under way and those that leave too"
            ),
            "dispatcher": ref("Dispatcher"),
            "totals": ref("Totals"),
            "monitor_hz": said("samples per second of every process; 0 = off", NUMBER),
            "updating": maybe(ref("Update", "the update under way; null without one")),
            "last_update": maybe(ref("Update", "the latest update; null before the first one")),
            "warnings": listing(TEXT, "what works and should be known nevertheless"),
            "controller": said(
                "control messages",
                obj(
                    {
                        "received": count("received"),
                        "malformed": count("refused: not a message of the protocol"),
                        "unknown": count("refused: from a process that nobody has started"),
                        "unreachable": count("not sent: there is no connection"),
                        "refused": count("not sent: the process does not read"),
                        "strays": count("from the dead, or out of place in the sender's state"),
                        "late_acks": count("new routes that a worker did not confirm in time"),
                    }
                ),
            ),
            "control": ref("Control"),
        },
        description="Everything at one moment.",
    )

"""The resource table: one row per method and path. Routing and the OpenAPI document both come from
it, so that they cannot drift apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockflow.control.commands import MAX_HZ, WAIT_S, Commands
from blockflow.control.rest.body import fields
from blockflow.control.rest.query import DRY_RUN, IF_EPOCH, WAIT, Flag, Number
from blockflow.control.samples import Former
from blockflow.control.update import FINAL, Kind
from blockflow.core.errors import Problem, RequestError, SystemError_, make_error


@dataclass(frozen=True, slots=True)
class Call:
    """One request, decoded. ``duplicates`` are the names that stood twice in the body, ``numbers``
    those query parameters that are numbers and were given."""

    path: Mapping[str, str]
    query: Mapping[str, bool]
    body: Any = None
    duplicates: Sequence[Problem] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and a JSON document. ``after`` runs when the answer is made; it must not wait."""

    document: Any
    status: int = 200
    after: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Resource:
    """One operation.

    Attributes:
        method, path: ``{name}`` in the path is a parameter.
        operation: its id in the OpenAPI document.
        summary: one line for people.
        handler: does it.
        answers: status -> (schema name, when).
        body: schema of the request body, '' = none is taken (an empty object is tolerated).
        flags, numbers: query parameters; others are refused.
        errors: codes it may answer besides those that every resource may.
    """

    method: str
    path: str
    operation: str
    summary: str
    handler: Callable[[Call], Answer]
    answers: Mapping[int, tuple[str, str]]
    body: str = ""
    flags: tuple[Flag, ...] = ()
    numbers: tuple[Number, ...] = ()
    errors: tuple[str, ...] = ()
    tag: str = "system"


@dataclass(frozen=True)
class Handlers:
    """What the resources do. ``shutdown`` ends the whole system."""

    commands: Commands
    repository: str
    shutdown: Callable[[], None]
    document: Callable[[], Mapping[str, Any]] = field(default=dict)

    def system_update(self, call: Call) -> Answer:
        body, twice = call.body, call.duplicates
        if call.query["dry_run"]:
            return Answer(self.commands.preview(body, twice, **call.numbers))
        wait_s = WAIT_S if call.query["wait"] else 0.0
        apply = self.commands.apply
        return _outcome(apply(body, wait_s=wait_s, problems=twice, **call.numbers))

    def rollback(self, call: Call) -> Answer:
        to = fields(call.body, call.duplicates, {}, {"to": (int,)}).get("to")
        if call.query["dry_run"]:
            return Answer(self.commands.rollback(to, dry_run=True, **call.numbers))
        wait_s = WAIT_S if call.query["wait"] else 0.0
        return _outcome(self.commands.rollback(to, wait_s=wait_s, **call.numbers))

    def operate(self, kind: Kind) -> Callable[[Call], Answer]:
        def handler(call: Call) -> Answer:
            wait_s = WAIT_S if call.query["wait"] else 0.0
            return _outcome(self.commands.operate(kind, call.path["name"], wait_s=wait_s))

        return handler

    def update(self, call: Call) -> Mapping[str, Any]:
        text = call.path["id"]
        if not (text.isascii() and text.isdecimal()) or len(text) > 18:
            raise SystemError_("NOT_FOUND", f"no update {text[:40]!r}", hint="GET /v1/updates")
        return self.commands.update(int(text))

    def workers(self, call: Call) -> Mapping[str, Any]:
        *workers, dispatcher = self.commands.workers()
        return {"workers": workers, "dispatcher": dispatcher}

    def ping(self, call: Call) -> Answer:
        answers = self.commands.ping(call.path.get("name"))
        return Answer({"ok": all(a["ok"] for a in answers), "pings": answers})

    def monitor(self, call: Call) -> Answer:
        order = fields(call.body, call.duplicates, {"on": (bool,)}, {"hz": (int, float)})
        hz = order.get("hz", 4.0)
        if not 0 < hz <= MAX_HZ:
            what = f"hz {str(hz)[:20]} is not above 0 and at most {MAX_HZ:g}"
            raise RequestError("INVALID_REQUEST", what, where="hz", hint='off is {"on": false}')
        return Answer(self.commands.monitor(hz if order["on"] else 0.0))

    def store_kpis(self, call: Call) -> Answer:
        order = fields(call.body, call.duplicates, {"file": (str,)}, {"force": (bool,)})
        former = Former.REPLACED if order.get("force") else Former.KEPT
        return Answer(self.commands.store_kpis(order["file"], former))

    def live(self, call: Call) -> Mapping[str, Any]:
        self.commands.epoch()  # the manager's thread turns
        return {"live": True}

    def ready(self, call: Call) -> Answer:
        health = self.commands.health()
        if health["ready"]:
            return Answer(health)
        error = make_error(
            "NOT_READY",
            "; ".join(health["reasons"][:5]),
            hint="GET /v1/status",
            details={"reasons": health["reasons"]},
        )
        return Answer({**health, "error": error.to_dict()}, 503)

    def stop_all(self, call: Call) -> Answer:
        return Answer({"accepted": True}, 202, after=self.shutdown)


def resources(handlers: Handlers) -> tuple[Resource, ...]:
    """The table."""
    h, c = handlers, handlers.commands
    one = ("UNKNOWN_BLOCK",)
    operated = (*one, "UPDATE_IN_PROGRESS", "UPDATE_FAILED", "INVALID_REQUEST", "NOT_RUNNING")
    done = {200: ("Outcome", "done"), 202: ("Outcome", "accepted, not done yet")}

    update_errors = (
        "INVALID_TOPOLOGY",
        "UPDATE_IN_PROGRESS",
        "UPDATE_FAILED",
        "EPOCH_MISMATCH",
        "NO_SPACE",
        "STATE_UNUSABLE",
        "NOT_RUNNING",
    )
    updated = {200: ("OutcomeOrPreview", "done, or the plan of a dry run"), 202: done[202]}
    pinged = {200: ("Pings", "who answered")}

    def get(
        path: str,
        operation: str,
        summary: str,
        schema: str,
        document: Callable[[Call], Any],
        *,
        errors: tuple[str, ...] = (),
        tag: str = "system",
    ) -> Resource:
        """What ``document`` makes, as it is."""
        return Resource(
            "GET",
            path,
            operation,
            summary,
            lambda call: Answer(document(call)),
            {200: (schema, "as asked")},
            errors=errors,
            tag=tag,
        )

    def update(
        path: str, operation: str, summary: str, handler: Callable[[Call], Answer], body: str
    ) -> Resource:
        return Resource(
            "POST",
            path,
            operation,
            summary,
            handler,
            updated,
            body=body,
            flags=(WAIT, DRY_RUN),
            numbers=(IF_EPOCH,),
            errors=update_errors,
            tag="updates",
        )

    def operation(kind: Kind, summary: str) -> Resource:
        return Resource(
            "POST",
            f"/v1/blocks/{{name}}/{kind}",
            f"{kind}Block",
            summary,
            h.operate(kind),
            done,
            flags=(WAIT,),
            errors=operated,
            tag="blocks",
        )

    return (
        update(
            "/v1/system-update",
            "systemUpdate",
            "Apply a whole topology: what is missing starts, what is unneeded stops",
            h.system_update,
            "SystemUpdate",
        ),
        update(
            "/v1/rollback",
            "rollBack",
            "Put an earlier epoch's topology and artifacts in force again, as a new epoch",
            h.rollback,
            "RollbackOrder",
        ),
        get(
            "/v1/history",
            "listHistory",
            "The latest epochs, newest first",
            "History",
            lambda _: {"epochs": c.history()},
            tag="updates",
        ),
        get(
            "/v1/updates",
            "listUpdates",
            "The latest updates, newest first",
            "Updates",
            lambda _: {"updates": c.updates()},
            tag="updates",
        ),
        get("/v1/updates/{id}", "getUpdate", "One update", "Update", h.update, tag="updates"),
        get(
            "/v1/topology",
            "getTopology",
            "The topology in force",
            "Topology",
            lambda _: c.topology(),
        ),
        get("/v1/epoch", "getEpoch", "The epoch in force", "Epoch", lambda _: c.epoch()),
        get(
            "/v1/tasks",
            "listTasks",
            "The published tasks with their figures",
            "Tasks",
            lambda _: {"tasks": c.tasks()},
        ),
        get(
            "/v1/blocks",
            "listBlocks",
            "The blocks with state and figures",
            "Blocks",
            lambda _: {"blocks": c.blocks()},
            tag="blocks",
        ),
        get(
            "/v1/blocks/{name}",
            "getBlock",
            "One block",
            "Block",
            lambda call: c.block(call.path["name"]),
            errors=one,
            tag="blocks",
        ),
        get(
            "/v1/workers",
            "listWorkers",
            "The worker processes and the Dispatcher",
            "Workers",
            h.workers,
            tag="workers",
        ),
        get(
            "/v1/workers/{name}",
            "getWorker",
            "One worker, or the Dispatcher",
            "Process",
            lambda call: c.worker(call.path["name"]),
            tag="workers",
        ),
        Resource(
            "POST",
            "/v1/blocks/{name}/ping",
            "pingBlock",
            "Ping the workers of a block",
            h.ping,
            pinged,
            errors=one,
            tag="blocks",
        ),
        operation(Kind.DRAIN, "Finish what the block has, take no more"),
        operation(Kind.UNDRAIN, "Let a drained block take work again"),
        operation(Kind.STOP, "Terminate the block's workers until restart or the next update"),
        operation(Kind.RESTART, "Replace the block's workers without a gap"),
        Resource(
            "POST", "/v1/ping", "pingAll", "Ping every process", h.ping, pinged, tag="workers"
        ),
        Resource(
            "POST",
            "/v1/monitor",
            "setMonitor",
            "Turn KPI samples on or off",
            h.monitor,
            {200: ("Monitor", "as set")},
            body="MonitorOrder",
            errors=("INVALID_REQUEST",),
            tag="figures",
        ),
        get(
            "/v1/kpis",
            "getKpis",
            "The latest figures of everything",
            "Kpis",
            lambda _: c.kpis(),
            tag="figures",
        ),
        Resource(
            "POST",
            "/v1/kpis/store",
            "storeKpis",
            "Write the recent samples to a file below the state directory",
            h.store_kpis,
            {200: ("Stored", "where, and how many")},
            body="StoreOrder",
            errors=("FILE_EXISTS", "INVALID_REQUEST", "NO_SPACE", "STATE_UNUSABLE"),
            tag="figures",
        ),
        get("/v1/health/live", "getLive", "The control plane's own liveness", "Live", h.live),
        Resource(
            "GET",
            "/v1/health/ready",
            "getReady",
            "Whether every task can be served",
            h.ready,
            {200: ("Ready", "ready"), 503: ("Ready", "not ready, with reasons")},
        ),
        get("/v1/status", "getStatus", "Everything at one moment", "Status", lambda _: c.status()),
        get(
            "/v1/repository",
            "listRepository",
            "The stored blocks",
            "Repository",
            lambda _: {"repository": h.repository, "blocks": c.repository()},
            tag="blocks",
        ),
        Resource(
            "POST",
            "/v1/shutdown",
            "shutDown",
            "Stop everything and end",
            h.stop_all,
            {202: ("Accepted", "it ends")},
        ),
        get("/openapi.json", "getOpenApi", "This document", "OpenApi", lambda _: h.document()),
    )


def _outcome(outcome: dict[str, Any]) -> Answer:
    """202 while the update goes on."""
    final = outcome["update"]["state"] in {str(p) for p in FINAL}
    return Answer(outcome, 200 if final else 202)

"""Entrance: whether a checked request may enter now, and on which way. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from blockflow.core.routing import TaskRoute
from blockflow.dispatcher.admission import Admission, Reject
from blockflow.dispatcher.plan import Plan, Planner
from blockflow.dispatcher.recovery import may_have_run
from blockflow.dispatcher.register import Register
from blockflow.wire.client import Request


def let_in(
    admission: Admission,
    register: Register,
    planner: Planner,
    client: bytes,
    request: Request,
    tasks: Sequence[TaskRoute],
    now_ns: int,
    framed: int = 0,
) -> Plan:
    """The way of ``request``, whose ``tasks`` these are; an outline when it has to wait for it.

    ``framed``: bytes of inputs that are kept in no slot, also those of requests that have ended.

    Raises:
        RequestError: OVERLOADED, or what :meth:`Planner.way` says; WORKER_LOST: it may have been
            begun before, and must not be a second time.
    """
    inflight, nbytes = len(register), request.tensor.nbytes
    verdict = admission.decide(
        client,
        request.tasks,
        inflight=inflight,
        of_client=register.of_client(client),
        charged=max(register.charged, framed),
        nbytes=nbytes,
        budget_ns=request.deadline_ms * 1_000_000,
        now_ns=now_ns,
    )
    if isinstance(verdict, Reject):
        raise verdict.error
    admission.check_tasks(tasks, register.rows_of, request.tensor.dims[0], inflight, now_ns)
    plan = planner.way(tasks)
    refusal = may_have_run(request.request_id, plan) if request.tries > 1 else None
    if refusal is not None:
        raise refusal
    if plan.absent:
        places, room = admission.max_inflight, admission.max_bytes
        why = register.may_not_wait(client, nbytes, places, room)
        if why:
            raise admission.no_place(f"{why} ({plan.absent!r})", inflight, now_ns).error
        return plan
    full = planner.edges.full(plan.guards)
    if full:
        raise admission.no_edge(full, inflight, now_ns).error
    return plan

"""Entrance: whether a checked request may enter now, and on which way. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from blockflow.core.routing import TaskRoute
from blockflow.dispatcher.admission import Admission, Reject
from blockflow.dispatcher.plan import Plan, Planner
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
) -> Plan:
    """The way of ``request``, whose ``tasks`` these are; an outline when it has to wait for it.

    Raises:
        RequestError: OVERLOADED, or what :meth:`Planner.way` says.
    """
    inflight, nbytes = len(register), request.tensor.nbytes
    verdict = admission.decide(
        client,
        request.tasks,
        inflight=inflight,
        of_client=register.of_client(client),
        charged=register.charged,
        nbytes=nbytes,
        budget_ns=request.deadline_ms * 1_000_000,
        now_ns=now_ns,
    )
    if isinstance(verdict, Reject):
        raise verdict.error
    admission.check_tasks(tasks, register.rows_of, request.tensor.dims[0], inflight, now_ns)
    plan = planner.way(tasks)
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

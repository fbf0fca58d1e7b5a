"""The names of the reliability benchmark's figures, and how they follow from samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockflow.bench.results import Figure, latency_figure

NOTICED, REPLACED, BEYOND_LOAD = "noticed", "replaced", "replaced, beyond load"
KILLED, STOPPED, STUCK, FROZEN = "killed", "stopped", "stuck forward", "silent"
"""How a worker fails: SIGKILL; SIGSTOP; a forward without an end; asleep with the interpreter."""

COUNT = "count"
PROBE, PROBED = "readiness probe", "published workers that were probed"
POISONED, MATES = "poison blamed", "its batch mates answered"
DIED_OF_IT = "workers that died of one poison"
AGAIN = "requests of hung workers answered by others"
CRASHES, LOADS = "crashes until given up", "starts after a load failure"
STAYS, REFUSED = "stays given up", "refused when given up"
BYSTANDERS = "requests of others while workers were given up"
LATENESS = "reply after its deadline"
CANCELLED, IN_VAIN = "reply to a cancellation", "cancelled and computed"
AFTERWARDS, OVERDUE = "replies after their deadline", "replies after their deadline and 100 ms"
NO_REPLY = "requests without a reply"
SMALLEST_SHARE, JAIN = "smallest share of the fair one", "Jain's index"
CUT_OFF, OTHERS = "cut off", "p99 of the others"
BY_BYTES, BY_TIME = "by bytes", "by time"
BESIDE, ITSELF = "beside one that does not read", "beside itself"
LEFT = "left behind"
AFTER_DEATHS, AFTER_ALL = "after single deaths", "after everything was killed"
WORKER, TEMPLATE = "worker killed", "template killed"
ROLES = (WORKER, "dispatcher killed", "manager killed", TEMPLATE)
"""Whose single deaths may leave something, as the faults of ``make chaos`` call them."""
BACK = "serves again after everything was killed"


def timed(name: str, mode: str, samples_ms: Sequence[float]) -> Figure:
    """Durations; the largest is among the labels."""
    return latency_figure(name, mode, None, samples_ms, {"max": round(max(samples_ms), 3)})


def counted(name: str, value: float, of: int, labels: Mapping[str, Any] | None = None) -> Figure:
    """So many of so many."""
    return Figure.of(COUNT, name, float(value), "1", of, labels or {})

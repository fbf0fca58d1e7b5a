"""What admission learns from a request that has ended."""

from __future__ import annotations

from collections.abc import Sequence

from blockflow.core.errors import BlockFlowError
from blockflow.dispatcher.admission import Admission
from blockflow.dispatcher.entry import Entry, TaskEnd


def learn(admission: Admission, entry: Entry, ends: Sequence[TaskEnd], now_ns: int) -> None:
    """Tell ``admission`` where the time of each task of ``entry`` went; ``ends`` are its results.

    A re-run says nothing of the queues: its time went elsewhere. Nor does a failure, except for a
    deadline that has passed; and not that one, either, if the time went by before it could set out.
    """
    if entry.attempt > 1 or entry.waits_for:
        return
    for task, plan, end, outcome, ingress_ns in ends:
        if isinstance(outcome, BlockFlowError):
            in_time = 2 * ingress_ns < entry.deadline_ns - entry.received_ns
            if in_time and outcome.code == "DEADLINE_EXCEEDED":
                admission.expired(entry.ticket, task, now_ns)
            continue
        way = plan.lineage[end]
        queued = worked = 0
        for node, transit, wait, overhead, compute in outcome.timings:
            if node in way:
                queued += transit + wait
                worked += overhead + compute
        admission.answered(entry.ticket, task, queued, worked, now_ns)

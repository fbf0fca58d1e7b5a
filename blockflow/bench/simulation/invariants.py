"""Invariants: what must hold at every step of every simulation, whatever the policy.

Each rule is a :class:`~blockflow.bench.simulation.watch.Watch` of its own and raises
:class:`~blockflow.bench.simulation.watch.InvariantBroken` at the very event that breaks it.
:func:`invariants` puts together those that a system's policies promise to keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockflow.batching.sliced import grouped
from blockflow.bench.simulation.joins import JoinInTime, StretchInTime
from blockflow.bench.simulation.request import Exit, Request
from blockflow.bench.simulation.simulator import Simulator
from blockflow.bench.simulation.system import SystemModel
from blockflow.bench.simulation.watch import InvariantBroken, Watch
from blockflow.bench.simulation.worker import SimWorker
from blockflow.worker.ticket import Batch, Ticket


class ClockRunsForward(Watch):
    """Time never runs backwards, and nothing starts before it has come."""

    def __init__(self) -> None:
        self._now = 0

    def _tick(self, now: int) -> None:
        if now < self._now:
            raise InvariantBroken("clock runs forward", now, f"it was {self._now} ns already")
        self._now = now

    def came(self, request: Request, now: int) -> None:
        self._tick(now)

    def left(self, request: Request, how: Exit, now: int) -> None:
        self._tick(now)
        if now < request.came_ns:
            raise InvariantBroken("clock runs forward", now, f"{request} leaves before it came")

    def queued(self, worker: SimWorker, ticket: Ticket, now: int) -> None:
        self._tick(now)

    def started(self, worker: SimWorker, batch: Batch, now: int) -> None:
        self._tick(now)
        for ticket in batch.tickets:
            if ticket.ready_ns > now:
                raise InvariantBroken("clock runs forward", now, f"{ticket.key} starts unready")

    def ended(self, worker: SimWorker, batch: Batch, now: int) -> None:
        self._tick(now)


class LeavesOnce(Watch):
    """Every query leaves exactly once: with a result, expired, or rejected."""

    def __init__(self) -> None:
        self._inside: dict[int, Request] = {}

    def came(self, request: Request, now: int) -> None:
        if request.number in self._inside:
            raise InvariantBroken("leaves once", now, f"{request} comes twice")
        self._inside[request.number] = request

    def left(self, request: Request, how: Exit, now: int) -> None:
        if self._inside.pop(request.number, None) is None:
            raise InvariantBroken(
                "leaves once", now, f"{request} leaves again ({how}, before: {request.exit})"
            )

    def finished(self, simulator: Simulator, now: int) -> None:
        if self._inside:
            left = ", ".join(map(repr, list(self._inside.values())[:5]))
            raise InvariantBroken("leaves once", now, f"{len(self._inside)} never leave: {left}")
        if simulator.inflight:
            raise InvariantBroken("leaves once", now, f"{simulator.inflight} credits are gone")


class OneBatchAtATime(Watch):
    """A query waits at one stage or runs in one batch, never both, never twice."""

    def __init__(self) -> None:
        self._state: dict[int, str] = {}

    def _move(self, key: int, before: str, after: str, now: int, what: str) -> None:
        state = self._state.get(key, "away")
        if state != before:
            raise InvariantBroken("one batch at a time", now, f"query {key} {what} while {state}")
        self._state[key] = after

    def queued(self, worker: SimWorker, ticket: Ticket, now: int) -> None:
        self._move(ticket.key, "away", "waiting", now, "begins to wait")

    def chosen(self, worker: SimWorker, batch: Batch, now: int) -> None:
        if not batch.tickets:
            raise InvariantBroken("one batch at a time", now, f"{worker.name}: a batch of nothing")
        for ticket in batch.tickets:
            self._move(ticket.key, "waiting", "chosen", now, "is chosen")
            if ticket.stage != batch.stage:
                raise InvariantBroken(
                    "one batch at a time",
                    now,
                    f"query {ticket.key} waits at stage {ticket.stage}, not {batch.stage}",
                )
        shapes = {t.source.shape for t in batch.tickets}
        if len(shapes) > 1 and any(s > batch.pad_to for s in shapes):
            raise InvariantBroken(
                "one batch at a time", now, f"shapes {shapes} padded to {batch.pad_to}"
            )

    def started(self, worker: SimWorker, batch: Batch, now: int) -> None:
        for ticket in batch.tickets:
            self._move(ticket.key, "chosen", "running", now, "starts")

    def ended(self, worker: SimWorker, batch: Batch, now: int) -> None:
        for ticket in batch.tickets:
            self._move(ticket.key, "running", "away", now, "ends")

    def expired(self, worker: SimWorker, ticket: Ticket, now: int) -> None:
        if self._state.pop(ticket.key, "away") not in ("waiting", "chosen"):
            raise InvariantBroken("one batch at a time", now, f"query {ticket.key} expires running")


class LanesBounded(Watch):
    """No worker computes more batches at once than it has lanes, and no stage more than its engine
    and its policy are made for.

    (A policy that runs a batch at a busy stage is stopped by the scheduler, which breaks this rule
    as well.)
    """

    def started(self, worker: SimWorker, batch: Batch, now: int) -> None:
        count = len(worker.running)
        if count > worker.model.lanes:
            raise InvariantBroken(
                "lanes bounded", now, f"{worker.name}: {count} at once in {worker.model.lanes}"
            )

    def chosen(self, worker: SimWorker, batch: Batch, now: int) -> None:
        # Not when it starts: while it waits for a slot its stage may be found to be of fewer tasks.
        same = 1 + sum(b.stage == batch.stage for b in worker.running)
        if same > worker.scheduler.width(batch.stage):
            raise InvariantBroken(
                "lanes bounded", now, f"{worker.name}: {same} batches at stage {batch.stage}"
            )


class SlotsBounded(Watch):
    """No worker has more tensors out than it has slots, and at the end none."""

    def slots(self, worker: SimWorker, now: int) -> None:
        if not 0 <= worker.slots_out <= worker.model.slots:
            raise InvariantBroken(
                "slots bounded", now, f"{worker.name}: {worker.slots_out} of {worker.model.slots}"
            )

    def finished(self, simulator: Simulator, now: int) -> None:
        for worker in simulator.workers:
            if worker.slots_out:
                raise InvariantBroken(
                    "slots bounded", now, f"{worker.name}: {worker.slots_out} never come back"
                )


class RowsBounded(Watch):
    """No batch has more rows than its stage takes, nor than its policy's own bound.

    One query alone may be larger than the policy's bound: it cannot be cut.
    """

    OPTIONS = ("max_rows", "bs_max", "n_max")

    def started(self, worker: SimWorker, batch: Batch, now: int) -> None:
        stage = worker.stages[batch.stage]
        most = stage.max_rows
        if len(batch.tickets) > 1:
            most = min([most, *(stage.policy.get(name, most) for name in self.OPTIONS)])
        if batch.rows > most:
            raise InvariantBroken(
                "rows bounded", now, f"{worker.name}: {batch.rows} rows, at most {most}"
            )


class DeadlinesKept(Watch):
    """Nothing starts after its deadline, and every query has left by then."""

    def started(self, worker: SimWorker, batch: Batch, now: int) -> None:
        for ticket in batch.tickets:
            if worker.requests[ticket.key].deadline_ns <= now:
                raise InvariantBroken("deadlines kept", now, f"query {ticket.key} starts too late")

    def left(self, request: Request, how: Exit, now: int) -> None:
        if now > request.deadline_ns and request.exit is None:
            raise InvariantBroken("deadlines kept", now, f"{request} is still here")

    def expired(self, worker: SimWorker, ticket: Ticket, now: int) -> None:
        if now < ticket.deadline_ns:
            raise InvariantBroken("deadlines kept", now, f"query {ticket.key} expires early")


class NobodyForgotten(Watch):
    """While somebody waits, an idle worker has work or a time at which it will look again."""

    def rested(self, worker: SimWorker, now: int) -> None:
        idle = not worker.running and worker.stalled is None
        if idle and len(worker.scheduler) and worker.wait_until is None:
            raise InvariantBroken(
                "nobody forgotten", now, f"{worker.name}: {len(worker.scheduler)} wait for nothing"
            )


class StagesWhole(Watch):
    """Several blocks that make one stage are run one after another by the same batch: nobody joins
    it between them, and nobody stays behind."""

    def __init__(self) -> None:
        self._last: dict[tuple[SimWorker, int], Batch] = {}
        self._inner: dict[SimWorker, set[int]] = {}

    def began(self, simulator: Simulator) -> None:
        for worker in simulator.workers:
            numbers = {s.block: n for n, s in worker.stages.items()}
            inner = self._inner[worker] = set()
            for policy, members in worker.model.groups():
                mine = [numbers[m.block] for m in members]
                for blocks in grouped(policy.get("stages", ()), mine):
                    inner |= set(blocks[1:])

    def started(self, worker: SimWorker, batch: Batch, now: int) -> None:
        if batch.stage in self._inner[worker]:
            before = {id(self._last.get((worker, t.key))) for t in batch.tickets}
            left = worker.scheduler.queued(batch.stage)
            if len(before) > 1 or left:
                what = f"{len(before)} batches meet, {left} stay behind"
                raise InvariantBroken(
                    "stages whole", now, f"{worker.name}: {what} before stage {batch.stage}"
                )
        for ticket in batch.tickets:
            self._last[worker, ticket.key] = batch


class WorkConserving(Watch):
    """No lane idles while somebody waits at a free stage: as ``none`` and windows without delay
    promise."""

    def rested(self, worker: SimWorker, now: int) -> None:
        if worker.stalled is not None or len(worker.running) >= worker.lanes:
            return
        scheduler = worker.scheduler
        waiting = sum(scheduler.queued(s) for s in worker.stages if s not in scheduler.busy)
        if waiting:
            raise InvariantBroken("work conserving", now, f"{worker.name} idles, {waiting} wait")


class InOrder(Watch):
    """Equals run in order: at every stage, among queries of one task with the same rows and shape,
    nobody waits who came earlier and whose deadline is no later than that of one who runs.

    (Behind several replicas queries may come in another order than that of their deadlines; which
    of the two orders a policy follows is its own business.)
    """

    def __init__(self) -> None:
        self._waiting: dict[_Group, dict[int, tuple[int, int]]] = {}

    def queued(self, worker: SimWorker, ticket: Ticket, now: int) -> None:
        line = self._waiting.setdefault(_group(worker, ticket), {})
        line[ticket.key] = (ticket.arrival_ns, ticket.deadline_ns)

    def chosen(self, worker: SimWorker, batch: Batch, now: int) -> None:
        latest: dict[_Group, list[tuple[int, int]]] = {}
        for ticket in batch.tickets:
            group = _group(worker, ticket)
            latest.setdefault(group, []).append(self._waiting[group].pop(ticket.key))
        for group, chosen in latest.items():
            for key, (arrival, deadline) in self._waiting[group].items():
                if any(arrival < came and deadline <= until for came, until in chosen):
                    raise InvariantBroken(
                        "in order", now, f"{worker.name}: query {key} waits, a later one runs"
                    )

    def expired(self, worker: SimWorker, ticket: Ticket, now: int) -> None:
        self._waiting[_group(worker, ticket)].pop(ticket.key, None)


_Group = tuple[str, int, str, int, tuple[int, ...]]


def _group(worker: SimWorker, ticket: Ticket) -> _Group:
    request = worker.requests[ticket.key]
    return worker.name, ticket.stage, request.task, request.rows, ticket.source.shape


def invariants(system: SystemModel, *, noisy: bool) -> list[Watch]:
    """The rules for a system: those for all policies, and what its policies promise beside.

    Args:
        noisy: forwards fluctuate: then no prediction comes true exactly, and none is checked.
    """
    rules: list[Watch] = [
        ClockRunsForward(),
        LeavesOnce(),
        OneBatchAtATime(),
        LanesBounded(),
        SlotsBounded(),
        RowsBounded(),
        DeadlinesKept(),
        NobodyForgotten(),
        StretchInTime(),
        StagesWhole(),
    ]
    if not any(w.lanes > 1 and any(s.side_by_side for s in w.stages) for w in system.workers):
        rules.append(InOrder())  # batches of one block side by side may overtake each other
    one_lane = all(w.lanes == 1 for w in system.workers)
    if not noisy and one_lane and system.threads <= system.cores:
        rules.append(JoinInTime())
    if all(conserves_work(s.policy) for w in system.workers for s in w.stages):
        rules.append(WorkConserving())
    return rules


def conserves_work(policy: Mapping[str, Any]) -> bool:
    """Whether this policy never lets an engine idle while somebody waits."""
    name = policy.get("policy", "none")
    return name == "none" or (name == "window" and not policy.get("max_delay_ms"))

"""Simulator: the Dispatcher's side of a simulated system, and the run as a whole.

Admission and the choice of replicas are the Dispatcher's own code, as scheduling is the workers'.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from blockflow.batching.shares import TaskShare
from blockflow.bench.simulation.arrivals import Arrival
from blockflow.bench.simulation.loop import EventLoop
from blockflow.bench.simulation.request import Exit, Request
from blockflow.bench.simulation.service import Service
from blockflow.bench.simulation.slots import Lease
from blockflow.bench.simulation.system import SystemModel
from blockflow.bench.simulation.watch import Watch
from blockflow.bench.simulation.worker import Message, SimWorker
from blockflow.bench.simulation.workload import Workload
from blockflow.core.routing import DISPATCHER_STAGE
from blockflow.dispatcher.admission import Admission, Reject
from blockflow.dispatcher.plan import Planner

_NS = 1_000_000
_NO_BOUND = 1 << 62
_CLIENT = b"all"


class Simulator:
    """One run: a system serves a workload from its first to its last query.

    Args:
        watch: looks at every step; None = nobody does.
        noisy: forwards fluctuate as the profile says; without it each takes its median.

    Attributes:
        requests: all queries, in order of arrival.
        workers: all replicas.
        last_exit_ns: when the last query so far has left.
        taken: by task and block, the length of what it takes there, of the query's own.
    """

    def __init__(
        self,
        system: SystemModel,
        workload: Workload,
        *,
        watch: Watch | None = None,
        noisy: bool = True,
    ) -> None:
        self.system = system
        self.turn_ns = round(system.turn_ms * _NS)
        self.requests: list[Request] = []
        self.inflight = 0
        self.last_exit_ns = 0
        self.loop = EventLoop(system.cores, system.threads)
        self._watch = watch
        self._workload = workload
        self._hop_ns = round(system.hop_ms * _NS)
        self._deadline_ns = {t.name: round(t.deadline_ms * _NS) for t in system.tasks}
        self._admission = Admission(
            system.credits, system.credits, _NO_BOUND, system.adaptive_limit
        )
        self._planner = Planner()
        table = system.routes()
        self._planner.replace(table)
        self._admission.publish(table.tasks)
        self._tasks = dict(table.tasks)
        # Index 0 is the share of queries whose task nobody knows.
        self.shares = (TaskShare(), *(t.share for t in system.tasks))
        self.taken = {
            (task.name, block): taken
            for task in system.tasks
            for block, taken in zip(task.path, system.taken(task.path), strict=True)
        }
        self.task_index = {t.name: i for i, t in enumerate(system.tasks, 1)}
        self._deadlines: list[tuple[int, int]] = []
        self._source = workload.queries()
        rng = workload.noise() if noisy else None
        self.workers: list[SimWorker] = []
        self._hosts: dict[int, SimWorker] = {}
        numbers = iter(table.stages)
        for model in system.workers:
            for replica in range(model.replicas):
                mine = [next(numbers) for _ in model.stages]
                services = {
                    n: Service(s.profile, model.threads, rng)
                    for n, s in zip(mine, model.stages, strict=True)
                }
                name = f"{model.name}#{replica}"
                worker = SimWorker(name, model, mine, services, self, self.loop, watch)
                self.workers.append(worker)
                self._hosts.update(dict.fromkeys(mine, worker))

    @property
    def now(self) -> int:
        """Virtual nanoseconds since the start."""
        return self.loop.now

    def run(self) -> None:
        """Serve all queries; returns when the last has left.

        Raises:
            InvariantBroken: the watch, or the simulator itself, has found a defect.
        """
        if self._watch is not None:
            self._watch.began(self)
        if self._workload.closed:
            for arrival in self._source:
                self.loop.plan(arrival.at_ns, self._come, arrival)
        else:
            self._next(0)
        self.loop.run()
        if self._watch is not None:
            self._watch.finished(self, self.loop.now)

    # --- called by the workers -------------------------------------------------------------------

    def send(
        self, stage: int, members: Sequence[tuple[Request, int]], lease: Lease | None, now: int
    ) -> None:
        """A message to a stage, or to the Dispatcher."""
        call = self._answered if stage == DISPATCHER_STAGE else self._hosts[stage].receive
        if self._hop_ns:
            self.loop.plan(now + self._hop_ns, call, (members, lease))
        else:
            call(now, (members, lease))

    def expired(self, request: Request, now: int) -> None:
        """A worker has taken a query away whose deadline has passed."""
        self._leave(request, Exit.EXPIRED, now)

    # --- the Dispatcher --------------------------------------------------------------------------

    def _next(self, now: int) -> None:
        """Plan the next query of open arrivals."""
        arrival = next(self._source, None)
        if arrival is not None:
            self.loop.plan(arrival.at_ns, self._come_and_next, arrival)

    def _come_and_next(self, now: int, arrival: Arrival) -> None:
        self._next(now)
        self._come(now, arrival)

    def _come(self, now: int, arrival: Arrival) -> None:
        deadline = now + self._deadline_ns[arrival.task]
        request = Request(
            len(self.requests) + 1, arrival.task, arrival.rows, arrival.length, now, deadline
        )
        self.requests.append(request)
        if self._watch is not None:
            self._watch.came(request, now)
        verdict = self._admission.decide(
            _CLIENT,
            (arrival.task,),
            inflight=self.inflight,
            of_client=self.inflight,
            charged=0,
            nbytes=0,
            budget_ns=deadline - now,
            now_ns=now,
        )
        if isinstance(verdict, Reject):
            self._leave(request, Exit.REJECTED, now, verdict.error.retry_after_ms or 1)
            return
        plan = self._planner.plan((self._tasks[arrival.task],))
        self._planner.take(plan)
        self._admission.enter(request.number, _CLIENT, (arrival.task,), deadline - now, now)
        request.plan = plan
        self.inflight += 1
        if not self._deadlines or deadline < self._deadlines[0][0]:
            self.loop.plan(deadline, self._overdue)
        heapq.heappush(self._deadlines, (deadline, request.number))
        self.send(plan.root.stage, ((request, 0),), None, now)

    def _answered(self, now: int, message: Message) -> None:
        members, lease = message
        for request, _ in members:
            self._leave(request, Exit.RESULT, now)
        if lease is not None:
            lease.release()

    def _overdue(self, now: int, _: None) -> None:
        """Queries whose deadline has come leave, wherever they are."""
        heap = self._deadlines
        while heap:
            deadline, number = heap[0]
            request = self.requests[number - 1]
            if request.exit is None and deadline > now:
                self.loop.plan(deadline, self._overdue)
                return
            heapq.heappop(heap)
            if request.exit is None:
                self._leave(request, Exit.EXPIRED, now)

    def _leave(self, request: Request, how: Exit, now: int, pause_ms: int = 0) -> None:
        if request.exit is not None:
            # What comes after the deadline is dropped; nothing else may come twice.
            if self._watch is not None and request.exit is not Exit.EXPIRED:
                self._watch.left(request, how, now)
            return
        if self._watch is not None:
            self._watch.left(request, how, now)
        request.exit = how
        request.left_ns = self.last_exit_ns = now
        if request.plan is not None:
            self.inflight -= 1
            if how is Exit.RESULT:
                worked = request.compute_ns + self.turn_ns * len(request.plan.tree.nodes)
                self._admission.answered(request.number, request.task, request.wait_ns, worked, now)
            else:
                self._admission.expired(request.number, request.task, now)
            self._admission.leave(request.number, now)
            self._planner.give_back(request.plan)
        if self._workload.closed:
            self.loop.plan(now + pause_ms * _NS, self._again)

    def _again(self, now: int, _: None) -> None:
        """A client of a closed loop sends its next query, if the time is not over."""
        arrival = self._workload.again(now)
        if arrival is not None:
            self._come(now, arrival)

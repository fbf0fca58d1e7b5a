"""Threads: how many intra-op threads each worker gets, planned over all workers of a machine. Pure.

Threads that compute at once must not outnumber the cores: OpenMP's threads spin at their barriers,
and with more of them than cores each waits for one that is not running (four processes of two
threads on two cores were measured at a tenth of the throughput of one thread each). Packrat
(section 3) will choose threads, replicas and batches together from a profile; this plan is what
holds until then, and the rule that its choice must keep as well.

The rule: every worker has one thread; every further one needs a core that no other thread needs. A
worker with several *lanes* computes so many forwards at once, each with all of its threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

Share = tuple[int, int]
"""Threads of a forward, and how many forwards may run at once (lanes): what one process gets."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one worker asks for.

    Attributes:
        name: breaks ties, so that the plan does not depend on the order of the demands.
        replicas: its processes; all get the same number of threads.
        cores: the cpu numbers that they may run on.
        threads: the number that was asked for; None = planned.
        cost_ms: measured compute of one row on one thread; None = unknown.
        grows: False for one that gains nothing from a second thread (it computes on a GPU).
        lanes: forwards at once that were asked for; None = planned.
        overlap: as many lanes as its batching policy can use; where lanes are planned, no more.
    """

    name: str
    replicas: int
    cores: tuple[int, ...]
    threads: int | None = None
    cost_ms: float | None = None
    grows: bool = True
    lanes: int | None = None
    overlap: int = 1


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """Answer to a sequence of demands, in their order.

    Attributes:
        threads: of each forward of a worker's process.
        unplaced: how many of the threads that a worker asked for, over all its processes and lanes,
            find no core of their own. Not all zero: the demands oversubscribe the cores.
        lanes: forwards that each process of a worker may compute at once.
    """

    threads: tuple[int, ...]
    unplaced: tuple[int, ...]
    lanes: tuple[int, ...]

    @property
    def shares(self) -> list[Share]:
        return list(zip(self.threads, self.lanes, strict=True))

    @property
    def oversubscribed(self) -> bool:
        return any(self.unplaced)


def plan_threads(demands: Sequence[Demand], at_once: int | None = None) -> ThreadPlan:
    """Plan the threads of all workers of a machine, of whose cores so many may be busy ``at_once``
    (None = all of them).

    Asked numbers come first. What is left goes, thread by thread, to the planned worker whose
    processes have the most to compute per thread: by their measured cost, an unknown cost counting
    as the mean of the known ones, and evenly when nothing is known. All replicas and lanes of a
    worker grow together or not at all.

    Planned lanes get the cores that no thread wants: all threads in one lane answer a lone request
    soonest, and what is planned shall not cost it anything.
    """
    order = sorted(range(len(demands)), key=lambda i: demands[i].name)
    seats = _Seats([d.cores for d in demands], at_once)
    threads = [d.threads or 1 for d in demands]
    lanes = [d.lanes or 1 for d in demands]
    unplaced = [0] * len(demands)
    for i in order:
        seats.take(i, demands[i].replicas)  # first threads that find no core share one
    for i in order:
        further = (threads[i] * lanes[i] - 1) * demands[i].replicas
        unplaced[i] = further - seats.take(i, further)
    shares = _shares(demands)
    growing = [i for i in order if demands[i].threads is None and demands[i].grows]
    while growing:
        hungriest = max(growing, key=lambda i: shares[i] / (threads[i] * lanes[i]))
        if seats.take_all(hungriest, demands[hungriest].replicas * lanes[hungriest]):
            threads[hungriest] += 1
        else:
            growing.remove(hungriest)  # seats only get fewer: it would fail again
    for i in order:
        d = demands[i]
        while d.lanes is None and lanes[i] < d.overlap:
            if not seats.take_all(i, threads[i] * d.replicas):
                break
            lanes[i] += 1
    return ThreadPlan(tuple(threads), tuple(unplaced), tuple(lanes))


def _shares(demands: Sequence[Demand]) -> list[float]:
    """Compute per process, in one unit for all."""
    known = [d.cost_ms / d.replicas for d in demands if d.cost_ms is not None]
    usual = sum(known) / len(known) if known else 1.0
    return [usual if d.cost_ms is None else d.cost_ms / d.replicas for d in demands]


class _Seats:
    """A matching of threads with cores, grown by augmenting paths.

    Who has a core keeps one, though not always the same. So whether a thread finds a core depends
    on the threads that have one, and not on which they took.
    """

    def __init__(self, cores: Sequence[tuple[int, ...]], most: int | None) -> None:
        self._cores = cores
        self._most = most
        self._holder: dict[int, int] = {}

    def take(self, demand: int, count: int) -> int:
        """How many of ``count`` more threads of ``demand`` get a core."""
        return next((n for n in range(count) if not self._take_one(demand)), count)

    def take_all(self, demand: int, count: int) -> bool:
        """``count`` more threads of ``demand`` get a core, or none does."""
        before = dict(self._holder)
        if self.take(demand, count) == count:
            return True
        self._holder = before
        return False

    def _take_one(self, demand: int) -> bool:
        if len(self._holder) == self._most:
            return False
        came: dict[int, int | None] = dict.fromkeys(self._cores[demand])
        seen = {demand}
        queue = deque(came)
        while queue:
            core = queue.popleft()
            holder = self._holder.get(core)
            if holder is None:
                while (before := came[core]) is not None:
                    self._holder[core] = self._holder[before]
                    core = before
                self._holder[core] = demand
                return True
            if holder not in seen:
                seen.add(holder)
                for other in self._cores[holder]:
                    if other not in came:
                        came[other] = core
                        queue.append(other)
        return False

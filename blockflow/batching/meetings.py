"""Meetings: whose turn it is at a stage that those under way come to, in several lanes.

In one lane who is under way goes to his end, and nobody else is. With several lanes many may wait
for a stage that takes longer than those before it, and somebody may always be on his way to it: by
age, whoever sends most would get most of it, and who begins there would wait for ever. So at each
such stage all who come to it and all who begin there are served in the order of all policies:
priority, shares, earliest deadline. What counts for the shares is what has run at that stage
(start-time fair queueing, as in :class:`~blockflow.batching.room.WaitingRoom`): who is under way
has been charged when he began, and any number may have begun.

A task is charged for what rides in batches whose turn is another task's. Its first query, where it
cannot ride with them (another shape, too many rows), keeps a turn: right behind those whom others
of its task have ridden with, as if only so many rows of the task as its own had. By all that has
ridden it might never come: there may always be a task that has had less.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence

from blockflow.batching.convoy import Convoy
from blockflow.batching.policy import Query
from blockflow.batching.shares import TaskShare

Rank = tuple[int, float, int, int, int]
"""Of two tasks' queries that wait at one stage the one with the smaller rank goes first."""

Firsts = Sequence[tuple[Query, Rank]]
"""Of those who wait at one stage the oldest of each task, and its rank."""


class Meetings:
    """Books of what has run at each stage.

    Args:
        shares: of the tasks.
    """

    def __init__(self, shares: Sequence[TaskShare]) -> None:
        self._shares = tuple(shares)
        self._virtual: dict[tuple[int, int], float] = {}  # by stage and task
        self._reached: dict[tuple[int, int], float] = {}  # by stage and priority
        # By stage and task: the age of its first whom others of it have overtaken, and his turn.
        self._kept: dict[tuple[int, int], tuple[tuple[int, int], float]] = {}

    def rank(self, query: Query) -> Rank:
        """Where ``query`` stands among those who wait at its stage now."""
        stage, task = query.stage, query.task
        if not 0 <= task < len(self._shares):  # :meth:`_task`, without a call for each
            task = 0
        kept = self._kept.get((stage, task))
        if kept is not None and age(query) <= kept[0]:
            start = kept[1]
        else:
            start = self._start(stage, task)
        priority = self._shares[task].priority
        return -priority, start, query.deadline_ns, query.arrival_ns, query.key

    def next_of(self, stage: int, waiting: Sequence[Convoy]) -> Convoy:
        """Of batches that wait for ``stage``, oldest first, the one with the first turn; but older
        ones that share a task of its priority with it go before it. Else those of a task that rides
        in others' batches, and so has had more and more, would never have a turn by themselves."""
        turns: list[tuple[Rank, Collection[int]]] = []  # of each the first, and its tasks
        for batch in waiting:
            firsts: dict[int, Query] = {}  # of each task, which was its most urgent
            for query in batch.waiting.values():
                if query.stage == stage:
                    firsts.setdefault(query.task, query)
            ranks = {task: self.rank(query) for task, query in firsts.items()}
            first = min(ranks.values())
            tasks: Collection[int] = ranks.keys()
            if len(ranks) > 1:
                tasks = {task for task, (priority, *_) in ranks.items() if priority == first[0]}
            turns.append((first, tasks))
        chosen = min(range(len(turns)), key=lambda i: turns[i][0])
        while True:
            tasks = set(turns[chosen][1])
            older = next((i for i in range(chosen) if not tasks.isdisjoint(turns[i][1])), None)
            if older is None:
                return waiting[chosen]
            chosen = older

    def in_turn(self, queries: Iterable[Query]) -> Iterator[Query]:
        """Those under way who wait at one stage, in their order as if they ran there one by one: of
        each task the oldest comes first."""
        lanes: dict[int, list[tuple[int, int, Query]]] = {}
        for query in queries:
            entry = (query.arrival_ns, query.key, query)
            lanes.setdefault(self._task(query), []).append(entry)
        for lane in lanes.values():
            heapq.heapify(lane)
        order = [(self.rank(lane[0][2]), task) for task, lane in lanes.items()]
        heapq.heapify(order)
        counted: dict[int, float] = {}  # only the first has a turn that was kept
        while order:
            task = order[0][1]
            lane = lanes[task]
            query = heapq.heappop(lane)[2]
            yield query
            if lane:
                start = counted.get(task)
                if start is None:
                    start = self._start(query.stage, task)
                start = counted[task] = start + query.rows / self._shares[task].weight
                first, _, deadline, arrival, key = self.rank(lane[0][2])
                heapq.heapreplace(order, ((first, start, deadline, arrival, key), task))
            else:
                heapq.heappop(order)

    def served(self, queries: Sequence[Query], firsts: Firsts = ()) -> None:
        """They run, as one batch.

        Args:
            queries: of the batch.
            firsts: of those who waited there; who of them does not run keeps his turn.
        """
        stage = queries[0].stage
        rows: dict[int, int] = {}
        tasks = len(self._shares)
        for query in queries:  # :meth:`_task`, without a call for each
            task = query.task if 0 <= query.task < tasks else 0
            rows[task] = rows.get(task, 0) + query.rows
        begun = {task: self._start(stage, task) for task in rows}
        reached: dict[int, float] = {}
        for task, start in begun.items():
            share = self._shares[task]
            reached[share.priority] = min(start, reached.get(share.priority, start))
            self._virtual[stage, task] = start + rows[task] / share.weight
        for priority, start in reached.items():
            self._reached[stage, priority] = start
        keys = {query.key for query in queries} if firsts else ()
        for query, rank in firsts:
            task = self._task(query)
            if query.key in keys:
                self._kept.pop((stage, task), None)
            elif task in rows:
                share = self._shares[task]
                own = reached[share.priority] + query.rows / share.weight
                self._kept[stage, task] = age(query), min(rank[1], own)

    def _start(self, stage: int, task: int) -> float:
        """A task that was away has saved nothing up."""
        reached = self._reached.get((stage, self._shares[task].priority), 0.0)
        return max(self._virtual.get((stage, task), 0.0), reached)

    def _task(self, query: Query) -> int:
        return query.task if 0 <= query.task < len(self._shares) else 0


def age(query: Query) -> tuple[int, int]:
    """Who has come to the worker first is the least."""
    return query.arrival_ns, query.key

"""WaitingRoom: queries that wait, grouped by what can share a batch, taken in a fair order.

The order: higher priority first; among tasks of one priority the one that has had the least service
for its weight; within a task the earliest deadline. Service is counted as in start-time fair
queueing (Goyal, Vin and Cheng, 1996): each task has a virtual time that grows by service / weight
with what it is served, and a task that was away re-enters at the present virtual time. Over any
time in which two tasks wait, their service differs from their weights' proportion by at most about
one request each; that is what deficit round robin promises (Shreedhar and Varghese, 1995), without
a quantum that would have to be as large as the largest request.

Service is rows where all cost the same. In a worker of several blocks they do not, and a task whose
rows take a hundred times as long would get a hundred times as much of it: there a row counts for
what the blocks on its way take (:class:`~blockflow.batching.row_costs.RowCosts`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heapreplace

from blockflow.batching.policy import Query, rows_of
from blockflow.batching.row_costs import RowCosts
from blockflow.batching.shares import TaskShare

Group = tuple[int, tuple[int, ...]]
"""Stage and shape (or class of shapes): queries of one group can share a batch."""

Admit = Callable[[int, Query], bool]
"""Whether a batch that would then have so many rows may take this query."""

_Entry = tuple[int, int, int, Query]
"""(deadline, arrival, key, query): sorted, a task's lane is earliest deadline first."""


class _Waiting:
    """The queries of one group."""

    __slots__ = ("inner", "lanes", "ready", "rows")

    def __init__(self) -> None:
        self.lanes: dict[int, list[_Entry]] = {}
        self.ready: dict[int, int] = {}
        self.rows = 0
        self.inner = 0


class WaitingRoom:
    """Books of what waits.

    Args:
        shares: of the tasks.
        group_of: which group a query belongs to.
        costs: what a row of a query counts for; None: one.

    Attributes:
        capped: some task has a limit of rows in a batch.
    """

    def __init__(
        self,
        shares: Sequence[TaskShare],
        group_of: Callable[[Query], Group],
        costs: RowCosts | None = None,
    ) -> None:
        self._costs = costs or RowCosts(())
        self._shares = tuple(shares)
        self._group_of = group_of
        self._rank = [-share.priority for share in self._shares]
        self._ranked = len(set(self._rank)) > 1
        self._weight = [share.weight for share in self._shares]
        self.capped = any(share.max_batch_rows for share in self._shares)
        self._groups: dict[Group, _Waiting] = {}
        self._queries: dict[int, Query] = {}
        self._virtual = [0.0] * len(self._shares)
        self._backlog = [0] * len(self._shares)
        self._reached: dict[int, float] = {}  # by priority: the virtual time that service is at
        # By task: its first query, which others of it have overtaken, and the turn that it keeps.
        self._kept: dict[int, tuple[_Entry, float]] = {}
        self._seen: dict[int, set[int]] = {}  # by stage: tasks that have waited there

    def __len__(self) -> int:
        return len(self._queries)

    def __iter__(self) -> Iterator[Query]:
        return iter(self._queries.values())

    @property
    def groups(self) -> Collection[Group]:
        """Groups in which something waits."""
        return self._groups

    def groups_beside(self, stages: Collection[int]) -> list[Group]:
        """Those at other stages than these."""
        return [group for group in self._groups if group[0] not in stages]

    def rows(self, group: Group) -> int:
        """Rows that wait in a group."""
        waiting = self._groups.get(group)
        return waiting.rows if waiting is not None else 0

    def full(self, group: Group, limit: int) -> bool:
        """Whether a batch of a group need not wait for more: so many rows are there, or each task
        that has come to the stage so far has as many as it may have in a batch."""
        if self.rows(group) >= limit:
            return True
        if not self.capped:
            return False
        lanes = self._groups[group].lanes
        return all(self._at_cap(task, lanes.get(task, ())) for task in self._seen[group[0]])

    def _at_cap(self, task: int, lane: Sequence[_Entry]) -> bool:
        cap, rows = self._shares[task].max_batch_rows, 0
        if not cap:
            return False
        for *_, query in lane:
            rows += query.rows
            if rows >= cap:
                return True
        return False

    def inner(self, group: Group) -> int:
        """How many queries of the group have done another stage of this worker."""
        return self._groups[group].inner

    def since(self, group: Group) -> int:
        """When the group's oldest query began to wait."""
        return next(iter(self._groups[group].ready.values()))

    def shapes(self, group: Group) -> set[tuple[int, ...]]:
        """The shapes of those that wait in a group."""
        return {entry[3].shape for lane in self._groups[group].lanes.values() for entry in lane}

    def most_urgent(self, group: Group) -> Query:
        """The group's query with the earliest deadline."""
        return min([lane[0] for lane in self._groups[group].lanes.values()])[3]

    def add(self, query: Query) -> None:
        group = self._group_of(query)
        waiting = self._groups.get(group)
        if waiting is None:
            waiting = self._groups[group] = _Waiting()
        key, task = query.key, query.task
        if not 0 <= task < len(self._shares):  # :meth:`_task`, without a call for each query
            task = 0
        entry = (query.deadline_ns, query.arrival_ns, key, query)
        lane = waiting.lanes.get(task)
        if lane is None:
            waiting.lanes[task] = [entry]
        elif lane[-1] < entry:
            lane.append(entry)
        else:
            insort(lane, entry)
        waiting.ready[key] = query.ready_ns
        waiting.rows += query.rows
        if not query.first:
            waiting.inner += 1
        self._queries[key] = query
        if self.capped:
            self._seen.setdefault(group[0], set()).add(task)
        before = self._backlog[task]
        if before == 0:
            reached = self._reached.get(self._shares[task].priority, 0.0)
            self._virtual[task] = max(self._virtual[task], reached)
        self._backlog[task] = before + 1
        if task in self._kept and entry < self._kept[task][0]:
            self._kept[task] = entry, self._kept[task][1]

    def remove(self, key: int) -> Query | None:
        """Take one query away unserved; None when it does not wait here."""
        query = self._queries.get(key)
        if query is None:
            return None
        group, task = self._group_of(query), self._task(query)
        waiting = self._groups[group]
        lane = waiting.lanes[task]
        at = bisect_left(lane, (query.deadline_ns, query.arrival_ns, key))
        if task in self._kept and self._kept[task][0] is lane[at]:
            del self._kept[task]
        del lane[at]
        if not lane:
            del waiting.lanes[task]
        del self._queries[key], waiting.ready[key]
        waiting.rows -= query.rows
        waiting.inner -= not query.first
        self._backlog[task] -= 1
        if not waiting.ready:
            del self._groups[group]
        return query

    def first(self, groups: Iterable[Group] | None = None) -> Group | None:
        """The group of the query whose turn it is, among ``groups`` (all of them by default)."""
        best: tuple[int, float, _Entry] | None = None
        found = None
        for group in self._groups if groups is None else groups:
            for task, lane in self._groups[group].lanes.items():
                rank = (self._rank[task], self._turn(task, lane), lane[0])
                if best is None or rank < best:
                    best, found = rank, group
        return found

    def head(self, group: Group) -> Query:
        """The query of a group whose turn it is."""
        lanes = self._groups[group].lanes
        return min((self._rank[t], self._turn(t, e), e[0]) for t, e in lanes.items())[2][3]

    def heads(self, group: Group) -> list[Query]:
        """Of each task that waits in a group the query that comes first."""
        return [lane[0][3] for lane in self._groups[group].lanes.values()]

    def outranked(self, group: Group, busy: Collection[int]) -> bool:
        """Whether somebody in another group, at a stage that is not ``busy``, has a higher priority
        than all of ``group``."""
        if not self._ranked:
            return False
        mine = min(map(self._rank.__getitem__, self._groups[group].lanes))
        return self._elsewhere(group, busy) < mine

    def _elsewhere(self, group: Group, busy: Collection[int]) -> int:
        """The rank of the highest priority among those whom :meth:`outranked` asks for."""
        found = (
            self._rank[task]
            for other, waiting in self._groups.items()
            if other != group and other[0] not in busy
            for task in waiting.lanes
        )
        return min(found, default=0)  # no rank is above it

    def pick(
        self,
        group: Group,
        limit: int,
        admit: Admit | None = None,
        aboard: Sequence[Query] = (),
        busy: Collection[int] = (),
    ) -> list[Query]:
        """Queries of ``group`` in the fair order, as many as fit; they go on waiting until
        :meth:`serve`. The first that does not fit ends it, so that no large request is overtaken
        for ever by small ones.

        Args:
            limit: rows of the whole batch. A first query that is larger is picked alone.
            admit: has the last word on each query.
            aboard: what the batch has already; with any, the first query has to fit as well, and
                nobody joins before one of a higher priority who cannot.
            busy: stages that are; who waits there is kept from nothing by who joins.
        """
        waiting = self._groups.get(group)
        if waiting is None:
            return []
        rows = sum([q.rows for q in aboard])
        lanes, virtual, rank, weight = waiting.lanes, self._virtual, self._rank, self._weight
        used = self._used(aboard) if self.capped else None
        cost_of = None if self._costs.alike else self._costs.of
        least = self._elsewhere(group, busy) if aboard and self._ranked else 0
        order = [(rank[t], self._turn(t, lane), lane[0], t, 0) for t, lane in lanes.items()]
        heapq.heapify(order)
        picked: list[Query] = []
        while order:
            first, served, entry, task, at = order[0]
            query = entry[3]
            mine = query.rows
            total = rows + mine
            if rows and total > limit:
                break
            if first > least:
                break
            if used is not None:
                cap, already = self._shares[task].max_batch_rows, used[task]
                if cap and already and already + mine > cap:
                    heapq.heappop(order)
                    if aboard:
                        least = first
                    continue
            if admit is not None and not admit(total, query):
                break
            picked.append(query)
            rows = total
            if used is not None:
                used[task] += mine
            lane, at = lanes[task], at + 1
            if at < len(lane):
                counts = mine if cost_of is None else mine * cost_of(query)
                if at == 1:  # only the first has a turn that was kept
                    served = virtual[task]
                heapreplace(order, (first, served + counts / weight[task], lane[at], task, at))
            else:
                heapq.heappop(order)
        return picked

    def with_company(
        self,
        aboard: Sequence[Query],
        others: Iterable[Query],
        limit: int,
        admit: Admit | None = None,
    ) -> list[Query]:
        """A batch of ``aboard`` and as many of ``others`` as it may take, in their order. All of
        them are of one group, and have been served.

        Args:
            limit: rows of the whole batch.
            admit: has the last word on each of the others.
        """
        batch, used = list(aboard), self._used(aboard)
        rows = sum([q.rows for q in batch])
        for query in others:
            task, total = self._task(query), rows + query.rows
            cap, already = self._shares[task].max_batch_rows, used[task]
            if total > limit or (cap and already and already + query.rows > cap):
                continue
            if admit is not None and not admit(total, query):
                break
            batch.append(query)
            rows, used[task] = total, already + query.rows
            if rows >= limit:
                break
        return batch

    def serve(self, group: Group, picked: Sequence[Query]) -> None:
        """``picked`` by :meth:`pick` just now run: they are gone, and their tasks have had them."""
        if not picked:
            return
        waiting = self._groups[group]
        queries, ready, lanes = self._queries, waiting.ready, waiting.lanes
        cost_of = None if self._costs.alike else self._costs.of
        reached, tasks = self._reached, len(self._shares)
        served: dict[int, list[float]] = defaultdict(list)  # what each query counts for, by task
        for query in picked:
            key, task, mine = query.key, query.task, query.rows
            del queries[key], ready[key]
            if not 0 <= task < tasks:  # the same
                task = 0
            served[task].append(mine if cost_of is None else mine * cost_of(query))
        waiting.rows -= sum(map(rows_of, picked))
        several = len(self._groups) > 1 or self._kept
        for task, each in served.items():
            count, weight, priority = len(each), self._weight[task], self._shares[task].priority
            if several:
                self._keep_turn(task, lanes[task][0])
            end = self._virtual[task] = self._virtual[task] + sum(each) / weight
            begun = end - each[-1] / weight
            if begun > reached.get(priority, 0.0):
                reached[priority] = begun
            self._backlog[task] -= count
            lane = lanes[task]
            if count == len(lane):
                del lanes[task]
            else:
                del lane[:count]
        if waiting.inner:
            waiting.inner -= sum([not q.first for q in picked])
        if not ready:
            del self._groups[group]

    def _turn(self, task: int, lane: Sequence[_Entry]) -> float:
        """The virtual time at which it is the turn of the first in a lane of ``task``."""
        kept = self._kept.get(task)
        return kept[1] if kept is not None and kept[0] is lane[0] else self._virtual[task]

    def _keep_turn(self, task: int, served: _Entry) -> None:
        """``served``, first of its lane, runs. Whom it overtakes in another group keeps his turn.
        (A task that rides in the batches of others has more and more: his would never come.)"""
        first = min([w.lanes[task][0] for w in self._groups.values() if task in w.lanes])
        if first is served:
            self._kept.pop(task, None)
        else:
            self._kept.setdefault(task, (first, self._virtual[task]))

    def _used(self, aboard: Iterable[Query]) -> list[int]:
        """Rows of each task in a batch."""
        used = [0] * len(self._shares)
        for query in aboard:
            used[self._task(query)] += query.rows
        return used

    def _task(self, query: Query) -> int:
        return query.task if 0 <= query.task < len(self._shares) else 0

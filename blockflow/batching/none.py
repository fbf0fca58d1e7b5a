"""NonePolicy: every query runs by itself, in the fair order. The baseline, and the default."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from blockflow.batching.facts import StageFacts
from blockflow.batching.meetings import Meetings, age
from blockflow.batching.options import option_problems
from blockflow.batching.policy import ELSEWHERE, Decision, Policy, Query, Run
from blockflow.batching.room import Group, WaitingRoom
from blockflow.batching.shares import TaskShare
from blockflow.core.errors import Problem


class NonePolicy(Policy):
    """No batching beyond what a request brings itself.

    Who has come from outside, or from another policy's stage, waits in a :class:`WaitingRoom` for
    its turn. Who has done a stage of this policy goes before them, the oldest first, so that what
    is under way leaves before newcomers start: its task has had its turn. A stage that is busy
    keeps only its own queries waiting. With several lanes many may wait for one stage: who comes to
    it and who begins there have their turns (:class:`~blockflow.batching.meetings.Meetings`).
    """

    NAME: ClassVar[str] = "none"
    SIDE_BY_SIDE: ClassVar[bool] = True

    def __init__(
        self,
        stages: Sequence[int],
        options: Mapping[str, Any],
        facts: Mapping[int, StageFacts] | None = None,
        shares: Sequence[TaskShare] = (),
    ) -> None:
        super().__init__(stages, options, facts, shares)
        self._room = WaitingRoom(self.shares, _group_of, self.costs_of_rows)
        # Where nobody else waits there is no order to keep, and no books that a request must pay.
        self._lone: Query | None = None
        # (arrival, key) by stage and, where turns are taken, by task; who is gone is skipped
        self._order: dict[int, dict[int, list[tuple[int, int]]]] = {s: {} for s in self.stages}
        self._under_way: dict[int, Query] = {}
        self._meetings = Meetings(self.shares)

    @classmethod
    def problems(cls, options: Mapping[str, Any], path: str) -> list[Problem]:
        return option_problems("policy 'none'", options, {}, path)

    def arrive(self, query: Query, now: int) -> None:
        if query.first or query.origin == ELSEWHERE:  # its turn elsewhere is none here
            if self._lone is None and not self._room.groups:
                self._lone = query
                return
            if self._lone is not None:
                self._room.add(self._lone)
                self._lone = None
            self._room.add(query)
            return
        self._under_way[query.key] = query
        lines, task = self._order[query.stage], query.task if self.lanes > 1 else 0
        line = lines.get(task)
        if line is None:
            line = lines[task] = []
        heapq.heappush(line, (query.arrival_ns, query.key))

    def drop(self, key: int, now: int) -> None:
        if self._lone is not None and self._lone.key == key:
            self._lone = None
        elif self._under_way.pop(key, None) is None:
            self._room.remove(key)

    def done(self, stage: int, keys: Sequence[int], now: int) -> None:
        """Nothing depends on what has run."""

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        return (self._go_on(busy) if self._under_way else None) or self._begin(busy)

    def _go_on(self, busy: Collection[int]) -> Run | None:
        """Of those under way whose turn it is at a free stage, the oldest."""
        oldest: Query | None = None
        for stage, lines in self._order.items():
            if lines and stage not in busy:
                query = self._head(stage, lines)
                if query is not None and (oldest is None or age(query) < age(oldest)):
                    oldest = query
        if oldest is None:
            return None
        if self.lanes > 1:
            if before := self._beginning(oldest.stage, oldest):
                return before
            self._meetings.served((oldest,))
        del self._under_way[oldest.key]
        lines = self._order[oldest.stage]
        for task, line in lines.items():
            if line[0][1] == oldest.key:
                heapq.heappop(line)
                if not line:
                    del lines[task]
                break
        return Run(oldest.stage, (oldest.key,))

    def _head(self, stage: int, lines: dict[int, list[tuple[int, int]]]) -> Query | None:
        """Whose turn it is among those under way who wait at ``stage``: of each task the oldest
        comes first."""
        heads = []
        for task in tuple(lines):
            line = lines[task]
            while line:
                query = self._under_way.get(line[0][1])
                if query is not None and query.stage == stage:
                    heads.append(query)
                    break
                heapq.heappop(line)
            else:
                del lines[task]
        if len(heads) < 2:
            return heads[0] if heads else None
        return min(heads, key=age if self.lanes == 1 else self._meetings.rank)

    def _beginning(self, stage: int, other: Query) -> Run | None:
        """The newcomer at ``stage`` whose turn is before that of ``other``, who is under way."""
        lone, group = self._lone, (stage, ())
        if lone is not None and lone.stage == stage:
            self._room.add(lone)
            self._lone = None
        if group not in self._room.groups:
            return None
        rank = self._meetings.rank
        return self._serve(group) if rank(self._room.head(group)) < rank(other) else None

    def _begin(self, busy: Collection[int]) -> Run | None:
        """The newcomer whose turn it is."""
        lone, room = self._lone, self._room
        if lone is not None:
            if lone.stage in busy:
                return None
            self._lone = None
            return Run(lone.stage, (lone.key,))
        group = room.first(room.groups_beside(busy))
        return None if group is None else self._serve(group)

    def _serve(self, group: Group) -> Run:
        alone = self._room.pick(group, 1)
        self._room.serve(group, alone)
        if self.lanes > 1:
            self._meetings.served(alone)
        return Run(group[0], (alone[0].key,))

    def waiting(self) -> Iterable[Query]:
        lone = () if self._lone is None else (self._lone,)
        own = chain(self._under_way.values(), self._room, lone)
        return sorted(own, key=lambda q: (q.arrival_ns, q.key))


def _group_of(query: Query) -> Group:
    """Shapes need not be told apart where nobody shares a batch."""
    return query.stage, ()

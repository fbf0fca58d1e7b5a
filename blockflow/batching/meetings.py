"""Meetings: whose turn it is where newcomers meet those who are under way, in several lanes.

In one lane who is under way goes to his end. With several lanes somebody may always be on his way
to a stage, and who begins there would wait for ever. So at each such stage both are served in the
order of all policies: priority, shares, earliest deadline. What counts for the shares is what has
run at that stage (start-time fair queueing, as in :class:`~blockflow.batching.room.WaitingRoom`):
who is under way has been charged when he began, and any number may have begun.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockflow.batching.policy import Query
from blockflow.batching.shares import TaskShare


class Meetings:
    """Books of what has run at each stage.

    Args:
        shares: of the tasks.
    """

    def __init__(self, shares: Sequence[TaskShare]) -> None:
        self._shares = tuple(shares)
        self._virtual: dict[tuple[int, int], float] = {}  # by stage and task
        self._reached: dict[int, float] = {}  # by stage

    def goes_before(self, newcomer: Query, other: Query) -> bool:
        """Whether ``newcomer`` has his turn before ``other``, who is under way to the same
        stage."""
        return self._rank(newcomer) < self._rank(other)

    def served(self, queries: Sequence[Query]) -> None:
        """They run, as one batch."""
        stage = queries[0].stage
        rows: dict[int, int] = {}
        for query in queries:
            task = self._task(query)
            rows[task] = rows.get(task, 0) + query.rows
        begun = {task: self._start(stage, task) for task in rows}
        self._reached[stage] = min(begun.values())
        for task, start in begun.items():
            self._virtual[stage, task] = start + rows[task] / self._shares[task].weight

    def _rank(self, query: Query) -> tuple[int, float, int, int, int]:
        task = self._task(query)
        start = self._start(query.stage, task)
        priority = self._shares[task].priority
        return -priority, start, query.deadline_ns, query.arrival_ns, query.key

    def _start(self, stage: int, task: int) -> float:
        """A task that was away has saved nothing up."""
        return max(self._virtual.get((stage, task), 0.0), self._reached.get(stage, 0.0))

    def _task(self, query: Query) -> int:
        return query.task if 0 <= query.task < len(self._shares) else 0

"""WindowPolicy: collect queries for a while, then run them together to the end.

The usual batching of serving systems: at most so many rows, at most so much delay. ``max_delay_ms``
0 is the ZeroBatch, a tuned one the DelayBatch of DVABatch's evaluation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

from blockflow.batching.convoy import Convoy
from blockflow.batching.costs import at
from blockflow.batching.facts import StageFacts
from blockflow.batching.meetings import Firsts, age
from blockflow.batching.options import Integer, Kind, Number, option_problems
from blockflow.batching.policy import Decision, Query, Run, WaitUntil
from blockflow.batching.predicting import in_time
from blockflow.batching.queueing import CLASSES, MS, QueueingPolicy, latest_start
from blockflow.batching.room import Admit, Group
from blockflow.batching.shares import TaskShare
from blockflow.core import limits
from blockflow.core.errors import Problem

_KINDS: Mapping[str, Kind] = {
    "max_rows": Integer(1, limits.MAX_ROWS),
    "max_delay_ms": Number(0, limits.MAX_DEADLINE_MS),
    "classes": CLASSES,
}
_MARGIN = 1.25
"""Who waits for a window leaves a quarter more time to the deadline than the work should take."""
_FADES = 0.9
"""Without a profile the slowest batch counts, and each further one forgets a tenth of it."""


class _Batch(Convoy):
    """A batch under way, or a part of one; ``number`` counts the batches as they began, ``since``
    is when its latest run has begun."""

    __slots__ = ("number", "since")

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.since = number, 0


class _Meeting(NamedTuple):
    """Those who wait at one stage.

    Attributes:
        head: whose turn it is.
        batch: in which of the batches under way it is.
        apart: whether they are of several tasks and batches.
        firsts: the oldest of each task, and its rank.
    """

    head: Query
    batch: int
    apart: bool
    firsts: Firsts


class WindowPolicy(QueueingPolicy):
    """A batch starts when it is full, when its oldest query has waited ``max_delay_ms``, or when a
    deadline allows no more delay.

    Between the stages of a worker nothing is delayed: what has left one stage runs through the next
    with whatever else is under way and waits there already, and what is under way goes before what
    is not. In one lane a batch therefore goes to its end before the next one starts. With several,
    where the ways of two batches part into the same stages, the parts run together; and who begins
    at a stage has his turn among those who come to it.
    """

    NAME: ClassVar[str] = "window"
    SIDE_BY_SIDE: ClassVar[bool] = True
    ROWS_OPTION: ClassVar[str] = "max_rows"

    def __init__(
        self,
        stages: Sequence[int],
        options: Mapping[str, Any],
        facts: Mapping[int, StageFacts] | None = None,
        shares: Sequence[TaskShare] = (),
    ) -> None:
        super().__init__(stages, options, facts, shares)
        self._delay = round(options.get("max_delay_ms", 0) * MS)
        self._spent = dict.fromkeys(self.stages, 0)
        self._under_way: list[_Batch] = []
        self._begun = 0

    @classmethod
    def problems(cls, options: Mapping[str, Any], path: str) -> list[Problem]:
        return option_problems(f"policy {cls.NAME!r}", options, _KINDS, path)

    def done(self, stage: int, keys: Sequence[int], now: int) -> None:
        batch = self._convoys.done(stage, keys)
        if isinstance(batch, _Batch):
            spent = now - batch.since
            self._spent[stage] = max(spent, round(_FADES * self._spent[stage]))

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        landed = [c for c in self._convoys.settle() if isinstance(c, _Batch)]
        under_way = [c for c in (*reversed(landed), *self._under_way) if c.waiting]
        # The oldest batch first; of its parts, the one that has just run.
        under_way.sort(key=lambda c: c.number)
        self._under_way = under_way
        overtaking = self._overtaking(busy)
        if overtaking and isinstance(run := self._begin(now, overtaking), Run):
            return run
        run = self._go_on(now, busy)
        if run is not None:
            return run
        groups = self._room.groups_beside(busy)
        return self._begin(now, groups) if groups else None

    def _go_on(self, now: int, busy: Collection[int]) -> Run | None:
        """Run what waits of a batch under way, and with it what waits there of others; None when
        all stages are busy."""
        if self.lanes > 1:
            return self._in_turn(now, busy)
        for batch in self._under_way:
            stages = {q.stage for q in batch.waiting.values()}.difference(busy)
            if stages:
                return self._go(batch, min(stages, key=self._position.__getitem__), now)
        return None

    def _in_turn(self, now: int, busy: Collection[int]) -> Run | None:
        """With several lanes many may wait at one stage: their tasks' turns decide, and not the age
        of their batches. Of those whose turn it is somewhere, the oldest batch's goes on."""
        there: dict[int, list[int]] = {}  # of each stage: the batches that wait there
        for i, batch in enumerate(self._under_way):
            for stage in {q.stage for q in batch.waiting.values()}.difference(busy):
                there.setdefault(stage, []).append(i)
        if not there:
            return None
        met = {s: self._whose_turn(s, found) for s, found in there.items() if len(found) > 1}
        turn = {s: met[s].batch if s in met else found[0] for s, found in there.items()}
        stage = min(turn, key=lambda s: (turn[s], self._position[s]))
        meeting = met.get(stage)
        if meeting is None:
            return self._go(self._under_way[turn[stage]], stage, now)
        if not meeting.apart:
            return self._go(self._under_way[meeting.batch], stage, now, meeting.firsts)
        group = self._group_of(meeting.head)
        waiting = [
            (query, batch.number)
            for batch in self._under_way
            for query in batch.waiting.values()
            if query.stage == stage and self._group_of(query) == group
        ]
        turns = self._meetings.in_turn(query for query, _ in waiting)
        chosen = {q.key for q in self._with_others([next(turns)], turns, now)}
        part = _Batch(min(number for query, number in waiting if query.key in chosen))
        queries = [q for q, _ in waiting if q.key in chosen]  # as they lie side by side
        self._convoys.join(part, queries)
        return self._start(part, queries, now, meeting.firsts)

    def _whose_turn(self, stage: int, batches: Sequence[int]) -> _Meeting:
        """Of several batches, or parts of them, that wait at ``stage``."""
        rank, heads = self._meetings.rank, dict[int, tuple[Query, int]]()
        for i in batches:
            for query in self._under_way[i].waiting.values():
                if query.stage == stage:
                    known = heads.get(query.task)
                    if known is None or age(query) < age(known[0]):
                        heads[query.task] = query, i
        firsts = [(query, rank(query)) for query, _ in heads.values()]
        head = min(firsts, key=itemgetter(1))[0]
        oldest, youngest = (self._under_way[batches[at]].number for at in (0, -1))
        apart = len(heads) > 1 and oldest != youngest
        return _Meeting(head, heads[head.task][1], apart, firsts)

    def _go(self, convoy: _Batch, stage: int, now: int, firsts: Firsts = ()) -> Run:
        convoy = self._first_there(stage, convoy)
        waiting = list(convoy.waiting.values())
        mine = self._fitting([q for q in waiting if q.stage == stage])
        queries = self._with_company(convoy, mine, now)
        if len(mine) < len(waiting) or len(mine) < len(queries):
            # Ways part or meet here. Who runs now is a part of its own, the others are next.
            convoy = _Batch(convoy.number)
            self._convoys.join(convoy, queries)
        else:
            self._under_way.remove(convoy)
        return self._start(convoy, queries, now, firsts)

    def _start(
        self, convoy: _Batch, queries: Sequence[Query], now: int, firsts: Firsts = ()
    ) -> Run:
        self._convoys.start(convoy, queries)
        convoy.since = now
        return self._run(queries, firsts)

    def _first_there(self, stage: int, batch: _Batch) -> _Batch:
        """Of the parts of ``batch`` the one that waits at ``stage`` longest."""
        parts = [part for part in self._under_way if part.number == batch.number]
        if len(parts) == 1:
            return batch
        first, since = batch, None
        for part in parts:  # who has just run before those that have rested
            for query in part.waiting.values():
                if query.stage == stage and (since is None or query.ready_ns <= since):
                    first, since = part, query.ready_ns
        return first

    def _with_company(self, convoy: _Batch, mine: list[Query], now: int) -> list[Query]:
        """``mine``, which ``convoy`` is to run, and of the other batches who waits for the same."""
        found = [
            (other.number, query.ready_ns, query)
            for other in reversed(self._under_way)
            if other is not convoy
            for query in other.waiting.values()
            if query.stage == mine[0].stage
        ]
        others = [query for *_, query in sorted(found, key=lambda entry: entry[:2])]
        return self._with_others(mine, others, now) if others else mine

    def _with_others(self, mine: list[Query], others: Iterable[Query], now: int) -> list[Query]:
        """``mine``, and of ``others`` at that stage as many as may run with them."""
        group = self._group_of(mine[0])
        company = (q for q in others if self._group_of(q) == group)
        admit = in_time(now, self._known, mine) if self._costs.known else None
        return self._room.with_company(mine, company, self._max_rows[group[0]], admit)

    def _begin(self, now: int, groups: Iterable[Group]) -> Decision:
        room = self._room
        due: list[Group] = []
        soonest: int | None = None
        for group in groups:
            at_ns = self._start_of(group)
            if at_ns <= now:
                due.append(group)
            elif soonest is None or at_ns < soonest:
                soonest = at_ns
        group_due = room.first(due)
        if group_due is None:
            return None if soonest is None else WaitUntil(soonest)
        queries = room.pick(group_due, self._max_rows[group_due[0]], self._admit(group_due, now))
        room.serve(group_due, queries)
        self._begun += 1
        convoy = _Batch(self._begun)
        self._convoys.join(convoy, queries)
        return self._start(convoy, queries, now)

    def _start_of(self, group: Group) -> int:
        """When a batch of this group starts at the latest."""
        room, stage = self._room, group[0]
        since = room.since(group)
        rows = room.rows(group)
        if not self._delay or room.full(group, self._max_rows[stage]) or room.inner(group):
            return since
        urgent = room.most_urgent(group)
        # Before anything is known of the work, half of the time is left for it.
        work = round(_MARGIN * self._predicted(group, rows)) or (urgent.deadline_ns - since) // 2
        return min(since + self._delay, latest_start(since, urgent.deadline_ns, work))

    def _predicted(self, group: Group, rows: int) -> int:
        """What the way of the most urgent takes, in a batch with all that wait in ``group``."""
        route = self._route(self._room.most_urgent(group))
        if self._costs.known:
            return at(self._costs.line(route, self._longest(group)), rows)
        return sum(map(self._spent.__getitem__, route))

    def _admit(self, group: Group, now: int) -> Admit | None:
        """With a profile: who would make others late stays for the next batch."""
        if not self._costs.known:
            return None
        return self._in_time(group, self._max_rows[group[0]], now)

"""QueueingPolicy: what policies share that let queries wait: the room, limits, padding, costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from blockflow.batching.convoy import Convoys
from blockflow.batching.costs import Costs, Route, at, measured
from blockflow.batching.facts import StageFacts
from blockflow.batching.joining import Arrivals
from blockflow.batching.meetings import Firsts, Meetings, Rank
from blockflow.batching.options import Ascending
from blockflow.batching.policy import (
    ELSEWHERE,
    Policy,
    Query,
    Run,
    ahead_of,
    key_of,
    rows_of,
    shape_of,
)
from blockflow.batching.predicting import Known, LengthOf, in_time
from blockflow.batching.room import Admit, Group, WaitingRoom
from blockflow.batching.shares import TaskShare
from blockflow.core import limits
from blockflow.core.errors import Problem
from blockflow.core.measuring import Subject, commands

MS = 1_000_000
CLASSES = Ascending(limits.MAX_DIM)
_SHAPES_KEPT = 4096
_KEPT = 4
_NOT_LOOKED = 7
"""So many batches are formed query by query after one that deadlines bound: the look that could
spare it costs as much as five queries do, and such batches may have less."""


def latest_start(since_ns: int, deadline_ns: int, work_ns: int) -> int:
    """When a query that waits since ``since_ns`` for company starts at the latest.

    A quarter of its time is kept for the work, however short that is said to be: predictions miss,
    cores wake late, and behind this worker the query's path goes on.
    """
    return deadline_ns - max(work_ns, (deadline_ns - since_ns) // _KEPT)


class QueueingPolicy(Policy):
    """Queries wait in a :class:`WaitingRoom`; batches under way are :class:`Convoys`.

    The option ``classes`` lists upper bounds of lengths. Queries whose lengths fall into one class
    may share a batch, in which all are padded to the longest of them; without it only queries of
    one shape do. (Beyond the last class, too: such inputs are refused at the door, but one may be
    under way when the classes change.)
    """

    ROWS_OPTION: ClassVar[str]
    """The option that bounds a batch's rows; by default the block's own bound does."""

    COSTS: ClassVar[type[Costs]] = Costs

    def __init__(
        self,
        stages: Sequence[int],
        options: Mapping[str, Any],
        facts: Mapping[int, StageFacts] | None = None,
        shares: Sequence[TaskShare] = (),
    ) -> None:
        super().__init__(stages, options, facts, shares)
        self._classes: tuple[int, ...] = tuple(options.get("classes", ()))
        own = options.get(self.ROWS_OPTION)
        self._max_rows: dict[int, int] = {}
        for stage, f in self.facts.items():
            laid_out = f.max_rows or own or limits.DEFAULT_MAX_ROWS
            self._max_rows[stage] = min(laid_out, own or laid_out)
        self._position = {stage: i for i, stage in enumerate(self.stages)}
        self._known_groups: dict[tuple[int, tuple[int, ...]], Group] = {}
        self._known_routes: dict[tuple[int, Route | None], Route] = {}
        self._room = WaitingRoom(self.shares, self._group_of, self.costs_of_rows)
        self._convoys = Convoys()
        self._met: set[int] = set()  # stages that convoys have come to
        self._meetings = Meetings(self.shares)
        self._arrivals = Arrivals()
        self._costs = self.COSTS(self.facts, max(self._max_rows.values()))
        fixed = not any(f.length_dims for f in self.facts.values())
        self._measure: LengthOf | None = None if fixed else self._length_of
        self._in_danger = 0  # so many batches more are formed as if deadlines bound them

    @classmethod
    def batch_rows(cls, options: Mapping[str, Any], laid_out: int) -> int:
        return min(laid_out, options.get(cls.ROWS_OPTION, laid_out))

    @classmethod
    def unfit(
        cls,
        options: Mapping[str, Any],
        stages: Sequence[StageFacts],
        path: str,
        ways: Sequence[Sequence[int]],
    ) -> list[Problem]:
        rows = options.get(cls.ROWS_OPTION, 1)
        problems = [
            _too_many(rows, f, f.max_rows, f"{path}.{cls.ROWS_OPTION}")
            for f in stages
            if f.max_rows is not None and rows > f.max_rows
        ]
        classes = options.get("classes", ())
        for f in stages if classes else ():
            if not f.length_dims:
                continue
            if not f.pads:
                problems.append(
                    Problem(
                        f"{path}.classes",
                        f"block {f.block!r} does not promise that padding changes no result",
                        "leave classes out: queries of one length then share batches",
                    )
                )
            elif classes[-1] < f.lengths[0]:
                problems.append(
                    Problem(
                        f"{path}.classes",
                        f"the last class is {classes[-1]}, block {f.block!r} takes lengths from "
                        f"{f.lengths[0]}",
                        f"end the list with the longest input that is to be taken, at most "
                        f"{f.lengths[1]}",
                    )
                )
        return problems

    @classmethod
    def idle(
        cls, options: Mapping[str, Any], stages: Sequence[StageFacts], path: str
    ) -> list[Problem]:
        if options.get("classes") and not any(f.length_dims for f in stages):
            return [Problem(f"{path}.classes", "no block here has a variable dim")]
        return []

    def arrive(self, query: Query, now: int) -> None:
        if self._convoys.arrive(query):
            self._met.add(query.stage)
            return
        if query.first or query.origin == ELSEWHERE:  # a newcomer here, if not in the worker
            # Not ``now``: what waits when the policy changes arrives here all at once.
            self._arrivals.add(query.rows, query.ready_ns)
        self._room.add(query)

    def drop(self, key: int, now: int) -> None:
        if self._room.remove(key) is None:
            self._convoys.drop(key)

    def done(self, stage: int, keys: Sequence[int], now: int) -> None:
        self._convoys.done(stage, keys)

    def waiting(self) -> Iterable[Query]:
        return sorted(chain(self._room, self._convoys), key=lambda q: (q.arrival_ns, q.key))

    # --- for the policies ------------------------------------------------------------------------

    def _overtaking(self, busy: Collection[int]) -> list[Group]:
        """With several lanes: groups at free stages whose turn comes before that of all who are
        under way and wait there, too."""
        if self.lanes == 1 or self._met.isdisjoint(g[0] for g in self._room.groups):
            return []
        begin = {stage for stage, _ in self._room.groups}.difference(busy)
        rank = self._meetings.rank
        there: dict[int, Rank] = {}
        for query in self._convoys if begin else ():
            if query.stage in begin:
                mine = rank(query)
                there[query.stage] = min(mine, there.get(query.stage, mine))
        return [
            group
            for group in self._room.groups
            if group[0] in there and rank(self._room.head(group)) < there[group[0]]
        ]

    def _not_through(self, stages: Collection[int], groups: Collection[Group]) -> Collection[Group]:
        """Those of ``groups`` in which no task's next query will come through any of ``stages``."""
        if not stages:
            return groups
        at = self._position

        def comes_through(query: Query) -> bool:
            first, last = at[query.stage], at[self._route(query)[-1]]
            return any(first < at[s] <= last for s in stages)

        return [g for g in groups if not any(map(comes_through, self._room.heads(g)))]

    def _group_of(self, query: Query) -> Group:
        """Stage and shape; of lengths in one class the shape with the class's bound."""
        key = (query.stage, query.shape)
        group = self._known_groups.get(key)
        if group is None:
            group = key
            facts = self.facts[query.stage]
            length = facts.length(query.shape) if facts.pads else None
            bound = next((c for c in self._classes if length is not None and length <= c), None)
            if bound is not None:
                dims = facts.length_dims
                shape = tuple(bound if i in dims else d for i, d in enumerate(query.shape))
                group = (query.stage, shape)
            if len(self._known_groups) >= _SHAPES_KEPT:
                self._known_groups.clear()
            self._known_groups[key] = group
        return group

    def _run(self, queries: Sequence[Query], firsts: Firsts = ()) -> Run:
        """One batch of ``queries``, padded if their shapes differ; ``firsts`` as of
        :meth:`Meetings.served`."""
        if self.lanes > 1 and queries[0].stage in self._met:
            self._meetings.served(queries, firsts)
        first = queries[0].shape
        pad_to: tuple[int, ...] = ()
        if self._classes and any(q.shape != first for q in queries):
            pad_to = tuple(map(max, *(q.shape for q in queries)))
        return Run(queries[0].stage, tuple(map(key_of, queries)), pad_to)

    def _fitting(self, queries: list[Query]) -> list[Query]:
        """Of queries that wait at one stage, as many of the first one's group as the stage is laid
        out for. (Who goes different ways after a shared stage may find narrower ones; and branches
        of one request that meet again count for its task as two.)"""
        first = queries[0]
        limit = self._max_rows[first.stage]
        fits = sum(map(rows_of, queries)) <= limit
        if fits and not self._room.capped:
            shapes = list(map(shape_of, queries))
            if shapes.count(shapes[0]) == len(shapes):
                return queries
        group = self._group_of(first)
        others = [q for q in queries[1:] if self._group_of(q) == group]
        return self._room.with_company([first], others, limit)

    def _route(self, query: Query) -> Route:
        """The stage of ``query`` and those of this policy that it has still to run."""
        stage, ahead = query.stage, query.ahead
        try:
            return self._known_routes[stage, ahead]
        except KeyError:
            if ahead is None:
                route = self.stages[self._position[stage] :]
            else:
                route = (stage, *(s for s in ahead if s in self._position))
            if len(self._known_routes) >= _SHAPES_KEPT:
                self._known_routes.clear()
            self._known_routes[stage, ahead] = route
            return route

    def _routes(self, queries: Sequence[Query]) -> Route:
        """All stages that some of ``queries``, which wait at one stage, run: for a tree, its
        branches one after another."""
        ways = list(map(ahead_of, queries))
        if ways.count(ways[0]) == len(ways):
            return self._route(queries[0])
        routes = set(map(self._route, dict(zip(ways, queries, strict=True)).values()))
        return tuple(sorted({s for r in routes for s in r}, key=self._position.__getitem__))

    def _limit(self, route: Route) -> int:
        """Most rows that every stage of ``route`` takes at once."""
        return min(map(self._max_rows.__getitem__, route))

    def _length_of(self, query: Query) -> int | None:
        """The length of ``query``; None for fixed dims."""
        return self.facts[query.stage].length(query.shape)

    def _longest(self, group: Group) -> int | None:
        """The longest of those that wait in ``group``; None for fixed dims."""
        length = self.facts[group[0]].length
        if not self._classes:
            return length(group[1])  # that of all of them
        found = map(length, self._room.shapes(group))
        return max((n for n in found if n is not None), default=None)

    @property
    def _known(self) -> Known:
        """What is predicted from."""
        return Known(self._costs, self._measure, self._route, self._position, self.lanes)

    def _in_time(self, group: Group, limit: int, now: int) -> Admit | None:
        """:func:`in_time` for a new batch of ``group`` with up to ``limit`` rows; None when nobody
        of it is found to be in danger, which is sooner said than asked of each."""
        urgent = self._room.most_urgent(group)
        length = self.facts[group[0]].length(group[1])  # no query of the class is longer
        ahead, most = self.stages[self._position[group[0]] :], self._max_rows[group[0]]
        if urgent.deadline_ns >= now + self._costs.bound(ahead, length, most):
            return None
        if self._in_danger:  # who is so once is so for a while
            self._in_danger -= 1
        elif self._all_in_time(self._room.pick(group, limit), ahead, length, now):
            return None
        else:
            self._in_danger = _NOT_LOOKED
        return in_time(now, self._known)

    def _all_in_time(
        self, queries: Sequence[Query], ahead: Route, length: int | None, now: int
    ) -> bool:
        """Whether no batch of the first so many of ``queries`` makes one of them late. Those on
        ways that visit stages before ``ahead`` are not looked at."""
        there: dict[int, int] = defaultdict(int)  # rows by stage: most ways leave some out
        for query in queries:
            for stage in self._route(query):
                there[stage] += query.rows
        bounds = self._costs.bounds(ahead, length)
        if not there.keys() <= bounds.keys():
            return False
        whole = sum([at(bounds[stage], rows) for stage, rows in there.items()])
        return now + whole <= min([query.deadline_ns for query in queries])


def missing_profiles(policy: str, stages: Sequence[StageFacts], path: str) -> list[Problem]:
    """A finding when a stage has no profile for its threads, with the command that makes them."""
    missing = [f for f in stages if not measured(f)]
    if not missing:
        return []
    names = ", ".join(dict.fromkeys(f.block or "BLOCK" for f in missing))
    needed = ((f.subject or Subject((f.block or "BLOCK",)), f.threads) for f in missing)
    threads = sorted({f.threads for f in missing})
    wanted = ", ".join(map(str, threads))
    return [
        Problem(
            path,
            f"policy {policy!r} needs a profile of {names} "
            f"({wanted} thread{'s' if threads != [1] else ''}) on this machine",
            f"run: {commands(needed)}",
        )
    ]


def _too_many(rows: int, f: StageFacts, laid_out: int, path: str) -> Problem:
    """What is wrong with batches of ``rows``, and what helps: no topology takes a block beyond the
    rows that it was exported for."""
    bound = laid_out >= f.exported_rows
    why, helps = (
        ("was exported for", f"export the block with --range rows=1..{rows}")
        if bound
        else ("is laid out for", "raise the block's max_rows")
    )
    return Problem(
        path,
        f"{rows} rows are over the {laid_out} that block {f.block!r} {why}",
        f"at most {laid_out}, or {helps}",
    )

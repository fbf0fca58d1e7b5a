"""Predicting: when batches that grow query by query end, by the profiles.

A batch takes as long as the longest of its queries makes it, to which all are padded; and each of
its queries ends where its own way does. In one lane that is behind the other ways' stages: where
they part, the worker runs one after another, in the order of its blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from blockflow.batching.costs import Costs, Line, Route, at
from blockflow.batching.policy import Query
from blockflow.batching.room import Admit

LengthOf = Callable[[Query], int | None]
RouteOf = Callable[[Query], Route]


class Known(NamedTuple):
    """What predictions follow from.

    Attributes:
        costs: of the stages.
        length_of: of a query, which is None for fixed dims; None where all have these.
        route_of: the stages that a query has still to run, the present one among them.
        position: of each stage in the worker.
        lanes: of the worker. In several, ways that have parted may run side by side.
    """

    costs: Costs
    length_of: LengthOf | None
    route_of: RouteOf
    position: Mapping[int, int]
    lanes: int

    def line(self, route: Route, queries: Iterable[Query]) -> Line:
        """Nanoseconds through ``route`` by rows, in a batch of ``queries``."""
        if self.length_of is None:
            return self.costs.line(route)
        found = map(self.length_of, queries)
        return self.costs.line(route, max((n for n in found if n is not None), default=None))


class BatchTimes:
    """Predicted times of a batch to which queries are added one by one.

    Attributes:
        longest: length of the longest so far; None for fixed dims, and before the first query.
        rows: of all of them.
        ways: what they run, and how many rows run it.
    """

    __slots__ = ("_known", "_lines", "_ns", "_there", "_total", "longest", "rows", "ways")

    def __init__(self, known: Known) -> None:
        self._known = known
        # Of each stage, once ways differ: times by rows, rows, and what they take.
        self._lines: dict[int, Line] = {}
        self._there: dict[int, int] = defaultdict(int)
        self._ns: dict[int, int] = defaultdict(int)
        self._total = 0  # of all stages, as long as there are lines
        self.longest: int | None = None
        self.rows = 0
        self.ways: dict[Route, int] = {}

    def add(self, query: Query, way: Route) -> None:
        """``query``, which runs ``way``, is among them."""
        length_of, mine, rows = self._known.length_of, query.rows, self.ways.get(way)
        if length_of is not None:
            length = length_of(query)
            if length is not None and (self.longest is None or length > self.longest):
                self.longest = length
                self._lines.clear()
        if rows is None:
            rows = 0
            if self.longest is not None:
                self._lines.clear()  # what comes to a stage may be longer on another way
            elif self._lines:
                self._learn(way)
        self.ways[way] = rows + mine
        self.rows += mine
        if self._there:
            self._count(way, mine)

    def ns(self, way: Route) -> int:
        """Nanoseconds until those who run ``way`` have done so."""
        if len(self.ways) < 2:
            return at(self._known.costs.line(way, self.longest), self.rows)
        self._look()
        if not way or self._known.lanes > 1:
            return sum(map(self._ns.__getitem__, way))
        position = self._known.position
        last = position[way[-1]]
        return sum([ns for stage, ns in self._ns.items() if position[stage] <= last])

    def late(self, bounds: Mapping[Route, int], begin: int) -> bool:
        """Whether some of those who run these ways from ``begin`` on end after their bounds."""
        if not bounds:
            return False
        whole = begin + self.whole()  # no way ends later
        if whole <= min(bounds.values()):
            return False
        return any(begin + self.ns(way) > b for way, b in bounds.items() if b < whole)

    @property
    def stages(self) -> Iterable[int]:
        """That some of them run."""
        return self._there or {stage for way in self.ways for stage in way}

    def latest(self) -> Route:
        """The way that ends last."""
        if len(self.ways) < 2:
            return next(iter(self.ways))
        if self._known.lanes > 1:
            return max(self.ways, key=self.ns)
        position = self._known.position
        return max(self.ways, key=lambda way: position[way[-1]] if way else -1)

    def whole(self) -> int:
        """Nanoseconds until all of them have run all, one stage after another."""
        if len(self.ways) < 2:
            return self.ns(next(iter(self.ways)))
        self._look()
        return self._total

    def _look(self) -> None:
        """Ways differ: look at each stage by itself."""
        if not self._there:
            for way, rows in self.ways.items():
                self._count(way, rows)
        if not self._lines:
            for way in self.ways:
                self._learn(way)
            lines = self._lines
            for stage, rows in self._there.items():
                self._ns[stage] = at(lines[stage], rows)
            self._total = sum(self._ns.values())

    def _learn(self, way: Route) -> None:
        lines = self._lines
        for stage, line in zip(way, self._known.costs.parts(way, self.longest), strict=True):
            known = lines.get(stage)
            if known is None or known[-1] < line[-1]:  # what comes another way may be shorter
                lines[stage] = line

    def _count(self, way: Route, rows: int) -> None:
        there, lines, spent, total = self._there, self._lines, self._ns, self._total
        if not lines:
            for stage in way:
                there[stage] += rows
            return
        for stage in way:
            after, line = there[stage] + rows, lines[stage]
            try:
                ns = line[after]
            except IndexError:
                ns = at(line, after)
            total += ns - spent[stage]
            there[stage], spent[stage] = after, ns
        self._total = total


class JoinTimes:
    """Predicted ends when newcomers, one after the other, are to catch up with a batch.

    Args:
        known: of the worker.
        route: of the newcomers; they join before its ``k``-th stage.
        k: as above.
        aboard: who waits there, or runs the stage before.
        now: when the newcomers start.
        there_ns: when those aboard are there, ``now`` at the earliest. Until then the stage before
            is theirs.

    Attributes:
        all: of those aboard and the newcomers, from there on.
    """

    def __init__(
        self,
        known: Known,
        route: Route,
        k: int,
        aboard: Sequence[Query],
        now: int,
        there_ns: int,
    ) -> None:
        self._before = route[:k]
        self._to_there = route[: k + 1]
        self._known = known
        self._now = now
        self._there_ns = there_ns
        self._theirs, self.all = BatchTimes(known), BatchTimes(known)
        self._rests: dict[Route, Route] = {}
        ways = list(map(self.from_there, aboard))
        for query, way in zip(aboard, ways, strict=True):
            self.all.add(query, way)
        self._bounds: dict[Route, int] = {}
        # Who leaves before the boundary waits for nobody there.
        ends = {way: there_ns + self.all.ns(way) for way in self.all.ways if way}
        for query, way in zip(aboard, ways, strict=True):
            bound = query.deadline_ns
            if way and ends[way] <= bound < self._bounds.get(way, bound + 1):
                self._bounds[way] = bound

    def same_way(self, query: Query) -> bool:
        """Whether ``query`` comes to where the batch waits, and through the same stages."""
        return self._known.route_of(query)[: len(self._to_there)] == self._to_there

    def admit(self, query: Query) -> bool:
        """``query``, which goes the same way, is among the newcomers; whether nobody is late for it
        who would be in time without it: neither aboard nor among the newcomers before it."""
        way, bound = self.from_there(query), query.deadline_ns
        self._theirs.add(query, self._before)
        self.all.add(query, way)
        caught_up = self._caught_up()
        if self.all.late(self._bounds, caught_up):
            return False
        if bound < self._bounds.get(way, bound + 1) and caught_up + self.all.ns(way) <= bound:
            self._bounds[way] = bound
        return True

    def from_there(self, query: Query) -> Route:
        """The stages of ``query`` from where the batch waits on."""
        route = self._known.route_of(query)
        rest = self._rests.get(route)
        if rest is None:
            position = self._known.position
            first = position[self._to_there[-1]]
            rest = self._rests[route] = tuple([s for s in route if position[s] >= first])
        return rest

    def end(self, way: Route) -> int:
        """When those who run ``way`` from there on have done so."""
        return self._caught_up() + self.all.ns(way)

    def _caught_up(self) -> int:
        """When the newcomers are where the others wait."""
        costs, theirs = self._known.costs, self._theirs
        behind = self._now + theirs.ns(self._before)
        if self._there_ns > self._now:
            last = at(costs.line(self._before[-1:], theirs.longest), theirs.rows)
            behind = max(behind, self._there_ns + last)
        return behind


def in_time(now: int, known: Known, aboard: Iterable[Query] = ()) -> Admit:
    """Admit queries while nobody misses a deadline because of them.

    A query that the batch would reach in time at the size that it has stays in time: the batch
    does not grow beyond what its deadline allows. Whoever is late anyhow does not count.

    Args:
        now: when the batch starts.
        known: of the worker.
        aboard: whom it has already.
    """
    times = BatchTimes(known)
    bounds: dict[Route, int] = {}

    def bind(query: Query, way: Route) -> None:
        bound = query.deadline_ns
        if bound < bounds.get(way, bound + 1) and now + times.ns(way) <= bound:
            bounds[way] = bound

    def admit(rows: int, query: Query) -> bool:
        way = known.route_of(query)
        times.add(query, way)
        if times.late(bounds, now):
            return False
        bind(query, way)
        return True

    mine = [(query, known.route_of(query)) for query in aboard]
    for query, way in mine:
        times.add(query, way)
    for query, way in mine:
        bind(query, way)
    return admit

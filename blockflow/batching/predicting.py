"""Predicting: when batches that grow query by query end, by the profiles.

A batch takes as long as the longest of its queries makes it, to which all are padded; and each of
its queries ends where its own way does. In one lane that is behind the other ways' stages: where
they part, the worker runs one after another, in the order of its blocks.
"""

from __future__ import annotations

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

    __slots__ = ("_known", "_lines", "_there", "_total", "longest", "rows", "ways")

    def __init__(self, known: Known) -> None:
        self._known = known
        self._lines: dict[int, Line] = {}
        self._there: dict[int, int] = {}  # rows by stage, once ways differ
        self._total = 0  # of all stages, as long as there are lines
        self.longest: int | None = None
        self.rows = 0
        self.ways: dict[Route, int] = {}

    def add(self, query: Query, way: Route) -> None:
        """``query``, which runs ``way``, is among them."""
        length_of, rows = self._known.length_of, self.ways.get(way)
        length = None if length_of is None else length_of(query)
        if length is not None and (self.longest is None or length > self.longest):
            self.longest = length
            self._lines.clear()
        if rows is None:
            rows = 0
            if self._lines:
                self._learn(way)
        self.ways[way] = rows + query.rows
        self.rows += query.rows
        if self._there:
            self._count(way, query.rows)

    def ns(self, way: Route) -> int:
        """Nanoseconds until those who run ``way`` have done so."""
        if len(self.ways) < 2:
            return at(self._known.costs.line(way, self.longest), self.rows)
        self._look()
        before: Iterable[int] = way
        if way and self._known.lanes == 1:
            position = self._known.position
            last = position[way[-1]]
            before = (stage for stage in self._there if position[stage] <= last)
        return sum([at(self._lines[stage], self._there[stage]) for stage in before])

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
            self._total = sum([at(self._lines[s], rows) for s, rows in self._there.items()])

    def _learn(self, way: Route) -> None:
        parts = self._known.costs.parts(way, self.longest)
        self._lines.update(zip(way, parts, strict=True))

    def _count(self, way: Route, rows: int) -> None:
        for stage in way:
            before = self._there.get(stage, 0)
            after = self._there[stage] = before + rows
            line = self._lines.get(stage)
            if line is not None:
                self._total += at(line, after) - at(line, before)


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
        whole: of the same, as if they ran all of it together.
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
        self._theirs = BatchTimes(known)
        self.all, self.whole = BatchTimes(known), BatchTimes(known)
        for query in aboard:
            self._add(query)
        self._bounds: dict[Route, int] = {}
        for query in aboard:
            way, bound = self._from_there(query), query.deadline_ns
            # Who leaves before the boundary waits for nobody there.
            if way and there_ns + self.all.ns(way) <= bound < self._bounds.get(way, bound + 1):
                self._bounds[way] = bound

    def same_way(self, query: Query) -> bool:
        """Whether ``query`` comes to where the batch waits, and through the same stages."""
        return self._known.route_of(query)[: len(self._to_there)] == self._to_there

    def add(self, query: Query) -> None:
        """``query``, which goes the same way, is among the newcomers."""
        self._theirs.add(query, self._before)
        self._add(query)

    def _add(self, query: Query) -> None:
        way = self._from_there(query)
        self.all.add(query, way)
        self.whole.add(query, self._before + way)

    def _from_there(self, query: Query) -> Route:
        position = self._known.position
        first = position[self._to_there[-1]]
        return tuple([s for s in self._known.route_of(query) if position[s] >= first])

    def end(self, way: Route) -> int:
        """When those who run ``way`` from there on have done so."""
        costs, theirs = self._known.costs, self._theirs
        behind = self._now + theirs.ns(self._before)
        if self._there_ns > self._now:
            last = at(costs.line(self._before[-1:], theirs.longest), theirs.rows)
            behind = max(behind, self._there_ns + last)
        return behind + self.all.ns(way)

    def makes_late(self) -> bool:
        """Whether somebody aboard who would be in time without newcomers is late with them."""
        return any(self.end(way) > bound for way, bound in self._bounds.items())


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
        if now + times.ns(way) <= bound < bounds.get(way, bound + 1):
            bounds[way] = bound

    def admit(rows: int, query: Query) -> bool:
        way = known.route_of(query)
        times.add(query, way)
        if any(now + times.ns(way) > bound for way, bound in bounds.items()):
            return False
        bind(query, way)
        return True

    mine = [(query, known.route_of(query)) for query in aboard]
    for query, way in mine:
        times.add(query, way)
    for query, way in mine:
        bind(query, way)
    return admit

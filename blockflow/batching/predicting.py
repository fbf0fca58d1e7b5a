"""Predicting: when batches that grow query by query end, by the profiles.

A batch takes as long as the longest of its queries makes it, to which all are padded; and each of
its queries ends where its own way does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from blockflow.batching.costs import Costs, Line, Route, at
from blockflow.batching.policy import Query
from blockflow.batching.room import Admit

LengthOf = Callable[[Query], int | None]
RouteOf = Callable[[Query], Route]


class BatchTimes:
    """Predicted times of a batch to which queries are added one by one.

    Args:
        costs: of the stages.
        length_of: of a query, which is None for fixed dims; None where all have these.
        aboard: whom it has already.

    Attributes:
        longest: length of the longest so far; None for fixed dims, and before the first query.
    """

    __slots__ = ("_costs", "_length_of", "longest")

    def __init__(
        self, costs: Costs, length_of: LengthOf | None, aboard: Iterable[Query] = ()
    ) -> None:
        self._costs = costs
        self._length_of = length_of
        self.longest: int | None = None
        if length_of is not None:
            self.longest = max((n for n in map(length_of, aboard) if n is not None), default=None)

    def add(self, query: Query) -> None:
        """``query`` is among them."""
        length = None if self._length_of is None else self._length_of(query)
        if length is not None and (self.longest is None or length > self.longest):
            self.longest = length

    def line(self, route: Route) -> Line:
        """Nanoseconds through ``route`` by rows."""
        return self._costs.line(route, self.longest)

    def ns(self, route: Route, rows: int) -> int:
        """Nanoseconds of ``rows`` rows through ``route``."""
        return at(self._costs.line(route, self.longest), rows)


class JoinTimes:
    """Predicted ends when newcomers, one after the other, are to catch up with a batch.

    Args:
        costs: of the stages.
        length_of: as of :class:`BatchTimes`.
        route_of: the stages that a query has still to run, the present one among them.
        position: of each stage in the worker.
        route: of the newcomers; they join before its ``k``-th stage.
        k: as above.
        aboard: who waits there, or runs the stage before.
        now: when the newcomers start.
        there_ns: when those aboard are there, ``now`` at the earliest. Until then the stage before
            is theirs.

    Attributes:
        before: the stages that newcomers catch up with.
        ways: what those aboard and the newcomers run from there on.
    """

    def __init__(
        self,
        costs: Costs,
        length_of: LengthOf | None,
        route_of: RouteOf,
        position: Mapping[int, int],
        route: Route,
        k: int,
        aboard: Sequence[Query],
        now: int,
        there_ns: int,
    ) -> None:
        self.before = route[:k]
        self._to_there = route[: k + 1]
        self._route_of = route_of
        self._position = position
        self._now = now
        self._there_ns = there_ns
        self._rows = sum([q.rows for q in aboard])
        self._theirs = BatchTimes(costs, length_of)
        self._all = BatchTimes(costs, length_of, aboard)
        self.ways: set[Route] = set()
        self._bounds: dict[Route, int] = {}
        for query in aboard:
            way, bound = self._from_there(query), query.deadline_ns
            self.ways.add(way)
            in_time = bound >= there_ns + self._all.ns(way, self._rows)
            # Who leaves before the boundary waits for nobody there.
            if way and in_time and bound < self._bounds.get(way, bound + 1):
                self._bounds[way] = bound

    @property
    def longest(self) -> int | None:
        """Length of the longest of all; None for fixed dims."""
        return self._all.longest

    def same_way(self, query: Query) -> bool:
        """Whether ``query`` comes to where the batch waits, and through the same stages."""
        return self._route_of(query)[: len(self._to_there)] == self._to_there

    def add(self, query: Query) -> None:
        """``query``, which goes the same way, is among the newcomers."""
        self._theirs.add(query)
        self._all.add(query)
        self.ways.add(self._from_there(query))

    def _from_there(self, query: Query) -> Route:
        first = self._position[self._to_there[-1]]
        return tuple([s for s in self._route_of(query) if self._position[s] >= first])

    def end(self, way: Route, rows: int) -> int:
        """When a batch of so many rows in all has run ``way``."""
        theirs, joining = self._theirs, rows - self._rows
        behind = self._now + theirs.ns(self.before, joining)
        if self._there_ns > self._now:
            behind = max(behind, self._there_ns + theirs.ns(self.before[-1:], joining))
        return behind + self._all.ns(way, rows)

    def makes_late(self, rows: int) -> bool:
        """Whether somebody aboard who would be in time without newcomers is late with them."""
        return any(self.end(way, rows) > bound for way, bound in self._bounds.items())


def in_time(now: int, times: BatchTimes, route_of: RouteOf) -> Admit:
    """Admit queries while nobody misses a deadline because of them.

    A query that the batch would reach in time at the size that it has stays in time: the batch
    does not grow beyond what its deadline allows. Whoever is late anyhow does not count.

    Args:
        now: when the batch starts.
        times: of the batch.
        route_of: to the end of what is predicted.
    """
    bounds: dict[Route, int] = {}

    def admit(rows: int, query: Query) -> bool:
        times.add(query)
        if any(now + times.ns(way, rows) > bound for way, bound in bounds.items()):
            return False
        way, bound = route_of(query), query.deadline_ns
        if now + times.ns(way, rows) <= bound < bounds.get(way, bound + 1):
            bounds[way] = bound
        return True

    return admit

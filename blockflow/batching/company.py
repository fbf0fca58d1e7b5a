"""CompanyPolicy: what policies share whose batches under way take company: newcomers who join them
at a boundary and, in several lanes, batches that wait for the same stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from blockflow.batching.convoy import Convoy
from blockflow.batching.costs import Route, at
from blockflow.batching.joining import Lines, together
from blockflow.batching.policy import Query, rows_of
from blockflow.batching.predicting import JoinTimes, in_time
from blockflow.batching.queueing import QueueingPolicy
from blockflow.batching.room import Admit

_Batch = TypeVar("_Batch", bound=Convoy)

Within = Callable[[Iterable[Query]], bool]
"""Whether a batch is within its bounds with these queries besides those it was asked for before."""


class CompanyPolicy(QueueingPolicy):
    """Batches under way, whom others may join."""

    def _join_times(
        self, route: Route, k: int, aboard: Sequence[Query], now: int, there_ns: int
    ) -> JoinTimes:
        """Of newcomers on ``route`` that catch up with ``aboard``, who are before its ``k``-th
        stage at ``there_ns``."""
        return JoinTimes(self._known, route, k, aboard, now, there_ns)

    def _end_of(self, running: Mapping[int, Query], began_ns: int) -> int:
        """When a batch that began then should be done at its stage, by the profile."""
        queries = list(running.values())
        line = self._known.line((queries[0].stage,), queries)
        return began_ns + at(line, sum(map(rows_of, queries)))

    def _join_lines(
        self, route: Route, k: int, aboard: Sequence[Query], joining: Sequence[Query]
    ) -> Lines:
        """What decides whether it pays that ``joining`` catch up with ``aboard``, who have done the
        first ``k`` stages of ``route``."""
        line, rest = self._known.line, route[k:]
        return Lines(
            line(route[:k], joining),
            line(rest, aboard),
            line(rest, [*aboard, *joining]),
            line(route, joining),
        )

    def _going_along(
        self,
        batch: Convoy,
        others: Sequence[_Batch],
        now: int,
        within: Within = lambda _: True,
    ) -> list[_Batch]:
        """Of ``others``, all of which wait for the stage that ``batch`` is to run, those that are
        to run with it: where the sum of what all there still take falls, by the profile, and while
        rows and deadlines allow. The first that may not or should not go along ends it."""
        if not others:
            return []
        aboard, rows = list(batch.waiting.values()), batch.rows
        group, behind = self._group_of(aboard[0]), sum([other.rows for other in others])
        admit, along = in_time(now, self._known, aboard), list[_Batch]()
        for other in others:
            theirs, more = list(other.waiting.values()), other.rows
            if any(self._group_of(q) != group for q in theirs):
                continue
            both, behind = [*aboard, *theirs], behind - more
            route = self._routes(both)
            if rows + more > self._limit(route):
                break
            if together(self._join_lines(route, 0, aboard, theirs), rows, more, behind) < 0:
                break
            if not (self._all_fit(aboard, theirs, rows + more, admit) and within(theirs)):
                break
            along.append(other)
            aboard, rows = both, rows + more
        return along

    def _all_fit(
        self, aboard: Sequence[Query], theirs: Sequence[Query], rows: int, admit: Admit
    ) -> bool:
        """Whether all of ``theirs`` may ride with ``aboard``, in ``rows`` rows."""
        if not self._room.capped:  # sooner asked than if each of ``aboard`` is counted again
            return all(admit(rows, query) for query in theirs)
        company = self._room.with_company(aboard, theirs, rows, admit)
        return len(company) == len(aboard) + len(theirs)

"""SlicedPolicy: several blocks of a chain as one stage, with nothing to decide between them.

A policy that works over stages takes the worker's blocks for its stages, one by one. With the
option ``stages`` consecutive blocks make one: the policy is told only of the first block of each
(its head), with the times of all of them. Between two blocks of a stage a batch goes on as it is:
nobody joins it, and it is not split. DVABatch slices its models so (Cui et al., USENIX ATC 2022);
how many stages are best is found by :mod:`blockflow.tuning.stages`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise, takewhile
from typing import Any, ClassVar, Final

from blockflow.batching.costs import measured
from blockflow.batching.facts import LENGTH, StageFacts
from blockflow.batching.options import Counts, Either, Kind, OneOf, option_problems
from blockflow.batching.policy import Decision, Policy, Query, Run
from blockflow.batching.shares import TaskShare
from blockflow.core import limits
from blockflow.core.dims import substituted
from blockflow.core.errors import Problem
from blockflow.core.profile import Point, StageProfile

OPTION: Final = "stages"
AUTO: Final = "auto"
SLICES: Kind = Either((Counts(limits.MAX_PATH_NODES), OneOf((AUTO,))))
"""The option's values: how many consecutive blocks make each stage; or: find that out."""


def grouped(sizes: Sequence[int], blocks: Sequence[int]) -> list[tuple[int, ...]]:
    """``blocks`` by stage; ``sizes`` add up to their number."""
    return [tuple(blocks[a:b]) for a, b in pairwise(accumulate(sizes, initial=0))]


def slicing_problems(
    options: Mapping[str, Any],
    blocks: Sequence[str],
    paths: Mapping[str, Sequence[Sequence[str]]],
    path: str,
) -> list[Problem]:
    """What keeps the option ``stages`` from working for these blocks of one worker.

    Args:
        options: of their policy.
        blocks: in the worker's order.
        paths: of each task, its canary's among them.
        path: JSON path of the policy.
    """
    sizes = options.get(OPTION)
    if sizes is None:
        return []
    where = f"{path}.{OPTION}"
    problems = []
    for task, ways in paths.items():
        for way in ways:
            mine = [i for i, b in enumerate(way) if b in blocks]
            # From the first of the blocks on, in their order, without a way around; it may end
            # before the last.
            if mine and list(blocks[: len(mine)]) != list(way[mine[0] : mine[0] + len(mine)]):
                visited = ", ".join(way[i] for i in mine)
                problems.append(
                    Problem(
                        where,
                        f"stages need a chain: of the blocks {', '.join(blocks)} task {task!r} "
                        f"runs {visited}",
                        "list the worker's blocks in the order in which every task runs them, "
                        "beginning with the first; or leave the option out",
                    )
                )
                break
    if sizes != AUTO and sum(sizes) != len(blocks):
        problems.append(
            Problem(
                where,
                f"{list(sizes)} slices {sum(sizes)} blocks, the worker has {len(blocks)} with "
                "this policy",
                f"numbers whose sum is {len(blocks)}, or {AUTO!r}",
            )
        )
    return problems


def merged(members: Sequence[StageFacts]) -> StageFacts:
    """What a policy may know of blocks that make one stage: their smallest limit, the sum of their
    times. Without a profile of each there is none of the stage."""
    if len(members) == 1:
        return members[0]
    first, carries = members[0], members[0].carries
    for f in members[1:]:
        carries = substituted(f.carries, {LENGTH: carries})
    bounds = [f.max_rows for f in members if f.max_rows is not None]
    return StageFacts(
        block="+".join(f.block for f in members),
        max_rows=min(bounds, default=None),
        threads=first.threads,
        profile=_summed(members) if all(map(measured, members)) else None,
        length_dims=first.length_dims,
        lengths=first.lengths,
        pads=all(f.pads for f in members if f.length_dims) and first.pads,
        carries=carries,
        exported_rows=min(f.exported_rows for f in members),
    )


def _summed(members: Sequence[StageFacts]) -> StageProfile | None:
    threads = members[0].threads
    tables = [f.profile for f in members if f.profile is not None]
    rows = sorted({b for t in tables for b in t.rows_measured(threads)})
    same = list(takewhile(lambda pair: pair[0].carries == LENGTH, pairwise(members)))
    alike = tables[: len(same) + 1]  # those that all take the length that the first one takes
    lengths: list[int | None] = [*sorted({n for t in alike for n in t.lengths_measured(threads)})]
    spread = max(t.r_max(threads) for t in tables)
    points = []
    for length in lengths or [None]:
        for b in rows:
            ms, taken = 0.0, length
            for f, t in zip(members, tables, strict=True):
                ms += t.ms(b, threads, taken)
                taken = f.carried(taken)
            points.append(Point(threads, b, length, 1, ms, ms, ms, ms, ms, ms, spread, 0))
    first = tables[0]
    name = "+".join(t.block for t in tables)
    return StageProfile(
        name, first.digest, first.engine, first.precision, first.machine, tuple(points)
    )


@dataclass(slots=True)
class _Trip:
    """A batch between the first and the last block of a stage.

    Attributes:
        keys: of all that began it here.
        at: which of the stage's blocks it runs, or ran last.
        running: it runs there.
        asked: the policy has asked for it; else it goes on after something went wrong.
        landed: keys that have run and may arrive again.
        held: those that wait for the stage's next block.
        aside: those that have arrived elsewhere; they wait until the stage is done.
    """

    keys: tuple[int, ...]
    at: int
    asked: bool
    running: bool = True
    landed: set[int] = field(default_factory=set)
    held: dict[int, Query] = field(default_factory=dict)
    aside: dict[int, Query] = field(default_factory=dict)


class SlicedPolicy(Policy):
    """Drives another policy with several blocks per stage.

    A query that waits within a stage, although no batch has brought it there (it was handed over
    from another policy, say), goes on by itself to the end of the stage.

    Args:
        kind: the policy; it gets the first block of each stage for the stage.
        sizes: how many of ``stages`` make each of its stages.
        stages, options, facts, shares: as of any policy.
    """

    NAME: ClassVar[str] = "sliced"

    def __init__(
        self,
        kind: type[Policy],
        sizes: Sequence[int],
        stages: Sequence[int],
        options: Mapping[str, Any],
        facts: Mapping[int, StageFacts] | None = None,
        shares: Sequence[TaskShare] = (),
    ) -> None:
        super().__init__(stages, options, facts, shares)
        self.slices = grouped(sizes, self.stages)
        self._slice_of = {s: members for members in self.slices for s in members}
        heads = [members[0] for members in self.slices]
        known = {m[0]: merged([self.facts[s] for s in m]) for m in self.slices}
        plain = {k: v for k, v in options.items() if k != OPTION}
        self._policy = kind(heads, plain, known, shares)
        self.costs_of_rows = self._policy.costs_of_rows  # which are measured block by block
        self.costs_of_rows.count_in(self.stages)
        self._trips: dict[int, _Trip] = {}  # by head
        self._trip_of: dict[int, _Trip] = {}  # by key, while it is aboard and does not run
        self._strays: dict[int, Query] = {}

    @classmethod
    def problems(cls, options: Mapping[str, Any], path: str) -> list[Problem]:
        return option_problems("a sliced policy", options, {OPTION: SLICES}, path, (OPTION,))

    def arrive(self, query: Query, now: int) -> None:
        key = query.key
        trip = None if query.first else self._trip_of.get(key)
        if trip is not None and key in trip.landed:
            trip.landed.discard(key)
            members = self._slice_of[query.stage]
            if self._trips.get(members[0]) is trip and members.index(query.stage) == trip.at + 1:
                trip.held[key] = query
            else:
                trip.aside[key] = query
        elif self._slice_of[query.stage][0] == query.stage:
            self._policy.arrive(query, now)
        else:
            self._strays[key] = query

    def drop(self, key: int, now: int) -> None:
        if self._strays.pop(key, None) is not None:
            return
        trip = self._trip_of.get(key)
        if trip is not None and (key in trip.held or key in trip.aside):
            del self._trip_of[key]
            trip.held.pop(key, None)
            trip.aside.pop(key, None)
            return
        self._policy.drop(key, now)

    def done(self, stage: int, keys: Sequence[int], now: int) -> None:
        members = self._slice_of.get(stage)
        trip = self._trips.get(members[0]) if members else None
        if members is None or trip is None or not trip.running or members[trip.at] != stage:
            return  # another policy has started it
        trip.running = False
        if trip.at + 1 == len(members):
            self._end(members[0], trip, now)
            return
        trip.landed = set(keys)
        for key in keys:
            self._trip_of[key] = trip

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        for head, trip in list(self._trips.items()):
            if trip.running:
                continue
            for key in trip.landed:  # has not come again: it has left the worker
                self._trip_of.pop(key, None)
            trip.landed = set()
            if not trip.held:
                self._end(head, trip, now)
                continue
            following = self._slice_of[head][trip.at + 1]
            if following not in busy:
                return self._go_on(trip, following)
        for query in self._strays.values():
            members = self._slice_of[query.stage]
            if members[0] not in self._trips and not any(s in busy for s in members):
                del self._strays[query.key]
                at = members.index(query.stage)
                self._trips[members[0]] = _Trip((query.key,), at, asked=False)
                return Run(query.stage, (query.key,))
        # A stage is busy as long as one of its blocks runs a batch, or a batch is between them.
        seen = [self._slice_of[s][0] if s in self._slice_of else s for s in busy]
        self._policy.lanes = self.lanes
        decision = self._policy.decide(now, [*seen, *(self._trips.keys() - set(seen))])
        if isinstance(decision, Run):
            self._trips[decision.stage] = _Trip(decision.keys, 0, asked=True)
        return decision

    def waiting(self) -> Iterable[Query]:
        aboard = (q for t in self._trips.values() for q in (*t.held.values(), *t.aside.values()))
        own = chain(self._policy.waiting(), self._strays.values(), aboard)
        return sorted(own, key=lambda q: (q.arrival_ns, q.key))

    # --- a batch within a stage ------------------------------------------------------------------

    def _go_on(self, trip: _Trip, stage: int) -> Run:
        """All that is aboard runs the stage's next block, padded like before if that is needed."""
        queries = list(trip.held.values())
        for query in queries:
            del self._trip_of[query.key]
        trip.held = {}
        trip.at += 1
        trip.running = True
        shapes = [q.shape for q in queries]
        alike = all(s == shapes[0] for s in shapes)
        pad_to = () if alike else tuple(map(max, zip(*shapes, strict=True)))
        return Run(stage, tuple(q.key for q in queries), pad_to)

    def _end(self, head: int, trip: _Trip, now: int) -> None:
        """The stage is done: the policy hears of it, and of who waits elsewhere."""
        del self._trips[head]
        for key in trip.aside:
            del self._trip_of[key]
        if trip.asked:
            self._policy.done(head, trip.keys, now)
        for query in trip.aside.values():
            self.arrive(query, now)

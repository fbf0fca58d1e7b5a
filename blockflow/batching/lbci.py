"""LbciPolicy: layered batch inference: newcomers join a batch under way at a block boundary.

Zhao et al., "Layered Batch Inference Optimization Method for Convolutional Neural Networks Based on
CPU" (ANIT 2023), section 3. With g(b) the predicted time of a batch of b rows through the whole
chain, fitted to the profile, and r[p, q] the share of its first q stages at p rows (so that
g(p) r[p, q] is the time of the first q stages):

    t_OPT  = t_opt / (1 + r_max)
    N_opt  = the largest b with g(b) <= t_OPT
    t_add  = g(N_add) r[N_add, k]                            newcomers catch up with stage k
    t_rest = g(N_d + N_add) (1 - r[N_d + N_add, k])          all go on together
    N_add  = the largest with t_wait + t_done + t_add + t_rest < t_opt and N_d + N_add <= N_opt

The paper prints t_OPT = t_opt r_max, which would shrink a bound of 500 ms to a few, and multiplies
by the batch once too often in its equations 4 and 5, whose g is the total (its equation 6).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import ROUND_CEILING, Context
from typing import Any, ClassVar

from blockflow.batching.company import CompanyPolicy
from blockflow.batching.convoy import Convoy
from blockflow.batching.costs import Costs, FittedCosts, Route, at
from blockflow.batching.facts import StageFacts
from blockflow.batching.joining import gain
from blockflow.batching.options import Integer, Kind, Number, OneOf, option_problems
from blockflow.batching.policy import Decision, Query, Run, stage_of
from blockflow.batching.predicting import BatchTimes
from blockflow.batching.queueing import CLASSES, MS, missing_profiles
from blockflow.batching.room import Group
from blockflow.batching.shares import TaskShare
from blockflow.batching.sliced import OPTION, SLICES
from blockflow.core import limits
from blockflow.core.errors import Problem

_KINDS: Mapping[str, Kind] = {
    "t_opt_ms": Number(0, limits.MAX_DEADLINE_MS, above=True),
    "n_max": Integer(1, limits.MAX_ROWS),
    "join": OneOf(("always", "gain")),
    "classes": CLASSES,
    OPTION: SLICES,
}

_THREE_DIGITS = Context(prec=3, rounding=ROUND_CEILING)
"""For bounds that are told to people: what they are told is enough."""


def n_opt(costs: Costs, route: Route, length: int | None, t_opt: int, n_max: int) -> int:
    """``N_opt``: the largest batch of at most ``n_max`` rows within the strict bound; 0 when one
    row exceeds it. ``t_opt`` in ns. (LBCI, section 3.2)"""
    g = costs.line(route, length)
    strict = t_opt / (1 + costs.fluctuation(route))
    # Looked at one by one: a fitted g may fall somewhere.
    fits = (b for b in range(min(n_max, len(g) - 1), 0, -1) if g[b] <= strict)
    return next(fits, 0)


class _Batch(Convoy):
    """A batch under way.

    Attributes:
        group: where and with which shape it began; newcomers come from there.
        started_ns: when it began.
        may_join: newcomers may still be asked for.
        newcomers: those that are catching up.
    """

    __slots__ = ("group", "may_join", "newcomers", "started_ns")

    def __init__(self, group: Group, started_ns: int) -> None:
        super().__init__()
        self.group = group
        self.started_ns = started_ns
        self.may_join = True
        self.newcomers: Convoy | None = None

    def rests_at(self, stage: int) -> bool:
        """Whether all of it waits for ``stage``, and no newcomers are catching up with it."""
        if self.newcomers is not None or self.running or not self.waiting:
            return False
        return set(map(stage_of, self.waiting.values())) == {stage}


class LbciPolicy(CompanyPolicy):
    """Batches of at most N_opt rows; a smaller one takes newcomers in, once, if the bound allows.

    Several batches are under way only when the worker can run them side by side. Then they may wait
    for each other's stages, which no prediction counts: the bound holds for one lane. Before a slow
    stage small batches would line up, and take it up one by one: those that wait there go on as one
    where that saves time.
    """

    NAME: ClassVar[str] = "lbci"
    ROWS_OPTION: ClassVar[str] = "n_max"
    COSTS: ClassVar[type[Costs]] = FittedCosts

    def __init__(
        self,
        stages: Sequence[int],
        options: Mapping[str, Any],
        facts: Mapping[int, StageFacts] | None = None,
        shares: Sequence[TaskShare] = (),
    ) -> None:
        super().__init__(stages, options, facts, shares)
        self._t_opt = round(options["t_opt_ms"] * MS)
        self._by_gain = options.get("join", "always") == "gain"
        self._batches: list[_Batch] = []
        self._known_n_opt: dict[tuple[Route, int | None], int] = {}

    @classmethod
    def problems(cls, options: Mapping[str, Any], path: str) -> list[Problem]:
        return option_problems(f"policy {cls.NAME!r}", options, _KINDS, path, ("t_opt_ms",))

    @classmethod
    def unfit(
        cls,
        options: Mapping[str, Any],
        stages: Sequence[StageFacts],
        path: str,
        ways: Sequence[Sequence[int]],
    ) -> list[Problem]:
        problems = super().unfit(options, stages, path, ways)
        missing = missing_profiles(cls.NAME, stages, path)
        if missing:
            return problems + missing
        costs = FittedCosts(dict(enumerate(stages)), 1)
        bound = options["t_opt_ms"]

        def times(way: Sequence[int]) -> tuple[float, float]:
            one = at(costs.line(tuple(way)), 1) / MS
            return one * (1 + costs.fluctuation(tuple(way))), one

        dearest = max(ways, key=times, default=())
        strict, one = times(dearest)
        if bound < strict:
            least = f"{float(_THREE_DIGITS.create_decimal_from_float(strict)):g}"
            where = " through " + ", ".join(stages[i].block for i in dearest)
            problems.append(
                Problem(
                    f"{path}.t_opt_ms",
                    f"t_opt of {bound:g} ms cannot be met: one sample takes {one:.3g} ms"
                    f"{where if len(ways) > 1 else ''} by the profile, {least} ms with its "
                    "fluctuation",
                    f"at least {least}",
                )
            )
        return problems

    @classmethod
    def boundaries(cls, options: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"join"})

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        self._convoys.settle()
        self._batches = [b for b in self._batches if not b.empty or b.newcomers is not None]
        for batch in self._batches:
            if batch.newcomers is not None:
                self._catch_up(batch, batch.newcomers)
        overtaking = self._overtaking(busy)
        if overtaking:
            return self._begin(now, overtaking)
        taken = set(busy)  # stages that are busy, and those for which an older batch waits
        for batch in self._in_turn(busy):
            if self._stays(batch, taken):
                continue
            run = self._advance(batch, now, taken, len(busy))
            if run is not None:
                return run
            for convoy in (batch, batch.newcomers):
                if convoy is not None:
                    taken.update(map(stage_of, convoy.waiting.values()))
        groups = self._room.groups_beside(taken)
        return self._begin(now, groups) if groups else None

    # --- a batch under way -----------------------------------------------------------------------

    def _advance(self, batch: _Batch, now: int, taken: Collection[int], running: int) -> Run | None:
        """Its next run; None when it runs already, waits for a stage, or is over. ``running``: how
        many batches compute."""
        newcomers = batch.newcomers
        if batch.running or (newcomers is not None and newcomers.running):
            return None
        if newcomers is not None:
            behind = self._foremost(newcomers)
            return None if behind is None or behind in taken else self._go(newcomers, behind)
        stage = self._foremost(batch)
        if stage is None:
            return None
        newest = batch is self._batches[-1]  # or newcomers would overtake the batches between
        # For a gain nobody joins whom another lane takes at once.
        spare = self._by_gain and self.lanes - running > 1 and stage not in taken
        entry = batch.group[0]
        asked = newest and batch.may_join and stage != entry and entry not in taken and not spare
        if asked and not self._outranked(batch, taken):
            joining = self._choose(batch, stage, now, taken)
            if joining:
                batch.newcomers = Convoy()
                self._convoys.join(batch.newcomers, joining)
                return self._go(batch.newcomers, joining[0].stage)
        if stage in taken:
            return None
        return self._go(self._merged(batch, stage, now) if self.lanes > 1 else batch, stage)

    def _merged(self, batch: _Batch, stage: int, now: int) -> _Batch:
        """``batch``, which is to run ``stage``, with those of the others before it that are to run
        with it: all in the oldest of them, which nobody joins any more."""
        others = [b for b in self._batches if b is not batch and b.rests_at(stage)]
        if not others or not batch.rests_at(stage):
            return batch
        times = BatchTimes(self._known)

        def within(queries: Iterable[Query]) -> bool:
            for query in queries:
                times.add(query, self._route(query))
            return self._within(times)

        within(batch.waiting.values())
        along = self._going_along(batch, others, now, within)
        oldest = min([batch, *along], key=self._batches.index)
        oldest.may_join &= not along
        for other in (batch, *along):
            if other is not oldest:
                self._convoys.join(oldest, list(other.waiting.values()))
        return oldest

    def _outranked(self, batch: _Batch, taken: Collection[int]) -> bool:
        """Whether somebody with a higher priority than all who could join waits elsewhere."""
        room, group = self._room, batch.group
        return bool(room.rows(group)) and room.outranked(group, taken)

    def _catch_up(self, batch: _Batch, newcomers: Convoy) -> None:
        """Newcomers who have caught up travel with the others from now on."""
        if newcomers.running or batch.running:
            return
        here, behind = self._foremost(batch), self._foremost(newcomers)
        if behind is None or (here is not None and not self._before(behind, here)):
            self._convoys.join(batch, list(newcomers.waiting.values()))
            batch.newcomers = None

    def _in_turn(self, busy: Collection[int]) -> list[_Batch]:
        """The batches by age; with several lanes of those that would run one stage next only the
        one that has whose turn it is there, and then the others."""
        if self.lanes == 1 or len(self._batches) < 2:
            return self._batches
        there: dict[int, list[_Batch]] = {}
        elsewhere: set[int] = set()  # stages before which one is that has something to do elsewhere
        for batch in self._batches:
            stages = set(map(stage_of, batch.waiting.values()))
            if not stages:
                continue
            stage = min(stages, key=self._position.__getitem__)
            there.setdefault(stage, []).append(batch)
            if len(stages) > 1 or batch.newcomers is not None:
                elsewhere.add(stage)
        turns = {
            id(self._meetings.next_of(stage, waiting) if len(waiting) > 1 else waiting[0])
            for stage, waiting in there.items()
            if stage not in busy or stage in elsewhere  # else none of them goes on anyhow
        }
        return sorted(self._batches, key=lambda b: bool(b.waiting) and id(b) not in turns)

    def _stays(self, batch: _Batch, taken: set[int]) -> bool:
        """Whether nothing can become of ``batch`` now: where it waits is taken, and nobody joins
        it, as nobody joins any but the newest."""
        if batch.newcomers is not None or batch is self._batches[-1]:
            return False
        return taken.issuperset(map(stage_of, batch.waiting.values()))

    def _foremost(self, convoy: Convoy) -> int | None:
        """The first stage at which some of ``convoy`` waits."""
        stages = set(map(stage_of, convoy.waiting.values()))
        return min(stages, key=self._position.__getitem__, default=None)

    def _before(self, one: int, other: int) -> bool:
        return self._position[one] < self._position[other]

    def _go(self, convoy: Convoy, stage: int) -> Run:
        """Run what waits at ``stage``, in batches that the stage is laid out for."""
        queries = self._fitting([q for q in convoy.waiting.values() if q.stage == stage])
        self._convoys.start(convoy, queries)
        return self._run(queries)

    def _choose(self, batch: _Batch, stage: int, now: int, taken: Collection[int]) -> list[Query]:
        """The newcomers that may join before ``stage``; section 3.3 of the paper. What the rest
        takes is predicted for each way that one of them goes.

        None although some wait: never ask again for this batch.
        """
        aboard = list(batch.waiting.values())
        if any(q.stage != stage for q in aboard):
            batch.may_join = False  # it has parted
            return []
        if not self._room.rows(batch.group):
            return []
        route = self._route(self._room.most_urgent(batch.group))
        if stage not in route:
            return []
        k = route.index(stage)
        times = self._join_times(route, k, aboard, now, now)
        whole = BatchTimes(self._known)  # as if all of them ran all of it together
        for query in aboard:
            whole.add(query, route[:k] + times.from_there(query))
        n_d = whole.rows
        done = now - batch.started_ns
        oldest, fits = now, 0
        same_way = self._room.pick(
            batch.group, self._limit(route), lambda _, q: times.same_way(q), aboard, taken
        )
        # All are looked at: measured times may fall somewhere, so that more fit than fewer.
        for n, query in enumerate(same_way, start=1):
            oldest = min(oldest, query.ready_ns)
            in_time = times.admit(query)
            whole.add(query, route[:k] + times.from_there(query))
            end = times.end(times.all.latest())
            in_bound = self._within(whole) and end - oldest + done < self._t_opt
            if in_bound and in_time:
                fits = n
        joining = same_way[:fits]
        batch.may_join = False
        n_add = sum(q.rows for q in joining)
        behind = self._room.rows(batch.group) - n_add
        if self._by_gain and joining:
            lines = self._join_lines(route, k, aboard, joining)
            if gain(lines, n_d, n_add, behind, self._arrivals.rate(now)) < 0:
                return []
        self._room.serve(batch.group, joining)
        return joining

    # --- a new batch -----------------------------------------------------------------------------

    def _begin(self, now: int, groups: Iterable[Group]) -> Run | None:
        group = self._room.first(groups)
        if group is None:
            return None
        most = self._limit(self._route(self._room.most_urgent(group)))
        in_time = self._in_time(group, most, now)
        times, limit, most_ns, full = BatchTimes(self._known), most, 0.0, False

        def admit(rows: int, query: Query) -> bool:
            nonlocal limit, most_ns, full
            ways, longest = len(times.ways), times.longest
            times.add(query, self._route(query))
            if len(times.ways) != ways or times.longest != longest:
                limit, most_ns = self._bounds(times)
            over = times.whole() > most_ns if most_ns else rows > limit
            full = over and rows > query.rows
            return not full and (in_time is None or in_time(rows, query))

        queries = self._room.pick(group, most, admit)
        batch = _Batch(group, now)
        batch.may_join = not full and self._room.rows(group) < self._n_opt(
            times.ways, times.longest
        )
        self._room.serve(group, queries)
        self._convoys.join(batch, queries)
        self._batches.append(batch)
        return self._go(batch, group[0])

    def _within(self, times: BatchTimes) -> bool:
        """Whether a batch is within its bounds."""
        limit, most_ns = self._bounds(times)
        return times.whole() <= most_ns if most_ns else times.rows <= limit

    def _bounds(self, times: BatchTimes) -> tuple[int, float]:
        """``N_opt`` of a batch and 0. If its ways part, in one lane: its rows say little of what
        it takes, and the strict bound itself counts."""
        if len(times.ways) > 1 and self.lanes == 1:
            return 0, self._t_opt / (1 + self._costs.fluctuation(times.stages))
        return self._n_opt(times.ways, times.longest), 0.0

    def _n_opt(self, ways: Iterable[Route], length: int | None) -> int:
        """The least ``N_opt`` of ``ways``."""
        known = self._known_n_opt
        least = limits.MAX_ROWS
        for way in ways:
            key = (way, length)
            found = known.get(key)
            if found is None:
                if len(known) >= limits.MAX_BLOCKS:
                    known.clear()
                found = n_opt(self._costs, way, length, self._t_opt, self._limit(way))
                known[key] = found
            least = min(least, found)
        return least

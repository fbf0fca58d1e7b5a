"""DvabatchPolicy: batches with many entries and many exits.

Cui et al., "DVABatch: Diversity-aware Multi-Entry Multi-Exit Batching for Efficient Processing of
DNN Services on GPUs" (USENIX ATC 2022). Three meta-operations on the batches under way (new,
stretch, split: batch_table.py), run by stage executors (stage.py), serve three kinds of diversity:

* ``load``: newcomers stretch the newest batch and catch up with it, instead of waiting for its end.
* ``input``: queries of like length form batches, padded to their longest; no more rows are under
  way than one batch may have.
* ``operator``: a batch that would do the remaining stages in halves as fast as whole is halved; the
  halves run one after the other, so that the first one's queries leave early.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from blockflow.batching.batch_table import BatchTable, Part
from blockflow.batching.company import CompanyPolicy
from blockflow.batching.costs import at
from blockflow.batching.facts import StageFacts
from blockflow.batching.joining import gain
from blockflow.batching.options import Either, Integer, Kind, Number, OneOf, SomeOf, option_problems
from blockflow.batching.policy import Decision, Query, Run, WaitUntil, rows_of, stage_of
from blockflow.batching.queueing import CLASSES, MS, latest_start, missing_profiles
from blockflow.batching.room import Group
from blockflow.batching.shares import TaskShare
from blockflow.batching.sliced import OPTION, SLICES
from blockflow.batching.stage import Pipeline
from blockflow.core import limits
from blockflow.core.errors import Problem

STAGE1 = "stage1"
_BUFFER_PAIRS = 2
_KINDS: Mapping[str, Kind] = {
    "bs_max": Integer(1, limits.MAX_ROWS),
    "policies": SomeOf(("load", "input", "operator")),
    "last_join_stage": Integer(1, limits.MAX_PATH_NODES),
    "t_comp_wait_ms": Number(0, limits.MAX_DEADLINE_MS, above=True),
    "buffer_pairs": Integer(1, 8),
    "window_ms": Either((Number(0, limits.MAX_DEADLINE_MS), OneOf((STAGE1,)))),
    "join": OneOf(("always", "gain")),
    "classes": CLASSES,
    OPTION: SLICES,
}


class DvabatchPolicy(CompanyPolicy):
    """New, stretch and split over the stages of one worker.

    One stretch is under way at a time: two batches that both rest for newcomers could wait for each
    other's buffers for ever. In several lanes, with a profile, batches that wait for one stage go
    on as one where that saves time; nobody joins them any more.
    """

    NAME: ClassVar[str] = "dvabatch"
    ROWS_OPTION: ClassVar[str] = "bs_max"

    def __init__(
        self,
        stages: Sequence[int],
        options: Mapping[str, Any],
        facts: Mapping[int, StageFacts] | None = None,
        shares: Sequence[TaskShare] = (),
    ) -> None:
        super().__init__(stages, options, facts, shares)
        self._bs_max = options.get("bs_max", max(self._max_rows.values()))
        kinds = options.get("policies", ("load",))
        self._load, self._input = "load" in kinds, "input" in kinds
        self._operator = "operator" in kinds
        self._last_join = options.get("last_join_stage", len(self.stages))
        self._t_comp_wait = round(options.get("t_comp_wait_ms", limits.MAX_DEADLINE_MS) * MS)
        self._window = options.get("window_ms", 0)
        by_default = "gain" if self._costs.known else "always"
        self._by_gain = options.get("join", by_default) == "gain"
        self._table = BatchTable()
        self._pipeline = Pipeline(len(self.stages), options.get("buffer_pairs", _BUFFER_PAIRS))
        self._groups: dict[int, Group] = {}  # by batch id: where its queries come from
        self._wanting: set[int] = set()  # stages where newcomers had their turn, and no place

    @classmethod
    def problems(cls, options: Mapping[str, Any], path: str) -> list[Problem]:
        return option_problems(f"policy {cls.NAME!r}", options, _KINDS, path)

    @classmethod
    def unfit(
        cls,
        options: Mapping[str, Any],
        stages: Sequence[StageFacts],
        path: str,
        ways: Sequence[Sequence[int]],
    ) -> list[Problem]:
        problems = super().unfit(options, stages, path, ways)
        needs = (
            "operator" in options.get("policies", ())
            or options.get("window_ms") == STAGE1
            or options.get("join") == "gain"
        )
        return problems + (missing_profiles(cls.NAME, stages, path) if needs else [])

    @classmethod
    def overlap(cls, options: Mapping[str, Any]) -> int:
        return int(options.get("buffer_pairs", _BUFFER_PAIRS))

    @classmethod
    def boundaries(cls, options: Mapping[str, Any]) -> frozenset[str]:
        kinds = options.get("policies", ("load",))
        joins = "load" in kinds and options.get("buffer_pairs", _BUFFER_PAIRS) > 1
        return frozenset({"join"} if joins else ()) | ({"split"} if "operator" in kinds else set())

    def drop(self, key: int, now: int) -> None:
        if self._room.remove(key) is not None:
            return
        convoy = self._convoys.drop(key)
        if isinstance(convoy, Part) and convoy.empty:
            self._dissolve(convoy)

    def done(self, stage: int, keys: Sequence[int], now: int) -> None:
        part = self._convoys.done(stage, keys)
        if isinstance(part, Part) and part.pair is not None:
            self._pipeline.finish(part.level, part.pair)

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        for convoy in self._convoys.settle():
            if isinstance(convoy, Part):
                self._landed(convoy)
        if len(self._room) and self._load:
            self._stretch(now, busy)
        overtaking = self._overtaking(busy)
        begun = self._new(now, overtaking) if overtaking else None
        if isinstance(begun, Run):
            return begun
        if begun is None:  # until they have a place nobody begins who would take it from them
            self._wanting.update([stage for stage, _ in overtaking])
        taken = set(busy)  # stages that are busy, and those for which an older batch waits
        seen: set[Part] = set()
        for row in self._table:
            for part in row.parts:
                run = self._advance(part, now, taken, seen)
                if run is not None:
                    return run
            for part in row.parts:
                if part.waiting:
                    taken.update(self._before_others(part))
        self._wanting &= {stage for stage, _ in self._room.groups}
        groups = self._not_through(self._wanting, self._room.groups_beside(taken))
        return self._new(now, groups) if groups else None

    def _advance(self, part: Part, now: int, taken: Collection[int], seen: set[Part]) -> Run | None:
        """The next run of ``part``, or of one that it waits for.

        Whom an old batch waits for is treated as if it were as old. Where ways part and meet again
        a younger batch can be ahead of an older one; if it left its stage to that one, too, both
        would wait for ever.
        """
        if part in seen or not part.waiting:
            return None
        seen.add(part)
        free = self.stages[part.level] not in taken
        pair = self._pair_of(part, free)
        if pair is not None and free:
            return self._start(part, pair, now)
        runs = (self._advance(other, now, taken, seen) for other in self._table.before(part))
        return next((run for run in runs if run is not None), None)

    # --- parts at a boundary ---------------------------------------------------------------------

    def _landed(self, part: Part) -> None:
        """A part has run a stage: who goes on waits before a later one, in one part or several."""
        part.level += 1
        part.at = part.level
        stages = set(map(stage_of, part.waiting.values()))
        if not stages:  # all have left the worker, or failed
            self._dissolve(part)
            return
        levels = sorted(map(self._position.__getitem__, stages))
        going: dict[int, list[Query]] = {stage: [] for stage in stages}
        for query in part.waiting.values() if len(levels) > 1 else ():
            going[query.stage].append(query)
        for level in reversed(levels[1:]):  # each comes right behind the first
            # Ways part here: that is a split, whose branches need not go one after the other.
            self._convoys.join(self._table.split(part, level), going[self.stages[level]])
        part.level = nearest = levels[0]
        if nearest < part.at and part.pair is not None:
            # The worker's blocks stand in another order than this path visits them.
            self._pipeline.vacate(part.at, part.pair)
            part.pair = None
        for other in part.row.parts:
            if other is not part and other.level == part.level and not other.running:
                self._convoys.join(other, list(part.waiting.values()))
                self._dissolve(part)
                return

    def _dissolve(self, part: Part) -> None:
        self._table.remove(part)
        if not part.row.parts:
            self._groups.pop(part.row.id, None)
        if part.pair is not None:
            self._pipeline.vacate(part.at, part.pair)

    def _before_others(self, part: Part) -> list[int]:
        """Stages that younger batches leave to ``part``, which waits.

        One without a pair, as the later half of a split is, needs a place at its stage. No younger
        batch comes to that stage meanwhile; and those that hold all its places have to go on, or
        all would wait for each other.
        """
        level = part.level
        if part.pair is not None:
            return [self.stages[level]]
        before = [self.stages[level - 1]] if level else []
        return before if self._pipeline.full(level) else [*before, self.stages[level]]

    def _pair_of(self, part: Part, free: bool) -> int | None:
        """The buffer pair on which ``part`` can run now. None while it waits for the rest of its
        batch, for the batch that it was split from, or for a legal pair. Who has none yet gets one
        only if its stage is ``free``, or it would hold a place that those before it may need."""
        row, pipeline = part.row, self._pipeline
        if part.running or not row.complete_before(part):
            return None
        if row.serial and not self._table.first_of_origin(row):
            return None
        if part.pair is None and free:
            # Not one of a part ahead, which rests for this one and needs what is behind it.
            ahead = [other.pair for other in row.parts if other.pair is not None]
            part.pair, part.at = pipeline.enter(part.level, avoid=ahead), part.level
        if part.pair is None:
            return None
        while part.at < part.level:
            if not pipeline.skip(part.at, part.pair):
                return None
            part.at += 1
        return part.pair if pipeline.can_start(part.level, part.pair) else None

    def _start(self, part: Part, pair: int, now: int) -> Run:
        if self.lanes > 1 and self._costs.known:
            for other in self._going_along(part, self._table.resting_with(part), now):
                self._convoys.join(part, list(other.waiting.values()))
                self._dissolve(other)
        queries = self._fitting(list(part.waiting.values()))
        self._leave(part, queries)
        while self._operator and len(part.row.parts) == 1:
            half = self._half(queries)
            if half == len(queries):
                break
            queries = queries[:half]
            self._leave(part, queries)
        return self._go(part, pair, queries, now)

    def _go(self, part: Part, pair: int, queries: Sequence[Query], now: int) -> Run:
        part.began_ns = now
        self._convoys.start(part, queries)
        self._pipeline.start(part.level, pair)
        return self._run(queries)

    def _leave(self, part: Part, queries: Sequence[Query]) -> None:
        """Who of ``part`` is not among ``queries`` becomes a batch of its own, to run after it."""
        if len(queries) == len(part.waiting):
            return
        going = {q.key for q in queries}
        stay = [q for q in part.waiting.values() if q.key not in going]
        self._convoys.join(self._table.split(part, part.level, serial=True), stay)

    def _half(self, queries: Sequence[Query]) -> int:
        """How many of ``queries`` should run first: about half of their rows if
        ``T_remain(i, n) >= 2 T_remain(i, n / 2)``, else all. (With an odd number of rows, or
        requests of several, the two real parts' times are added instead of doubling one.)"""
        if len(queries) < 2:
            return len(queries)
        total = sum(map(rows_of, queries))
        count = head = (total + 1) // 2
        if total > len(queries):  # some have several rows
            heads = list(accumulate(map(rows_of, queries)))
            count = max(1, bisect_right(heads, head, 0, len(queries) - 1))
            head = heads[count - 1]
        line, route = self._known.line, self._routes(queries)
        whole = first = second = line(route, queries)
        if self._measure is not None:  # who is shorter takes less
            first, second = line(route, queries[:count]), line(route, queries[count:])
        halves = at(first, head) + at(second, total - head)
        return count if at(whole, total) >= halves else len(queries)

    # --- stretch and new -------------------------------------------------------------------------

    def _stretch(self, now: int, busy: Collection[int]) -> None:
        """Let waiting queries join the newest batch, if it can still be joined."""
        row = self._table.newest
        if row is None:
            return
        rows = row.size
        active = self._table.size if self._input else rows
        if active >= self._bs_max or any(len(r.parts) > 1 for r in self._table):
            return
        part, group = row.parts[0], self._groups[row.id]
        entry = self._position[group[0]]
        boundary = part.level + bool(part.running)
        if (
            part.pair is None
            or not entry < boundary <= min(self._last_join, len(self.stages) - 1)
            or now - row.created_ns >= self._t_comp_wait
            or not self._room.rows(group)
            or self._room.outranked(group, busy)
            # For a gain nobody joins whom another lane takes at once.
            or (self._by_gain and self.lanes - len(busy) > (not part.running))
        ):
            return
        aboard = [*part.running.values(), *part.waiting.values()]
        route = self._route(self._room.most_urgent(group))
        stage = self.stages[boundary]
        if stage not in route:
            return
        k = route.index(stage)
        there_ns = max(now, self._end_of(part.running, part.began_ns)) if part.running else now
        times = self._join_times(route, k, aboard, now, there_ns)

        def admit(total: int, query: Query) -> bool:
            under_way = active + total - rows if self._input else 0
            return under_way <= self._bs_max and times.same_way(query) and times.admit(query)

        joining = self._room.pick(group, self._limit(route), admit, aboard, busy)
        if not joining:
            return
        if self._by_gain:
            n = sum(q.rows for q in joining)
            lines = self._join_lines(route, k, aboard, joining)
            if gain(lines, rows, n, self._room.rows(group) - n, self._arrivals.rate(now)) < 0:
                return
        pair = self._pipeline.enter(entry, avoid=(part.pair,))
        if pair is None:
            return
        self._room.serve(group, joining)
        behind = self._table.stretch(row, entry)
        behind.pair = pair
        self._convoys.join(behind, joining)

    def _new(self, now: int, groups: Collection[Group]) -> Decision:
        """A new batch of one of ``groups``, if its first executor can run it at once."""
        due, soonest = self._due(now, groups)
        active = self._table.size if self._input else 0
        if active >= self._bs_max:
            return None
        group = self._room.first(due)
        if group is None:
            return None if soonest is None else WaitUntil(soonest)
        level = self._position[group[0]]
        if self._pipeline.working(level):
            return None
        route = self._route(self._room.most_urgent(group))
        limit = min(self._bs_max - active, self._limit(route))
        queries = self._room.pick(group, limit, self._in_time(group, limit, now))
        if active and queries[0].rows > limit:  # alone it may be larger than a batch
            return None
        if self._operator:
            # Before the first stage nothing has to be split: who should run later goes on waiting.
            while (half := self._half(queries)) < len(queries):
                queries = queries[:half]
        pair = self._pipeline.enter(level)
        if pair is None:
            return None
        self._wanting.discard(group[0])
        self._room.serve(group, queries)
        part = self._table.new(level, now)
        part.pair = pair
        self._groups[part.row.id] = group
        self._convoys.join(part, queries)
        return self._go(part, pair, queries, now)

    def _due(self, now: int, groups: Collection[Group]) -> tuple[Collection[Group], int | None]:
        """Those of ``groups`` whose window is over, and when the next one's will be."""
        if not self._window:
            return groups, None
        due: list[Group] = []
        soonest: int | None = None
        for group in groups:
            route = self._route(self._room.most_urgent(group))
            if self._room.inner(group) or self._room.full(group, self._limit(route)):
                due.append(group)
                continue
            end = self._room.since(group) + self._window_ns(group)
            if end <= now:
                due.append(group)
            elif soonest is None or end < soonest:
                soonest = end
        return due, soonest

    def _window_ns(self, group: Group) -> int:
        """The window of a group; by the paper, what stage 1 takes for the largest batch. It ends
        early enough for the most urgent query's deadline."""
        urgent, length = self._room.most_urgent(group), self._longest(group)
        route = self._route(urgent)
        if self._window == STAGE1:
            window = at(self._costs.line(self.stages[:1], length), self._limit(route))
        else:
            window = round(self._window * MS)
        work = at(self._costs.line(route, length), self._room.rows(group))
        since = self._room.since(group)
        return min(window, latest_start(since, urgent.deadline_ns, work) - since)

"""Joins: rules on who may get into a batch under way, seen from outside the policy.

Queries that begin in a worker together are a *cohort*. When one run names several cohorts, the
later ones have joined the first. What the policies promise about that can then be checked without
knowing how they decide.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from blockflow.bench.simulation.simulator import Simulator
from blockflow.bench.simulation.watch import InvariantBroken, Watch
from blockflow.bench.simulation.worker import SimWorker
from blockflow.core.fit import fit_curve
from blockflow.worker.ticket import Batch, Ticket

_NS = 1_000_000
_ROUNDING = 0.01


@dataclass(slots=True, eq=False)
class Cohort:
    """Queries that began together, and who has joined them.

    Attributes:
        began_ns: when its first batch started.
        came_ns: when the oldest of its queries came into the worker.
        newest_ns: when the newest did.
        joined_at: position of the stage before which others have joined; -1 = none has.
        waited_ns: how long the oldest of those had waited when they began.
        queries: how many they are.
        stalls: of the worker, before they began; or before others joined.
    """

    began_ns: int
    came_ns: int
    newest_ns: int
    joined_at: int = -1
    waited_ns: int = 0
    queries: int = 1
    stalls: int = 0


class Joins(Watch):
    """Follows the cohorts of the workers whose stages all have one policy of this kind."""

    POLICY = ""

    def __init__(self) -> None:
        self._cohorts: dict[tuple[SimWorker, int], Cohort] = {}
        self._options: dict[SimWorker, Mapping[str, Any]] = {}

    def began(self, simulator: Simulator) -> None:
        for worker in simulator.workers:
            policies = [s.policy for s in worker.model.stages]
            if policies[0].get("policy") == self.POLICY and all(p == policies[0] for p in policies):
                self._options[worker] = policies[0]

    def started(self, worker: SimWorker, batch: Batch, now: int) -> None:
        if worker not in self._options:
            return
        fresh = [t for t in batch.tickets if (worker, t.key) not in self._cohorts]
        if fresh:
            arrivals = [t.arrival_ns for t in fresh]
            cohort = Cohort(now, min(arrivals), max(arrivals))
            cohort.queries, cohort.stalls = len(fresh), worker.stalls
            for ticket in fresh:
                self._cohorts[worker, ticket.key] = cohort
        aboard = {id(c): c for t in batch.tickets for c in [self._cohorts[worker, t.key]]}
        if len(aboard) > 1:
            first, *later = sorted(aboard.values(), key=lambda c: c.began_ns)
            position = self._position(worker, batch)
            self.joined(worker, first, later, position, now)
            first.joined_at = position
            first.queries += sum(c.queries for c in later)
            for ticket in batch.tickets:
                self._cohorts[worker, ticket.key] = first

    def _position(self, worker: SimWorker, batch: Batch) -> int:
        """Which of the policy's stages the batch runs; a block is one, or several are."""
        place = list(worker.stages).index(batch.stage)
        sizes = self._options[worker].get("stages")
        return place if sizes is None else bisect_right(list(accumulate(sizes)), place)

    def joined(
        self, worker: SimWorker, first: Cohort, later: list[Cohort], position: int, now: int
    ) -> None:
        """``later`` have joined ``first`` before the stage at ``position``."""

    def expired(self, worker: SimWorker, ticket: Ticket, now: int) -> None:
        self._cohorts.pop((worker, ticket.key), None)

    def ended(self, worker: SimWorker, batch: Batch, now: int) -> None:
        if worker not in self._options:
            return
        for ticket in batch.tickets:
            if not worker.goes_on(ticket):
                self.over(worker, self._cohorts.pop((worker, ticket.key)), now)

    def over(self, worker: SimWorker, cohort: Cohort, now: int) -> None:
        """A query of ``cohort`` leaves the worker."""


class StretchInTime(Joins):
    """``dvabatch``: nobody who came when a batch was older than ``t_comp_wait`` is aboard of it,
    and nobody joins behind the last join stage."""

    POLICY = "dvabatch"

    def joined(
        self, worker: SimWorker, first: Cohort, later: list[Cohort], position: int, now: int
    ) -> None:
        options = self._options[worker]
        last = options.get("last_join_stage", len(worker.stages))
        if position > last:
            raise InvariantBroken(
                "stretch in time", now, f"{worker.name}: a join before stage {position + 1}"
            )
        wait = options.get("t_comp_wait_ms")
        newest = max(c.newest_ns for c in later)
        if wait is not None and newest >= first.began_ns + wait * _NS:
            age = (newest - first.began_ns) / _NS
            raise InvariantBroken(
                "stretch in time", now, f"{worker.name}: came at age {age:.3f} ms, joined"
            )


class JoinInTime(Joins):
    """``lbci``: a batch of several queries ends within ``t_opt``, counted as the paper does (of one
    that others have joined the newcomers' wait and what had run then included), and nobody joins
    twice.

    Holds for forwards that take what the profile says, without fluctuation and without sharing
    cores, in one lane (in several, batches wait for each other's stages). How far the fitted curve
    is from the table is allowed for.
    """

    POLICY = "lbci"

    def __init__(self) -> None:
        super().__init__()
        self._limits: dict[SimWorker, float] = {}

    def began(self, simulator: Simulator) -> None:
        super().began(simulator)
        for worker, options in self._options.items():
            bound = options["t_opt_ms"] * _NS * (1 + fit_error(worker) + _ROUNDING)
            self._limits[worker] = bound + 2 * len(worker.stages) * simulator.turn_ns

    def joined(
        self, worker: SimWorker, first: Cohort, later: list[Cohort], position: int, now: int
    ) -> None:
        if any(c.joined_at not in (-1, position) for c in (first, *later)):
            raise InvariantBroken("join in time", now, f"{worker.name}: a second join")
        oldest = min(c.came_ns for c in later)
        first.waited_ns = max(c.began_ns for c in later) - oldest
        first.stalls = worker.stalls

    def over(self, worker: SimWorker, cohort: Cohort, now: int) -> None:
        if cohort.queries < 2 or worker.stalls != cohort.stalls:
            return  # one that is too large runs all the same; a stall is nobody's decision
        took = cohort.waited_ns + now - cohort.began_ns
        if took > self._limits[worker]:
            raise InvariantBroken("join in time", now, f"{worker.name}: {took / _NS:.3f} ms")


def fit_error(worker: SimWorker) -> float:
    """How far LBCI's curve is from a worker's profiles at worst, relative to these."""
    stages, threads = worker.model.stages, worker.model.threads

    def total(rows: int) -> float:
        return sum(s.profile.ms(rows, threads) for s in stages)

    top = min(s.max_rows for s in stages)
    rows = sorted({b for s in stages for b in s.profile.rows_measured(threads) if b <= top})
    curve = fit_curve(rows, [total(b) for b in rows])
    return max(abs(curve.total(b) - total(b)) / total(b) for b in range(1, top + 1))

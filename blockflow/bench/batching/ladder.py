"""Ladder: policies of one chain of blocks at several loads, measured in turns and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from statistics import fmean
from typing import Any

from blockflow.bench.batching.blocks import Profiles
from blockflow.bench.batching.figures import (
    CAPACITY,
    SERVED,
    SIMULATED,
    SIMULATED_OVER,
    Paper,
    against,
    decided,
    note,
    time_figures,
)
from blockflow.bench.batching.peaks import Search, search_peaks
from blockflow.bench.batching.plan import Plan, Recipe
from blockflow.bench.batching.predict import simulated
from blockflow.bench.batching.rig import TASK, Further, Policy, Rig, chain_topology
from blockflow.bench.batching.traffic import Cell, Inputs, inputs_for, poisson, saturate
from blockflow.bench.results import Figure
from blockflow.bench.simulation.arrivals import Arrival, Mix
from blockflow.bench.simulation.sizes import Sizes, parse_sizes
from blockflow.core import limits
from blockflow.core.profile import StageProfile
from blockflow.repository.zoo.catalog import ZOO

_WARM_UP = 8
_START = 0.8
"""Of the batched capacity: where a search for a peak begins that knows no better."""
_DRAWN = 64
"""Queries that a capacity is measured with, drawn as the others are."""


@dataclass(frozen=True, slots=True)
class Rivalry:
    """Who is laid beside whom.

    Attributes:
        arm: whose ratios count.
        bases: beside these arms.
        paper: what is told of a ratio.
        goals: the aims, where they are not to be no slower.
    """

    arm: str
    bases: Sequence[str]
    paper: Paper
    goals: Paper


@dataclass(slots=True)
class Ladder:
    """One chain and what is asked of it.

    Attributes:
        rig: serves.
        plan: how much is measured.
        experiment: its name, on every figure.
        recipe: the blocks.
        measured: profiles of the blocks.
        batch: the rows that the batched capacity is taken at.
        max_rows: that the blocks are laid out for.
        lengths: of the queries, in text form; '' where blocks have fixed dims.
        serial, batched: queries per second, measured: one by one, and in full batches.
    """

    rig: Rig
    plan: Plan
    experiment: str
    recipe: Recipe
    measured: Profiles
    batch: int
    max_rows: int = limits.DEFAULT_MAX_ROWS
    lengths: str = ""
    serial: float = 0.0
    batched: float = 0.0
    inputs: Inputs = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = inputs_for(self.recipe.input, ZOO[self.recipe.model].int_below)

    @property
    def profiles(self) -> Sequence[StageProfile]:
        """Of the blocks in turn, as a worker runs them."""
        return self.measured.in_turn

    @property
    def alone_ms(self) -> float:
        """A query's mean compute by those profiles."""
        return self._alone(self.profiles)

    def _alone(self, profiles: Sequence[StageProfile]) -> float:
        sizes = self._lengths()
        if sizes is None:
            return sum(p.ms(1) for p in profiles)
        return sizes.mean_of(lambda length: sum(p.ms(1, 1, length) for p in profiles))

    def topology(self, policy: Policy) -> dict[str, Any]:
        return chain_topology(self.recipe.blocks, policy, self.max_rows)

    def mix(self) -> Mix:
        """Single rows, of the lengths that there are."""
        return Mix([(TASK, 1.0)], parse_sizes("1", ""), self._lengths())

    def queries(self, rate: float, seed: int, multiple: int = 1) -> list[Arrival]:
        """One visit's."""
        return poisson(self.mix(), rate, self.plan.seconds, seed, multiple)

    def measure_capacity(self, serial: Policy, batched: Policy) -> list[Figure]:
        """Fill in ``serial`` and ``batched``, after some of warm-up."""
        queries = poisson(self.mix(), 1.0, 1.0, seed=0, multiple=_DRAWN)
        found = []
        for policy, outstanding in ((serial, _WARM_UP), (batched, 2 * self.batch)):
            with self.rig.step(f"{self.experiment}: capacity"):
                self.rig.apply(self.topology(policy))
                for seconds in (self.plan.seconds / 8, self.plan.seconds):
                    rate = saturate(self.rig.client, queries, self.inputs, outstanding, seconds)
            found.append(min(rate, self.plan.rate_limit))
        self.serial, self.batched = found[0], max(found)
        labels = {"experiment": self.experiment}
        return [
            *(
                Figure(CAPACITY, mode, rows, None, None, value, "1/s", 1, labels=labels)
                for mode, rows, value in (
                    ("serial", 1, found[0]),
                    ("batched", self.batch, found[1]),
                )
            ),
            *self.served(),
        ]

    def stretch(self, rows: int) -> float:
        """What a batch of so many rows takes in the running system without a pause, beside its
        profile: measured for one row and for a full batch, and in between by the logarithm."""
        alone = 1e3 / self.serial / self.alone_ms
        if self.lengths:
            return alone
        full = 1e3 * self.batch / self.batched / sum(p.ms(self.batch) for p in self.profiles)
        share = min(1.0, log2(rows) / log2(self.batch))
        return alone + share * (full - alone)

    def served(self) -> list[Figure]:
        """How far a row's time in the system lies from what was profiled. Where the sender is what
        holds the rate down, nothing can be said."""
        if self.serial >= self.plan.rate_limit:
            return []
        apart = self._alone(self.measured.apart)
        values: tuple[tuple[str, float], ...] = (
            ("served, to the blocks in turn", self.stretch(1)),
            ("the blocks in turn, to each by itself", self.alone_ms / apart),
            ("served, to each block by itself", self.stretch(1) * self.alone_ms / apart),
        )
        if not self.lengths:
            values += (("full batches served, to the blocks in turn", self.stretch(self.batch)),)
        labels = {"experiment": self.experiment}
        return [
            Figure(SERVED, mode, 1, None, None, value, "x", 1, labels=labels)
            for mode, value in values
        ]

    def labels(self, load: str, rate: float) -> dict[str, Any]:
        """Of a figure at a load."""
        x_serial = rate / self.serial
        return {"experiment": self.experiment, "load": load, "rate": rate, "x_serial": x_serial}

    def climb(
        self,
        arms: Mapping[str, Policy],
        loads: Mapping[str, float],
        bound_ms: float,
        multiple: int,
        rivalry: Rivalry,
    ) -> list[Figure]:
        """Every arm at every load, which are shares of the batched capacity, and the ratios."""
        found: list[Figure] = []
        lag_ms = 0.0
        plan = self.plan
        topologies = {arm: self.topology(policy) for arm, policy in arms.items()}
        for load, share in loads.items():
            rate = share * self.batched
            labels = self.labels(load, rate)
            rounds = [
                self.queries(rate, seed + 1, multiple)
                for seed in range(plan.stretch * plan.repeats)
            ]

            def visit(_arm: str, turn: int, rounds: list[list[Arrival]] = rounds) -> Cell:
                return self.rig.visit(rounds[turn], self.inputs, bound_ms)

            def ratios(
                cells: Mapping[str, list[Cell]], labels: Mapping[str, Any] = labels
            ) -> list[Figure]:
                one = rivalry
                pairs = [(base, cells[one.arm], cells[base]) for base in one.bases]
                return [
                    figure
                    for base, mine, its in pairs
                    for figure in against(one.arm, mine, base, its, labels, one.paper, one.goals)
                ]

            cells = self.rig.take_turns(
                f"{self.experiment}: load {load}",
                topologies,
                plan.repeats,
                visit,
                Further.of(plan, plan.repeats, lambda cells: decided(ratios(cells))),
            )
            for arm, policy in arms.items():
                found += time_figures(arm, cells[arm], labels)
                had = rounds[: len(cells[arm])]
                found += self._simulated(arm, policy, had, bound_ms, labels)
                lag_ms = max(lag_ms, *(c.lag_ms for c in cells[arm]))
            found += ratios(cells)
        text = f"99% of the queries were sent at most {lag_ms:.1f} ms after they were due"
        return [*found, note(self.experiment, text)]

    def search(
        self,
        what: str,
        arms: Mapping[str, Policy],
        bound_ms: float,
        starts: Mapping[str, float],
        confirming: int,
    ) -> dict[str, Search]:
        """Every arm's highest rate within the bound.

        Args:
            what: for the progress bar.
            arms: their policies.
            bound_ms: the bound.
            starts: rates to begin with, where they are known.
            confirming: probes that a search may add to confirm what it has found.
        """
        plan = self.plan
        searches = {
            arm: Search(starts.get(arm, _START * self.batched), plan.probes, confirming)
            for arm in arms
        }
        seconds = plan.probe_seconds(bound_ms)

        def probe(_arm: str, rate: float, seed: int) -> Cell:
            queries = poisson(self.mix(), rate, seconds, seed)
            return self.rig.visit(queries, self.inputs, bound_ms)

        topologies = {arm: self.topology(policy) for arm, policy in arms.items()}
        search_peaks(self.rig, f"{self.experiment}: {what}", topologies, searches, probe, bound_ms)
        return searches

    def _simulated(
        self,
        arm: str,
        policy: Policy,
        rounds: Sequence[Sequence[Arrival]],
        bound_ms: float,
        labels: Mapping[str, Any],
    ) -> list[Figure]:
        """The same policy and queries in the simulator."""
        runs = [
            simulated(self.profiles, policy, queries, self.max_rows, seed, bound_ms)
            for seed, queries in enumerate(rounds)
        ]
        values = (
            (SIMULATED, fmean(r.times.mean_ms for r in runs), "ms"),
            (SIMULATED_OVER, 100 * fmean(r.over for r in runs), "%"),
        )
        return [
            Figure(name, arm, None, None, None, value, unit, len(runs), labels=labels)
            for name, value, unit in values
        ]

    def _lengths(self) -> Sizes | None:
        return parse_sizes(self.lengths, "lengths") if self.lengths else None

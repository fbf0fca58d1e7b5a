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
    failures,
    note,
    time_figures,
)
from blockflow.bench.batching.peaks import Search, search_peaks
from blockflow.bench.batching.plan import Plan, Recipe
from blockflow.bench.batching.predict import simulated
from blockflow.bench.batching.rig import TASK, Further, Policy, Rig, chain_topology
from blockflow.bench.batching.traffic import Cell, Inputs, inputs_for, poisson, saturate
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.simulation.arrivals import Arrival, Mix
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.statistics import median_interval
from blockflow.core import limits
from blockflow.core.profile import StageProfile
from blockflow.repository.zoo.catalog import ZOO

_WARM_UP = 8
_START = 0.8
"""Of the batched capacity: where a search for a peak begins that knows no better."""
_DRAWN = 64
"""Queries that a capacity is measured with, drawn as the others are."""
_NOT_FASTER = 0.9
_VISITS = 3
"""Of a capacity, at most: all loads of an experiment are shares of it."""


@dataclass(frozen=True, slots=True)
class Rivalry:
    """Who is laid beside whom.

    Attributes:
        arm: whose ratios count.
        bases: beside these arms.
        paper: what is told of a ratio.
        goals: the aims, where they are not to be no slower.
        shown: arms beside which there is no aim.
        tail: the 99th percentile is to be no longer either.
    """

    arm: str
    bases: Sequence[str]
    paper: Paper
    goals: Paper
    shown: Sequence[str] = ()
    tail: bool = False

    def ratios(self, cells: Mapping[str, list[Cell]], labels: Mapping[str, Any]) -> list[Figure]:
        """At one load, from all visits."""
        mine = cells[self.arm]
        return [
            figure
            for base in (*self.bases, *self.shown)
            for figure in against(
                self.arm,
                mine,
                base,
                cells[base],
                labels,
                self.paper,
                self.goals if base in self.bases else None,
                tail=self.tail,
            )
        ]


@dataclass(slots=True)
class Ladder:
    """One chain and what is asked of it.

    Attributes:
        experiment: its name, on every figure.
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
        return mean_alone_ms(self.profiles, self.lengths)

    def topology(self, policy: Policy) -> dict[str, Any]:
        return chain_topology(self.recipe.blocks, policy, self.max_rows)

    def mix(self) -> Mix:
        """Single rows, of the lengths that there are."""
        lengths = parse_sizes(self.lengths, "lengths") if self.lengths else None
        return Mix([(TASK, 1.0)], parse_sizes("1", ""), lengths)

    def queries(self, rate: float, seed: int, multiple: int = 1) -> list[Arrival]:
        """One visit's."""
        return poisson(self.mix(), rate, self.plan.seconds, seed, multiple)

    def measure_capacity(self, serial: Policy, batched: Policy) -> list[Figure]:
        """Fill in ``serial`` and ``batched``: medians of visits in turn, after some of warm-up."""
        plan, rig = self.plan, self.rig
        queries = poisson(self.mix(), 1.0, 1.0, seed=0, multiple=_DRAWN)
        under_way = {"serial": _WARM_UP, "batched": 2 * self.batch}
        topologies = {"serial": self.topology(serial), "batched": self.topology(batched)}

        def rate(mode: str, seconds: float) -> float:
            return saturate(rig.client, queries, self.inputs, under_way[mode], seconds)

        what = f"{self.experiment}: capacity"
        with rig.step(what):
            for mode, topology in topologies.items():
                rig.apply(topology)
                rate(mode, plan.seconds / 8)
        rounds = min(_VISITS, plan.repeats)
        visits = rig.take_turns(
            what,
            topologies,
            rounds,
            lambda mode, _turn: min(rate(mode, plan.seconds), plan.rate_limit),
        )
        found = {mode: median_interval(rates) for mode, rates in visits.items()}
        self.serial = found["serial"].value
        self.batched = max(one.value for one in found.values())
        labels = {"experiment": self.experiment}
        rows = {"serial": 1, "batched": self.batch}
        return [
            *(
                interval_figure(CAPACITY, mode, rows[mode], one, "1/s", labels)
                for mode, one in found.items()
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
        apart = mean_alone_ms(self.measured.apart, self.lengths)
        values: tuple[tuple[str, float], ...] = (
            ("served, to the blocks in turn", self.stretch(1)),
            ("the blocks in turn, to each by itself", self.alone_ms / apart),
            ("served, to each block by itself", self.stretch(1) * self.alone_ms / apart),
        )
        if not self.lengths:
            values += (("full batches served, to the blocks in turn", self.stretch(self.batch)),)
        labels = {"experiment": self.experiment}
        found = [Figure.of(SERVED, mode, value, "x", 1, labels, batch=1) for mode, value in values]
        if self.stretch(1) < _NOT_FASTER:
            text = (
                f"a row takes {self.stretch(1):.2f} times its profile's time: nothing is served "
                "faster than it computes, so the profile was disturbed, and bounds and t_opt are "
                "as much too long; profile again"
            )
            found.append(note(self.experiment, text))
        return found

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

            def known(cells: Mapping[str, list[Cell]], labels: Mapping[str, Any] = labels) -> bool:
                return decided(rivalry.ratios(cells, labels))

            cells = self.rig.take_turns(
                f"{self.experiment}: load {load}",
                topologies,
                plan.repeats,
                visit,
                Further.of(plan, plan.repeats, known),
            )
            for arm, policy in arms.items():
                found += time_figures(arm, cells[arm], labels)
                had = rounds[: len(cells[arm])]
                found += self._simulated(arm, policy, had, bound_ms, labels)
                lag_ms = max(lag_ms, *(c.lag_ms for c in cells[arm]))
                lost = failures(arm, cells[arm])
                if lost:
                    found.append(note(self.experiment, f"at load {load} {lost}"))
            found += rivalry.ratios(cells, labels)
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
            return self.rig.probe(queries, self.inputs, bound_ms)

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
            Figure.of(name, arm, value, unit, len(runs), labels) for name, value, unit in values
        ]


def mean_alone_ms(profiles: Sequence[StageProfile], lengths: str) -> float:
    """A query's mean compute by these profiles; ``lengths`` as in :class:`Ladder`."""
    if not lengths:
        return sum(p.ms(1) for p in profiles)
    sizes = parse_sizes(lengths, "lengths")
    return sizes.mean_of(lambda length: sum(p.ms(1, 1, length) for p in profiles))

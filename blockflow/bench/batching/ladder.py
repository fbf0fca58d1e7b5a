"""Ladder: policies of one chain of blocks at several loads, measured in turns and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from blockflow.bench.batching.figures import (
    CAPACITY,
    PEAK,
    PEAK_RATIO,
    SIMULATED,
    Search,
    note,
    time_figures,
)
from blockflow.bench.batching.plan import Plan, Recipe
from blockflow.bench.batching.predict import mean_ms
from blockflow.bench.batching.rig import TASK, Policy, Rig, chain_topology
from blockflow.bench.batching.traffic import Cell, Inputs, inputs_for, poisson, saturate
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.simulation.arrivals import Arrival, Mix
from blockflow.bench.simulation.sizes import Sizes, parse_sizes
from blockflow.bench.statistics import Interval, percentile
from blockflow.core import limits
from blockflow.core.profile import StageProfile
from blockflow.repository.zoo.catalog import ZOO

_WARM_UP = 8
_DRAWN = 64
"""Queries that a capacity is measured with, drawn as the others are."""


@dataclass(slots=True)
class Ladder:
    """One chain and what is asked of it.

    Attributes:
        rig: serves.
        plan: how much is measured.
        experiment: its name, on every figure.
        recipe: the blocks.
        profiles: of the blocks.
        batch: the rows that the batched capacity is taken at.
        max_rows: that the blocks are laid out for.
        lengths: of the queries, in text form; '' where blocks have fixed dims.
        serial, batched: queries per second, measured: one by one, and in full batches.
    """

    rig: Rig
    plan: Plan
    experiment: str
    recipe: Recipe
    profiles: Sequence[StageProfile]
    batch: int
    max_rows: int = limits.DEFAULT_MAX_ROWS
    lengths: str = ""
    serial: float = 0.0
    batched: float = 0.0
    inputs: Inputs = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = inputs_for(self.recipe.input, ZOO[self.recipe.model].int_below)

    @property
    def alone_ms(self) -> float:
        """A query's mean compute by the profiles."""
        sizes = self._lengths()
        if sizes is None:
            return sum(p.ms(1) for p in self.profiles)
        return sizes.mean_of(lambda length: sum(p.ms(1, 1, length) for p in self.profiles))

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
            Figure(CAPACITY, mode, rows, None, None, value, "1/s", 1, labels=labels)
            for mode, rows, value in (("serial", 1, found[0]), ("batched", self.batch, found[1]))
        ]

    def labels(self, load: str, rate: float) -> dict[str, Any]:
        """Of a figure at a load."""
        x_serial = rate / self.serial
        return {"experiment": self.experiment, "load": load, "rate": rate, "x_serial": x_serial}

    def climb(
        self, arms: Mapping[str, Policy], loads: Mapping[str, float], bound_ms: float, multiple: int
    ) -> tuple[list[Figure], dict[tuple[str, str], list[Cell]]]:
        """Every arm at every load, which are shares of the batched capacity.

        Returns:
            the figures, and the visits by load and arm.
        """
        found: list[Figure] = []
        visits: dict[tuple[str, str], list[Cell]] = {}
        topologies = {arm: self.topology(policy) for arm, policy in arms.items()}
        for load, share in loads.items():
            rate = share * self.batched
            labels = self.labels(load, rate)
            rounds = [self.queries(rate, seed + 1, multiple) for seed in range(self.plan.repeats)]

            def visit(_arm: str, turn: int, rounds: list[list[Arrival]] = rounds) -> Cell:
                return self.rig.visit(rounds[turn], self.inputs, bound_ms)

            cells = self.rig.take_turns(
                f"{self.experiment}: load {load}", topologies, self.plan.repeats, visit
            )
            for arm, policy in arms.items():
                visits[load, arm] = cells[arm]
                found += time_figures(arm, cells[arm], labels)
                found.append(self._simulated(arm, policy, rounds, labels))
        late = max(c.lag_ms for cells in visits.values() for c in cells)
        text = f"99% of the queries were sent at most {late:.1f} ms after they were due"
        return [*found, note(self.experiment, text)], visits

    def peaks(self, arms: Mapping[str, Policy], bound_ms: float, base: str) -> list[Figure]:
        """Search every arm's highest rate within the bound, probe by probe in turns."""
        topologies = {arm: self.topology(policy) for arm, policy in arms.items()}
        searches = {arm: Search(0.8 * self.batched) for arm in arms}

        def visit(arm: str, turn: int) -> None:
            search = searches[arm]
            queries = poisson(self.mix(), search.rate, self.plan.probe_seconds, 100 + turn)
            cell = self.rig.visit(queries, self.inputs, bound_ms)
            search.tell(within(cell, bound_ms))

        self.rig.take_turns(f"{self.experiment}: peaks", topologies, self.plan.probes, visit)
        return peak_figures(self.experiment, searches, bound_ms, base)

    def _simulated(
        self,
        arm: str,
        policy: Policy,
        rounds: Sequence[Sequence[Arrival]],
        labels: Mapping[str, Any],
    ) -> Figure:
        """The same policy and queries in the simulator."""
        mean = fmean(
            mean_ms(self.profiles, policy, queries, self.max_rows, seed)
            for seed, queries in enumerate(rounds)
        )
        return Figure(SIMULATED, arm, None, None, None, mean, "ms", len(rounds), labels=labels)

    def _lengths(self) -> Sizes | None:
        return parse_sizes(self.lengths, "lengths") if self.lengths else None


def within(cell: Cell, bound_ms: float) -> bool:
    """Whether a visit kept the bound: all answered, and the 99th percentile in time."""
    return not cell.failed and percentile(cell.times_ms, 99) <= bound_ms


def peak_figures(
    experiment: str, searches: Mapping[str, Search], bound_ms: float, base: str
) -> list[Figure]:
    """The peaks, and their ratios to ``base``'s; an arm that never kept the bound has a note."""
    labels = {"experiment": experiment, "bound_ms": bound_ms}
    peaks = {arm: s.found for arm, s in searches.items() if s.found is not None}
    out = [interval_figure(PEAK, arm, None, p, "1/s", labels) for arm, p in peaks.items()]
    for arm in sorted(searches.keys() - peaks.keys()):
        out.append(note(experiment, f"{arm} kept the bound in none of the probes for its peak"))
    low = peaks.get(base)
    for arm, peak in peaks.items():
        if low is not None and arm != base:
            ratio = Interval(
                peak.value / low.value, peak.low / low.high, peak.high / low.low, peak.n
            )
            out.append(interval_figure(PEAK_RATIO, arm, None, ratio, "x", {**labels, "base": base}))
    return out

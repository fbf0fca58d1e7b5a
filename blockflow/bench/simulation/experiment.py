"""Experiment: policies against rates and seeds; every cell is one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from blockflow.batching.facts import length_of
from blockflow.bench.simulation.arrivals import Arrivals, Mix, parse_arrivals
from blockflow.bench.simulation.invariants import invariants
from blockflow.bench.simulation.outcome import Outcome, outcome
from blockflow.bench.simulation.recorded import Queries
from blockflow.bench.simulation.service import mean_ms
from blockflow.bench.simulation.simulator import Simulator
from blockflow.bench.simulation.sizes import Sizes, parse_sizes
from blockflow.bench.simulation.system import SystemModel
from blockflow.bench.simulation.watch import InvariantBroken, Watches
from blockflow.bench.simulation.workload import Workload
from blockflow.core.dims import Dim
from blockflow.core.profile import StageProfile
from blockflow.worker.scheduler import PolicyDefect


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: which policy, which rate (indices), which seed."""

    policy: int
    rate: int
    seed: int


@dataclass(frozen=True)
class Experiment:
    """What is compared.

    Attributes:
        system: its policies are replaced by each of ``policies``; an empty mapping among them
            leaves the system's own.
        policies: ``{"policy": name, ...options}`` each.
        rates: queries per second.
        arrivals: in text form (:func:`~blockflow.bench.simulation.arrivals.parse_arrivals`).
        rows: in text form (:func:`~blockflow.bench.simulation.sizes.parse_sizes`).
        lengths: likewise; empty where blocks have no variable dim.
        duration_s: of one run, in virtual seconds.
        warmup_s: of that, left out of the figures.
        seeds: one run per policy, rate and seed.
        bound_ms: for the share of queries over it.
        noisy: forwards fluctuate as measured.
        check: every rule of :mod:`~blockflow.bench.simulation.invariants` is looked after.
    """

    system: SystemModel
    policies: Sequence[Mapping[str, Any]]
    rates: Sequence[float]
    arrivals: str = "poisson"
    rows: str = "1"
    lengths: str = ""
    duration_s: float = 60.0
    warmup_s: float = 6.0
    seeds: Sequence[int] = field(default_factory=lambda: range(1, 21))
    bound_ms: float = 500.0
    noisy: bool = True
    check: bool = False

    def cells(self) -> list[Cell]:
        """All runs; those that end soon first within a seed, so that progress is even."""
        return [
            Cell(p, r, seed)
            for seed in self.seeds
            for r in range(len(self.rates))
            for p in range(len(self.policies))
        ]

    def mix(self) -> Mix:
        """What the queries are like."""
        tasks = [(t.name, t.traffic) for t in self.system.tasks]
        return Mix(tasks, self.row_sizes(), self.length_sizes())

    def row_sizes(self) -> Sizes:
        return parse_sizes(self.rows, "--rows")

    def length_sizes(self) -> Sizes | None:
        return parse_sizes(self.lengths, "--lengths") if self.lengths else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form."""
        return {**asdict(self), "seeds": list(self.seeds)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Experiment:
        """Inverse of :meth:`to_dict`."""
        return TypeAdapter(cls).validate_python(data)


class Runner:
    """Runs cells of one experiment; what they share is made once."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._arrivals: Arrivals = parse_arrivals(experiment.arrivals)
        self._mix = experiment.mix()
        own = experiment.system
        self._systems = [own.with_policy(p) if p else own for p in experiment.policies]

    def workload(self, cell: Cell) -> Workload:
        """What comes in a run: the same under every policy."""
        e = self._experiment
        rate = e.rates[cell.rate]
        return Workload(self._arrivals, self._mix, rate, e.duration_s, cell.seed)

    def run(self, cell: Cell) -> Outcome:
        """One run.

        Raises:
            TopologyError: the policy does not fit the system.
            InvariantBroken: a defect, with the cell in its message.
        """
        e = self._experiment
        system = self._systems[cell.policy]
        rate = e.rates[cell.rate]
        workload = self.workload(cell)
        watch = Watches(invariants(system, noisy=e.noisy)) if e.check else None
        simulator = Simulator(system, workload, watch=watch, noisy=e.noisy)
        try:
            simulator.run()
        except (InvariantBroken, PolicyDefect) as exc:
            broken = exc
            if isinstance(exc, PolicyDefect):
                broken = InvariantBroken(exc.rule, simulator.now, str(exc))
            note = f"policy {dict(e.policies[cell.policy])}, rate {rate}, seed {cell.seed}"
            broken.add_note(note)
            raise broken from exc.__cause__
        return outcome(simulator, e.warmup_s, e.duration_s, e.bound_ms)


def capacity(
    system: SystemModel,
    rows: Sizes,
    lengths: Sizes | None,
    *,
    noisy: bool = True,
    queries: Mapping[str, Queries] | None = None,
) -> float:
    """Queries per second that the system serves at most without batching: the yardstick of a load.

    The smaller of what its busiest worker and what its cores can do. A forward counts with its
    mean, which is its median where none is ``noisy``. A worker of several lanes is as busy as its
    busiest stage at least, unless that runs in all of them at once, as its trunk may. What is
    between two forwards (``turn_ms``) keeps a worker, and no core.

    Args:
        queries: what those of some tasks are like instead, by the tasks' names.
    """
    alike = Queries(rows, lengths)
    forward = mean_ms if noisy else StageProfile.ms
    work: dict[str, float] = {}
    computing: dict[str, float] = {}
    slowest: dict[str, float] = {}
    by_block: dict[str, float] = {}
    traffic = sum(t.traffic for t in system.tasks)
    hosts = system.stages()
    trunks = _trunks(system)
    for task in system.tasks:
        sizes = (queries or {}).get(task.name, alike)
        for block, taken in zip(task.path, system.taken(task.path), strict=True):
            worker, stage = hosts[block]
            share = task.traffic / traffic
            ms = _mean_ms(partial(forward, stage.profile), worker.threads, *sizes, taken)
            computing[worker.name] = computing.get(worker.name, 0.0) + share * ms
            part = share * (ms + system.turn_ms)
            work[worker.name] = work.get(worker.name, 0.0) + part
            by_block[block] = by_block.get(block, 0.0) + part
            width = worker.lanes if stage.side_by_side and block in trunks[worker.name] else 1
            slowest[worker.name] = max(slowest.get(worker.name, 0.0), by_block[block] / width)
    models = {w.name: w for w in system.workers}
    alone = min(
        1000.0 * models[name].replicas / max(ms / models[name].lanes, slowest[name])
        for name, ms in work.items()
    )
    core_ms = sum(ms * models[name].threads for name, ms in computing.items())
    together = 1000.0 * system.cores / core_ms
    return min(alone, together)


def _trunks(system: SystemModel) -> dict[str, frozenset[str]]:
    """By worker, its blocks that all who come to it run: :class:`~blockflow.worker.trunk.Trunk`."""
    hosts = system.stages()
    found: dict[str, frozenset[str]] = {}
    for task in system.tasks:
        names = [hosts[block][0].name for block in task.path]
        for i, name in enumerate(names):
            if i == 0 or names[i - 1] != name:
                way = frozenset(task.path[i:])
                found[name] = found.get(name, way) & way
    return found


def _mean_ms(
    forward: Callable[..., float], threads: int, rows: Sizes, lengths: Sizes | None, taken: Dim
) -> float:
    """Over the sizes of queries; ``forward`` takes rows, threads and length, which is ``taken`` of
    the query's."""
    if lengths is None:
        return rows.mean_of(lambda r: forward(r, threads))
    return rows.mean_of(
        lambda r: lengths.mean_of(lambda n: forward(r, threads, length_of(taken, n)))
    )

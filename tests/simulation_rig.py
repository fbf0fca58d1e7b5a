"""Small systems under virtual time, looked after at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blockflow.bench.simulation.arrivals import Arrivals, Mix, Recorded
from blockflow.bench.simulation.invariants import invariants
from blockflow.bench.simulation.simulator import Simulator
from blockflow.bench.simulation.sizes import Sizes, parse_sizes
from blockflow.bench.simulation.system import SystemModel
from blockflow.bench.simulation.watch import Watches
from blockflow.bench.simulation.workload import Workload
from blockflow.core.profile import Point, StageProfile

MS = 1_000_000
ONE = parse_sizes("1", "")


def profile(
    block: str,
    ms: Callable[[int, int], float],
    lengths: Sequence[int | None] = (None,),
    spread: float = 0.0,
) -> StageProfile:
    points = tuple(
        Point(1, b, n, 9, *[ms(b, n or 1)] * 6, spread=spread, outliers=0)
        for n in lengths
        for b in (1, 2, 4, 8)
    )
    return StageProfile(block, "0" * 64, "example", "fp32", "test", points)


def steady(block: str, ms: float) -> StageProfile:
    """Takes ``ms`` per row, whatever the batch."""
    return profile(block, lambda b, n: ms * b)


def run(
    model: SystemModel,
    arrivals: Arrivals,
    rate: float = 1.0,
    seconds: float = 1.0,
    rows: Sizes = ONE,
    lengths: Sizes | None = None,
    seed: int = 1,
    noisy: bool = False,
) -> Simulator:
    mix = Mix([(t.name, t.traffic) for t in model.tasks], rows, lengths)
    watch = Watches(invariants(model, noisy=noisy))
    simulator = Simulator(
        model, Workload(arrivals, mix, rate, seconds, seed), watch=watch, noisy=noisy
    )
    simulator.run()
    return simulator


def at(*times_ms: float) -> Recorded:
    return Recorded(tuple((round(t * MS), None, None, None) for t in times_ms))


def totals(simulator: Simulator) -> list[float]:
    return [(r.left_ns - r.came_ns) / MS for r in simulator.requests]

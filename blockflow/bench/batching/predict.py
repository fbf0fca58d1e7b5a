"""What the simulator says of the very queries that a visit sends. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from blockflow.bench.batching.rig import TASK, Policy
from blockflow.bench.simulation.arrivals import Arrival, Mix, Recorded
from blockflow.bench.simulation.outcome import Outcome, outcome
from blockflow.bench.simulation.simulator import Simulator
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.system import chain
from blockflow.bench.simulation.workload import Workload
from blockflow.core import limits
from blockflow.core.profile import Point, StageProfile

_TIMES = ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "low_ms", "high_ms")


def last_exit_ms(
    profiles: Sequence[StageProfile], policy: Policy, queries: Sequence[Arrival], max_rows: int
) -> float:
    """When the last of ``queries`` is answered; forwards take their medians."""
    simulator, _ = _simulate(profiles, policy, queries, max_rows, 0, noisy=False)
    return simulator.last_exit_ns / 1e6


def simulated(
    profiles: Sequence[StageProfile],
    policy: Policy,
    queries: Sequence[Arrival],
    max_rows: int,
    seed: int,
    bound_ms: float = limits.MAX_DEADLINE_MS,
) -> Outcome:
    """What becomes of the queries with these blocks in one worker, without any cost but compute.

    Args:
        queries: all of them, with their times.
        seed: of the forwards' fluctuation.
        bound_ms: that an answer should keep.
    """
    simulator, end_s = _simulate(profiles, policy, queries, max_rows, seed)
    return outcome(simulator, 0.0, end_s, bound_ms)


def stretched(
    profiles: Sequence[StageProfile], factor: Callable[[int], float]
) -> list[StageProfile]:
    """The same blocks, whose batches of so many rows take ``factor`` of that times as long."""
    return [
        replace(profile, points=tuple(_stretched(p, factor(p.rows)) for p in profile.points))
        for profile in profiles
    ]


def _stretched(point: Point, factor: float) -> Point:
    return replace(point, **{name: factor * getattr(point, name) for name in _TIMES})


def _simulate(
    profiles: Sequence[StageProfile],
    policy: Policy,
    queries: Sequence[Arrival],
    max_rows: int,
    seed: int,
    *,
    noisy: bool = True,
) -> tuple[Simulator, float]:
    """A finished run, and until when queries came, in seconds."""
    model = chain(profiles, max_rows=max_rows, credits=len(queries), adaptive_limit=False)
    (task,) = model.tasks
    patient = replace(task, name=TASK, deadline_ms=float(limits.MAX_DEADLINE_MS))
    model = replace(model, tasks=(patient,)).with_policy(policy)
    trace = Recorded(tuple((q.at_ns, q.task, q.rows, q.length) for q in queries))
    end_s = queries[-1].at_ns / 1e9 + 1.0
    mix = Mix([(TASK, 1.0)], parse_sizes("1", ""))
    simulator = Simulator(model, Workload(trace, mix, 0.0, end_s, seed), noisy=noisy)
    simulator.run()
    return simulator, end_s

"""What scheduling costs: a decision's CPU time, and the time of a request that is alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from blockflow.bench import decisions
from blockflow.bench.batching.figures import ALONE_RATIO, decided, ratio_figure
from blockflow.bench.batching.ladder import Ladder
from blockflow.bench.batching.plan import COST
from blockflow.bench.batching.rig import TASK, Further, Policy
from blockflow.bench.batching.traffic import DEADLINE_S
from blockflow.bench.results import Figure
from blockflow.bench.simulation.arrivals import Arrival
from blockflow.bench.statistics import judge_value, noise_of, percentile, ratio_interval

QUEUED, TASKS = 64, 8
DECISION_GOAL_US = 50.0
ALONE_GOAL = 1.02
AGAIN = "none, again"
"""The same policy as the base: how far apart two equal things look in this run."""
_BURST = 12
_LANES = 2
"""Of the policy that runs batches of one block side by side."""
_NONE = decisions.policy_name({"policy": "none"})
_PLACE = 3


def measure(ladder: Ladder, count: int) -> list[Figure]:
    """``count`` decisions per policy, then requests one by one, the policies taking turns."""
    return [*_decisions(count), *_alone(ladder)]


def _decisions(count: int) -> list[Figure]:
    """The aim is one for a decision; the turn around it is held to the same number, apart."""
    out = []
    ways = decisions.ways_for({}, TASKS)
    cases = [(spec, 1, *way) for way in ways for spec in decisions.SPECS]
    cases.insert(len(decisions.SPECS), ({"policy": "window"}, _LANES, *ways[0]))
    for spec, lanes, heads, due in cases:
        for found in decisions.measure(spec, QUEUED, TASKS, count, lanes, heads, due):
            verdict = judge_value(found.value, DECISION_GOAL_US)
            more = {"experiment": COST, "goal": DECISION_GOAL_US, "verdict": verdict.value}
            out.append(replace(found, labels={**found.labels, **more}))
    return out


def arms() -> dict[str, Policy]:
    """A window that waits for company is left out: it delays a request that is alone on purpose.

    ``none`` is there twice, and never beside itself: every visit follows a change of the policy.
    """
    found = [
        (decisions.policy_name(spec), spec)
        for spec in decisions.SPECS
        if "max_delay_ms" not in spec
    ]
    found.insert(_PLACE, (AGAIN, {"policy": "none"}))
    return dict(found)


def _alone(ladder: Ladder) -> list[Figure]:
    """Medians of bursts, paired by round."""
    topologies = {arm: ladder.topology(policy) for arm, policy in arms().items()}
    x = ladder.inputs(Arrival(0, TASK, 1, None))
    plan = ladder.plan

    def visit(_arm: str, _turn: int) -> float:
        times = []
        for i in range(-1, _BURST):
            begin = time.monotonic_ns()
            ladder.rig.client.infer(TASK, x, deadline_s=DEADLINE_S)
            if i >= 0:
                times.append((time.monotonic_ns() - begin) / 1e6)
        return percentile(times, 50)

    further = Further.of(plan, plan.rounds, lambda found: decided(ratios(found)))
    what = "cost: one by one"
    return ratios(ladder.rig.take_turns(what, topologies, plan.rounds, visit, further))


def ratios(found: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Every arm beside ``none``, judged with the run's own noise; ``none`` again is not judged."""
    noise = noise_of(ratio_interval(found[_NONE], found[AGAIN]))
    labels = {"experiment": COST, "noise": round(noise, 4)}
    return [
        ratio_figure(
            ALONE_RATIO,
            arm,
            _NONE,
            ratio_interval(found[_NONE], times),
            labels,
            goal=None if arm == AGAIN else ALONE_GOAL,
            noise=noise,
        )
        for arm, times in found.items()
        if arm != _NONE
    ]

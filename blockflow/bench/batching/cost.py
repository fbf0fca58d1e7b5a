"""What scheduling costs: a decision's CPU time, and the time of a request that is alone."""

from __future__ import annotations

import time
from dataclasses import replace

from blockflow.bench import decisions
from blockflow.bench.batching.figures import ALONE_RATIO, ratio_figure
from blockflow.bench.batching.ladder import Ladder
from blockflow.bench.batching.plan import COST
from blockflow.bench.batching.rig import TASK
from blockflow.bench.batching.traffic import DEADLINE_S
from blockflow.bench.results import Figure
from blockflow.bench.simulation.arrivals import Arrival
from blockflow.bench.statistics import Verdict, percentile, ratio_interval

QUEUED, TASKS = 64, 8
DECISION_GOAL_US = 50.0
ALONE_GOAL = 1.02
_BURST = 12
_NONE = decisions.policy_name({"policy": "none"})


def measure(ladder: Ladder, count: int) -> list[Figure]:
    """``count`` decisions per policy, then requests one by one, the policies taking turns."""
    return [*_decisions(count), *_alone(ladder)]


def _decisions(count: int) -> list[Figure]:
    out = []
    for spec in decisions.SPECS:
        found = decisions.measure(spec, QUEUED, TASKS, count)
        verdict = Verdict.MET if found.value <= DECISION_GOAL_US else Verdict.MISSED
        more = {"experiment": COST, "goal": DECISION_GOAL_US, "verdict": verdict.value}
        out.append(replace(found, labels={**found.labels, **more}))
    return out


def _alone(ladder: Ladder) -> list[Figure]:
    """Medians of bursts, paired by round. A window that waits for company is left out: it delays a
    request that is alone on purpose."""
    arms = {
        decisions.policy_name(spec): ladder.topology(spec)
        for spec in decisions.SPECS
        if "max_delay_ms" not in spec
    }
    x = ladder.inputs(Arrival(0, TASK, 1, None))

    def visit(_arm: str, _turn: int) -> float:
        times = []
        for i in range(-1, _BURST):
            begin = time.monotonic_ns()
            ladder.rig.client.infer(TASK, x, deadline_s=DEADLINE_S)
            if i >= 0:
                times.append((time.monotonic_ns() - begin) / 1e6)
        return percentile(times, 50)

    found = ladder.rig.take_turns("cost: one by one", arms, ladder.plan.rounds, visit)
    labels = {"experiment": COST}
    return [
        ratio_figure(
            ALONE_RATIO, arm, _NONE, ratio_interval(found[_NONE], times), labels, goal=ALONE_GOAL
        )
        for arm, times in found.items()
        if arm != _NONE
    ]

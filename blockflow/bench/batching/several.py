"""Several tasks on one input: what a shared trunk is for.

Every input is for all tasks, whose blocks are all in one worker with a lane per core. ``one
request for all`` names them together, so the trunk computes the
input once; ``a request per task`` sends it to the same blocks once per task; ``full models`` sends
it to a whole model per task. As many answers are under way in each. The bound is computing alone:
in as many processes as there are cores, the trunk over some inputs and then every head over these.
"""

from __future__ import annotations

import time
from concurrent.futures import wait
from contextlib import ExitStack

from blockflow.bench.batching.figures import decided
from blockflow.bench.batching.homes import FULL_HOME, KINDS, SHARED_HOME, topology, window
from blockflow.bench.batching.plan import PER_TASK, SEVERAL, Plan
from blockflow.bench.batching.rig import Further, Rig
from blockflow.bench.batching.several_figures import (
    ALL,
    BOUND,
    EACH,
    FULL_MODELS,
    Rates,
    alone_figures,
    rate_figures,
)
from blockflow.bench.batching.shared import Bound
from blockflow.bench.batching.traffic import DEADLINE_S, inputs_for, saturate
from blockflow.bench.results import Figure
from blockflow.bench.simulation.arrivals import Arrival
from blockflow.bench.statistics import percentile

HOMES = {ALL: SHARED_HOME, EACH: SHARED_HOME, FULL_MODELS: FULL_HOME}
_VISITS = 2
_ALONE = 5


def measure(plan: Plan, rig: Rig) -> list[Figure]:
    """Answers per second and the time of all answers, where the tasks part early and late."""
    partings = {each.trunk.name: each for each in (plan, plan.parted_late())}
    return [figure for each in partings.values() for figure in _parted(each, rig)]


def _parted(plan: Plan, rig: Rig) -> list[Figure]:
    own = plan.trunk.cuts[-1]
    what = f"{SEVERAL}, {own} of their own"
    deployed = topology(plan, window(plan), set(HOMES.values()))
    with rig.step(f"{what}: starting"):
        rig.apply(deployed)
    inputs = inputs_for(plan.trunk.input, 2)
    names = {arm: [f"{KINDS[home]}{i}" for i in range(plan.tasks)] for arm, home in HOMES.items()}
    asked = {arm: [Arrival(0, name, 1, None) for name in those] for arm, those in names.items()}
    together = {arm: names[arm] if arm == ALL else [] for arm in HOMES}

    def saturated(arm: str, seconds: float) -> float:
        count = PER_TASK * bound.width * (1 if together[arm] else plan.tasks)
        return saturate(rig.client, asked[arm], inputs, count, seconds, together=together[arm])

    def alone(arm: str, _turn: int) -> float:
        times = []
        for _ in range(_ALONE):
            begin = time.monotonic()
            x = inputs(asked[arm][0])
            groups = [together[arm]] if together[arm] else names[arm]
            sent = [rig.client.submit(group, x, deadline_s=DEADLINE_S) for group in groups]
            wait(sent)
            times.append((time.monotonic() - begin) * 1e3)
            for pending in sent:
                pending.result()
        return percentile(times, 50)

    with ExitStack() as stack:
        bound = Bound(plan, rig, stack)

        def visit(arm: str, _turn: int) -> float:
            return bound.answers(plan.tasks) if arm == BOUND else saturated(arm, plan.seconds)

        for arm in HOMES:  # of warm-up
            saturated(arm, plan.seconds / 8)
        rounds = _VISITS * plan.repeats
        further = Further.of(
            plan, rounds, lambda found: decided(rate_figures(found, own, plan.tasks))
        )
        arms = dict.fromkeys((*HOMES, BOUND), deployed)
        rates: Rates = rig.take_turns(f"{what}: saturated", arms, rounds, visit, further)
    arms = dict.fromkeys(HOMES, deployed)
    times: Rates = rig.take_turns(f"{what}: alone", arms, rounds, alone)
    return rate_figures(rates, own, plan.tasks) + alone_figures(times, own, plan.tasks)

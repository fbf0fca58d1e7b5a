"""Several tasks on one input: what a shared trunk is for.

Every input is for all tasks, whose blocks are all in one worker with a lane per core. ``one
request for all`` names them together, so the trunk computes the
input once; ``a request per task`` sends it to the same blocks once per task; ``full models`` sends
it to a whole model per task. As many answers are under way in each. The bound is computing alone:
in as many processes as there are cores, the trunk over some inputs and then every head over these,
each with its own weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack

from blockflow.bench.batching.blocks import ENGINE, PRECISION
from blockflow.bench.batching.figures import decided, note
from blockflow.bench.batching.homes import FULL_HOME, KINDS, SHARED_HOME, topology, window
from blockflow.bench.batching.plan import PER_TASK, SEVERAL, Plan
from blockflow.bench.batching.rig import Further, Rig
from blockflow.bench.batching.several_costs import Look, Spent, line, look
from blockflow.bench.batching.several_figures import (
    ALL,
    BOUND,
    EACH,
    FULL_MODELS,
    Rates,
    alone_figures,
    rate_figures,
)
from blockflow.bench.batching.traffic import DEADLINE_S, inputs_for, saturate
from blockflow.bench.in_process import Chain, InProcess, side_by_side
from blockflow.bench.results import Figure
from blockflow.bench.simulation.arrivals import Arrival
from blockflow.bench.statistics import percentile

HOMES = {ALL: SHARED_HOME, EACH: SHARED_HOME, FULL_MODELS: FULL_HOME}
_VISITS = 2
_ALONE = 5

_Visit = tuple[float, Spent | None]
"""Answers per second, and what they cost in the system."""


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
    *trunk, head = plan.trunk.blocks
    heads = [f"{head}.{i}" for i in range(plan.tasks)]
    inputs = inputs_for(plan.trunk.input, 2)
    names = {arm: [f"{KINDS[home]}{i}" for i in range(plan.tasks)] for arm, home in HOMES.items()}
    asked = {arm: [Arrival(0, name, 1, None) for name in those] for arm, those in names.items()}
    together = {arm: names[arm] if arm == ALL else [] for arm in HOMES}
    cores = len(os.sched_getaffinity(0))

    def saturated(arm: str, seconds: float) -> float:
        count = PER_TASK * cores * (1 if together[arm] else plan.tasks)
        return saturate(rig.client, asked[arm], inputs, count, seconds, together=together[arm])

    def now() -> Look:
        return look(rig.system.status(), KINDS[SHARED_HOME], trunk[0], heads)

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
        with rig.step("several: starting the bound"):
            chain = Chain(rig.folder, tuple(trunk), ENGINE, PRECISION, heads=(head,) * plan.tasks)
            bound = [stack.enter_context(InProcess(chain)) for _ in range(cores)]

        def visit(arm: str, _turn: int) -> _Visit:
            if arm == BOUND:
                return side_by_side(bound, PER_TASK, plan.seconds) * plan.tasks, None
            before = now()
            rate = saturated(arm, plan.seconds)
            return rate, Spent(cores, rate / plan.tasks, before, now())

        for arm in HOMES:  # of warm-up
            saturated(arm, plan.seconds / 8)
        rounds = _VISITS * plan.repeats
        further = Further.of(
            plan, rounds, lambda found: decided(rate_figures(_rates(found), own, plan.tasks))
        )
        arms = dict.fromkeys((*HOMES, BOUND), deployed)
        visits = rig.take_turns(f"{what}: saturated", arms, rounds, visit, further)
        computed = [bound[0].run(PER_TASK)[len(trunk) :] for _ in range(1 + _ALONE)]
    rates = _rates(visits)
    head_ms = percentile([ms for times in computed[1:] for ms in times], 50)
    bound_ms = cores * plan.tasks * 1e3 / percentile(rates[BOUND], 50)
    arms = dict.fromkeys(HOMES, deployed)
    times: Rates = rig.take_turns(f"{what}: alone", arms, rounds, alone)
    return [
        *rate_figures(rates, own, plan.tasks),
        *alone_figures(times, own, plan.tasks),
        note(SEVERAL, line(own, [spent for _, spent in visits[ALL]], bound_ms, head_ms)),
    ]


def _rates(visits: Mapping[str, Sequence[_Visit]]) -> Rates:
    return {arm: [rate for rate, _ in those] for arm, those in visits.items()}

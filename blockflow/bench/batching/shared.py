"""The shared trunk: several tasks whose blocks but the last are the same, in all their homes
(:mod:`.homes`); or, where they part at the classifier (``heads``), in the first and the last.

``batched`` and ``a replica per core`` are batches over the tasks, ``batched within tasks`` of one
task's requests alone; ``none`` is each request by itself. The bound is computing alone: in as many
processes as there are cores, the trunk over what all tasks have under way, then each head over its
task's. Where larger batches are no faster, that bounds nothing: beside it the trunk is computed
over what one task has under way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from blockflow.bench.batching.blocks import ENGINE, PRECISION
from blockflow.bench.batching.figures import (
    OF_BOUND,
    PEAK_OF_BOUND,
    SATURATED,
    SATURATED_RATIO,
    decided,
    note,
    ratio_figure,
)
from blockflow.bench.batching.homes import (
    FULL_HOME,
    KINDS,
    OWN_HOME,
    PARTS_HOME,
    REPLICAS_HOME,
    SHARED_HOME,
    block_names,
    memory_figures,
    topology,
    window,
)
from blockflow.bench.batching.peaks import Search, peak_figures, search_peaks
from blockflow.bench.batching.plan import HEADS, PER_TASK, SHARED, SHARED_BOUND_ROWS, Plan
from blockflow.bench.batching.rig import Further, Rig
from blockflow.bench.batching.sharing import Counts, batch_line, counts
from blockflow.bench.batching.traffic import Cell, inputs_for, poisson, saturate
from blockflow.bench.in_process import Chain, InProcess, side_by_side
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.simulation.arrivals import Mix
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.statistics import Interval, median_interval, percentile, ratio_interval

BATCHED, REPLICAS, PER_CORE = "batched", "a replica per core", "a worker per core"
WITHIN = "batched within tasks"
UNBATCHED, FULL_MODELS = "none", "full models"
IN_PROCESS, IN_PROCESS_WITHIN = "in process", f"in process, {PER_TASK} rows"
HOMES = {
    BATCHED: SHARED_HOME,
    REPLICAS: REPLICAS_HOME,
    PER_CORE: PARTS_HOME,
    UNBATCHED: SHARED_HOME,
    WITHIN: OWN_HOME,
    FULL_MODELS: FULL_HOME,
}
"""Who lives where: two of the arms are the same processes."""
ARMS = {SHARED: tuple(HOMES), HEADS: (BATCHED, FULL_MODELS)}
OF_BOUND_GOAL = 0.9
_VISITS = 2
_START = 0.8
"""Of the saturated throughput: where the search for a peak begins."""
_ABOVE = 1.05
"""Nobody is faster than computing alone. Who seems to be by more than this was not laid beside a
bound, but beside processes that something else held up."""
_ALONE = 9


def measure(plan: Plan, rig: Rig, experiment: str) -> list[Figure]:
    """Saturated throughput beside the bound, peaks within a latency bound, memory.

    Args:
        plan, rig: how much, and where.
        experiment: whose arms: ``shared``, or ``heads`` with the plan's late parting.
    """
    if experiment == HEADS:
        plan = plan.parted_late()
    homes = {HOMES[arm] for arm in ARMS[experiment]}
    together = topology(plan, window(plan), homes)
    topologies = dict.fromkeys(ARMS[experiment], together)
    if UNBATCHED in topologies:
        topologies[UNBATCHED] = topology(plan, {"policy": "none"}, homes)
    with rig.step(f"{experiment}: starting"):
        rig.apply(topologies[BATCHED])
    with ExitStack() as stack:
        bound = Bound(plan, rig, stack)
        found, rates = _saturated(plan, rig, experiment, topologies, bound)
        alone_ms = bound.alone_ms()
    found += memory_figures(
        plan, rig, experiment, dict.fromkeys(HOMES[arm] for arm in ARMS[experiment])
    )
    bound_ms = SHARED_BOUND_ROWS * alone_ms
    searches = {
        arm: Search(min(_START * median_interval(rates[arm]).value, plan.rate_limit), plan.probes)
        for arm in topologies
        if arm not in (REPLICAS, PER_CORE)
    }
    seconds, inputs = plan.probe_seconds(bound_ms), _inputs(plan)

    def probe(arm: str, rate: float, seed: int) -> Cell:
        queries = poisson(_mix(plan, arm), rate, seconds, seed)
        return rig.probe(queries, inputs, bound_ms)

    search_peaks(rig, f"{experiment}: peaks", topologies, searches, probe, bound_ms)
    bases = [arm for arm in (FULL_MODELS, WITHIN) if arm in searches]
    found += peak_figures(experiment, searches, bound_ms, bases, {BATCHED: 1.0})
    mine = searches[BATCHED]
    share = mine.beside(median_interval(rates[IN_PROCESS]))
    last = _of_bound(PEAK_OF_BOUND, experiment, BATCHED, share, _most(rates), sure=mine.sure)
    return [*found, last]


class Bound:
    """Processes that compute only, one per core: what a perfect system could reach."""

    def __init__(self, plan: Plan, rig: Rig, stack: ExitStack) -> None:
        *trunk, head = plan.trunk.blocks
        self.width = len(os.sched_getaffinity(0))

        def start(blocks: Sequence[str]) -> list[InProcess]:
            chain = Chain(rig.folder, tuple(blocks), ENGINE, PRECISION)
            return [stack.enter_context(InProcess(chain)) for _ in range(self.width)]

        self._together = plan.together
        self._seconds = plan.seconds / 2
        with rig.step("shared: starting the bound"):
            self._trunks, self._heads = start(trunk), start([head])

    def rate(self, tasks: int | None = None) -> float:
        """Requests per second with ``PER_TASK`` of each task in a batch of its head, and of so many
        tasks (the plan's by default) in one of the trunk.

        Each half is timed on all cores at once; a request needs both, one after the other.
        """
        trunk = side_by_side(self._trunks, PER_TASK * (tasks or self._together), self._seconds)
        head = side_by_side(self._heads, PER_TASK, self._seconds)
        return 1 / (1 / trunk + 1 / head)

    def alone_ms(self) -> float:
        """One request by itself: the median of some, after a first one that lays out its tensors.
        All peaks are held to multiples of it."""
        trunk, head = self._trunks[0], self._heads[0]
        times = [sum(trunk.run(1)) + sum(head.run(1)) for _ in range(1 + _ALONE)]
        return percentile(times[1:], 50)


def _saturated(
    plan: Plan,
    rig: Rig,
    experiment: str,
    topologies: Mapping[str, Mapping[str, Any]],
    bound: Bound,
) -> tuple[list[Figure], dict[str, list[float]]]:
    """Rates of all ways, in turns, with as many requests under way all the time as the bound has.

    Each of its processes has ``PER_TASK`` of every task: with fewer, smaller batches are compared.
    """
    under_way = PER_TASK * plan.tasks * bound.width
    drawn = {arm: poisson(_mix(plan, arm), 1.0, 1.0, 0, 8 * plan.tasks) for arm in topologies}
    inputs = _inputs(plan)
    names = {arm: block_names(plan, HOMES[arm]) for arm in topologies}

    def visit(arm: str, _turn: int) -> Visit:
        if arm == IN_PROCESS:
            return Visit(bound.rate())
        if arm == IN_PROCESS_WITHIN:
            return Visit(bound.rate(1))
        before = counts(rig.system.status(), names[arm])
        rate = saturate(rig.client, drawn[arm], inputs, under_way, plan.seconds)
        return Visit(rate, before, counts(rig.system.status(), names[arm]))

    for arm, one in topologies.items():  # of warm-up
        rig.apply(one)
        saturate(rig.client, drawn[arm], inputs, under_way, plan.seconds / 8)
    # The bound needs no topology of its own: any will do.
    computing = dict.fromkeys((IN_PROCESS, IN_PROCESS_WITHIN), topologies[BATCHED])
    arms = {**topologies, **computing}
    # Rates of single visits lie far apart here: so many more of them.
    rounds = _VISITS * plan.repeats
    further = Further.of(plan, rounds, lambda found: decided(shares(experiment, _rates(found))))
    visits = rig.take_turns(f"{experiment}: saturated", arms, rounds, visit, further)
    rates = _rates(visits)
    out: list[Figure] = []
    for arm, values in rates.items():
        home = {"experiment": experiment, "home": HOMES.get(arm, "")}
        out.append(interval_figure(SATURATED, arm, 1, values, "1/s", home))
    of_bound = shares(experiment, rates)
    out += of_bound
    most = _most(rates)
    if any(g.name == OF_BOUND and g.low is not None and g.low > most for g in of_bound):
        why = "nothing is faster than the bound: something else held its processes up"
        out.append(note(experiment, f"{why}, and no share of it says anything"))
    for arm in topologies:
        text = batch_line(arm, [(v.before, v.after) for v in visits[arm]])
        if text:
            own = f"the bound computes {plan.trunk_rows} and, in each head, {PER_TASK}"
            out.append(note(experiment, f"{text}; {own}"))
    return out, rates


@dataclass(frozen=True, slots=True)
class Visit:
    """A saturated one: requests per second, and what the blocks had counted before and after."""

    rate: float
    before: Counts = field(default_factory=dict)
    after: Counts = field(default_factory=dict)


def _rates(visits: Mapping[str, Sequence[Visit]]) -> dict[str, list[float]]:
    return {arm: [v.rate for v in those] for arm, those in visits.items()}


def shares(experiment: str, rates: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Of the bound, for every arm; and what batches over the tasks are worth beside batches within
    them."""
    most = _most(rates)
    out = [
        _of_bound(OF_BOUND, experiment, arm, ratio_interval(rates[IN_PROCESS], values), most)
        for arm, values in rates.items()
        if arm != IN_PROCESS
    ]
    for base in (WITHIN, FULL_MODELS):
        if base in rates:
            gain = ratio_interval(rates[base], rates[BATCHED])
            labels = {"experiment": experiment}
            out.append(ratio_figure(SATURATED_RATIO, BATCHED, base, gain, labels))
    return out


def _most(rates: Mapping[str, Sequence[float]]) -> float:
    """The largest share of the bound that is credible: of who computes alone, and a little more."""
    bound = median_interval(rates[IN_PROCESS]).value
    within = rates.get(IN_PROCESS_WITHIN)
    return _ABOVE * max(1.0, median_interval(within).value / bound if within else 1.0)


def _of_bound(
    name: str, experiment: str, arm: str, share: Interval, most: float, *, sure: bool = True
) -> Figure:
    """A share of the bound, judged where there is an aim and the share is credible."""
    return ratio_figure(
        name,
        arm,
        IN_PROCESS,
        share,
        {"experiment": experiment},
        goal=OF_BOUND_GOAL if arm == BATCHED else None,
        at_least=True,
        sure=sure and share.low <= most,
    )


def _mix(plan: Plan, arm: str) -> Mix:
    kind = KINDS[HOMES[arm]]
    return Mix([(f"{kind}{i}", 1.0) for i in range(plan.tasks)], parse_sizes("1", ""))


def _inputs(plan: Plan) -> Any:
    return inputs_for(plan.trunk.input, 2)

"""The shared trunk: several tasks whose blocks but the last are the same, deployed in three ways.

``batched``: the path is cut into as many workers as there are cores to compute, all heads in the
last one; what waits at a block runs together, whatever its task. ``unbatched``: the same, each
request by itself. ``full models``: each task has a worker with a whole model of its own, and
batches there. The bound is computing alone: in as many processes as there are cores, the trunk over
what all tasks have under way, then each head over its task's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from blockflow.bench.batching.blocks import ENGINE, PRECISION
from blockflow.bench.batching.figures import (
    MEMORY,
    MEMORY_RATIO,
    OF_BOUND,
    PEAK_OF_BOUND,
    SATURATED,
    Search,
    note,
    ratio_figure,
)
from blockflow.bench.batching.ladder import peak_figures, within
from blockflow.bench.batching.plan import PER_TASK, SHARED, SHARED_BOUND_ROWS, Plan
from blockflow.bench.batching.rig import Policy, Rig, block_spec
from blockflow.bench.batching.sharing import Counts, batch_line, counts, weight_lines
from blockflow.bench.batching.traffic import inputs_for, poisson, saturate
from blockflow.bench.demo.measure import measure_memory
from blockflow.bench.in_process import Chain, InProcess
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.simulation.arrivals import Mix
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.statistics import Interval, median_interval, ratio_interval
from blockflow.core import limits
from blockflow.repository.repository import BlockRepository

BATCHED, UNBATCHED, FULL_MODELS = "batched", "unbatched", "full models"
IN_PROCESS = "in process"
SHARED_HOME, FULL_HOME = "shared trunk", "full models"
"""Who lives where: the first two arms are the same processes."""

OF_BOUND_GOAL, MEMORY_GOAL = 0.9, 0.25
_VISITS = 2
_HEADS = "heads"


def hosts(plan: Plan) -> dict[str, str]:
    """Block of the path -> its worker: neighbours together, no more workers than cores.

    More of them would begin batches while others compute: of fewer rows, and each slower.
    """
    path = plan.trunk.blocks
    parts = min(len(os.sched_getaffinity(0)), len(path))
    return {block: f"part{1 + i * parts // len(path)}" for i, block in enumerate(path)}


def topology(plan: Plan, policy: Policy) -> dict[str, Any]:
    """Both deployments side by side; ``policy`` is that of the shared blocks.

    Idle workers cost no time, and so nothing has to be started anew between the visits.
    """
    *trunk, head = plan.trunk.blocks
    host = hosts(plan)
    blocks = [block_spec(name, host[name], policy) for name in trunk]
    tasks: dict[str, Any] = {}
    for i in range(plan.tasks):
        name, own = f"{head}.{i}", f"{plan.whole.name}.{i}"
        blocks.append(block_spec(name, host[head], policy, head))
        blocks.append(block_spec(own, own, window(plan), plan.whole.blocks[0]))
        tasks[f"shared{i}"] = {"path": [*trunk, name], "deadline_ms": limits.MAX_DEADLINE_MS}
        tasks[f"full{i}"] = {"path": [own], "deadline_ms": limits.MAX_DEADLINE_MS}
    return {"blocks": blocks, "tasks": tasks, "limits": {"max_rows": PER_TASK * plan.tasks}}


def window(plan: Plan) -> dict[str, Any]:
    return {"policy": "window", "max_rows": PER_TASK * plan.tasks}


def measure(plan: Plan, rig: Rig) -> list[Figure]:
    """Saturated throughput beside the bound, peaks within a latency bound, memory."""
    arms = {BATCHED: window(plan), UNBATCHED: {"policy": "none"}, FULL_MODELS: window(plan)}
    topologies = {arm: topology(plan, policy) for arm, policy in arms.items()}
    with rig.step("shared: starting"):
        rig.apply(topologies[BATCHED])
    with ExitStack() as stack:
        bound = _Bound(plan, rig, stack)
        found, rates = _saturated(plan, rig, topologies, bound)
        alone_ms = bound.alone_ms()
    found += _memory(plan, rig)
    bound_ms = SHARED_BOUND_ROWS * alone_ms
    starts = {arm: min(0.8 * max(rates[arm]), plan.rate_limit) for arm in arms}
    searches = {arm: Search(start) for arm, start in starts.items()}

    def probe(arm: str, turn: int) -> None:
        rate = searches[arm].rate
        queries = poisson(_mix(plan, arm), rate, plan.probe_seconds, 100 + turn)
        cell = rig.visit(queries, _inputs(plan), bound_ms)
        searches[arm].tell(within(cell, bound_ms))

    rig.take_turns("shared: peaks", topologies, plan.probes, probe)
    found += peak_figures(SHARED, searches, bound_ms, FULL_MODELS)
    peak = searches[BATCHED].found
    if peak is not None:
        middle = median_interval(rates[IN_PROCESS])
        share = Interval(
            peak.value / middle.value, peak.low / middle.high, peak.high / middle.low, 1
        )
        labels = {"experiment": SHARED}
        found.append(
            ratio_figure(
                PEAK_OF_BOUND,
                BATCHED,
                IN_PROCESS,
                share,
                labels,
                goal=OF_BOUND_GOAL,
                at_least=True,
            )
        )
    return found


class _Bound:
    """Processes that compute only, one per core: what a perfect system could reach."""

    def __init__(self, plan: Plan, rig: Rig, stack: ExitStack) -> None:
        *trunk, head = plan.trunk.blocks
        self.width = len(os.sched_getaffinity(0))

        def start(blocks: Sequence[str]) -> list[InProcess]:
            chain = Chain(rig.folder, tuple(blocks), ENGINE, PRECISION)
            return [stack.enter_context(InProcess(chain)) for _ in range(self.width)]

        self._tasks = plan.tasks
        self._seconds = plan.seconds / 2
        with rig.step("shared: starting the bound"):
            self._trunks, self._heads = start(trunk), start([head])

    def rate(self) -> float:
        """Requests per second with ``PER_TASK`` of each task in a batch.

        Each half is timed on all cores at once; a request needs both, one after the other.
        """
        trunk = self._side_by_side(self._trunks, PER_TASK * self._tasks)
        head = self._side_by_side(self._heads, PER_TASK)
        return 1 / (1 / trunk + 1 / head)

    def alone_ms(self) -> float:
        """One request by itself."""
        return sum(self._trunks[0].run(1)) + sum(self._heads[0].run(1))

    def _side_by_side(self, others: Sequence[InProcess], rows: int) -> float:
        for other in others:
            other.start_running(rows, self._seconds)
        return sum(other.rate() for other in others)


def _saturated(
    plan: Plan, rig: Rig, topologies: Mapping[str, Mapping[str, Any]], bound: _Bound
) -> tuple[list[Figure], dict[str, list[float]]]:
    """Rates of all ways, in turns, with as many requests under way all the time as the bound has.

    Each of its processes has ``PER_TASK`` of every task: with fewer, smaller batches are compared.
    """
    under_way = PER_TASK * plan.tasks * bound.width
    drawn = {arm: poisson(_mix(plan, arm), 1.0, 1.0, 0, 8 * plan.tasks) for arm in topologies}
    inputs = _inputs(plan)
    *trunk, head = plan.trunk.blocks
    names = {b: b for b in trunk} | {f"{head}.{i}": _HEADS for i in range(plan.tasks)}
    seen: dict[str, list[tuple[Counts, Counts]]] = {BATCHED: [], UNBATCHED: []}

    def visit(arm: str, _turn: int) -> float:
        if arm == IN_PROCESS:
            return bound.rate()
        before = counts(rig.system.status(), names)
        rate = saturate(rig.client, drawn[arm], inputs, under_way, plan.seconds)
        if arm in seen:
            seen[arm].append((before, counts(rig.system.status(), names)))
        return rate

    for arm, one in topologies.items():  # of warm-up
        rig.apply(one)
        saturate(rig.client, drawn[arm], inputs, under_way, plan.seconds / 8)
    # The bound needs no topology of its own: any will do.
    arms = {**topologies, IN_PROCESS: topologies[BATCHED]}
    # Rates of single visits lie far apart here: so many more of them.
    rates = rig.take_turns("shared: saturated", arms, _VISITS * plan.repeats, visit)
    labels = {"experiment": SHARED}
    homes = {BATCHED: SHARED_HOME, UNBATCHED: SHARED_HOME, FULL_MODELS: FULL_HOME}
    out: list[Figure] = []
    for arm, values in rates.items():
        home = {**labels, "home": homes.get(arm, "")}
        out.append(interval_figure(SATURATED, arm, 1, median_interval(values), "1/s", home))
        if arm != IN_PROCESS:
            share = ratio_interval(rates[IN_PROCESS], values)
            goal = OF_BOUND_GOAL if arm == BATCHED else None
            out.append(
                ratio_figure(OF_BOUND, arm, IN_PROCESS, share, labels, goal=goal, at_least=True)
            )
    for arm, pairs in seen.items():
        text = batch_line(arm, pairs)
        if text:
            own = f"the bound computes {PER_TASK * plan.tasks} and, in each head, {PER_TASK}"
            out.append(note(SHARED, f"{text}; {own}"))
    return out, rates


def _memory(plan: Plan, rig: Rig) -> list[Figure]:
    """Of the worker processes of both deployments, after they have worked."""
    *trunk, head = plan.trunk.blocks
    whole = plan.whole.blocks[0]
    repository = BlockRepository(rig.folder)
    inhabitants = {
        SHARED_HOME: (set(hosts(plan).values()), [*trunk, *(head for _ in range(plan.tasks))]),
        FULL_HOME: (
            {f"{plan.whole.name}.{i}" for i in range(plan.tasks)},
            [whole for _ in range(plan.tasks)],
        ),
    }
    workers = rig.system.status()["workers"]
    out: list[Figure] = []
    pss: dict[str, float] = {}
    weights: dict[str, float] = {}
    for home, (names, stored) in inhabitants.items():
        pids = [w["pid"] for w in workers if w["worker"] in names and w["pid"] is not None]
        state = sum(repository.info(b).state_bytes for b in stored)
        found = measure_memory(pids, state)
        sizes = {"weights": found.state, "uss": found.uss, "pss": found.pss}
        for kind, size in sizes.items():
            labels = {"experiment": SHARED, "kind": kind}
            mib = size / 2**20
            out.append(Figure(MEMORY, home, None, None, None, mib, "MiB", len(pids), labels=labels))
        pss[home], weights[home] = float(found.pss), float(found.state)
    value = pss[SHARED_HOME] / pss[FULL_HOME]
    ratio = Interval(value, value, value, 1)
    labels = {"experiment": SHARED}
    out.append(ratio_figure(MEMORY_RATIO, SHARED_HOME, FULL_HOME, ratio, labels, goal=MEMORY_GOAL))
    floor = weights[SHARED_HOME] / weights[FULL_HOME]
    text = (
        f"each task's own last block alone is {repository.info(head).state_bytes / 2**20:.0f} of "
        f"the model's {repository.info(whole).state_bytes / 2**20:.0f} MiB of weights, so the "
        f"weights of the shared deployment are {floor:.2f} of the full models'"
    )
    return [*out, *(note(SHARED, line) for line in (text, *weight_lines(plan)))]


def _mix(plan: Plan, arm: str) -> Mix:
    kind = "full" if arm == FULL_MODELS else "shared"
    return Mix([(f"{kind}{i}", 1.0) for i in range(plan.tasks)], parse_sizes("1", ""))


def _inputs(plan: Plan) -> Any:
    return inputs_for(plan.trunk.input, 2)

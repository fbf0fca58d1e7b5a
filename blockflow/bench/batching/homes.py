"""Homes: the deployments of tasks on a shared trunk that the benchmark lays beside each other.

``shared trunk``: one worker with all blocks and as many lanes as there are cores; what waits at a
block runs together, whatever its task, and a core takes whatever block has work. ``a replica per
core``: the same worker with one lane, once per core; a batch runs on its core to the end.
``a worker per core``: the path is cut into as many workers as there are cores, all heads in the
last one. ``a trunk per task``: one worker with as many lanes again, in which each task has a copy
of the trunk's blocks. ``full models``: each task has a worker with a whole model of its own.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from blockflow.bench.batching.figures import MEMORY, MEMORY_RATIO, note, ratio_figure
from blockflow.bench.batching.plan import PER_TASK, Plan
from blockflow.bench.batching.rig import Policy, Rig, block_spec
from blockflow.bench.batching.sharing import weight_lines
from blockflow.bench.demo.measure import measure_memory
from blockflow.bench.results import Figure
from blockflow.bench.statistics import Interval
from blockflow.core import limits
from blockflow.repository.repository import BlockRepository

SHARED_HOME, PARTS_HOME = "shared trunk", "shared trunk, a worker per core"
REPLICAS_HOME = "shared trunk, a replica per core"
OWN_HOME, FULL_HOME = "a trunk per task", "full models"
KINDS = {
    SHARED_HOME: "shared",
    REPLICAS_HOME: "replicas",
    PARTS_HOME: "parts",
    OWN_HOME: "own",
    FULL_HOME: "full",
}
"""What the tasks of a home are called."""

MEMORY_GOAL = 0.25
_OWN = "heads"


def parts(plan: Plan) -> dict[str, str]:
    """Block of the path -> its worker where there is one per core: neighbours together.

    More of them would begin batches while others compute: of fewer rows, and each slower.
    """
    path = plan.trunk.blocks
    count = min(len(os.sched_getaffinity(0)), len(path))
    return {block: f"part{1 + i * count // len(path)}" for i, block in enumerate(path)}


def topology(plan: Plan, policy: Policy, homes: Collection[str]) -> dict[str, Any]:
    """These deployments side by side; ``policy`` is that of the shared blocks.

    Idle workers cost no time, and so nothing has to be started anew between the visits. A copy of
    a block under another name is another stage, with a queue of its own.
    """
    *trunk, head = plan.trunk.blocks
    part = parts(plan)
    cores = len(os.sched_getaffinity(0))
    lanes = min(cores, len(trunk) + plan.tasks, limits.MAX_LANES)
    blocks: dict[str, dict[str, Any]] = {}
    tasks: dict[str, Any] = {}

    def path(home: str, i: int, names: Mapping[str, str]) -> None:
        """Task ``i`` of a home visits these blocks: name -> block, in order."""
        if home not in homes:
            return
        tasks[f"{KINDS[home]}{i}"] = {"path": list(names), "deadline_ms": limits.MAX_DEADLINE_MS}
        for name, block in names.items():
            if home == PARTS_HOME:
                blocks[name] = block_spec(name, part[block], policy, block)
            elif home == FULL_HOME:
                blocks[name] = block_spec(name, name, window(plan), block)
            elif home == REPLICAS_HOME:
                own = parted(plan, policy, cores)
                blocks[name] = {**block_spec(name, KINDS[home], own, block), "replicas": cores}
            else:
                own = parted(plan, policy, lanes) if home == SHARED_HOME else window(plan)
                spec = block_spec(name, KINDS[home], own, block)
                blocks[name] = {**spec, "lanes": lanes}

    for i in range(plan.tasks):
        path(SHARED_HOME, i, {**{b: b for b in trunk}, f"{head}.{i}": head})
        path(REPLICAS_HOME, i, {**{f"{b}.rep": b for b in trunk}, f"{head}.rep{i}": head})
        path(PARTS_HOME, i, {**{f"{b}.part": b for b in trunk}, f"{head}.part{i}": head})
        path(OWN_HOME, i, {own_block(block, i): block for block in plan.trunk.blocks})
        path(FULL_HOME, i, {f"{plan.whole.name}.{i}": plan.whole.blocks[0]})
    return {
        "blocks": list(blocks.values()),
        "tasks": tasks,
        "limits": {"max_rows": plan.trunk_rows},
        "oversubscribe": True,  # by deployments that rest while another one works
    }


def own_block(block: str, task: int) -> str:
    """A task's copy of a block of the path."""
    return f"{block}.own{task}"


def parted(plan: Plan, policy: Policy, count: int) -> dict[str, Any]:
    """The same for so many batches of a block at once. Where the plan says so they have the rows of
    one of these together, and so the memory of its activations."""
    rows = policy.get("max_rows") if plan.rows_in_all_lanes else None
    more = {} if rows is None else {"max_rows": max(PER_TASK, rows // count)}
    return {**policy, **more}


def window(plan: Plan) -> dict[str, Any]:
    return {"policy": "window", "max_rows": plan.trunk_rows}


def block_names(plan: Plan, home: str) -> dict[str, str]:
    """What the blocks of a home are called in the counts: heads alike, copies as their original.

    Counts come with the workers' heartbeats, a little late: those of another home stay out.
    """
    *trunk, head = plan.trunk.blocks
    found: dict[str, str] = {}
    for i in range(plan.tasks):
        if home == SHARED_HOME:
            found |= {**{block: block for block in trunk}, f"{head}.{i}": _OWN}
        elif home == REPLICAS_HOME:
            found |= {**{f"{b}.rep": b for b in trunk}, f"{head}.rep{i}": _OWN}
        elif home == PARTS_HOME:
            found |= {**{f"{b}.part": b for b in trunk}, f"{head}.part{i}": _OWN}
        elif home == OWN_HOME:
            found |= {own_block(block, i): block for block in trunk}
            found[own_block(head, i)] = _OWN
    return found


def memory_figures(plan: Plan, rig: Rig, experiment: str, homes: Collection[str]) -> list[Figure]:
    """Of the worker processes of all deployments, after they have worked."""
    *trunk, head = plan.trunk.blocks
    whole = plan.whole.blocks[0]
    repository = BlockRepository(rig.folder)
    shared = [*trunk, *(head for _ in range(plan.tasks))]
    inhabitants = {
        SHARED_HOME: ({KINDS[SHARED_HOME]}, shared),
        REPLICAS_HOME: ({KINDS[REPLICAS_HOME]}, shared),
        PARTS_HOME: (set(parts(plan).values()), shared),
        OWN_HOME: ({KINDS[OWN_HOME]}, list(plan.trunk.blocks) * plan.tasks),
        FULL_HOME: (
            {f"{plan.whole.name}.{i}" for i in range(plan.tasks)},
            [whole for _ in range(plan.tasks)],
        ),
    }
    workers = rig.system.status()["workers"]
    out: list[Figure] = []
    pss: dict[str, float] = {}
    weights: dict[str, float] = {}
    for home in homes:
        names, stored = inhabitants[home]
        pids = [w["pid"] for w in workers if w["worker"] in names and w["pid"] is not None]
        state = sum(repository.info(b).state_bytes for b in stored)
        found = measure_memory(pids, state)
        sizes = {"weights": found.state, "uss": found.uss, "pss": found.pss}
        for kind, size in sizes.items():
            labels = {"experiment": experiment, "kind": kind}
            mib = size / 2**20
            out.append(Figure.of(MEMORY, home, mib, "MiB", len(pids), labels))
        pss[home], weights[home] = float(found.pss), float(found.state)
    labels = {"experiment": experiment}
    value = pss[SHARED_HOME] / pss[FULL_HOME]
    ratio = Interval(value, value, value, 1)
    out.append(ratio_figure(MEMORY_RATIO, SHARED_HOME, FULL_HOME, ratio, labels, goal=MEMORY_GOAL))
    floor = weights[SHARED_HOME] / weights[FULL_HOME]
    text = (
        f"each task's own last block alone is {repository.info(head).state_bytes / 2**20:.0f} of "
        f"the model's {repository.info(whole).state_bytes / 2**20:.0f} MiB of weights, so the "
        f"weights of the shared deployment are {floor:.2f} of the full models'"
    )
    return [*out, *(note(experiment, line) for line in (text, *weight_lines(plan)))]

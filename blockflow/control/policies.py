"""Policy checks of a system update: can the batching that it asks for work with these blocks?

The options alone are checked when the topology is parsed. Here they meet the blocks: what has been
measured of them, and how large their batches may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockflow.batching.facts import StageFacts
from blockflow.batching.registry import policy_problems
from blockflow.control.profiles import ProfileShelf
from blockflow.core.errors import Problem
from blockflow.core.launchspec import StageSpec
from blockflow.core.placement import StagePlan, desired_workers, plan_workers
from blockflow.core.topology import Topology


def policy_misfits(topology: Topology, cores: Sequence[int], shelf: ProfileShelf) -> list[Problem]:
    """What keeps a valid policy from working, with JSON paths.

    Blocks of one worker that have the same policy are scheduled together, so they are judged
    together.
    """
    workers = desired_workers(topology, cores)
    places = {name: i for i, name in enumerate(topology.blocks)}
    problems: list[Problem] = []
    for worker, threads in zip(workers, plan_workers(workers).threads, strict=True):
        groups: list[tuple[Mapping[str, Any], list[StagePlan]]] = []
        for stage in worker.stages:
            policy = stage.spec.batching.model_dump(mode="json")
            for known, members in groups:
                if known == policy:
                    members.append(stage)
                    break
            else:
                groups.append((policy, [stage]))
        for shared, members in groups:
            facts = [StageFacts.of(_stage_spec(s, shelf, worker.device), threads) for s in members]
            path = f"$.blocks[{places[members[0].spec.name]}].batching"
            problems += policy_problems(shared, path, facts)
    return problems


def _stage_spec(stage: StagePlan, shelf: ProfileShelf, device: str) -> StageSpec:
    spec = StageSpec(
        1,
        stage.info,
        stage.spec.engine,
        stage.spec.precision,
        options=stage.spec.options,
        max_rows=stage.max_rows,
    )
    return StageSpec.from_dict(shelf.with_profile(spec.to_dict(), device))

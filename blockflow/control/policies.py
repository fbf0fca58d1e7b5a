"""Policy checks of a system update: can the batching that it asks for work with these blocks?

The options alone are checked when the topology is parsed. Here they meet the blocks: what has been
measured of them, and how large their batches may be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockflow.batching.costs import measured
from blockflow.batching.facts import StageFacts
from blockflow.batching.options import stages_text
from blockflow.batching.queueing import missing_profiles
from blockflow.batching.registry import alike, policy_problems, with_overlap
from blockflow.batching.sliced import slicing_problems
from blockflow.batching.ways import Ways
from blockflow.control.profiles import ProfileShelf
from blockflow.control.stages import is_open, resolved
from blockflow.core.errors import Problem
from blockflow.core.launchspec import StageSpec
from blockflow.core.placement import StagePlan, desired_workers, plan_workers
from blockflow.core.specs import PolicySpec
from blockflow.core.topology import Topology


@dataclass(frozen=True, slots=True)
class _Group:
    """Blocks of one worker with the same policy, in its order; ``path`` is where that stands."""

    worker: str
    policy: Mapping[str, Any]
    blocks: list[str]
    facts: list[StageFacts]
    path: str


def policy_misfits(topology: Topology, cores: Sequence[int], shelf: ProfileShelf) -> list[Problem]:
    """What keeps a valid policy from working, with JSON paths. Raises as :func:`with_fitting`."""
    groups = _groups(topology, cores, shelf)
    ways = _ways(topology)
    return [p for group in groups for p in _misfits(group, ways)]


def _ways(topology: Topology) -> Ways:
    return Ways({name: task.paths for name, task in topology.tasks.items()})


def _misfits(group: _Group, ways: Ways) -> list[Problem]:
    found = policy_problems(group.policy, group.path, group.facts, ways.through(group.blocks))
    found += slicing_problems(group.policy, group.blocks, ways.meeting(group.blocks), group.path)
    if is_open(group.policy):
        found += missing_profiles(group.policy["policy"], group.facts, group.path)
    return list(dict.fromkeys(found))


def with_fitting(
    topology: Topology,
    cores: Sequence[int],
    shelf: ProfileShelf,
    working: Collection[str] = (),
) -> tuple[Topology, list[str]]:
    """A topology that was accepted once, and for people which of its policies cannot work any more
    (a profile may be of the torch before): their blocks run without one, rather than not at all.

    Args:
        topology: as it was stored.
        cores: of the system.
        shelf: what is measured now.
        working: blocks whose policies run already, by facts that they were told before; those stay.

    Raises:
        BlockFlowError: as :meth:`ProfileShelf.attach`: what cannot be read just now may work.
    """
    blocks = dict(topology.blocks)
    ways = _ways(topology)
    notes = []
    for group in _groups(topology, cores, shelf, working):
        found = _misfits(group, ways)
        if not found:
            continue
        for name in group.blocks:
            blocks[name] = blocks[name].model_copy(update={"batching": PolicySpec()})
        why = "; ".join(f"{p.message} -- {p.hint}" for p in found)
        names = ", ".join(group.blocks)
        notes.append(f"{names}: without a batching policy until it is applied again: {why}")
    return (with_overlap(replace(topology, blocks=blocks)) if notes else topology), notes


def with_stages(topology: Topology, cores: Sequence[int], shelf: ProfileShelf) -> Topology:
    """``topology`` with numbers for every slicing that was left to us, and a note of each.

    One that cannot be found stays open: :func:`policy_misfits` says why. Raises as
    :func:`with_fitting`.
    """
    if not any(is_open(b.batching.model_dump(mode="json")) for b in topology.blocks.values()):
        return topology
    ways = _ways(topology)
    blocks = dict(topology.blocks)
    notes = []
    for group in _groups(topology, cores, shelf):
        if not is_open(group.policy):
            continue
        if slicing_problems(group.policy, group.blocks, ways.meeting(group.blocks), group.path):
            continue
        policy = resolved(group.policy, group.facts)
        if is_open(policy):
            continue
        for name in group.blocks:
            chosen = PolicySpec.model_validate(policy)
            blocks[name] = blocks[name].model_copy(update={"batching": chosen})
        notes.append(f"worker {group.worker}: stages {stages_text(policy['stages'], group.blocks)}")
    return with_overlap(replace(topology, blocks=blocks, notes=(*topology.notes, *notes)))


def _groups(
    topology: Topology, cores: Sequence[int], shelf: ProfileShelf, but: Collection[str] = ()
) -> Iterator[_Group]:
    """All of them, without those of these blocks alone (``but``)."""
    workers = desired_workers(topology, cores)
    places = {name: i for i, name in enumerate(topology.blocks)}
    for worker, threads in zip(workers, plan_workers(workers, cores).threads, strict=True):
        for members, policy in alike(
            (s, s.spec.batching.model_dump(mode="json")) for s in worker.stages
        ):
            if {m.spec.name for m in members} <= set(but):
                continue
            yield _Group(
                worker.name,
                policy,
                [m.spec.name for m in members],
                [_facts(m, policy, shelf, worker.device, threads) for m in members],
                f"$.blocks[{places[members[0].spec.name]}].batching",
            )


def _facts(
    stage: StagePlan, policy: Mapping[str, Any], shelf: ProfileShelf, device: str, threads: int
) -> StageFacts:
    spec = StageSpec(
        1,
        stage.info,
        stage.spec.engine,
        stage.spec.precision,
        options=stage.spec.options,
        max_rows=stage.max_rows,
        policy=policy,
    )
    told = shelf.attached(spec.to_dict(), device, threads)
    facts = StageFacts.of(StageSpec.from_dict(told), threads)
    if measured(facts) or facts.subject is None:
        return facts
    return replace(facts, subject=replace(facts.subject, blocks=(shelf.reference(stage.info),)))

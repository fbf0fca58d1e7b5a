"""Placement: which workers a topology needs, with cores and memory spelled out.

A worker's spec depends on its own blocks alone, never on its neighbours, so that an update which
adds a worker leaves the others untouched. Threads are the exception: they are planned over all
workers, and running workers are told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.core import limits
from blockflow.core.cores import at_once
from blockflow.core.engines import pins
from blockflow.core.errors import Problem, TopologyError
from blockflow.core.fitting import LEAST_OUTPUTS, LEAST_SLOTS, MIB, core_problems
from blockflow.core.model import BlockInfo
from blockflow.core.ordering import along
from blockflow.core.specs import BlockSpec
from blockflow.core.threads import Demand, ThreadPlan, plan_threads
from blockflow.core.topology import Topology

MIN_ARENA_BYTES = 1 * MIB
SOFT_ARENA_BYTES = 256 * MIB
"""Default ceiling of an arena, unless the least outputs need more. Arenas commit memory only as it
is used, so this bounds a worker under load; it is not its cost when idle."""
_NAMED = 8
"""Workers that one text names: each of a thousand findings has it."""

_CHANGEABLE = frozenset(
    {
        *("batching", "replicas", "threads", "lanes", "worker", "replayable"),
        *("block", "version", "digest"),
        *("device", "cores", "mode", "max_rows", "slots", "arena_mib"),
    }
)
"""Fields of a block that a running process need not have been started with. Which artifact it has
loaded is said by the digest, whatever it was called; the last ones by what they come to, be it
named or the default."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One block in a worker, resolved."""

    spec: BlockSpec
    info: BlockInfo
    max_rows: int


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A desired worker: ``replicas`` processes of it shall run.

    ``name`` is the topology's worker name (the block's own name by default). ``threads`` and
    ``lanes`` are the numbers that were asked for, None where they are planned. ``cost_ms`` is the
    measured compute of one row on one thread through all its blocks, None where one of them is
    unknown; ``overlap`` is how many lanes its batching policies can use.
    """

    name: str
    stages: tuple[StagePlan, ...]
    device: str
    replicas: int
    threads: int | None
    cores: tuple[int, ...]
    mode: str
    transport: str
    arena_bytes: int
    slots: int
    cost_ms: float | None = None
    lanes: int | None = None
    overlap: int = 1

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(s.spec.name for s in self.stages)

    @property
    def full_slots(self) -> int:
        """Slots that it has for sure: with every one as large as its contracts allow, or as they
        are taken to allow where nothing bounds them, the arena may end before the slots do."""
        whole = self.arena_bytes // (_largest(self.stages) + limits.ARENA_ALIGN)
        return min(self.slots, max(1, (whole + 1) // limits.ARENA_GAPS))

    def identity(self) -> str:
        """Digest of all that cannot change in a running process.

        Replicas, threads, lanes and batching policies can, so they are left out; costs are not
        asked for.
        """
        facts: dict[str, Any] = {
            "name": self.name,
            "stages": [
                {
                    "spec": s.spec.model_dump(
                        mode="json",
                        exclude=set(_CHANGEABLE),
                    ),
                    "digest": s.info.digest,
                    "pins": pins(s.info, s.spec.engine),
                    "contract": s.info.contract.to_dict(),
                    "padding": s.info.padding and s.info.padding.to_dict(),
                    "max_rows": s.max_rows,
                }
                for s in self.stages
            ],
            "device": self.device,
            "cores": self.cores,
            "mode": self.mode,
            "transport": self.transport,
            "arena_bytes": self.arena_bytes,
            "slots": self.slots,
        }
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def policies(self) -> Mapping[str, dict[str, Any]]:
        """Batching policy per block."""
        return {s.spec.name: s.spec.batching.model_dump(mode="json") for s in self.stages}

    def demand(self, replicas: int | None = None) -> Demand:
        """What so many processes of it (default: all) ask of the cores."""
        count = self.replicas if replicas is None else replicas
        on_cpu = self.device == "cpu"
        return Demand(
            self.name,
            count,
            self.cores,
            self.threads,
            self.cost_ms,
            on_cpu,
            self.lanes,
            self.overlap,
        )


def plan_workers(specs: Sequence[WorkerSpec], cores: Sequence[int]) -> ThreadPlan:
    """The threads and lanes of these workers, in their order, on a machine with these ``cores``."""
    return plan_threads([s.demand() for s in specs], at_once(cores))


def oversubscription(specs: Sequence[WorkerSpec], plan: ThreadPlan, cores: Sequence[int]) -> str:
    """What is wrong with the threads that were asked for on a machine with these ``cores``, for
    people; "" when nothing is."""
    if not plan.oversubscribed:
        return ""
    each = zip(specs, plan.threads, plan.lanes, strict=True)
    total = sum(threads * lanes * s.replicas for s, threads, lanes in each)
    there, allowed = len({c for s in specs for c in s.cores}), at_once(cores)
    most = min(there, allowed)
    limit = f" (of {there}, the control group's limit)" if allowed < there else ""
    names = [s.name for s, n in zip(specs, plan.unplaced, strict=True) if n]
    if len(names) > _NAMED:
        names[_NAMED:] = [f"and {len(names) - _NAMED} more"]
    return (
        f"{total} threads may compute at once on {most} core{'s' if most > 1 else ''}{limit}; "
        f"asked for by {', '.join(names)}"
    )


def desired_workers(topology: Topology, cores: Sequence[int]) -> tuple[WorkerSpec, ...]:
    """The workers that ``topology`` asks for on a machine with these ``cores``.

    Raises:
        TopologyError: INVALID_TOPOLOGY when a block asks for cores that are not there, or for
            threads without a core each (the topology may say that this is meant).
    """
    problems: list[Problem] = []
    for index, spec in enumerate(topology.blocks.values()):
        problems += core_problems(spec, cores, f"$.blocks[{index}]")
    if not problems:
        index_of = {name: i for i, name in enumerate(topology.blocks)}
        problems += crowding_problems(topology, cores, index_of)
    if problems:
        raise TopologyError(
            "INVALID_TOPOLOGY",
            "the update does not fit this machine",
            problems=problems,
            hint="nothing was changed; mend all of them and send the update again",
        )
    return _workers(topology, cores)


def crowding_problems(
    topology: Topology, cores: Sequence[int], index: Mapping[Any, int]
) -> list[Problem]:
    """Threads that were asked for and have no core each, unless that is meant. Whoever lacks one
    here lacks it among more blocks as well, so a part of an update can be judged.

    Args:
        topology: an update, or a part of it.
        cores: that the system may use; every block's are among them.
        index: block -> where it stands in the update.
    """
    if topology.oversubscribe:
        return []
    workers = _workers(topology, cores)
    plan = plan_workers(workers, cores)
    all_together = oversubscription(workers, plan, cores)
    return [
        Problem(
            f"$.blocks[{index[spec.blocks[0]]}].{'threads' if spec.threads else 'lanes'}",
            f"{threads} threads x {spec.replicas}{f' x {lanes} lanes' if lanes > 1 else ''} of "
            f"{spec.name!r}: {all_together}",
            'give fewer, or "auto"; with "oversubscribe": true it is taken as it is',
        )
        for spec, missing, threads, lanes in zip(
            workers, plan.unplaced, plan.threads, plan.lanes, strict=True
        )
        if missing
    ]


def _workers(topology: Topology, cores: Sequence[int]) -> tuple[WorkerSpec, ...]:
    groups: dict[str, list[str]] = {}
    for name, spec in topology.blocks.items():
        groups.setdefault(spec.worker or name, []).append(name)
    # Batching policies take a worker's blocks for a chain or tree, from its beginning on.
    paths = [path for task in topology.tasks.values() for path in task.paths]
    return tuple(
        _worker(topology, name, along(paths, members), cores) for name, members in groups.items()
    )


def _worker(
    topology: Topology, name: str, members: Sequence[str], cores: Sequence[int]
) -> WorkerSpec:
    stages = tuple(
        StagePlan(topology.blocks[b], topology.infos[b], topology.rows_of(b)) for b in members
    )
    first = stages[0].spec
    largest = _largest(stages)
    bounded = all(s.info.contract.output.bounded for s in stages)
    slots = max(LEAST_SLOTS, sum(s.spec.slots for s in stages))
    asked = [s.spec.arena_mib for s in stages if s.spec.arena_mib is not None]
    if asked:
        arena = max(asked) * MIB
    else:
        # Memory of the host is taken as it is needed; a device's slab is taken whole.
        whole = slots if first.device != "cpu" else limits.ARENA_GAPS * slots - 1
        wanted = whole * largest if bounded else SOFT_ARENA_BYTES
        arena = max(MIN_ARENA_BYTES, LEAST_OUTPUTS * largest, min(wanted, SOFT_ARENA_BYTES))
    costs = [topology.costs[b] for b in members if b in topology.costs]
    # Slots are rounded up: leave room for it.
    unit = limits.ARENA_ALIGN
    arena = -(-arena // unit) * unit + limits.ARENA_GAPS * slots * unit
    return WorkerSpec(
        name=name,
        stages=stages,
        device=first.device,
        replicas=first.replicas,
        threads=first.asked_threads,
        cores=tuple(sorted(set(first.cores or cores))),
        mode=topology.mode_of(first.name),
        transport=topology.transport,
        arena_bytes=arena,
        slots=slots,
        cost_ms=sum(costs) if len(costs) == len(members) else None,
        lanes=first.asked_lanes,
        overlap=_overlap(topology, members) if first.device == "cpu" else 1,
    )


def _largest(stages: Sequence[StagePlan]) -> int:
    """Bytes of the largest output; a range may allow for larger ones, which have no slot."""
    most = max(s.info.contract.output.row_bytes() * s.max_rows for s in stages)
    return min(most, limits.MAX_MESSAGE_BYTES)


def _overlap(topology: Topology, members: Sequence[str]) -> int:
    """How many forwards the policies of one worker can have under way at once: as many as one of
    them wants, and no more than there are blocks for them."""
    wanted = [n for b in members if (n := topology.overlap.get(b, 1)) > 1]
    return min(max(wanted, default=1), max(1, len(wanted)))

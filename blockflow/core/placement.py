"""Placement: which workers a topology needs, with threads, cores and memory spelled out.

A worker's spec depends on its own blocks alone, never on its neighbours, so that an update which
adds
a worker leaves the others untouched. (Packrat's tuning will choose threads and replicas; here they
are what the topology says.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.core.errors import Problem, TopologyError
from blockflow.core.model import BlockInfo
from blockflow.core.topology import BlockSpec, Topology

MIB = 1024 * 1024
MIN_ARENA_BYTES = 1 * MIB
SOFT_ARENA_BYTES = 256 * MIB
"""Default ceiling of an arena, unless two full batches need more. Arenas commit memory only as it
is
used, so this bounds a worker under load; it is not its cost when idle."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One block in a worker, resolved."""

    spec: BlockSpec
    info: BlockInfo
    max_rows: int


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A desired worker: ``replicas`` processes of it shall run.

    ``name`` is the topology's worker name (the block's own name by default).
    """

    name: str
    stages: tuple[StagePlan, ...]
    device: str
    replicas: int
    threads: int
    cores: tuple[int, ...]
    mode: str
    transport: str
    arena_bytes: int
    slots: int

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(s.spec.name for s in self.stages)

    def identity(self) -> str:
        """Digest of all that cannot change in a running process.

        The number of replicas and the batching policy can, so they are left out.
        """
        facts: dict[str, Any] = {
            "name": self.name,
            "stages": [
                {
                    "spec": s.spec.model_dump(
                        mode="json", exclude={"batching", "replicas", "worker"}
                    ),
                    "digest": s.info.digest,
                    "contract": s.info.contract.to_dict(),
                    "max_rows": s.max_rows,
                }
                for s in self.stages
            ],
            "device": self.device,
            "threads": self.threads,
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


def desired_workers(topology: Topology, cores: Sequence[int]) -> tuple[WorkerSpec, ...]:
    """The workers that ``topology`` asks for on a machine with these ``cores``.

    Raises:
        TopologyError: INVALID_TOPOLOGY when a block asks for cores or threads that are not there.
    """
    problems: list[Problem] = []
    groups: dict[str, list[str]] = {}
    for index, (name, spec) in enumerate(topology.blocks.items()):
        groups.setdefault(spec.worker or name, []).append(name)
        if spec.cores and not set(spec.cores) <= set(cores):
            problems.append(
                Problem(
                    f"$.blocks[{index}].cores",
                    f"cores {sorted(set(spec.cores) - set(cores))} are not available",
                    f"this system may use cores {sorted(cores)}",
                )
            )
        most = len(spec.cores or cores)
        if spec.threads > most:
            problems.append(
                Problem(
                    f"$.blocks[{index}].threads",
                    f"{spec.threads} threads on {most} cores would fight for them",
                    "give at most one thread per core",
                )
            )
    if problems:
        raise TopologyError(
            "INVALID_TOPOLOGY", "the update does not fit this machine", problems=problems
        )
    return tuple(_worker(topology, name, members, cores) for name, members in groups.items())


def _worker(
    topology: Topology, name: str, members: Sequence[str], cores: Sequence[int]
) -> WorkerSpec:
    stages = tuple(
        StagePlan(topology.blocks[b], topology.infos[b], topology.rows_of(b)) for b in members
    )
    first = stages[0].spec
    largest = max(s.info.contract.output.row_bytes() * s.max_rows for s in stages)
    slots = sum(s.spec.slots for s in stages)
    asked = [s.spec.arena_mib for s in stages if s.spec.arena_mib is not None]
    if asked:
        arena = max(asked) * MIB
    else:
        arena = max(MIN_ARENA_BYTES, 2 * largest, min(slots * largest, SOFT_ARENA_BYTES))
    # Slots lie on page boundaries: leave room for the rounding.
    arena = -(-arena // 4096) * 4096 + slots * 4096
    return WorkerSpec(
        name=name,
        stages=stages,
        device=first.device,
        replicas=first.replicas,
        threads=first.threads,
        cores=tuple(first.cores or cores),
        mode=topology.mode_of(first.name),
        transport=topology.transport,
        arena_bytes=arena,
        slots=slots,
    )

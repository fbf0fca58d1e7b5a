"""Plan: what shall run against what runs, as ordered steps (thesis, figure 3.7)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.core.placement import WorkerSpec


@dataclass(frozen=True, slots=True)
class Running:
    """A live replica, as far as planning cares; ``down``: its process has died, and another one
    is to take its place."""

    replica: str
    incarnation: int
    identity: str
    policies: Mapping[str, Mapping[str, Any]]
    down: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Launch one replica of a worker under the name ``replica``."""

    spec: WorkerSpec
    replica: str

    def to_dict(self) -> dict[str, Any]:
        return {"replica": self.replica, "blocks": list(self.spec.blocks)}


@dataclass(frozen=True, slots=True)
class ChangePolicy:
    """Give a running replica's block another batching policy; the process stays."""

    incarnation: int
    replica: str
    block: str
    policy: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Ordered: start all, wait until all are ready, flip routes, then drain and stop.

    ``keep`` and ``stop`` are live replicas.
    """

    start: tuple[Start, ...]
    keep: tuple[Running, ...]
    stop: tuple[Running, ...]
    policies: tuple[ChangePolicy, ...]

    @property
    def empty(self) -> bool:
        """Nothing to start, stop or change (tasks may still differ)."""
        return not (self.start or self.stop or self.policies)

    def to_dict(self) -> dict[str, Any]:
        return {
            "start": [s.to_dict() for s in self.start],
            "keep": [r.replica for r in self.keep],
            "stop": [r.replica for r in self.stop],
            "policies": [
                {"replica": p.replica, "block": p.block, "policy": dict(p.policy)}
                for p in self.policies
            ],
        }


def diff(
    desired: Sequence[WorkerSpec], running: Sequence[Running], taken: Collection[str] = ()
) -> Plan:
    """Only what is missing starts, only what is unneeded stops.

    A running replica is kept when its worker's identity is unchanged; when fewer replicas are
    wanted, those that are down go first, and then those started last. Nobody gets a name that a
    running one bears, or that is ``taken`` by a process which does not count as running and has not
    ended yet.
    """
    names = {*taken, *(r.replica for r in running)}
    start: list[Start] = []
    keep: list[Running] = []
    policies: list[ChangePolicy] = []
    for spec in desired:
        identity = spec.identity()
        same = sorted(
            (r for r in running if r.identity == identity),  # it has the worker's name in it
            key=lambda r: (r.down, r.incarnation),
        )[: spec.replicas]
        keep += same
        wanted = spec.policies()
        policies += [
            ChangePolicy(r.incarnation, r.replica, block, policy)
            for r in same
            for block, policy in wanted.items()
            if dict(r.policies.get(block, {})) != policy
        ]
        start += new_replicas(spec, spec.replicas - len(same), names)
    kept = {r.incarnation for r in keep}
    stop = tuple(r for r in running if r.incarnation not in kept)
    return Plan(tuple(start), tuple(keep), stop, tuple(policies))


def new_replicas(spec: WorkerSpec, count: int, taken: set[str]) -> Iterator[Start]:
    """So many of a worker, by the first of the names ``worker#0``, ``worker#1``, ... that are not
    ``taken``; they are from then on."""
    for _ in range(count):
        name = next(n for i in itertools.count() if (n := f"{spec.name}#{i}") not in taken)
        taken.add(name)
        yield Start(spec, name)

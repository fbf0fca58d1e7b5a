"""Plant: the systems that a seed draws: blocks, tasks, replicas, slots, policies, and how an
operator changes them.

What was ever posted is kept: a result must be that of one of these designs as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from blockflow.bench.faultsim.rows import COLUMNS, digest_of, with_version
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.topology import Topology, parse_topology

TIMEOUT_MS = 400
"""Of a forward."""

BLOCKS = ("trunk", "mid", "head_a", "head_b", "head_c")
_SPEC = TensorSpec("int64", ("rows", len(COLUMNS)))
_PATHS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "a": (("trunk", "mid", "head_a"), ("trunk", "head_a")),
    "b": (("trunk", "mid", "head_b"),),
    "c": (("trunk", "head_c"),),
}
"""The ways that a task may take, the first one to begin with."""
_MOST_REPLICAS = 2
_POLICIES: tuple[Mapping[str, Any], ...] = (
    {"policy": "none"},
    {"policy": "window", "max_rows": 8, "max_delay_ms": 4},
    {"policy": "lbci", "t_opt_ms": 60, "n_max": 8},
    {"policy": "dvabatch", "bs_max": 8},
    {
        "policy": "dvabatch",
        "bs_max": 8,
        "policies": ["load", "input", "operator"],
        "window_ms": "stage1",
    },
)
_SHARES: tuple[Mapping[str, Any], ...] = (
    {},
    {"weight": 3.0},
    {"priority": 1},
    {"max_batch_rows": 2},
)


@dataclass(frozen=True, slots=True)
class Design:
    """What one update asks for.

    Attributes:
        tasks: with the path of each.
        versions, counts, policies: artifact, replicas and batching of each block, of those that
            are not deployed as well: a block comes back as it went.
    """

    tasks: Mapping[str, tuple[str, ...]]
    shares: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, int]
    counts: Mapping[str, int]
    policies: Mapping[str, Mapping[str, Any]]

    @property
    def blocks(self) -> tuple[str, ...]:
        """Those on some task's path."""
        used = {b for path in self.tasks.values() for b in path}
        return tuple(b for b in BLOCKS if b in used)

    @property
    def replicas(self) -> int:
        """Of all blocks."""
        return sum(self.counts[b] for b in self.blocks)

    @property
    def asked(self) -> tuple[tuple[str, ...], ...]:
        """What clients ask for: tasks of one request."""
        tasks = tuple(self.tasks)
        return (*((t,) for t in tasks), *((tasks,) if len(tasks) > 1 else ()))


@dataclass(slots=True)
class Plant:
    """What is deployed, and how it may change.

    Attributes:
        once: blocks that must not run twice.
        slots: per worker.
        max_inflight: the Dispatcher's credits.
        designs: all that were ever posted, the first one to begin with.
    """

    once: frozenset[str]
    slots: int
    max_inflight: int
    designs: list[Design] = field(default_factory=list)
    _made_by: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    @classmethod
    def draw(cls, rng: Random) -> Plant:
        """A small system."""
        tasks = rng.choice((("a",), ("a", "c"), ("a", "b", "c")))
        plant = cls(
            frozenset(b for b in BLOCKS if b != "trunk" and rng.random() < 0.25),
            rng.choice((8, 32)),
            rng.choice((16, 64)),
        )
        policy = rng.choice(_POLICIES)
        plant.add(
            Design(
                {t: _PATHS[t][0] for t in tasks},
                {t: {} for t in _PATHS},
                dict.fromkeys(BLOCKS, 1),
                {b: rng.choice((1, 1, 2)) for b in BLOCKS},
                # One policy everywhere shows most of it; updates mix them.
                dict.fromkeys(BLOCKS, policy),
            )
        )
        return plant

    @property
    def cores(self) -> int:
        """For a thread each, and for their successors beside them."""
        return 2 * _MOST_REPLICAS * len(BLOCKS)

    def add(self, design: Design) -> int:
        """It is going to be posted; the number that it has from now on."""
        number = len(self.designs)
        self.designs.append(design)
        for task, path in design.tasks.items():
            versions = 0
            for block in path:
                versions = with_version(versions, BLOCKS.index(block), design.versions[block])
            self._made_by.setdefault((task, versions), set()).add(number)
        return number

    def made_by(self, task: str, versions: int) -> set[int]:
        """The designs under which this task's result has come through just these artifacts."""
        return self._made_by.get((task, versions), set())

    def topology(self, number: int) -> Topology:
        """What is posted for a design."""
        design = self.designs[number]
        blocks = [
            {
                "name": b,
                "replicas": design.counts[b],
                "slots": self.slots,
                "timeout_ms": TIMEOUT_MS,
                "replayable": b not in self.once,
                "threads": 1,
                "batching": dict(design.policies[b]),
            }
            for b in design.blocks
        ]
        tasks = {t: {"path": list(p), **design.shares[t]} for t, p in design.tasks.items()}

        def info(name: str) -> BlockInfo:
            digest = digest_of(name, design.versions[name])
            return BlockInfo(name, "1", digest, "echo", Contract(_SPEC, _SPEC), 0, 0)

        return parse_topology({"blocks": blocks, "tasks": tasks}, info)


def renewed(design: Design, blocks: Sequence[str] = BLOCKS) -> Design:
    """``design`` with new artifacts of these blocks."""
    return replace(design, versions={b: v + (b in blocks) for b, v in design.versions.items()})


def varied(design: Design, rng: Random) -> Design:
    """``design`` after one or two changes by an operator. They may amount to nothing."""
    for _ in range(rng.randint(1, 2)):
        design = rng.choice(_CHANGES)(design, rng)
    return design


def _all_versions(design: Design, rng: Random) -> Design:
    return renewed(design)


def _one_version(design: Design, rng: Random) -> Design:
    return renewed(design, (rng.choice(design.blocks),))


def _replicas(design: Design, rng: Random) -> Design:
    block = rng.choice(design.blocks)
    return replace(design, counts={**design.counts, block: rng.randint(1, _MOST_REPLICAS)})


def _policy(design: Design, rng: Random) -> Design:
    block = rng.choice(design.blocks)
    return replace(design, policies={**design.policies, block: rng.choice(_POLICIES)})


def _share(design: Design, rng: Random) -> Design:
    task = rng.choice(tuple(design.tasks))
    return replace(design, shares={**design.shares, task: rng.choice(_SHARES)})


def _task(design: Design, rng: Random) -> Design:
    """A task comes, or goes if it is not the last one."""
    task = rng.choice(tuple(_PATHS))
    rest = {t: p for t, p in design.tasks.items() if t != task}
    if task not in design.tasks:
        rest[task] = _PATHS[task][0]
    return replace(design, tasks=rest or design.tasks)


def _path(design: Design, rng: Random) -> Design:
    task = rng.choice(tuple(design.tasks))
    return replace(design, tasks={**design.tasks, task: rng.choice(_PATHS[task])})


_CHANGES = (_all_versions, _one_version, _replicas, _policy, _share, _task, _path)

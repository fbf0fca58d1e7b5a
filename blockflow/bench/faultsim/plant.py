"""Plant: the system that a seed draws: blocks, tasks, replicas, slots, and its versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from blockflow.bench.faultsim.rows import COLUMNS, digest_of
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.topology import Topology, parse_topology

TIMEOUT_MS = 400
"""Of a forward."""

_SPEC = TensorSpec("int64", ("rows", len(COLUMNS)))
_PATHS: Mapping[str, list[str]] = {
    "a": ["trunk", "mid", "head_a"],
    "b": ["trunk", "mid", "head_b"],
    "c": ["trunk", "head_c"],
}
_POLICIES: tuple[dict[str, Any], ...] = (
    {"policy": "none"},
    {"policy": "window", "max_rows": 8, "max_delay_ms": 4},
)


@dataclass(slots=True)
class Plant:
    """What is deployed.

    Attributes:
        counts: replicas per block.
        once: blocks that must not run twice.
        asked: what clients ask for: tasks of one request.
        slots: per worker. policy: of every block.
        version: of all blocks' artifacts.
        max_inflight: the Dispatcher's credits.
    """

    counts: dict[str, int]
    once: frozenset[str]
    asked: tuple[tuple[str, ...], ...]
    slots: int
    policy: dict[str, Any]
    max_inflight: int
    version: int = 1

    @classmethod
    def draw(cls, rng: Random) -> Plant:
        """A small system."""
        tasks = rng.choice((("a",), ("a", "c"), ("a", "b", "c")))
        blocks = dict.fromkeys(b for t in tasks for b in _PATHS[t])
        together = (tasks,) if len(tasks) > 1 else ()
        return cls(
            {b: rng.choice((1, 1, 2)) for b in blocks},
            frozenset(b for b in blocks if b != "trunk" and rng.random() < 0.25),
            (*((t,) for t in tasks), *together),
            rng.choice((8, 32)),
            rng.choice(_POLICIES),
            rng.choice((16, 64)),
        )

    @property
    def replicas(self) -> int:
        """Of all blocks."""
        return sum(self.counts.values())

    @property
    def cores(self) -> int:
        """For a thread each, and for their successors beside them."""
        return 2 * self.replicas

    def topology(self) -> Topology:
        """The present version's."""
        blocks = [
            {
                "name": b,
                "replicas": n,
                "slots": self.slots,
                "timeout_ms": TIMEOUT_MS,
                "replayable": b not in self.once,
                "threads": 1,
                "batching": self.policy,
            }
            for b, n in self.counts.items()
        ]
        tasks = {t: _PATHS[t] for (t, *more) in self.asked if not more}
        return parse_topology({"blocks": blocks, "tasks": tasks}, self._info)

    def _info(self, name: str) -> BlockInfo:
        digest = digest_of(name, self.version)
        return BlockInfo(name, "1", digest, "echo", Contract(_SPEC, _SPEC), 0, 0)

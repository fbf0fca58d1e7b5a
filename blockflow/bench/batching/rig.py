"""Rig: one running system that the experiments put their topologies into, and visit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from blockflow.bench.batching.blocks import ENGINE, PRECISION
from blockflow.bench.batching.plan import Plan
from blockflow.bench.batching.steady import Steady
from blockflow.bench.batching.traffic import Cell, Hopeless, Inputs, replay
from blockflow.bench.simulation.arrivals import Arrival
from blockflow.bench.turns import rotated
from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core import limits

TASK = "task"

Policy = Mapping[str, Any]
Topology = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Further:
    """More rounds, as long as those so far decide nothing.

    Whoever looks again after every round finds a decision by chance more often than an interval
    says; so :attr:`decided` wants more than the last look does (:func:`figures.interim`).

    Attributes:
        most: rounds in all.
        seconds: that the further ones may take.
        decided: whether what has been found by arm is enough.
    """

    most: int
    seconds: float
    decided: Callable[[Mapping[str, list[Any]]], bool]

    @classmethod
    def of(
        cls, plan: Plan, rounds: int, decided: Callable[[Mapping[str, list[Any]]], bool]
    ) -> Further:
        """As the plan allows beyond ``rounds``."""
        return cls(plan.stretch * rounds, plan.spare_seconds, decided)

    def wanted(self, turn: int, spent: float, found: Mapping[str, list[Any]]) -> bool:
        """Whether there shall be a round ``turn``, after ``spent`` seconds of further ones."""
        return turn < self.most and spent < self.seconds and not self.decided(found)


class Rig:
    """Deploys topologies and sends queries.

    Args:
        system: running, over that folder.
        steady: repeats visits that were disturbed.
    """

    def __init__(
        self, folder: Path, system: System, client: Client, progress: Progress, steady: Steady
    ) -> None:
        self.folder = folder
        self.system = system
        self.client = client
        self.progress = progress
        self.steady = steady
        self._applied: Topology | None = None

    def apply(self, topology: Topology) -> None:
        """Deploy it, unless it is deployed; a policy alone changes in place.

        Raises:
            TopologyError: what is wrong with it.
        """
        if topology != self._applied:
            self._applied = None
            self.system.apply(dict(topology))
            self._applied = topology

    def visit(self, queries: Sequence[Arrival], inputs: Inputs, bound_ms: float) -> Cell:
        """Send these queries and wait for all answers."""
        return Cell.of(replay(self.client, queries, inputs), bound_ms)

    def probe(self, queries: Sequence[Arrival], inputs: Inputs, bound_ms: float) -> Cell:
        """The same, but a probe that cannot hold any more ends there: of one that is far too fast
        the rest, and the queue that it would leave, only cost time."""
        hopeless = Hopeless(bound_ms, len(queries))
        return Cell.of(replay(self.client, queries, inputs, hopeless), bound_ms)

    def take_turns(
        self,
        what: str,
        arms: Mapping[str, Topology],
        rounds: int,
        visit: Callable[[str, int], Any],
        further: Further | None = None,
    ) -> dict[str, list[Any]]:
        """``visit(arm, round)`` for every arm in every round, in rotating order.

        A visit may be repeated, so it leaves nothing behind but what it returns.
        """
        found: dict[str, list[Any]] = {arm: [] for arm in arms}
        spent = 0.0
        with self.step(what, rounds * len(arms)) as advance:
            turn = 0
            while turn < rounds or (further is not None and further.wanted(turn, spent, found)):
                begin = time.monotonic()
                for arm in rotated(list(arms), turn):
                    self.apply(arms[arm])
                    run = partial(visit, arm, turn)
                    found[arm].append(self.steady.visit(run, f"{what}, {arm}"))
                    advance()
                spent += time.monotonic() - begin if turn >= rounds else 0.0
                turn += 1
        return found

    @contextmanager
    def step(self, what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """A bar for as long as it takes."""
        task = self.progress.add_task(what, total=total)
        try:
            yield lambda: self.progress.advance(task)
        finally:
            self.progress.remove_task(task)


def chain_topology(
    blocks: Sequence[str], policy: Policy, max_rows: int = limits.DEFAULT_MAX_ROWS
) -> dict[str, Any]:
    """A chain of blocks in one worker of one thread, under one policy: the task ``TASK``."""
    specs = [block_spec(name, "chain", policy) for name in blocks]
    tasks = {TASK: {"path": list(blocks), "deadline_ms": limits.MAX_DEADLINE_MS}}
    return {"blocks": specs, "tasks": tasks, "limits": {"max_rows": max_rows}}


def block_spec(name: str, worker: str, policy: Policy, block: str | None = None) -> dict[str, Any]:
    """A block of a topology, computed by the engine that was profiled, on one core whatever its
    policy could do with a second one."""
    spec: dict[str, Any] = {
        "name": name,
        "worker": worker,
        "threads": 1,
        "lanes": 1,
        "engine": ENGINE,
        "precision": PRECISION,
        "batching": dict(policy),
    }
    return spec if block is None else {**spec, "block": block}

"""SystemModel: what is simulated: workers with their stages, tasks, cores, costs beside compute.

Plain frozen data with a JSON form, so that a process that simulates a part of an experiment gets
all that it needs as text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from blockflow.batching.facts import LENGTH, StageFacts, length_of
from blockflow.batching.registry import largest_batch
from blockflow.batching.shares import TaskShare
from blockflow.control.stages import is_open, resolved
from blockflow.core import limits
from blockflow.core.dims import Dim, substituted
from blockflow.core.engines import ENGINES
from blockflow.core.model import ROWS, Contract, TensorSpec
from blockflow.core.profile import StageProfile
from blockflow.core.routing import RouteTable, StageRoute, TaskRoute

_ANY = TensorSpec("float32", (ROWS,))
_CONTRACT = Contract(_ANY, _ANY)
"""Simulated tensors have no contents: all contracts are the same."""


@dataclass(frozen=True, slots=True)
class StageModel:
    """A block in a worker.

    Attributes:
        policy: ``{"policy": name, ...options}``.
        max_rows: of one batch, and of one query.
        carries: the length of what it gives, of the ``length`` of what it takes.
        pads: the block promises that padding changes no result; taken for granted where nothing is
            known of it but its profile.
    """

    block: str
    profile: StageProfile
    policy: Mapping[str, Any] = field(default_factory=lambda: {"policy": "none"})
    max_rows: int = limits.DEFAULT_MAX_ROWS
    carries: Dim = LENGTH
    pads: bool = True

    @property
    def side_by_side(self) -> bool:
        """Its engine computes several batches at once."""
        kind = ENGINES.get(self.profile.engine)
        return kind is not None and kind.side_by_side

    def lengths(self, threads: int) -> tuple[int, ...]:
        """Lengths that its profile has, ascending; none where its dims are fixed."""
        return self.profile.lengths_measured(threads)

    def facts(self, threads: int) -> StageFacts:
        """What its policy may know."""
        lengths = self.lengths(threads)
        return StageFacts(
            block=self.block,
            max_rows=self.max_rows,
            threads=threads,
            profile=self.profile,
            length_dims=(0,) if lengths else (),
            lengths=(1, lengths[-1] if lengths else limits.MAX_DIM),
            pads=self.pads and bool(lengths),
            carries=self.carries,
        )


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A worker process, ``replicas`` of it.

    Attributes:
        name: of the worker in the topology.
        stages: the blocks that it hosts, in order.
        threads: cores that one forward of it uses.
        slots: tensors that it may have out at once; without a free one it stalls.
        replicas: processes of it.
        lanes: forwards that it computes at once.
    """

    name: str
    stages: tuple[StageModel, ...]
    threads: int = 1
    slots: int = 16
    replicas: int = 1
    lanes: int = 1

    def groups(self) -> list[tuple[Mapping[str, Any], list[StageModel]]]:
        """Its stages by policy: those that have the same one are scheduled together."""
        out: list[tuple[Mapping[str, Any], list[StageModel]]] = []
        for stage in self.stages:
            for policy, members in out:
                if policy == stage.policy:
                    members.append(stage)
                    break
            else:
                out.append((stage.policy, [stage]))
        return out

    def sliced(self) -> WorkerModel:
        """The same worker with numbers for ``"stages": "auto"``."""
        found = {
            s.block: resolved(policy, [m.facts(self.threads) for m in members])
            for policy, members in self.groups()
            if is_open(policy)
            for s in members
        }
        stages = (replace(s, policy=found.get(s.block, s.policy)) for s in self.stages)
        return replace(self, stages=tuple(stages))


@dataclass(frozen=True, slots=True)
class TaskModel:
    """A task.

    Attributes:
        path: of blocks.
        traffic: its part of the queries, relative to the other tasks.
        share: what it may claim at blocks that it shares.
        deadline_ms: of each query, from its arrival at the Dispatcher.
    """

    name: str
    path: tuple[str, ...]
    traffic: float = 1.0
    share: TaskShare = field(default_factory=TaskShare)
    deadline_ms: float = float(limits.DEFAULT_DEADLINE_MS)


@dataclass(frozen=True, slots=True)
class SystemModel:
    """Everything that a query can meet.

    Attributes:
        workers: all of them.
        tasks: all of them.
        cores: that the workers share. More compute than cores is slowed down evenly (processor
            sharing).
        hop_ms: from a sender to the next process, the Dispatcher included.
        turn_ms: what a worker needs between the end of a forward and the next one's start; the
            output leaves at the end of it.
        credits: requests that the Dispatcher lets in at once.
        adaptive_limit: a task's credits follow its queues, as the Dispatcher's do by default.
    """

    workers: tuple[WorkerModel, ...]
    tasks: tuple[TaskModel, ...]
    cores: int = 1
    hop_ms: float = 0.0
    turn_ms: float = 0.0
    credits: int = 256
    adaptive_limit: bool = True

    def routes(self) -> RouteTable:
        """The published routes of such a system: what its Dispatcher plans by."""
        stages: dict[int, StageRoute] = {}
        incarnation = 0
        for worker in self.workers:
            for replica in range(worker.replicas):
                incarnation += 1
                for stage in worker.stages:
                    number = len(stages) + 1
                    stages[number] = StageRoute(
                        number,
                        stage.block,
                        f"{worker.name}#{replica}",
                        incarnation,
                        f"sim:{incarnation}",
                        "tensormq",
                    )
        rows = {b: largest_batch(s.policy, s.max_rows) for b, (_, s) in self.stages().items()}
        tasks = {
            t.name: TaskRoute(t.name, t.path, _CONTRACT, batch_rows=max(rows[b] for b in t.path))
            for t in self.tasks
        }
        return RouteTable(1, 1, stages, tasks)

    @property
    def threads(self) -> int:
        """Cores that all workers together could use at once."""
        return sum(w.threads * w.lanes * w.replicas for w in self.workers)

    def stages(self) -> Mapping[str, tuple[WorkerModel, StageModel]]:
        """Every block with the worker that hosts it."""
        return {s.block: (w, s) for w in self.workers for s in w.stages}

    def taken(self, path: Sequence[str]) -> list[Dim]:
        """The length of what each block of a path takes, of a query's own ``length``."""
        hosts = self.stages()
        found: list[Dim] = [LENGTH]
        for block in path[:-1]:
            found.append(substituted(hosts[block][1].carries, {LENGTH: found[-1]}))
        return found

    def lengths(self, task: TaskModel) -> tuple[int, ...]:
        """Of the blocks on a task's path that have a variable length, the longest queries whose
        times were measured there."""
        hosts = self.stages()
        out = []
        for block, taken in zip(task.path, self.taken(task.path), strict=True):
            worker, stage = hosts[block]
            if found := stage.lengths(worker.threads):
                out.append(_longest(taken, found[-1]))
        return tuple(out)

    def with_policy(self, policy: Mapping[str, Any]) -> SystemModel:
        """The same system with this policy at every stage."""
        spec = dict(policy)
        return replace(
            self,
            workers=tuple(
                replace(w, stages=tuple(replace(s, policy=spec) for s in w.stages)).sliced()
                for w in self.workers
            ),
        )


def _longest(taken: Dim, most: int) -> int:
    """The longest query of which a block takes ``most`` at most; what it takes grows with it."""
    if taken == LENGTH:
        return most
    over = bisect_right(range(1, limits.MAX_DIM + 1), most, key=lambda n: length_of(taken, n))
    return max(1, over)


def chain(
    profiles: Sequence[StageProfile],
    *,
    max_rows: int = limits.DEFAULT_MAX_ROWS,
    apart: Sequence[int] = (),
    slots: int = 16,
    lanes: int = 1,
    **system: Any,
) -> SystemModel:
    """One task over ``profiles`` in this order, in one worker.

    Args:
        max_rows: of a batch, at every stage.
        apart: where another worker begins (indices into ``profiles``); every index but 0 makes a
            process per block.
        **system: further fields of :class:`SystemModel`.
    """
    starts = [0, *sorted(apart), len(profiles)]
    workers = tuple(
        WorkerModel(
            f"worker{i + 1}",
            tuple(StageModel(p.block, p, max_rows=max_rows) for p in profiles[a:b]),
            slots=slots,
            lanes=lanes,
        )
        for i, (a, b) in enumerate(pairwise(starts))
    )
    task = TaskModel("task", tuple(p.block for p in profiles))
    return SystemModel(workers, (task,), **system)

"""Planner: from task names to the stages that will run them. Pure.

It holds the published route table, chooses one replica per block and merges the tasks' paths, so
that a common prefix runs once.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockflow.core import limits
from blockflow.core.errors import RequestError
from blockflow.core.routing import PathTree, RouteTable, StageRoute, TaskRoute, merge_paths

_CACHE_LIMIT = 4096
_DEAD_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """How one request travels; shared by all requests with the same tasks and replicas.

    Attributes:
        epoch, version: of the route table that it was made from.
        tree: the merged path.
        ends: for each task, the node that gives its answer.
        blocks: the block's name per node.
        incarnations: per node, the worker's life that hosts it.
        below: per node, the end nodes at or below it (what a failure there fails).
        lost_with: incarnation -> the end nodes whose way leads through it.
        lineage: end node -> its nodes from the root on.
        root: where the input goes.
        share: index of what its request may claim at blocks that others use too.
    """

    epoch: int
    version: int
    tree: PathTree
    ends: tuple[int, ...]
    blocks: tuple[str, ...]
    incarnations: tuple[int, ...]
    below: tuple[frozenset[int], ...]
    lost_with: Mapping[int, frozenset[int]]
    lineage: Mapping[int, tuple[int, ...]]
    root: StageRoute
    share: int


class Planner:
    """The route table in force, and which replica gets the next request.

    ``take`` and ``give_back`` count the requests that a stage has before it; the replica with the
    fewest is chosen, in turn when they are equal.
    """

    def __init__(self) -> None:
        self._table: RouteTable | None = None
        self._replicas: dict[str, tuple[int, ...]] = {}
        self._dead: dict[int, None] = {}  # in order of death
        self._load: dict[int, int] = {}
        self._turn: dict[str, int] = {}
        self._cache: dict[tuple[tuple[str, ...], tuple[int, ...]], Plan] = {}

    @property
    def table(self) -> RouteTable | None:
        """The published routes; None before the first publication."""
        return self._table

    @property
    def version(self) -> int:
        return self._table.version if self._table else 0

    @property
    def epoch(self) -> int:
        return self._table.epoch if self._table else 0

    def replace(self, table: RouteTable) -> None:
        """Plan by ``table`` from now on; requests planned before keep their way."""
        self._table = table
        self._cache.clear()
        self._index()
        self._turn = {b: n for b, n in self._turn.items() if b in self._replicas}

    def peer_gone(self, incarnation: int) -> None:
        """Choose none of its stages any more, even if a table that was made before names it."""
        self._dead[incarnation] = None
        while len(self._dead) > _DEAD_LIMIT:
            del self._dead[next(iter(self._dead))]
        self._cache.clear()
        self._index()

    def _index(self) -> None:
        replicas: dict[str, list[int]] = {}
        for number, route in self._table.stages.items() if self._table else ():
            if route.incarnation not in self._dead:
                replicas.setdefault(route.block, []).append(number)
        self._replicas = {block: tuple(numbers) for block, numbers in replicas.items()}

    def task(self, name: str) -> TaskRoute:
        """The published task.

        Raises:
            RequestError: NOT_READY before the first topology, UNKNOWN_TASK with near matches.
        """
        if self._table is None:
            raise RequestError(
                "NOT_READY", "no topology is deployed yet", hint="post a system update, then retry"
            )
        task = self._table.tasks.get(name)
        if task is None:
            near = difflib.get_close_matches(name, self._table.tasks, n=3)
            if near:
                hint = "did you mean " + " or ".join(repr(n) for n in near) + "?"
            else:
                known = sorted(self._table.tasks)
                hint = "deployed: " + ", ".join(known[:8]) + (" ..." if len(known) > 8 else "")
            raise RequestError("UNKNOWN_TASK", f"no task {name!r}", where=name, hint=hint)
        return task

    def plan(self, tasks: Sequence[TaskRoute]) -> Plan:
        """Choose replicas and merge the paths of ``tasks`` (at least one).

        Raises:
            RequestError: INVALID_REQUEST when the tasks cannot share an input or their tree is too
                large, BLOCK_UNAVAILABLE when a block has no live replica.
        """
        chosen: dict[str, int] = {}
        for task in tasks:
            before = 0
            for block in task.path:
                if block not in chosen:
                    chosen[block] = self._choose(block, before)
                before = chosen[block]
        names = tuple(t.name for t in tasks)
        key = (names, tuple(chosen.values()))
        plan = self._cache.get(key)
        if plan is None:
            if len(self._cache) >= _CACHE_LIMIT:
                self._cache.clear()
            plan = self._cache[key] = self._build(tasks, chosen)
        return plan

    def take(self, plan: Plan) -> None:
        """A request sets out on ``plan``."""
        load = self._load
        for node in plan.tree.nodes:
            load[node.stage] = load.get(node.stage, 0) + 1

    def give_back(self, plan: Plan) -> None:
        """A request of ``plan`` has ended."""
        load = self._load
        for node in plan.tree.nodes:
            left = load[node.stage] - 1
            if left:
                load[node.stage] = left
            else:
                del load[node.stage]

    def outstanding(self, stage: int) -> int:
        return self._load.get(stage, 0)

    def _choose(self, block: str, before: int) -> int:
        replicas = self._replicas.get(block)
        if not replicas:
            raise RequestError(
                "BLOCK_UNAVAILABLE",
                f"block {block!r} has no worker that runs",
                where=block,
                hint="see its state with `blockflow status`",
            )
        if len(replicas) == 1:
            return replicas[0]
        table = self._table
        if before and table is not None:
            # A replica in the worker that comes before costs no hop: balance was struck there.
            host = table.stages[before].incarnation
            for number in replicas:
                if table.stages[number].incarnation == host:
                    return number
        turn = self._turn.get(block, 0)
        self._turn[block] = turn + 1
        count, load = len(replicas), self._load
        order = (replicas[(turn + i) % count] for i in range(count))
        return min(order, key=lambda number: load.get(number, 0))

    def _build(self, tasks: Sequence[TaskRoute], chosen: Mapping[str, int]) -> Plan:
        table = self._table
        if table is None:
            raise RequestError("NOT_READY", "no topology is deployed yet")
        try:
            tree, ends = merge_paths([[chosen[b] for b in t.path] for t in tasks])
        except ValueError as exc:
            firsts = ", ".join(f"{t.name}: {t.path[0]}" for t in tasks)
            raise RequestError(
                "INVALID_REQUEST",
                f"these tasks cannot run on one input: {exc} ({firsts})",
                hint="name tasks with the same first block, and at most "
                f"{limits.MAX_PATH_NODES} blocks in all",
            ) from exc
        routes = [table.stages[n.stage] for n in tree.nodes]
        lineage: dict[int, tuple[int, ...]] = {}
        below: list[set[int]] = [set() for _ in tree.nodes]
        lost: dict[int, set[int]] = {}
        for end in set(ends):
            way: list[int] = []
            node = end
            while node != -1:
                way.append(node)
                below[node].add(end)
                lost.setdefault(routes[node].incarnation, set()).add(end)
                node = tree.nodes[node].parent
            lineage[end] = tuple(reversed(way))
        return Plan(
            table.epoch,
            table.version,
            tree,
            ends,
            tuple(r.block for r in routes),
            tuple(r.incarnation for r in routes),
            tuple(frozenset(b) for b in below),
            {inc: frozenset(e) for inc, e in lost.items()},
            lineage,
            routes[0],
            max((t.share for t in tasks), key=lambda i: _priority(table, i)),
        )


def _priority(table: RouteTable, share: int) -> int:
    known = table.shares[share] if share < len(table.shares) else {}
    return int(known.get("priority", 0))

"""Planner: from task names to the stages that will run them. Pure.

It holds the published route table, chooses one replica per block and merges the tasks' paths, so
that a common prefix runs once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from blockflow.core import limits
from blockflow.core.departed import Departed
from blockflow.core.errors import RequestError
from blockflow.core.guess import Guesses
from blockflow.core.routing import PathTree, RouteTable, StageRoute, TaskRoute, merge_paths
from blockflow.dispatcher.canary import CanaryTurns
from blockflow.dispatcher.edges import EdgeBook

_CACHE_LIMIT = 4096
_CACHE_NODES = 32_768
"""Of all remembered plans together, unless the tasks' own paths have more. A node takes 700 bytes,
and any order of any sixteen tasks is a plan of its own: by their number alone, a client could have
150 MB of them kept."""

_NO_TURNS: frozenset[str] = frozenset()


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
        tasks: the routes of the tasks, aligned with ``ends``.
        once: nodes of blocks that may not run a second time on the same request.
        canaries: names of the tasks that take their canary's path.
        guards: incarnations whose slots it holds on its way back (:class:`EdgeBook`).
        absent: a block without a live worker: this is an outline of the tasks' own paths, on which
            nothing can set out ('' = it is a way).
        turns: of an outline, the tasks whose canary's turn it is.
        trials: the canaries' paths that were published for its tasks.
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
    tasks: tuple[TaskRoute, ...]
    once: frozenset[int]
    canaries: frozenset[str] = frozenset()
    guards: tuple[int, ...] = ()
    absent: str = ""
    turns: frozenset[str] = frozenset()
    trials: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Planner:
    """The route table in force, and which replica gets the next request.

    ``take`` and ``give_back`` count the requests that a stage has before it; the replica with the
    fewest is chosen, in turn when they are equal.

    Attributes:
        edges: what the requests under way hold of the workers' slots.
        version: of the route table; 0 before the first publication.
    """

    def __init__(self) -> None:
        self.edges = EdgeBook()
        self.version = 0
        self._table: RouteTable | None = None
        self._guesses = Guesses(())
        self._replicas: dict[str, tuple[int, ...]] = {}
        self._dead = Departed()
        self._load: dict[int, int] = {}
        self._turn: dict[str, int] = {}
        self._canaries = CanaryTurns()
        self._has_canaries = False
        self._cache: dict[tuple[tuple[str, ...], frozenset[str], tuple[int, ...]], Plan] = {}
        self._only: dict[tuple[str, ...], Plan] = {}  # where there is no replica to choose
        self._nodes = 0  # of the plans in the cache
        self._most_nodes = _CACHE_NODES

    @property
    def table(self) -> RouteTable | None:
        """The published routes; None before the first publication."""
        return self._table

    @property
    def epoch(self) -> int:
        return self._table.epoch if self._table else 0

    def replace(self, table: RouteTable) -> None:
        """Plan by ``table`` from now on; requests planned before keep their way."""
        self._table = table
        self.version = table.version
        self._guesses = Guesses(table.tasks)
        self._most_nodes = max(_CACHE_NODES, sum(len(t.path) for t in table.tasks.values()))
        self._forget()
        self._index()
        self._turn = {b: n for b, n in self._turn.items() if b in self._replicas}
        self._canaries.keep(table.tasks)
        self._has_canaries = any(t.canary for t in table.tasks.values())
        self.edges.publish(table)

    def peer_gone(self, incarnation: int) -> None:
        """Choose none of its stages any more, even if a table that was made before names it."""
        self._dead.add(incarnation)
        self._index()

    def _index(self) -> None:
        replicas: dict[str, list[int]] = {}
        for number, route in self._table.stages.items() if self._table else ():
            if route.incarnation not in self._dead:
                replicas.setdefault(route.block, []).append(number)
        self._replicas = {block: tuple(numbers) for block, numbers in replicas.items()}
        self._only.clear()

    def published(self, name: str) -> TaskRoute | None:
        """The task of this name, if there is one now."""
        return self._table.tasks.get(name) if self._table else None

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
            known = self._guesses.known
            if near := self._guesses.near(name):
                hint = "did you mean " + " or ".join(repr(n) for n in near) + "?"
            else:
                hint = "deployed: " + ", ".join(known[:8]) + (" ..." if len(known) > 8 else "")
            raise RequestError("UNKNOWN_TASK", f"no task {name!r}", where=name, hint=hint)
        return task

    def plan(self, tasks: Sequence[TaskRoute]) -> Plan:
        """Choose replicas and merge the paths of ``tasks`` (at least one).

        A canary whose turn it is gives way where it cannot run, or where its path does not go with
        the other tasks': trying something must not cost an answer.

        Raises:
            RequestError: INVALID_REQUEST when the tasks cannot share an input or their tree is too
                large, BLOCK_UNAVAILABLE when a block has no live replica.
        """
        return self._first(tasks, self._turns(tasks))

    def way(self, tasks: Sequence[TaskRoute]) -> Plan:
        """As :meth:`plan`; an outline where a block has no live replica at the moment.

        Raises:
            RequestError: INVALID_REQUEST; BLOCK_UNAVAILABLE when nothing will bring a block back by
                itself.
        """
        turns = self._turns(tasks) if self._has_canaries else _NO_TURNS
        try:
            return self._first(tasks, turns)
        except RequestError as exc:
            if exc.code != "BLOCK_UNAVAILABLE" or self.down(exc.where):
                raise
            return self._outline(tasks, exc.where, turns)

    def plan_again(self, tasks: Sequence[TaskRoute], turns: frozenset[str] = frozenset()) -> Plan:
        """The way of what has waited. Raises as :meth:`plan`.

        Of a further attempt the tasks' own paths, since a canary may be why there has to be one;
        of a request that has not set out yet with the ``turns`` that it had when it came, as far as
        these canaries are still tried.
        """
        tried = [t.name for t in tasks if t.canary and t.name in turns]
        return self._first(tasks, frozenset(tried))

    def _turns(self, tasks: Sequence[TaskRoute]) -> frozenset[str]:
        return frozenset([t.name for t in tasks if t.canary and self._canaries.turn(t)])

    def _first(self, tasks: Sequence[TaskRoute], canaries: frozenset[str]) -> Plan:
        if canaries:
            with suppress(RequestError):
                return self._plan(tasks, canaries)
        return self._plan(tasks, frozenset())

    def _outline(self, tasks: Sequence[TaskRoute], absent: str, turns: frozenset[str]) -> Plan:
        paths = [t.path for t in tasks]
        blocks = dict.fromkeys(block for path in paths for block in path)
        numbers = {block: n for n, block in enumerate(blocks, 1)}
        nowhere = {n: StageRoute(n, block, "", 0, "", "") for block, n in numbers.items()}
        shape = self._build(tasks, paths, numbers, frozenset(), nowhere)
        return replace(shape, absent=absent, turns=turns)

    def _plan(self, tasks: Sequence[TaskRoute], canaries: frozenset[str]) -> Plan:
        names = tuple([t.name for t in tasks])
        plan = None if canaries else self._only.get(names)
        if plan is not None:
            return plan
        paths = [t.canary.path if t.canary and t.name in canaries else t.path for t in tasks]
        chosen: dict[str, int] = {}
        for path in paths:
            before = 0
            for block in path:
                if block not in chosen:
                    chosen[block] = self._choose(block, before, paths)
                before = chosen[block]
        key = (names, canaries, tuple(chosen.values()))
        plan = self._cache.get(key)
        if plan is None:
            stages = self._table.stages if self._table else {}
            plan = self._build(tasks, paths, chosen, canaries, stages)
            nodes = len(plan.tree.nodes)
            if len(self._cache) >= _CACHE_LIMIT or self._nodes + nodes > self._most_nodes:
                self._forget()
            self._cache[key] = plan
            self._nodes += nodes
        if not canaries and all(len(self._replicas[block]) == 1 for block in chosen):
            self._only[names] = plan
        return plan

    def _forget(self) -> None:
        """What was planned has to be planned anew."""
        self._cache.clear()
        self._only.clear()
        self._nodes = 0

    def take(self, plan: Plan) -> None:
        """A request sets out on ``plan``."""
        self.edges.take(plan.guards)
        load = self._load
        for node in plan.tree.nodes:
            load[node.stage] = load.get(node.stage, 0) + 1

    def give_back(self, plan: Plan) -> None:
        """A request of ``plan`` has ended."""
        self.edges.give_back(plan.guards)
        load = self._load
        for node in plan.tree.nodes:
            left = load[node.stage] - 1
            if left:
                load[node.stage] = left
            else:
                del load[node.stage]

    def outstanding(self, stage: int) -> int:
        return self._load.get(stage, 0)

    def down(self, block: str) -> str:
        """Why no worker will run ``block`` before somebody acts; '' when one will."""
        return self._table.down.get(block, "") if self._table else ""

    def hopeless(self, path: Sequence[str]) -> RequestError | None:
        """Why nothing will run ``path`` before somebody acts; None when something does, or will."""
        gone = any(self.down(block) and not self._replicas.get(block) for block in path)
        return self._unavailable([path]) if gone else None

    def tries(self, tasks: Sequence[TaskRoute], turns: frozenset[str]) -> bool:
        """Whether ``tasks`` can set out together with the canaries whose turn it is."""
        with suppress(RequestError):
            return bool(self._plan(tasks, turns).canaries)
        return False

    def _unavailable(self, paths: Sequence[Sequence[str]]) -> RequestError:
        """What to say of paths with absent blocks: of the one that will not come back, if any."""
        absent = [b for path in paths for b in path if not self._replicas.get(b)]
        block = next((b for b in absent if self.down(b)), absent[0])
        why = self.down(block)
        return RequestError(
            "BLOCK_UNAVAILABLE",
            f"block {block!r} has no worker that runs" + (f": {why}" if why else ""),
            where=block,
            hint="see its state with `blockflow status`",
        )

    def _choose(self, block: str, before: int, paths: Sequence[Sequence[str]]) -> int:
        replicas = self._replicas.get(block)
        if not replicas:
            raise self._unavailable(paths)
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

    def _build(
        self,
        tasks: Sequence[TaskRoute],
        paths: Sequence[Sequence[str]],
        chosen: Mapping[str, int],
        canaries: frozenset[str],
        stages: Mapping[int, StageRoute],
    ) -> Plan:
        table = self._table
        if table is None:
            raise RequestError("NOT_READY", "no topology is deployed yet")
        try:
            tree, ends = merge_paths([[chosen[b] for b in path] for path in paths])
        except ValueError as exc:
            firsts = ", ".join(f"{t.name}: {p[0]}" for t, p in zip(tasks, paths, strict=True))
            raise RequestError(
                "INVALID_REQUEST",
                f"these tasks cannot run on one input: {exc} ({firsts})",
                hint="name tasks with the same first block, and at most "
                f"{limits.MAX_PATH_NODES} blocks in all",
            ) from exc
        routes = [stages[n.stage] for n in tree.nodes]
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
            max((t.share for t in tasks), key=lambda i: _claim(table, i)),
            tuple(tasks),
            frozenset(i for i, r in enumerate(routes) if not r.replayable),
            canaries,
            self.edges.guards(tree, routes),
            trials={t.name: t.canary.path for t in tasks if t.canary},
        )


def _claim(table: RouteTable, share: int) -> tuple[int, float]:
    """Of several tasks of one request the largest decides, in whatever order they are named."""
    known = table.shares[share] if share < len(table.shares) else {}
    return int(known.get("priority", 0)), float(known.get("weight", 1.0))

"""Paths, path trees and the route table: who comes after whom, decided before a tensor moves.

Blocks take no routing decision: the path rides in the header (thesis, section 3.5.1) and the route
table only translates a stage number into an address.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from blockflow.core import limits
from blockflow.core.model import Contract

DISPATCHER_STAGE = 0
"""The stage number of the Dispatcher's return socket; real stages count from 1 and never repeat."""

_NODE = struct.Struct("<QBB")
"""A path node in a header: stage, parent + 1, terminal."""


@dataclass(frozen=True, slots=True)
class PathNode:
    """One stage visit of a request.

    Attributes:
        stage: number in the route table.
        parent: index of the node whose output is this node's input, -1 for the root.
        terminal: the output is (also) an answer and goes to the Dispatcher.
    """

    stage: int
    parent: int
    terminal: bool


@dataclass(frozen=True, slots=True)
class PathTree:
    """The path of a request: a chain for one task, a tree for several tasks on one input.

    Nodes stand in topological order (a parent before its children); node 0 is the root. ``wire`` is
    the tree packed for a header. ``targets`` says of each node where its output goes: stage and
    node, the Dispatcher with the node itself. Trees are read far more often than made: what every
    tensor's way asks of them is worked out once.
    """

    nodes: tuple[PathNode, ...]
    wire: bytes = field(init=False, repr=False, compare=False)
    targets: tuple[tuple[tuple[int, int], ...], ...] = field(init=False, repr=False, compare=False)
    _children: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.nodes) <= limits.MAX_PATH_NODES:
            raise ValueError(f"a path has 1..{limits.MAX_PATH_NODES} nodes, not {len(self.nodes)}")
        for i, node in enumerate(self.nodes):
            if (i == 0) != (node.parent == -1) or node.parent >= i:
                raise ValueError(f"node {i} has parent {node.parent}")
            if not DISPATCHER_STAGE < node.stage < 2**64:
                raise ValueError(f"node {i} has stage {node.stage}")

        below: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes[1:], start=1):
            below[node.parent].append(i)
        object.__setattr__(self, "_children", tuple(map(tuple, below)))
        targets = [[(self.nodes[child].stage, child) for child in children] for children in below]
        for i, node in enumerate(self.nodes):
            if node.terminal:
                targets[i].append((DISPATCHER_STAGE, i))
        object.__setattr__(self, "targets", tuple(map(tuple, targets)))
        object.__setattr__(self, "wire", b"".join([_NODE.pack(*_packable(n)) for n in self.nodes]))

    def children(self, index: int) -> tuple[int, ...]:
        """Indices of the nodes fed by node ``index``."""
        return self._children[index]

    def ways(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Stages below node ``index``: those that it feeds, those that these feed, and so on."""
        found, nodes = [], self._children[index]
        while nodes:
            found.append(tuple([self.nodes[n].stage for n in nodes]))
            nodes = tuple([below for n in nodes for below in self._children[n]])
        return tuple(found)

    @classmethod
    def from_wire(cls, packed: bytes) -> PathTree:
        """Inverse of :attr:`wire`. Raises ValueError."""
        if len(packed) % _NODE.size:
            raise ValueError(f"a path is a string of {_NODE.size}-byte nodes")
        return cls(tuple(PathNode(s, p - 1, t != 0) for s, p, t in _NODE.iter_unpack(packed)))


def _packable(node: PathNode) -> tuple[int, int, int]:
    return node.stage, node.parent + 1, int(node.terminal)


def merge_paths(paths: Sequence[Sequence[int]]) -> tuple[PathTree, tuple[int, ...]]:
    """Merge stage paths on their common prefixes, so that a shared prefix runs once.

    Returns:
        The tree and, for each path, the index of the node that gives its answer.

    Raises:
        ValueError: a path is empty or two paths start with different stages.
    """
    stages: list[int] = []
    parents: list[int] = []
    by_edge: dict[tuple[int, int], int] = {}
    ends: list[int] = []
    for path in paths:
        if not path:
            raise ValueError("a path has at least one stage")
        at = -1
        for stage in path:
            nxt = by_edge.get((at, stage))
            if nxt is None:
                if at == -1 and stages:
                    raise ValueError("paths on one input must start with the same stage")
                nxt = len(stages)
                by_edge[(at, stage)] = nxt
                stages.append(stage)
                parents.append(at)
            at = nxt
        ends.append(at)
    terminal = set(ends)
    tree = PathTree(
        tuple(
            PathNode(s, p, i in terminal)
            for i, (s, p) in enumerate(zip(stages, parents, strict=True))
        )
    )
    return tree, tuple(ends)


@dataclass(frozen=True, slots=True)
class StageRoute:
    """Where a stage can be reached.

    Attributes:
        stage: its number, never reused while the system lives.
        block: the block that it runs.
        worker: name of the replica that hosts it (``trunk1#0``).
        incarnation: which life of that replica.
        endpoint: ZeroMQ address of its data socket (ipc:// or tcp://).
        mode: how tensors reach it: ``tensormq`` (handles) or ``zeromq`` (whole tensors).
        device: ``cpu`` or ``cuda:N``.
        replayable: it may run a second time on the same request.
        slots: tensors that its worker may have out at once (0 = they are not counted).
    """

    stage: int
    block: str
    worker: str
    incarnation: int
    endpoint: str
    mode: str
    device: str = "cpu"
    replayable: bool = True
    slots: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> StageRoute:
        return cls(
            int(d["stage"]),
            str(d["block"]),
            str(d["worker"]),
            int(d["incarnation"]),
            str(d["endpoint"]),
            str(d["mode"]),
            str(d["device"]),
            bool(d["replayable"]),
            int(d["slots"]),
        )


@dataclass(frozen=True, slots=True)
class CanaryRoute:
    """Another path for a ``share`` (0..1) of a task's requests."""

    path: tuple[str, ...]
    share: float

    def to_dict(self) -> dict[str, Any]:
        return {"path": list(self.path), "share": self.share}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> CanaryRoute:
        return cls(tuple(str(b) for b in d["path"]), float(d["share"]))


@dataclass(frozen=True, slots=True)
class TaskRoute:
    """A published task: its path of blocks and what a request for it may ask.

    ``contract`` is the input of the first block and the output of the last one; ``share`` an index
    into :attr:`RouteTable.shares`; ``max_inflight_rows`` bounds what of this task may be under way
    at once (0 = no bound); ``batch_rows`` are those of the largest batch that a block on the way
    forms; ``cpu_latency_us`` bounds how long an idle core takes to wake meanwhile (None = it does
    not).
    """

    name: str
    path: tuple[str, ...]
    contract: Contract
    max_rows: int = limits.DEFAULT_MAX_ROWS
    deadline_ms: int = limits.DEFAULT_DEADLINE_MS
    check_finite: bool = True
    share: int = 0
    max_inflight_rows: int = 0
    canary: CanaryRoute | None = None
    batch_rows: int = 1
    cpu_latency_us: int | None = None

    def to_dict(self, contract: int | None = None) -> dict[str, Any]:
        """``contract``: what stands for it (:meth:`RouteTable.to_dict`); None: all of it."""
        return {
            "name": self.name,
            "path": list(self.path),
            "canary": None if self.canary is None else self.canary.to_dict(),
            "contract": self.contract.to_dict() if contract is None else contract,
            "max_rows": self.max_rows,
            "deadline_ms": self.deadline_ms,
            "check_finite": self.check_finite,
            "share": self.share,
            "max_inflight_rows": self.max_inflight_rows,
            "batch_rows": self.batch_rows,
            "cpu_latency_us": self.cpu_latency_us,
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], contract: Contract | None = None) -> TaskRoute:
        """Inverse of :meth:`to_dict`. Raises ValueError on nonsense."""
        try:
            canary, latency = d.get("canary"), d.get("cpu_latency_us")
            route = cls(
                str(d["name"]),
                tuple(str(b) for b in d["path"]),
                Contract.from_dict(d["contract"]) if contract is None else contract,
                int(d["max_rows"]),
                int(d["deadline_ms"]),
                bool(d["check_finite"]),
                int(d["share"]),
                int(d["max_inflight_rows"]),
                None if canary is None else CanaryRoute.from_dict(canary),
                int(d["batch_rows"]),
                None if latency is None else int(latency),
            )
        except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
            raise ValueError(f"not a task: {type(e).__name__}: {e}") from e
        if not 1 <= route.deadline_ms <= limits.MAX_DEADLINE_MS:
            raise ValueError(
                f"task {route.name[: limits.MAX_NAME_CHARS]!r}: a deadline of more than 0 and at "
                f"most {limits.MAX_DEADLINE_MS} ms expected"
            )
        return route


@dataclass(frozen=True, slots=True)
class RouteTable:
    """One epoch's published routes: the thesis's translation table (section 3.5.2) and addresses.

    ``version`` grows with every publication (a restart of one block changes routes within an
    epoch). ``shares`` says by index what tasks may claim at blocks that they share
    (:class:`blockflow.batching.shares.TaskShare`); index 0 is the default. ``down`` names the
    blocks that no worker will run again before somebody acts, and why.
    """

    epoch: int
    version: int
    stages: Mapping[int, StageRoute] = field(default_factory=dict)
    tasks: Mapping[str, TaskRoute] = field(default_factory=dict)
    shares: tuple[Mapping[str, Any], ...] = ()
    down: Mapping[str, str] = field(default_factory=dict)

    def without(self, gone: Container[int]) -> RouteTable:
        """The same table but for the stages of these incarnations."""
        left = {s: r for s, r in self.stages.items() if r.incarnation not in gone}
        return self if len(left) == len(self.stages) else replace(self, stages=left)

    def to_dict(self) -> dict[str, Any]:
        """As a message carries it. A contract that tasks have in common, as those of one path do,
        stands there once; tasks name it by its index. So do shares: every worker is sent those of
        all tasks, and of thousands few differ."""
        contracts = {id(t.contract): t.contract for t in self.tasks.values()}
        number = {key: n for n, key in enumerate(contracts)}
        kinds = [tuple(sorted(s.items())) for s in self.shares]
        known = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
        return {
            "epoch": self.epoch,
            "version": self.version,
            "stages": [r.to_dict() for r in self.stages.values()],
            "contracts": [c.to_dict() for c in contracts.values()],
            "tasks": [t.to_dict(number[id(t.contract)]) for t in self.tasks.values()],
            "shares": [dict(kind) for kind in known],
            "share_of": [known[kind] for kind in kinds],
            "down": dict(self.down),
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> RouteTable:
        """Inverse of :meth:`to_dict`. Raises ValueError on nonsense."""
        try:
            stages = [StageRoute.from_dict(x) for x in d["stages"]]
            contracts = dict(enumerate(Contract.from_dict(c) for c in d["contracts"]))
            shares = dict(enumerate(d["shares"]))
            tasks = [TaskRoute.from_dict(x, contracts[x["contract"]]) for x in d["tasks"]]
            return cls(
                int(d["epoch"]),
                int(d["version"]),
                {s.stage: s for s in stages},
                {t.name: t for t in tasks},
                tuple(shares[n] for n in d["share_of"]),
                {str(block): str(why) for block, why in d["down"].items()},
            )
        except (LookupError, TypeError, AttributeError, OverflowError) as e:
            raise ValueError(f"not a route table: {type(e).__name__}: {e}") from e

"""Traced: a model's graph, what each node gives for examples, and what crosses between nodes.

A graph is of calls of submodules (:func:`blockflow.repository.trace.trace`) or of operators
(:func:`blockflow.repository.unfold.unfold`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from blockflow.core.errors import ExportError
from blockflow.core.model import DTYPE_BYTES

Values = Mapping[fx.Node, Any]


class Untraced(ExportError):
    """What the forward does cannot be followed."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A model's graph with every node's value (tensors: on meta) under each example input.

    Attributes:
        module: what the graph's parameters and submodules belong to.
        nodes: in the order of execution.
        values: per example.
        following: nodes whose value follows from parameters, constants and sizes alone; whoever
            knows these can compute it anew.
        after: of a node, those that write into what it takes, between the node that made that and
            this one (``mask.fill_(0)``): who runs the node has to run them before.
    """

    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    values: tuple[Values, ...]
    following: frozenset[fx.Node]
    after: Mapping[fx.Node, frozenset[fx.Node]]

    def crossing(self, position: int) -> list[fx.Node]:
        """Nodes whose value is made before ``position`` and used at or after it."""
        index = {n: i for i, n in enumerate(self.nodes)}
        return [
            n
            for n in self.nodes[:position]
            if n.op != "get_attr" and any(index[u] >= position for u in n.users)
        ]

    def crossing_data(self, position: int) -> list[fx.Node]:
        """Those of :meth:`crossing` that nobody can compute anew."""
        return [n for n in self.crossing(position) if n not in self.following]

    def sole_crossings(self) -> list[fx.Node | None]:
        """For each position, in one sweep: what alone crosses there of :meth:`crossing_data`;
        None where nothing does, or more."""
        index = {n: i for i, n in enumerate(self.nodes)}
        ending: list[list[fx.Node]] = [[] for _ in self.nodes]
        crossing: dict[fx.Node, None] = {}
        found: list[fx.Node | None] = []
        for i, node in enumerate(self.nodes):
            found.append(next(iter(crossing)) if len(crossing) == 1 else None)
            # a node that is used here last crosses no further
            for ended in ending[i]:
                crossing.pop(ended, None)
            uses = [index[u] for u in node.users]
            if uses and node not in self.following:
                crossing[node] = None
                ending[max(uses)].append(node)
        return found

    def find(self, name: str) -> int | None:
        """Position of the first node that belongs to submodule ``name``."""
        for i, node in enumerate(self.nodes):
            if any(path == name or path.startswith(name + ".") for path in modules_of(node)):
                return i
        return None

    def places(self, begins: Iterable[int]) -> dict[int, int]:
        """Where to cut before what begins at each of these positions; none where it cannot be: one
        tensor has to cross alone, of a dtype that travels and as a contract can tell of it, and not
        the input itself."""
        sole = self.sole_crossings()
        found: dict[int, int] = {}
        for start in begins:
            for i in self._gap(start):
                node = sole[i]
                if node is not None and node.op != "placeholder" and self._travels(node):
                    found[start] = i
                    break
        return found

    def _travels(self, node: fx.Node) -> bool:
        dtype = str(getattr(self.values[0][node], "dtype", "")).removeprefix("torch.")
        return dtype in DTYPE_BYTES and self.dims_told(node)

    def dims_told(self, node: fx.Node) -> bool:
        """Whether a tensor's dims begin with the rows, and may follow from the input's."""
        (source, *_) = (n for n in self.nodes if n.op == "placeholder")
        shapes = [tuple(getattr(values[node], "shape", ())) for values in self.values]
        rows = [values[source].shape[0] for values in self.values]
        return len({len(s) for s in shapes}) == 1 and [next(iter(s), None) for s in shapes] == rows

    def _gap(self, position: int) -> Iterator[int]:
        """From where a submodule begins back to where the one before ends. What a forward does in
        between (a mask of what it has just computed, say) may lie on either side of a cut."""
        yield position
        around = frozenset(modules_of(self.nodes[position]))
        for i in range(position - 1, 0, -1):
            node = self.nodes[i]
            if node.op in ("placeholder", "call_module") or not around.issuperset(modules_of(node)):
                return
            yield i

    def computes(self, node: fx.Node) -> bool:
        """Whether the model's own work on its input is done there."""
        if node.op == "call_module":
            return True
        operator = isinstance(node.target, torch._ops.OpOverload)
        return operator and node not in self.following

    def entrances(self) -> list[int]:
        """Positions at which a submodule begins, in order."""
        found: list[int] = []
        inside: frozenset[str] = frozenset()
        for i, node in enumerate(self.nodes):
            if not self.computes(node):
                continue
            now = frozenset(modules_of(node))
            if node.op == "call_module" or now - inside:
                found.append(i)
            inside = now
        return found


def modules_of(node: fx.Node) -> Iterator[str]:
    """The submodules in whose forward a node stands, the outermost first, and the one it calls."""
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    for path, _ in stack.values():
        yield path.partition("@")[0]  # a second call is numbered
    if node.op == "call_module":
        yield str(node.target)


def settled(value: Any) -> bool:
    """A number or several, of which dims are made; or what a tensor is besides its elements."""
    if isinstance(value, tuple | list):
        return all(map(settled, value))
    return isinstance(value, int | float | torch.dtype | torch.device)


def described(traced: Traced, node: fx.Node) -> str:
    """A node for those who wrote the model."""
    if node.op == "call_module":
        return str(node.target)
    if node.target is getattr and isinstance(node.args[0], fx.Node):
        return f"{described(traced, node.args[0])}.{node.args[1]}"
    value = traced.values[0][node]
    modules = [m for m in modules_of(node) if m]
    if not isinstance(value, Tensor) or not isinstance(node.target, torch._ops.OpOverload):
        return node.name
    kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{node.name} ({kind}, made in {modules[-1] if modules else 'the model itself'})"


def first_line(e: Exception) -> str:
    text = str(e).strip()
    return text.splitlines()[0][:300] if text else ""

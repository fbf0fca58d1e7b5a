"""Stage: a module of some of a graph's nodes, from one tensor to another.

What follows from sizes and parameters alone may come from elsewhere in the graph: it is computed
anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from blockflow.core.errors import ExportError
from blockflow.repository.traced import Traced, settled


class Stage:
    """One stage in the making.

    Args:
        traced: the whole model's graph.
        nodes: what the stage runs, in the order of execution.
        taken: whose value goes in; None: the model's own input, which is one of ``nodes``.
        given: whose value comes out.
    """

    def __init__(
        self, traced: Traced, nodes: Sequence[fx.Node], taken: fx.Node | None, given: fx.Node
    ) -> None:
        self._traced = traced
        self._nodes, self._given = nodes, given
        self._graph = fx.Graph()
        self._made: dict[fx.Node, Any] = {}
        self._x: fx.Node | None = None
        self._shapes: list[torch.Size] = []
        """Of the tensor that goes in, per example; none where sizes are the model's own."""
        if taken is not None:
            self._x = self._made[taken] = self._graph.placeholder("x")
            self._shapes = [values[taken].shape for values in traced.values]

    def build(self) -> fx.GraphModule:
        """Raises ExportError: NOT_SPLITTABLE when a size that it needs is lost."""
        graph = self._graph
        for node in self._needed():
            self._made[node] = self._anew(node)
        for node in self._nodes:
            if node.op != "get_attr":
                self._made[node] = graph.node_copy(node, self._value)
        graph.output(self._value(self._given))
        for node in graph.nodes:
            # annotations would be printed under names that torch.jit.script does not know
            node.type = None
        graph.lint()
        return fx.GraphModule(self._traced.module, graph).eval()

    def _value(self, node: fx.Node) -> Any:
        if node not in self._made:  # a parameter used in several stages is an attribute of each
            self._made[node] = self._graph.node_copy(node)
        return self._made[node]

    def _needed(self) -> list[fx.Node]:
        """What is made elsewhere and to be made anew, with all that it takes: in the order in which
        the model does it, for some write into what others have made."""
        traced = self._traced
        own = set(self._nodes)
        wanted = [source for user in self._nodes for source in self._sources(user)]
        found: set[fx.Node] = set()
        while wanted:
            node = wanted.pop()
            if node in own or node in found or node in self._made:
                continue
            found.add(node)
            if self._known(node) is _UNKNOWN:
                if not traced.following.issuperset(node.all_input_nodes):
                    raise self._lost(node)
                wanted += self._sources(node)
        return [n for n in traced.nodes if n in found]

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """What has to be made before a node runs."""
        after = self._traced.after.get(node, frozenset())
        # those that write the model's data did so before it crossed
        return [*node.all_input_nodes, *(after & self._traced.following)]

    def _anew(self, node: fx.Node) -> Any:
        known = self._known(node)
        if known is _UNKNOWN:
            return self._graph.node_copy(node, self._value)

        def size(value: Any) -> Any:
            if not isinstance(value, _Dim):
                return value
            return self._graph.call_method("size", (self._x, value.index))

        return fx.node.map_aggregate(known, size)

    def _known(self, node: fx.Node) -> Any:
        """What gives a node's sizes without anything that was made before: constants, and dims of
        the tensor that crosses."""
        found = [values[node] for values in self._traced.values]
        return self._same(found) if settled(found[0]) else _UNKNOWN

    def _same(self, found: Sequence[Any]) -> Any:
        if all(value == found[0] for value in found):
            return found[0]
        if isinstance(found[0], tuple | list):
            if len({len(sizes) for sizes in found}) > 1:
                return _UNKNOWN
            parts = [self._same(sizes) for sizes in zip(*found, strict=True)]
            return _UNKNOWN if _UNKNOWN in parts else tuple(parts)
        for i, dims in enumerate(zip(*self._shapes, strict=True)):
            if dims == tuple(found):
                return _Dim(i)
        return _UNKNOWN

    def _lost(self, node: fx.Node) -> ExportError:
        source = next(n for n in self._traced.nodes if n.op == "placeholder")
        sizes = [
            f"{_told(values[node])} of an input {_told(values[source].shape)}, where "
            f"{_told(shape)} crosses"
            for values, shape in zip(self._traced.values, self._shapes, strict=True)
        ]
        return ExportError(
            "NOT_SPLITTABLE",
            "a size crosses a cut but is no dim of the tensor that crosses: "
            + "; ".join(sizes[:2]),
            hint="cut elsewhere, or compute the size in the block that uses it",
        )


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dim of the tensor that crosses."""

    index: int


def _told(sizes: Any) -> str:
    return str(list(sizes) if isinstance(sizes, tuple) else sizes)


_UNKNOWN = object()

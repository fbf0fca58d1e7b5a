"""Split: cut a model into a chain of stages before named submodules.

The model's forward is traced with torch.fx down to the modules that contain a cut; everything
below stays an opaque call, so that a module's inside may be any Python. Where that does not reach
a cut, torch.export traces it down to operators. (torch.distributed's pipelining does that, too:
tried, it fixes every size that the forward reads, rows and lengths among them, to the example's.)
A cut is legal where exactly one tensor crosses it. What follows from sizes and parameters alone
(a causal mask, the angles of rotary positions) crosses as well, by being computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from blockflow.core.errors import ExportError
from blockflow.repository.traced import Traced, Untraced, modules_of, settled, trace

Unfold = Callable[[], Traced]
"""Traces the same model down to its operators; raises ExportError."""


def ancestors(names: Iterable[str]) -> frozenset[str]:
    """All modules that strictly contain one of ``names`` (the root aside)."""
    out: set[str] = set()
    for name in names:
        parts = name.split(".")
        out.update(".".join(parts[:i]) for i in range(1, len(parts)))
    return frozenset(out)


def split_model(
    model: nn.Module, cuts: Sequence[str], examples: Sequence[Tensor], unfold: Unfold | None = None
) -> list[fx.GraphModule]:
    """Cut ``model`` before each submodule of ``cuts``; returns ``len(cuts) + 1`` stages in order.

    Args:
        model: in eval mode; its submodules are shared with the stages, not copied.
        cuts: names as in ``model.named_modules()``, in the order of execution.
        examples: inputs of all :func:`blockflow.repository.probe.probe_bindings`.
        unfold: what to cut where calls of submodules cannot be; None: nothing else.

    Raises:
        ExportError: NOT_SPLITTABLE with the reason.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    first_names = {id(module): name for name, module in model.named_modules()}
    for cut in cuts:
        if cut not in known or not cut:
            raise ExportError(
                "NOT_SPLITTABLE",
                f"the model has no submodule {cut!r}",
                hint=f"top-level submodules: {', '.join(n for n, _ in model.named_children())}",
            )
        if (first := first_names[id(known[cut])]) != cut:
            raise ExportError(
                "NOT_SPLITTABLE",
                f"submodule {cut!r} is the same module as {first!r}, which runs in both places",
                hint="cut before another one, or give each place a module of its own",
            )
    ways: list[Callable[[], Traced]] = [lambda: trace(model, ancestors(cuts), examples)]
    if unfold is not None:
        ways.append(unfold)
    refused: list[ExportError] = []
    for way in ways:
        try:
            traced = way()
            return cut_graph(traced, _positions(traced, cuts))
        except ExportError as e:
            refused.append(e)
    raise unreached(refused)


def unreached(refused: Sequence[ExportError]) -> ExportError:
    """Of the reasons of both ways the one to tell: why a cut is illegal says more than why there
    was no way to it, and calls of submodules bear the user's names."""
    for reason in refused:
        if not isinstance(reason, Untraced):
            return reason
    first, *others = refused
    first.message = "; ".join([first.message, *(e.message for e in others)])
    return first


def _positions(traced: Traced, cuts: Sequence[str]) -> list[int]:
    positions: list[int] = []
    begun = 0
    for cut in cuts:
        begins = traced.find(cut)
        if begins is None:
            raise ExportError("NOT_SPLITTABLE", f"the forward never calls submodule {cut!r}")
        computed = any(traced.computes(n) for n in traced.nodes[:begins])
        if not computed or all(n.op == "placeholder" for n in traced.crossing_data(begins)):
            raise ExportError(
                "NOT_SPLITTABLE",
                f"nothing runs before submodule {cut!r} for it: the first block would be empty",
                hint="leave this cut out; the first block begins at the input",
            )
        if begins <= begun:
            raise ExportError(
                "NOT_SPLITTABLE",
                f"submodule {cut!r} does not run after the cut before it",
                hint="list the cuts once each, in the order in which the model runs them",
            )
        found = traced.places([begins]).get(begins, 0)
        if found <= begun:
            found = begins
            check_crossing(traced, begins, cut)
        positions.append(found)
        begun = begins
    return positions


def check_crossing(traced: Traced, position: int, name: str) -> None:
    """Raise NOT_SPLITTABLE unless exactly one tensor crosses at ``position``. (What is wrong with
    the dims of a single one is told of when its contract is made.)"""
    crossing = traced.crossing_data(position)
    if len(crossing) == 1 and isinstance(traced.values[0][crossing[0]], Tensor):
        return
    names = [_describe(traced, n) for n in crossing]
    raise ExportError(
        "NOT_SPLITTABLE",
        f"{len(names)} values cross the cut before {name!r}: {', '.join(names)}",
        where=name,
        hint="one tensor may cross a cut; cut where no skip connection or mask passes by",
        details={"crossing": names},
    )


def cut_graph(traced: Traced, positions: Sequence[int]) -> list[fx.GraphModule]:
    """Build the stages between legal cut positions.

    Raises:
        ExportError: NOT_SPLITTABLE when what crosses besides the tensor cannot be computed anew.
    """
    bounds = [0, *positions, len(traced.nodes)]
    return [_Stage(traced, start, end).build() for start, end in pairwise(bounds)]


class _Stage:
    """One stage in the making."""

    def __init__(self, traced: Traced, start: int, end: int) -> None:
        self._traced = traced
        self._start, self._end = start, end
        self._graph = fx.Graph()
        self._made: dict[fx.Node, Any] = {}
        self._x: fx.Node | None = None
        self._shapes: list[torch.Size] = []
        """Of the tensor that crosses, per example; the first stage takes the model's own input."""
        if start:
            (crossing,) = traced.crossing_data(start)
            self._x = self._made[crossing] = self._graph.placeholder("x")
            self._shapes = [values[crossing].shape for values in traced.values]

    def build(self) -> fx.GraphModule:
        """Raises ExportError: NOT_SPLITTABLE when a size that it needs is lost."""
        traced, graph = self._traced, self._graph
        for node in self._needed():
            self._made[node] = self._anew(node)
        for node in traced.nodes[self._start : self._end]:
            if node.op == "output":
                graph.output(fx.map_arg(node.args[0], self._value))
            elif node.op != "get_attr":
                self._made[node] = graph.node_copy(node, self._value)
        if self._end < len(traced.nodes):
            (leaving,) = traced.crossing_data(self._end)
            graph.output(self._made[leaving])
        for node in graph.nodes:
            # annotations would be printed under names that torch.jit.script does not know
            node.type = None
        graph.lint()
        return fx.GraphModule(traced.module, graph).eval()

    def _value(self, node: fx.Node) -> Any:
        if node not in self._made:  # a parameter used in several stages is an attribute of each
            self._made[node] = self._graph.node_copy(node)
        return self._made[node]

    def _needed(self) -> list[fx.Node]:
        """What was made before this stage and is to be made anew, with all that it takes: in the
        order in which the model does it, for some write into what others have made."""
        traced = self._traced
        before = set(traced.nodes[: self._start])
        wanted = [n for user in traced.nodes[self._start : self._end] for n in user.all_input_nodes]
        found: set[fx.Node] = set()
        while wanted:
            node = wanted.pop()
            if node not in before or node in found or node in self._made:
                continue
            found.add(node)
            if self._known(node) is _UNKNOWN:
                sources = node.all_input_nodes
                if not traced.following.issuperset(sources):
                    raise self._lost(node)
                wanted += [*sources, *traced.writers.get(node, ())]
        return [n for n in traced.nodes[: self._start] if n in found]

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
        dims = " or ".join(str(list(shape)) for shape in self._shapes)
        return ExportError(
            "NOT_SPLITTABLE",
            f"the size {_describe(self._traced, node)} crosses a cut but is no dim of the tensor "
            f"that crosses ({dims})",
            hint="cut elsewhere, or compute the size in the block that uses it",
        )


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dim of the tensor that crosses."""

    index: int


_UNKNOWN = object()


def _describe(traced: Traced, node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    value = traced.values[0][node]
    modules = [m for m in modules_of(node) if m]
    if not isinstance(value, Tensor) or not isinstance(node.target, torch._ops.OpOverload):
        return node.name
    kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{node.name} ({kind}, made in {modules[-1] if modules else 'the model itself'})"

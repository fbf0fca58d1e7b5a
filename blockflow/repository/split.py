"""Split: cut a model into a chain of stages before named submodules.

The model's forward is traced with torch.fx down to the modules that contain a cut; everything
below stays an opaque call, so that a module's inside may be any Python. (torch.distributed's
pipelining traces down to operators instead: tried, it fixes every size that the forward reads, rows
and lengths among them, to the example's, and its stages cannot be scripted.) A cut is legal where
exactly one tensor crosses it; integers that cross (sizes) are taken anew from that tensor's dims.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from blockflow.core.errors import ExportError

Values = Mapping[fx.Node, Any]


@dataclass(frozen=True, slots=True)
class Traced:
    """A model's graph with every node's value (tensors: on meta) under each example input."""

    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    values: tuple[Values, ...]

    def crossing(self, position: int) -> list[fx.Node]:
        """Nodes whose value is made before ``position`` and used at or after it."""
        index = {n: i for i, n in enumerate(self.nodes)}
        return [
            n
            for n in self.nodes[:position]
            if n.op != "get_attr" and any(index[u] >= position for u in n.users)
        ]

    def crossing_tensors(self, position: int) -> list[fx.Node]:
        return [n for n in self.crossing(position) if not isinstance(self.values[0][n], int)]

    def sole_crossings(self) -> list[fx.Node | None]:
        """For each position, in one sweep: what alone crosses there of :meth:`crossing_tensors`;
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
            if uses and node.op != "get_attr" and not isinstance(self.values[0][node], int):
                crossing[node] = None
                ending[max(uses)].append(node)
        return found

    def find(self, name: str) -> int | None:
        """Position of the first node that belongs to submodule ``name``."""
        for i, node in enumerate(self.nodes):
            if node.op == "call_module" and _within(str(node.target), name):
                return i
            stack = node.meta.get("nn_module_stack") or {}
            if any(_within(str(key).split("@")[0], name) for key in stack):
                return i
        return None


class _Tracer(fx.Tracer):
    """Opens only the modules whose inside must be seen."""

    def __init__(self, opened: frozenset[str]) -> None:
        super().__init__()
        self._opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        # only dtype and dims are needed later: do not hold every activation
        kept = value.to("meta") if isinstance(value, Tensor) else value
        self.values[n] = kept
        return value


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith(name + ".")


def ancestors(names: Iterable[str]) -> frozenset[str]:
    """All modules that strictly contain one of ``names`` (the root aside)."""
    out: set[str] = set()
    for name in names:
        parts = name.split(".")
        out.update(".".join(parts[:i]) for i in range(1, len(parts)))
    return frozenset(out)


def refuse_open_forward(module: nn.Module, where: str) -> None:
    """Raises ExportError: NOT_SPLITTABLE when ``forward(*xs)`` leaves open how many tensors go in:
    neither a cut nor torch.export finds its one input then."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a compiled method, which no Python describes
        return
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise ExportError(
                "NOT_SPLITTABLE",
                f"forward takes any number of inputs (*{parameter.name}); a block takes one",
                where=where,
                hint="give the forward one parameter with a name, or wrap the model",
            )
        if parameter.kind is not parameter.VAR_KEYWORD:
            return


def refuse_more_inputs(module: nn.Module, where: str) -> None:
    """Raises ExportError: NOT_SPLITTABLE when ``forward`` has to be given more than one input."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a compiled method, which no Python describes
        return
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in open_ended]
    if len(required) > 1:
        raise ExportError(
            "NOT_SPLITTABLE",
            f"forward takes {len(required)} inputs ({', '.join(required)}); a block takes one",
            where=where,
            hint="wrap the model so that one tensor goes in",
        )


def trace(model: nn.Module, opened: frozenset[str], examples: Sequence[Tensor]) -> Traced:
    """Trace ``model`` with the modules of ``opened`` laid open and run it on the examples.

    Raises:
        ExportError: NOT_SPLITTABLE when the forward cannot be traced, takes more than one input,
            or returns anything but one tensor.
    """
    where = type(model).__name__
    refuse_open_forward(model, where)
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
        optional = {
            p.name: p.default
            for p in parameters[1:]
            if p.default is not p.empty and p.kind is not p.VAR_KEYWORD
        }
        refuse_more_inputs(model, where)
        taken = parameters[0].name if parameters else ""
        graph = _Tracer(opened).trace(model, concrete_args=optional or None)
        for node in list(graph.nodes):
            # concrete arguments stay behind as placeholders without users
            if node.op == "placeholder" and not node.users and node.name != taken:
                graph.erase_node(node)
        module = fx.GraphModule(model, graph)
        recorded: list[Values] = []
        with torch.no_grad():
            for example in examples:
                recorder = _Recorder(module)
                recorder.run(example.clone())
                recorded.append(recorder.values)
    except ExportError:
        raise
    except Exception as e:
        raise ExportError(
            "NOT_SPLITTABLE",
            f"the forward cannot be traced: {type(e).__name__}: {_first_line(e)}",
            where=where,
            hint="control flow that looks at tensors must lie inside a submodule that is not cut",
        ) from e
    nodes = tuple(module.graph.nodes)
    result = recorded[0][nodes[-1]]
    if not isinstance(result, Tensor):
        kind = type(result).__name__.removeprefix("immutable_")  # fx's own dict and list
        raise ExportError(
            "NOT_SPLITTABLE",
            f"the model returns a {kind}, not one tensor",
            where=where,
            hint="name each head as a block of its own (--block name=submodule)",
        )
    return Traced(module, nodes, tuple(recorded))


def split_model(
    model: nn.Module, cuts: Sequence[str], examples: Sequence[Tensor]
) -> list[fx.GraphModule]:
    """Cut ``model`` before each submodule of ``cuts``; returns ``len(cuts) + 1`` stages in order.

    Args:
        model: in eval mode; its submodules are shared with the stages, not copied.
        cuts: names as in ``model.named_modules()``, in the order of execution.
        examples: inputs of all :func:`blockflow.repository.probe.probe_bindings`.

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
    traced = trace(model, ancestors(cuts), examples)
    positions: list[int] = []
    for cut in cuts:
        position = traced.find(cut)
        if position is None:
            raise ExportError("NOT_SPLITTABLE", f"the forward never calls submodule {cut!r}")
        check_cut(traced, position, cut)
        if positions and position <= positions[-1]:
            raise ExportError(
                "NOT_SPLITTABLE",
                f"submodule {cut!r} does not run after the cut before it",
                hint="list the cuts once each, in the order in which the model runs them",
            )
        positions.append(position)
    return cut_graph(traced, positions)


def check_cut(traced: Traced, position: int, name: str) -> None:
    """Raise NOT_SPLITTABLE unless exactly one tensor crosses the cut at ``position``."""
    crossing = traced.crossing_tensors(position)
    if not any(n.op == "call_module" for n in traced.nodes[:position]):
        raise ExportError(
            "NOT_SPLITTABLE",
            f"nothing runs before submodule {name!r}: the first block would be empty",
            hint="leave this cut out; the first block begins at the input",
        )
    if len(crossing) == 1 and isinstance(traced.values[0][crossing[0]], Tensor):
        return
    names = [_describe(n) for n in crossing]
    raise ExportError(
        "NOT_SPLITTABLE",
        f"{len(crossing)} values cross the cut before {name!r}: {', '.join(names)}",
        where=name,
        hint="one tensor may cross a cut; cut where no skip connection passes by",
        details={"crossing": names},
    )


def cut_graph(traced: Traced, positions: Sequence[int]) -> list[fx.GraphModule]:
    """Build the stages between legal cut positions."""
    bounds = [0, *positions, len(traced.nodes)]
    return [_stage(traced, start, end) for start, end in pairwise(bounds)]


def _stage(traced: Traced, start: int, end: int) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    x: fx.Node | None = None
    if start:
        (crossing,) = traced.crossing_tensors(start)
        x = graph.placeholder("x")
        env[crossing] = x
        for node in traced.crossing(start):
            if node is not crossing:
                env[node] = _size_again(graph, traced, node, crossing, x)

    def source(node: fx.Node) -> Any:
        if node not in env:  # a parameter used in several stages is an attribute of each
            env[node] = graph.node_copy(node)
        return env[node]

    for node in traced.nodes[start:end]:
        if node.op == "get_attr":
            continue
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], source))
            continue
        env[node] = graph.node_copy(node, source)
    if end < len(traced.nodes):
        (leaving,) = traced.crossing_tensors(end)
        graph.output(source(leaving))
    for node in graph.nodes:
        # annotations would be printed under names that torch.jit.script does not know
        node.type = None
    graph.lint()
    stage = fx.GraphModule(traced.module, graph)
    return stage.eval()


def _size_again(
    graph: fx.Graph, traced: Traced, node: fx.Node, crossing: fx.Node, x: fx.Node
) -> Any:
    """An integer that crosses: a constant, or a dim of the crossing tensor."""
    sizes = tuple(values[node] for values in traced.values)
    if len(set(sizes)) == 1:
        return sizes[0]
    shapes = [values[crossing].shape for values in traced.values]
    for i, dims in enumerate(zip(*shapes, strict=True)):
        if dims == sizes:
            return graph.call_method("size", (x, i))
    raise ExportError(
        "NOT_SPLITTABLE",
        f"the size {_describe(node)} crosses a cut but is no dim of {_describe(crossing)}",
        hint="cut elsewhere, or compute the size in the block that uses it",
    )


def _describe(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _first_line(e: Exception) -> str:
    text = str(e).strip()
    return text.splitlines()[0][:300] if text else ""

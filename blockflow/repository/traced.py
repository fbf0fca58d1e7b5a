"""Traced: a model's graph, what each node gives for examples, and what crosses between nodes.

A graph is of calls of submodules (:func:`trace`) or of operators
(:func:`blockflow.repository.unfold.unfold`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from blockflow.core.errors import ExportError

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
        writers: of such a node, those of them that write into what it gave (``mask.fill_(0)``).
    """

    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    values: tuple[Values, ...]
    following: frozenset[fx.Node]
    writers: Mapping[fx.Node, frozenset[fx.Node]]

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
        tensor has to cross alone, as a contract can tell of it, and not the input itself."""
        sole = self.sole_crossings()
        found: dict[int, int] = {}
        for start in begins:
            for i in self._gap(start):
                node = sole[i]
                if node is not None and node.op != "placeholder" and self._dims_told(node):
                    found[start] = i
                    break
        return found

    def _dims_told(self, node: fx.Node) -> bool:
        """Whether a tensor's dims are numbers and the input's own, rows first."""
        shapes = [getattr(values[node], "shape", ()) for values in self.values]
        if not shapes[0] or len({len(shape) for shape in shapes}) > 1:
            return False
        (source, *_) = (n for n in self.nodes if n.op == "placeholder")
        known = list(zip(*(values[source].shape for values in self.values), strict=True))
        first, *rest = zip(*shapes, strict=True)
        return first == known[0] and all(len(set(d)) == 1 or d in known for d in rest)

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


def record(module: fx.GraphModule, examples: Sequence[Tensor]) -> Traced:
    """Run a graph on the examples, which it leaves as they are. Raises what the model raises."""
    runs: list[_Recorder] = []
    with torch.no_grad():
        for example in examples:
            runs.append(_Recorder(module))
            runs[-1].run(example.clone())
    following = frozenset(set.intersection(*(set(run.following) for run in runs)))
    writers = {
        node: frozenset(w for run in runs for w in run.writers.get(node, ())) for node in following
    }
    return Traced(
        module,
        tuple(module.graph.nodes),
        tuple(run.values for run in runs),
        following,
        {node: found for node, found in writers.items() if found},
    )


class _Recorder(fx.Interpreter):
    """Notes what each node gives, and which values follow from parameters and sizes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}
        self.following: dict[fx.Node, list[tuple[Tensor, int]]] = {}
        """With the tensors of each, and how often they have been written to."""
        self.writers: dict[fx.Node, set[fx.Node]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n] = _without_elements(value)
        follows = n.op not in ("placeholder", "output") and self.following.keys() >= set(
            n.all_input_nodes
        )
        if not _only_reads(n):
            self._note_writes(n, follows)
        if follows or settled(value):
            self.following[n] = [(t, _writes(t)) for t in _tensors(value)]
        return value

    def _note_writes(self, n: fx.Node, follows: bool) -> None:
        for node, held in list(self.following.items()):
            if all(_writes(t) == before for t, before in held):
                continue
            if follows:
                self.following[node] = [(t, _writes(t)) for t, _ in held]
                self.writers.setdefault(node, set()).add(n)
            else:  # the model's data is in it now
                del self.following[node]


def _without_elements(value: Any) -> Any:
    """Only dtype and dims are needed later: do not hold every activation."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, tuple | list):
        return (list if isinstance(value, list) else tuple)(map(_without_elements, value))
    return value


def _only_reads(node: fx.Node) -> bool:
    target = node.target
    return node.op in ("placeholder", "get_attr", "output") or (
        isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
    )


def settled(value: Any) -> bool:
    """A number or several, of which dims are made; or what a tensor is besides its elements."""
    if isinstance(value, tuple | list):
        return all(map(settled, value))
    return isinstance(value, int | float | torch.dtype | torch.device)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Tracer(fx.Tracer):
    """Opens only the modules whose inside must be seen."""

    def __init__(self, opened: frozenset[str]) -> None:
        super().__init__()
        self._opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened


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
        traced = record(fx.GraphModule(model, graph), examples)
    except ExportError:
        raise
    except Exception as e:
        raise Untraced(
            "NOT_SPLITTABLE",
            f"the forward cannot be traced: {type(e).__name__}: {first_line(e)}",
            where=where,
            hint="control flow that looks at tensors must lie inside a submodule that is not cut; "
            "pt2, the default format, follows what looks at their sizes only",
        ) from e
    result = traced.values[0][traced.nodes[-1]]
    if not isinstance(result, Tensor):
        kind = type(result).__name__.removeprefix("immutable_")  # fx's own dict and list
        raise ExportError(
            "NOT_SPLITTABLE",
            f"the model returns a {kind}, not one tensor",
            where=where,
            hint="name each head as a block of its own (--block name=submodule)",
        )
    return traced


def first_line(e: Exception) -> str:
    text = str(e).strip()
    return text.splitlines()[0][:300] if text else ""

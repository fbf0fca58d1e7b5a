"""Indices: which integers a block may be given so that none leads out of a table.

torch checks each index when it looks something up. Machine code that torch's compiler makes ends
the process instead where it checks within a parallel loop; ONNX Runtime and OpenVINO take negative
numbers from the table's end, and OpenVINO has zeros for those beyond it. So the exported graph is
asked, when a block is converted, which operators look up by what its input holds. Where these are
the input's own integers, the table's size is their bound; where the block computes them, it is what
the manifest says of the input (``int_below``). The file says it of itself, and its engines check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from blockflow.core.inplace import makes_new, written_nodes
from blockflow.core.model import BlockInfo

INDICES = "blockflow.indices"
"""What a file of ours says in its metadata: ``LEAST MOST`` of the input's integers; a dash where
they need no check, or where nobody knows their bound."""
_NONE = "-"

Span = tuple[int, int]

_MOVED = frozenset(
    "alias clone contiguous detach expand expand_as flatten lift_fresh_copy permute reshape "
    "reshape_as squeeze t to _to_copy transpose unflatten unsqueeze view view_as".split()
)
"""Give all of their input's numbers, and no others."""
_FROM_TABLE = frozenset("embedding embedding_bag gather index index_select select slice".split())
"""Give a table's numbers, whatever the indices are."""
_BOUNDED = frozenset(
    "argmax argmin argsort count_nonzero one_hot zeros ones full zeros_like ones_like empty_like "
    "full_like new_zeros new_ones new_full new_empty".split()
)
"""What they give stays within sizes, however large their input is."""
_CONSTANT = frozenset("zeros ones zeros_like ones_like new_zeros new_ones".split())
_FILLED = {"full": 1, "full_like": 1, "new_full": 2}
"""Which of their arguments all of their numbers are: a size of the input, perhaps."""
_CHOSEN = frozenset("copy fill masked_fill where zero".split())
"""All of their numbers are among their arguments', or 0."""
_PLACES = frozenset("cummax cummin kthvalue max median min mode sort topk".split())
"""Of two results the second is where the first has stood."""
_ARGS = frozenset("argmax argmin argsort".split())
_AT_DIM = frozenset(
    "gather index_add index_copy index_fill index_reduce index_select scatter scatter_add "
    "scatter_reduce".split()
)
"""``f(table, dim, index, ...)``."""


@dataclass(frozen=True, slots=True)
class Indices:
    """What a graph looks up by its input.

    Attributes:
        span: least and greatest of the input's integers that lead out of no table that they are
            looked up in themselves; None: there is no such.
        computed: an operator whose indices are computed of the input, '' = there is none.
        by_length: one that looks up by anything else that follows from the input, in a table of a
            fixed size, and so perhaps by its dims, which no check of integers bounds.
    """

    span: Span | None
    computed: str
    by_length: str = ""


def indices_of(program: Any) -> Indices:
    """Ask an exported program (``torch.export.ExportedProgram``) with one input."""
    (given,) = program.graph_signature.user_inputs
    walk = _Walk()
    for node in program.graph_module.graph.nodes:
        walk.node(node, program.graph_module, str(given))
    return Indices(walk.span, walk.computed, walk.by_length)


def span_within(found: Indices, block: BlockInfo) -> Span | None:
    """What the input's integers are to be checked for, with what the manifest says of them. What a
    block may be padded with it takes, too."""
    if not found.computed or block.int_below is None:
        return found.span
    also = 0 if block.padding is None else int(block.padding.value)
    said = (min(0, also), max(block.int_below - 1, also))
    return said if found.span is None else _both(found.span, said)


def to_text(span: Span | None) -> str:
    """As a file's metadata has it."""
    return _NONE if span is None else f"{span[0]} {span[1]}"


def from_text(text: str | None) -> Span | None:
    """Inverse of :func:`to_text`; files of before 0.2 say nothing."""
    if text in (None, "", _NONE):
        return None
    least, most = map(int, str(text).split())
    return least, most


def refuse_outside(x: Tensor, span: Span | None) -> None:
    """Raises IndexError where an integer of ``x`` would lead out of a table."""
    if span is None or not x.numel():
        return
    low, high = span
    ends = torch.aminmax(x)
    if not all(n.isfinite() for n in ends):
        raise IndexError("index out of range: a number that is not finite")
    least, most = (int(n) for n in ends)
    if least < low or most > high:
        found = least if least < low else most
        raise IndexError(f"index out of range: {found}, the block takes {low} to {high}")


def _both(a: Span, b: Span) -> Span:
    return max(a[0], b[0]), min(a[1], b[1])


class _Walk:
    """Follows the input through a graph. ``_own``: values that are its integers as they are;
    ``_limited``: those that were brought within a span; ``_made``: others that are computed of it,
    and may be as large as it likes. ``_later``: whatever follows from it, its dims among that;
    ``_steady``: what of this grows with none of them. ``_memory``: of each value, who made the
    memory that it may lie in, as a view does in what it is of."""

    def __init__(self) -> None:
        self.span: Span | None = None
        self.computed = ""
        self.by_length = ""
        self._own: set[fx.Node] = set()
        self._later: set[fx.Node] = set()
        self._steady: set[fx.Node] = set()
        self._limited: dict[fx.Node, Span] = {}
        self._made: set[fx.Node] = set()
        self._memory: dict[fx.Node, frozenset[fx.Node]] = {}

    def node(self, node: fx.Node, module: Any, given: str) -> None:
        """Take in the next node of the graph."""
        if node.op == "placeholder" and node.name == given:
            self._later.add(node)
            if not _is_bool(node):
                self._own.add(node)
        name = _name(node)
        self._memory[node] = self._lies(node)
        follows = self._follows(node.all_input_nodes)
        if node.op != "call_function" or (
            not follows and self._later.isdisjoint(node.all_input_nodes)
        ):
            return
        self._later.add(node)
        written = self._written(node)
        self._later |= written
        if name not in _CHOSEN or self._grows(n for n in node.all_input_nodes if n not in written):
            self._steady -= written
        if self._is_steady(node, name):
            self._steady.add(node)
        for index, size, least in _lookups(node, name):
            self._look_up(name, index, size, least)
        if any(_looks_up(graph) for graph in _graphs(node, module)):
            self.by_length = self.by_length or name
            self.computed = self.computed or name * follows
        if not follows:
            return
        # Tokens that were shifted through a view, say, are looked up by another name.
        self._own -= written
        self._made |= written
        for value in written:
            self._limited.pop(value, None)
        if self._is_bounded(node, name):
            return
        source = node.all_input_nodes[0]
        moved = name in _MOVED and _is_integer(node)
        limit = self._limited.get(source) if moved else _limit(node, name)
        if limit is not None:
            self._limited[node] = limit
        else:
            (self._own if moved and source in self._own else self._made).add(node)

    def _lies(self, node: fx.Node) -> frozenset[fx.Node]:
        schema = getattr(node.target, "_schema", None)
        new = schema is not None and (makes_new(schema) or _name(node) in _BOUNDED)
        made = [] if new else [self._memory[n] for n in node.all_input_nodes]
        return frozenset().union(*made) or frozenset((node,))

    def _written(self, node: fx.Node) -> set[fx.Node]:
        """What is not what it was after this: whatever lies in memory that it writes into."""
        schema = getattr(node.target, "_schema", None)
        targets = () if schema is None else filter(None, written_nodes(node, schema))
        memory = frozenset().union(*(self._memory[n] for n in targets))
        found = (v for v, lies in self._memory.items() if memory and not memory.isdisjoint(lies))
        return {v for v in found if v is not node and not _is_bool(v)}

    def _follows(self, nodes: Any) -> bool:
        return any(n in self._own or n in self._limited or n in self._made for n in nodes)

    def _grows(self, nodes: Iterable[Any]) -> bool:
        return any(n in self._later and n not in self._steady for n in nodes)

    def _is_steady(self, node: fx.Node, name: str) -> bool:
        if name in _FILLED:
            return not self._grows([node.args[_FILLED[name]]])
        if name in _CHOSEN:
            return not self._grows(node.all_input_nodes)
        moved = name in _MOVED and node.args[0] in self._steady
        return moved or name in _CONSTANT or _is_bool(node) or _is_place(node, name)

    def _look_up(self, name: str, index: fx.Node, size: int | None, least: int) -> None:
        limit = self._limited.get(index)
        if limit is not None and size is not None and least <= limit[0] and limit[1] < size:
            return
        if index in self._own and size is not None:
            span = (least, size - 1)
            self.span = span if self.span is None else _both(self.span, span)
            return
        follows = self._follows([index])
        if follows:
            self.computed = self.computed or name
        if size is not None and limit is None and (follows or self._grows([index])):
            self.by_length = self.by_length or name

    def _is_bounded(self, node: fx.Node, name: str) -> bool:
        if _is_bool(node):
            return True
        if name in _FILLED:
            return not self._follows([node.args[_FILLED[name]]])
        if name in _BOUNDED:
            return True
        if name in _FROM_TABLE | _MOVED:  # to sizes of the input, perhaps
            return not self._follows([node.args[0]])
        if name == "getitem":
            source, place = node.args
            places = isinstance(source, fx.Node) and _name(source) in _PLACES
            return places and bool(place == 1)
        return False


def _is_place(node: fx.Node, name: str) -> bool:
    """Whether it says where something stands in a dim of a fixed size."""
    known, source = _ARGS, node.args[0] if name == "getitem" else None
    if isinstance(source, fx.Node) and node.args[1] == 1:
        known, node, name = _PLACES, source, _name(source)
    if name not in known:
        return False
    at = 2 if name in ("topk", "kthvalue") else 1
    last = None if name in ("argmax", "argmin") else -1  # None: all dims
    dim = node.args[at] if len(node.args) > at else node.kwargs.get("dim", last)
    return _size(node.args[0], dim) is not None


def _limit(node: fx.Node, name: str) -> Span | None:
    """Within what an operator brings any integers. Floats it does not: a NaN stays one, and is an
    integer of any size in the end."""
    if not _is_integer(node):
        return None
    if name == "sign":
        return (-1, 1)
    if name in ("bucketize", "searchsorted"):
        places = _size(node.args[name == "bucketize"], -1)
        return None if places is None else (0, places)
    if name == "clamp":
        ends = [*node.args[1:3], *(node.kwargs[k] for k in ("min", "max") if k in node.kwargs)]
        low, high = (ends[0], ends[1]) if len(ends) == 2 else (None, None)
        return (low, high) if isinstance(low, int) and isinstance(high, int) else None
    if name == "remainder" and isinstance(by := node.args[1], int) and by:
        return (0, by - 1) if by > 0 else (by + 1, 0)
    return None


def _name(node: fx.Node) -> str:
    """``embedding`` of ``aten.embedding.default``; a write in place counts as what it writes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return str(getattr(node.target, "__name__", node.target))
    name = str(schema.name).rpartition("::")[2]
    return name.removesuffix("_") or name


def _lookups(node: fx.Node, name: str) -> Iterator[tuple[fx.Node, int | None, int]]:
    """Each tensor of indices, how many there are to look up, and the least that torch takes."""
    found: list[tuple[Any, Any, int]] = []
    if name in ("embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"):
        found = [(node.args[1], _size(node.args[0], 0), 0)]
    elif name in _AT_DIM:
        found = [(node.args[2], _size(node.args[0], node.args[1]), 0)]
    elif name in ("index", "index_put", "_index_put_impl", "_unsafe_index"):
        many: Any = node.args[1]
        sizes = [(index, _size(node.args[0], dim)) for dim, index in enumerate(many)]
        found = [(index, size, -(size or 0)) for index, size in sizes]
    elif name == "one_hot":
        classes = node.args[1] if len(node.args) > 1 else None
        found = [(node.args[0], classes if isinstance(classes, int) else None, 0)]
    elif name in ("take", "take_along_dim", "put"):
        found = [(node.args[1], None, 0)]
    for index, size, least in found:
        if isinstance(index, fx.Node) and not _is_bool(index):
            yield index, size, least


def _size(table: Any, dim: Any) -> int | None:
    """None: it is dynamic."""
    value = table.meta.get("val") if isinstance(table, fx.Node) else None
    if not isinstance(value, Tensor) or not isinstance(dim, int) or not value.dim():
        return None
    size = value.shape[dim]
    return size if isinstance(size, int) else None


def _graphs(node: fx.Node, module: Any) -> list[Any]:
    """The graphs that a branch or a loop runs."""
    named = [n for n in node.all_input_nodes if n.op == "get_attr"]
    values = [getattr(module, str(n.target), None) for n in named]
    return [v for v in values if isinstance(v, fx.GraphModule)]


def _looks_up(module: fx.GraphModule) -> bool:
    return any(
        n.op == "call_function"
        and (any(_lookups(n, _name(n))) or any(map(_looks_up, _graphs(n, module))))
        for n in module.graph.nodes
    )


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _is_integer(node: fx.Node) -> bool:
    dtype = _dtype(node)
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def _is_bool(node: fx.Node) -> bool:
    return _dtype(node) is torch.bool

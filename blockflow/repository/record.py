"""Record: run a model's graph on examples, and note what can be told of each node by that."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from blockflow.repository.traced import Traced, settled

_DEPTH = 4
"""How deep a value is looked into for tensors."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor as it was at one moment: later in-place operations change it, not the copy."""

    tensor: Tensor
    copy: Tensor
    writes: int

    @classmethod
    def now(cls, tensor: Tensor) -> Seen:
        return cls(tensor, tensor.clone(), _writes(tensor))

    def became(self, later: Seen) -> bool:
        """Whether it was written to before ``later``. Elements are compared as well: torch counts
        no writes through ``.data`` or in inference mode."""
        return self.writes != later.writes or not same_elements(self.copy, later.copy)

    def changed(self) -> bool:
        """Whether it was written to since."""
        writes = _writes(self.tensor)
        return self.writes != writes or not same_elements(self.copy, self.tensor)


def same_elements(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in dtype, dims and every element; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def tensors_of(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors in a tensor, a sequence, a map, or an object that holds such."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        parts: Any = ()
        if isinstance(value, list | tuple):
            parts = value
        elif isinstance(value, Mapping):
            parts = value.values()
        elif hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module):
            parts = vars(value).values()
        for part in parts:
            yield from tensors_of(part, depth - 1)


def record(module: fx.GraphModule, examples: Sequence[Tensor]) -> Traced:
    """Run a graph on the examples, which it leaves as they are. Raises what the model raises."""
    runs: list[_Recorder] = []
    with torch.no_grad():
        for example in examples:
            runs.append(_Recorder(module))
            runs[-1].run(example.clone())
    nodes = tuple(module.graph.nodes)
    after = {n: frozenset(w for run in runs for w in run.after.get(n, ())) for n in nodes}
    return Traced(
        module,
        nodes,
        tuple(run.values for run in runs),
        frozenset(set.intersection(*(run.following for run in runs))),
        {n: writers for n, writers in after.items() if writers},
    )


class _Recorder(fx.Interpreter):
    """Notes what each node gives, which values follow from parameters and sizes, and who writes
    into what others have made."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}
        self.following: set[fx.Node] = set()
        self.after: dict[fx.Node, set[fx.Node]] = {}
        """Of a node, those who wrote into what it takes since that was made."""
        self._position = {n: i for i, n in enumerate(module.graph.nodes)}
        self._memory: dict[fx.Node, dict[int, int]] = {}
        """Where the tensors in a node's value lie, by address: views of one another have the same
        number, and another tensor that is there later has not."""
        self._written: dict[int, list[fx.Node]] = {}
        self._parameters: dict[int, int] = {}
        self._numbers = itertools.count()

    def run_node(self, n: fx.Node) -> Any:
        taken = [(t, m) for i in n.all_input_nodes for t, m in self._held(i)]
        before = [] if _only_reads(n) else [Seen.now(t) for t, _ in taken]
        self._note_order(n)
        value = super().run_node(n)
        self.values[n] = _without_elements(value)
        follows = n.op not in ("placeholder", "output") and self.following.issuperset(
            n.all_input_nodes
        )
        written = {m for seen, (_, m) in zip(before, taken, strict=False) if seen.changed()}
        self._note_writes(n, written, follows)
        self._memory[n] = self._lies(n, value, taken)
        if follows or settled(value):
            self.following.add(n)
        return value

    def _held(self, node: fx.Node) -> Iterator[tuple[Tensor, int]]:
        known = self._memory[node]
        for tensor in tensors_of(self.env[node]):
            yield tensor, known.setdefault(_storage(tensor), next(self._numbers))

    def _lies(self, n: fx.Node, value: Any, taken: Sequence[tuple[Tensor, int]]) -> dict[int, int]:
        known = {_storage(t): m for t, m in taken}
        if n.op == "get_attr":  # one parameter may be got several times
            known = self._parameters
        return {
            _storage(t): known.setdefault(_storage(t), next(self._numbers))
            for t in tensors_of(value)
        }

    def _note_order(self, n: fx.Node) -> None:
        for taken in n.all_input_nodes:
            made = self._position[taken]
            late = {
                writer
                for memory in self._memory[taken].values()
                for writer in self._written.get(memory, ())
                if self._position[writer] > made
            }
            if late:
                self.after.setdefault(n, set()).update(late)

    def _note_writes(self, n: fx.Node, written: set[int], follows: bool) -> None:
        for memory in written:
            self._written.setdefault(memory, []).append(n)
        if written and not follows:  # the model's data is in it now
            self.following = {
                f for f in self.following if written.isdisjoint(self._memory[f].values())
            }


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


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version

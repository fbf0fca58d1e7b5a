"""Regions: what of a model's graph belongs to each named block of a tree.

A block is what its submodule does and, as a forward does things between two submodules (a mean, a
token that is taken out, an object that is opened), of that what leads from the tensor that its
parent gives to the tensor that it gives itself. The parent gives the last tensor that serves all
who follow it, so that what they have in common is done once, in the trunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, fx, nn

from blockflow.core.errors import ExportError
from blockflow.repository.stage import Stage
from blockflow.repository.traced import Traced, Untraced, described, modules_of
from blockflow.repository.tree import in_order


@dataclass(frozen=True, slots=True)
class Region:
    """One block of a graph.

    Attributes:
        parent: the block that it follows; None: the model's input.
        stage: from the one tensor to the other.
        begins, ends: whether it does something before its submodule, and after it.
    """

    parent: str | None
    stage: fx.GraphModule
    begins: bool
    ends: bool


def regions(
    traced: Traced, blocks: Mapping[str, str], gave: Mapping[str, str]
) -> dict[str, Region]:
    """What belongs to each block.

    Args:
        traced: of the whole model.
        blocks: block name -> submodule name, each of which runs once.
        gave: of the submodules that do not return one tensor what they do ("returns a tuple").

    Raises:
        ExportError: NOT_SPLITTABLE when more than one tensor crosses between two blocks, or when
            what stands between would be in several blocks with its parameters.
    """
    return _Regions(traced, blocks, gave).all()


class _Regions:
    def __init__(self, traced: Traced, blocks: Mapping[str, str], gave: Mapping[str, str]) -> None:
        self._traced = traced
        self._blocks, self._gave = blocks, gave
        self._position = {n: i for i, n in enumerate(traced.nodes)}
        self._owner: dict[fx.Node, str] = {}
        for node in traced.nodes:
            around = set(modules_of(node))
            for name, path in blocks.items():
                if path not in around:
                    continue
                if node in self._owner:
                    raise _refused(name, f"blocks {self._owner[node]!r} and {name!r} overlap")
                self._owner[node] = name

    def all(self) -> dict[str, Region]:
        """By block."""
        entrances = {name: self._entrances(name) for name in self._blocks}
        for name in self._blocks:
            self._given(name)
        parents = {name: self._parent(found[0]) for name, found in entrances.items()}
        taken = {
            name: entrances[name][-1]  # the input
            if parent is None
            else self._common({n: e for n, e in entrances.items() if parents[n] == parent})
            for name, parent in parents.items()
        }
        runs: dict[str, list[fx.Node]] = {}
        given: dict[str, fx.Node] = {}
        for name in in_order(parents):
            children = [n for n, parent in parents.items() if parent == name]
            given[name] = taken[children[0]] if children else self._result(name)
            before: set[fx.Node] = set()
            parent = parents[name]
            while parent is not None:
                before.update(runs[parent])
                parent = parents[parent]
            runs[name] = self._between(name, taken[name], given[name], before)
        self._refuse_doubled(runs)
        found: dict[str, Region] = {}
        for name, nodes in runs.items():
            mine = [i for i, n in enumerate(nodes) if self._owner.get(n) == name]
            found[name] = Region(
                parents[name],
                Stage(self._traced, nodes, taken[name], given[name]).build(),
                begins=self._computes(nodes[: mine[0]]),
                ends=self._computes(nodes[mine[-1] + 1 :]),
            )
        return found

    def _data(self, node: fx.Node) -> set[fx.Node]:
        """What of a node's sources is neither a parameter nor follows from sizes."""
        return {n for n in node.all_input_nodes if n not in self._traced.following}

    def _computes(self, nodes: Iterable[fx.Node]) -> bool:
        return any(n not in self._traced.following for n in nodes)

    def _entrances(self, name: str) -> list[fx.Node]:
        """The tensors of which the block can be computed, each with nothing else beside it: what
        its submodule takes, and back from there to the next named block, or the input."""
        inside = {n for n, owner in self._owner.items() if owner == name}
        frontier = {s for n in inside for s in self._data(n)} - inside
        if not frontier:
            path = self._blocks[name]
            raise _refused(name, f"submodule {path!r} takes nothing, or no result depends on it")
        found: list[fx.Node] = []
        while True:
            latest = max(frontier, key=self._position.__getitem__)
            if len(frontier) == 1 and self._crosses(latest):
                found.append(latest)
            if latest.op == "placeholder" or latest in self._owner:
                break
            inside.add(latest)
            frontier = (frontier | self._data(latest)) - inside
        if not found:
            raise self._crossing(name, frontier)
        return found

    def _crosses(self, node: fx.Node) -> bool:
        value = self._traced.values[0][node]
        return isinstance(value, Tensor) and self._traced.dims_told(node)

    def _parent(self, entrance: fx.Node) -> str | None:
        """The last named block that an entrance is computed from."""
        owned = self._ancestors(entrance) & self._owner.keys()
        return self._owner[max(owned, key=self._position.__getitem__)] if owned else None

    def _ancestors(self, node: fx.Node) -> set[fx.Node]:
        """A node and all data that it is made of."""
        found: set[fx.Node] = set()
        wanted = [node]
        while wanted:
            if (at := wanted.pop()) not in found:
                found.add(at)
                wanted += self._data(at)
        return found

    def _common(self, entrances: Mapping[str, list[fx.Node]]) -> fx.Node:
        """The last tensor that all blocks of one parent can be computed of."""
        common = set.intersection(*(set(found) for found in entrances.values()))
        if not common:
            wanted = {name: described(self._traced, found[-1]) for name, found in entrances.items()}
            each = ", ".join(f"{name!r} {what}" for name, what in wanted.items())
            raise _refused(
                next(iter(entrances)),
                f"blocks that follow the same block take different tensors of it: {each}",
                "a block gives one tensor: name what makes the others as blocks of their own, or "
                "instead of that block the part of it that all of them need; where one layer makes "
                "both (an LSTM its outputs and last state), let one follow from the other in the "
                "forward (outputs[:, -1])",
            )
        return max(common, key=self._position.__getitem__)

    def _result(self, name: str) -> fx.Node:
        """The tensor that a last block's submodule gives."""
        path = self._blocks[name]
        if gave := self._gave.get(name):
            raise _refused(
                name,
                f"submodule {path!r} {gave}; a last block gives one tensor",
                "wrap it in a submodule that gives the tensor, and name that",
            )
        return self._given(name)[0]

    def _given(self, name: str) -> list[fx.Node]:
        """What others take of a block's submodule. One that returns a tensor gives no other (by a
        write into what it takes, say)."""
        mine = [n for n, owner in self._owner.items() if owner == name]
        data = [n for n in mine if n not in self._traced.following]
        given = [n for n in data if any(self._owner.get(u) != name for u in n.users)]
        if len(given) > 1 and name not in self._gave:
            raise _refused(
                name,
                f"not only the result of submodule {self._blocks[name]!r} is used outside of it: "
                + ", ".join(described(self._traced, n) for n in given),
                "it writes into what it takes, or keeps a tensor: let it return all in one",
            )
        if not given and len(data) != 1:  # of operators it cannot be told which one would
            raise _refused(
                name, f"the model uses nothing of what submodule {self._blocks[name]!r} gives"
            )
        return given or data

    def _between(
        self, name: str, taken: fx.Node, given: fx.Node, before: set[fx.Node]
    ) -> list[fx.Node]:
        """What leads from the one tensor to the other, in order, with what is written meanwhile
        into tensors on the way, and what is written into the last one before others see it.
        ``before`` is what the blocks before this one do."""
        later = self._descendants(taken)
        found: set[fx.Node] = set()
        lost: set[fx.Node] = set()
        after = self._traced.after
        wanted = [given]
        for user in given.users:
            if self._owner.get(user) != name:
                wanted += [w for w in after.get(user, ()) if self._owner.get(w) == name]
        while wanted:
            node = wanted.pop()
            if node is taken or node in found:
                continue
            if node in later and self._owner.get(node, name) == name:
                found.add(node)
                wanted += [*node.all_input_nodes, *(after.get(node, frozenset()) - before)]
            elif node not in self._traced.following:
                lost.add(node)
        if lost:
            raise self._crossing(name, {taken, *lost})
        return [n for n in self._traced.nodes if n in found]

    def _descendants(self, node: fx.Node) -> set[fx.Node]:
        found: set[fx.Node] = set()
        wanted = list(node.users)
        while wanted:
            if (at := wanted.pop()) not in found and at.op != "output":
                found.add(at)
                wanted += at.users
        return found

    def _refuse_doubled(self, runs: Mapping[str, list[fx.Node]]) -> None:
        """What stands between and has parameters belongs to one block."""
        first: dict[fx.Node, str] = {}
        for name, nodes in runs.items():
            for node in nodes:
                if node in self._owner or not self._weighs(node):
                    continue
                other = first.setdefault(node, name)
                if other != name:
                    raise _refused(
                        name,
                        f"{described(self._traced, node)} has parameters, and both blocks "
                        f"{other!r} and {name!r} need it",
                        "name it as a block of its own",
                    )

    def _weighs(self, node: fx.Node) -> bool:
        module = self._traced.module
        if node.op == "call_module":
            return next(module.get_submodule(str(node.target)).parameters(), None) is not None
        wanted = [n for n in node.all_input_nodes if n in self._traced.following]
        seen: set[fx.Node] = set()
        while wanted:
            at = wanted.pop()
            if at in seen:
                continue
            seen.add(at)
            if at.op == "get_attr" and isinstance(_attribute(module, at), nn.Parameter):
                return True
            wanted += [n for n in at.all_input_nodes if n in self._traced.following]
        return False

    def _crossing(self, name: str, nodes: Iterable[fx.Node]) -> ExportError:
        ordered = sorted(nodes, key=self._position.__getitem__)
        names = [described(self._traced, n) for n in ordered]
        if len(names) == 1:
            if not isinstance(self._traced.values[0][ordered[0]], Tensor):  # operators tell more
                what = f"nor is what block {name!r} takes a tensor by itself: {names[0]}"
                return Untraced("NOT_SPLITTABLE", what, where=name)
            return _refused(
                name, f"the dims of what block {name!r} takes are not the input's own: {names[0]}"
            )
        writers = set().union(*self._traced.after.values())
        written = [n for n in ordered if n in writers]
        if written:
            writes = " and ".join(described(self._traced, n) for n in written)
            return _refused(
                name,
                f"block {name!r} reads what {writes} writes into, after it: {', '.join(names)} "
                "cross to it",
                "write in place (inplace=True, relu_, +=) only into what one block makes and takes",
                names,
            )
        return _refused(
            name,
            f"{len(names)} values cross to block {name!r}: {', '.join(names)}",
            "a block takes one tensor: name what makes the others as a block of its own, or let "
            "this one begin earlier",
            names,
        )


def _attribute(module: nn.Module, node: fx.Node) -> object:
    path, _, last = str(node.target).rpartition(".")
    return getattr(module.get_submodule(path), last, None)


def _refused(
    name: str, message: str, hint: str = "", crossing: list[str] | None = None
) -> ExportError:
    details = {"crossing": crossing} if crossing else {}
    return ExportError("NOT_SPLITTABLE", message, where=name, hint=hint, details=details)

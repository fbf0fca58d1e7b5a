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
from itertools import pairwise

from torch import Tensor, fx, nn

from blockflow.core.errors import ExportError
from blockflow.repository.stage import Stage
from blockflow.repository.trace import trace
from blockflow.repository.traced import Traced, Untraced, described

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
            return cut_before(way(), cuts)
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


def cut_before(traced: Traced, cuts: Sequence[str]) -> list[fx.GraphModule]:
    """Cut a graph before each submodule of ``cuts``. Raises as :func:`split_model` does."""
    return cut_graph(traced, _positions(traced, cuts))


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
            _check_crossing(traced, begins, cut)
        positions.append(found)
        begun = begins
    return positions


def _check_crossing(traced: Traced, position: int, name: str) -> None:
    """Raise NOT_SPLITTABLE unless exactly one tensor crosses at ``position``. (What is wrong with
    the dims of a single one is told of when its contract is made.)"""
    crossing = traced.crossing_data(position)
    if len(crossing) == 1 and isinstance(traced.values[0][crossing[0]], Tensor):
        return
    names = [described(traced, n) for n in crossing]
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
    return [_between(traced, start, end).build() for start, end in pairwise(bounds)]


def _between(traced: Traced, start: int, end: int) -> Stage:
    taken = given = None
    if start:
        (taken,) = traced.crossing_data(start)
    nodes = [n for n in traced.nodes[start:end] if n.op != "output"]
    if end < len(traced.nodes):
        (given,) = traced.crossing_data(end)
    else:
        (given,) = traced.nodes[-1].all_input_nodes
    return Stage(traced, nodes, taken, given)

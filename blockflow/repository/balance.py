"""Balance: cut a model into N stages of even measured time.

Candidates are the places before each call of a submodule; a submodule that takes more than one
stage's share is opened, so that places inside it become candidates. Among the legal ones the cuts
that make the slowest stage fastest are found by dynamic programming over prefix sums.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn

from blockflow.core.errors import ExportError
from blockflow.repository.split import Unfold, cut_graph, unreached
from blockflow.repository.trace import trace
from blockflow.repository.traced import Traced, Untraced
from blockflow.tuning.slicing import even_cuts

_REPEATS = 5
_MAX_OPENINGS = 64
_WORTH = 0.9
"""Cuts between operators have to make the slowest stage at least so much shorter: stages of
submodules are easier to read, and the times of one run differ."""


class _Timer(fx.Interpreter):
    """Seconds of each node in one run."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        start = time.perf_counter()
        value = super().run_node(n)
        self.seconds[n] = time.perf_counter() - start
        return value


def split_evenly(
    model: nn.Module,
    parts: int,
    examples: Sequence[Tensor],
    timed: Tensor,
    unfold: Unfold | None = None,
) -> list[fx.GraphModule]:
    """Cut ``model`` into ``parts`` stages whose slowest is as fast as the legal cuts allow.

    Args:
        model: in eval mode.
        parts: number of stages, at least 1.
        examples: inputs of all :func:`blockflow.repository.probe.probe_bindings`.
        timed: the input to measure with (one row, as a rule).
        unfold: what to cut where submodules cannot be opened, or leave too few places; None: they
            stay one piece.

    Raises:
        ExportError: NOT_SPLITTABLE when the model has fewer legal cuts than asked for.
    """
    if parts < 1:
        raise ExportError("NOT_SPLITTABLE", f"{parts} parts: at least one is needed")
    found: list[_Cut] = []
    refused: list[ExportError] = []
    whole = True
    try:
        traced, seconds, whole = _calls(model, parts, examples, timed)
        found.append(_evenly(traced, seconds, parts))
    except ExportError as e:
        refused.append(e)
    if unfold is not None and (whole or not found):
        try:
            operators = unfold()
            found.append(_evenly(operators, _measure(operators, timed), parts))
        except ExportError as e:
            untold = refused and not isinstance(refused[0], Untraced)
            if whole and untold and isinstance(e, Untraced):
                refused[0].message += f": what stays whole can be neither traced {e.message}"
            refused.append(e)
    if not found:
        raise unreached(refused)
    calls, *deeper = found
    best = next((cut for cut in deeper if cut.share < calls.share * _WORTH), calls)
    return cut_graph(best.traced, best.positions)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Cuts, and the slowest stage's share of the whole time."""

    traced: Traced
    positions: list[int]
    share: float


def _calls(
    model: nn.Module, parts: int, examples: Sequence[Tensor], timed: Tensor
) -> tuple[Traced, list[float], bool]:
    """The calls of submodules, their times, and whether one that is long stayed whole."""
    opened: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()
    traced = trace(model, opened, examples)
    seconds = _measure(traced, timed)
    for _ in range(_MAX_OPENINGS):
        long = _long(model, traced, seconds, parts) - closed
        if not long:
            break
        grown, further = _open(model, opened, long, examples)
        closed |= long - grown  # what cannot be traced inside stays one piece
        if further is not None:
            opened, traced, seconds = grown, further, _measure(further, timed)
    return traced, seconds, bool(closed)


def _evenly(traced: Traced, seconds: Sequence[float], parts: int) -> _Cut:
    legal = _legal(traced)
    if len(legal) < parts - 1:
        raise ExportError(
            "NOT_SPLITTABLE",
            f"{parts} parts need {parts - 1} cuts, the model has {len(legal)} legal ones",
            hint="a cut is where one tensor crosses alone, its rows first: ask for fewer parts"
            if legal
            else "a cut is where one tensor crosses alone, its rows first (dim 0), and this model "
            "has no such place: export it whole",
        )
    positions = even_cuts(seconds, legal, parts)
    bounds = [0, *positions, len(seconds)]
    slowest = max(sum(seconds[a:b]) for a, b in pairwise(bounds))
    return _Cut(traced, positions, slowest / (sum(seconds) or 1.0))


def _measure(traced: Traced, timed: Tensor) -> list[float]:
    runs: list[dict[fx.Node, float]] = []
    with torch.no_grad():
        for _ in range(_REPEATS + 1):
            timer = _Timer(traced.module)
            timer.run(timed.clone())
            runs.append(timer.seconds)
    # the first run pays for memory and primitives
    # what follows from sizes is computed anew in each stage: no cut makes that shorter
    return [
        0.0 if n in traced.following else median(run[n] for run in runs[1:]) for n in traced.nodes
    ]


def _long(model: nn.Module, traced: Traced, seconds: Sequence[float], parts: int) -> frozenset[str]:
    """Every submodule with children that exceeds a quarter of one part's share."""
    share = sum(seconds) / parts / 4
    return frozenset(
        str(node.target)
        for node, spent in zip(traced.nodes, seconds, strict=True)
        if node.op == "call_module"
        and parts > 1
        and spent > share
        and next(model.get_submodule(str(node.target)).children(), None) is not None
    )


def _open(
    model: nn.Module, opened: frozenset[str], more: frozenset[str], examples: Sequence[Tensor]
) -> tuple[frozenset[str], Traced | None]:
    """``opened`` with those of ``more`` whose inside can be traced, and what that gives; None where
    that is true of none."""
    try:
        return opened | more, trace(model, opened | more, examples)
    except ExportError:
        if len(more) == 1:
            return opened, None
    traced: Traced | None = None
    for name in sorted(more):
        opened, further = _open(model, opened, frozenset({name}), examples)
        traced = further or traced
    return opened, traced


def _legal(traced: Traced) -> list[int]:
    """Positions before a submodule at which a cut may lie, in order. Nothing runs before the
    first."""
    return sorted(set(traced.places(traced.entrances()[1:]).values()))

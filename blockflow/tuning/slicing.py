"""Slicing: cut a chain into stages of even time, and choose how many.

DVABatch ("Scheduling Policies of Serving Diversities") cuts a model in topological order into N_st
parts of even time, tries a few N_st and keeps the best.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Slicing:
    """A chain of pieces cut into stages.

    Attributes:
        bounds: stage i holds the pieces ``bounds[i]`` up to, not including, ``bounds[i + 1]``.
        times: of the stages, in the unit of the pieces.
    """

    bounds: tuple[int, ...]
    times: tuple[float, ...]

    @property
    def stages(self) -> int:
        return len(self.times)

    @property
    def slowest(self) -> float:
        return max(self.times)

    def grouped(self, pieces: Sequence[T]) -> list[list[T]]:
        """``pieces`` by stage."""
        return [list(pieces[a:b]) for a, b in pairwise(self.bounds)]


def even_cuts(times: Sequence[float], legal: Sequence[int], parts: int) -> list[int]:
    """Positions of ``parts - 1`` cuts that minimise the largest sum between two of them.

    Args:
        times: cost of each piece, not negative.
        legal: sorted positions at which a cut may lie (before that piece).
        parts: number of parts; at most ``len(legal) + 1``.

    Takes about ``parts * n log n`` steps for n legal positions.
    """
    bounds = [0, *legal, len(times)]
    prefix = [0.0, *accumulate(times)]
    cost = [prefix[b] for b in bounds]
    # slowest[j]: of the pieces up to bounds[j] in the parts so far. It grows with j, and the part
    # behind a cut shrinks the later the cut: the best place is where the two meet.
    slowest = cost
    chosen: list[list[int]] = []
    for part in range(1, parts):
        before, slowest, cuts = slowest, [inf] * len(bounds), [0] * len(bounds)
        meet = part
        for j in range(part + 1, len(bounds)):
            while meet < j and before[meet] < cost[j] - cost[meet]:
                meet += 1
            slowest[j] = min(
                before[meet] if meet < j else inf,
                cost[j] - cost[meet - 1] if meet > part else inf,
            )
            # of places that are as good, the first
            cuts[j] = _first_within(slowest[j], cost, part, j)
        chosen.append(cuts)
    found: list[int] = []
    j = len(bounds) - 1
    for cuts in reversed(chosen):
        j = cuts[j]
        found.insert(0, bounds[j])
    return found


def _first_within(limit: float, cost: Sequence[float], start: int, end: int) -> int:
    """The first of ``start`` .. ``end`` from which it costs no more than ``limit`` to ``end``."""
    return bisect_left(range(end), -limit, lo=start, key=lambda i: cost[i] - cost[end])


def slice_evenly(times: Sequence[float], stages: int) -> Slicing:
    """``times`` in ``stages`` contiguous groups whose slowest is as fast as possible.

    Raises:
        ValueError: more stages than pieces, none, or a negative time.
    """
    if not 1 <= stages <= len(times):
        raise ValueError(f"{len(times)} pieces cannot make {stages} stages")
    if min(times) < 0:
        raise ValueError("a time is negative")
    cuts = even_cuts(times, range(1, len(times)), stages)
    bounds = (0, *cuts, len(times))
    return Slicing(bounds, tuple(sum(times[a:b]) for a, b in pairwise(bounds)))


def best_slicing(
    times: Sequence[float], choices: Iterable[int], score: Callable[[Slicing], float]
) -> Slicing:
    """The slicing with the lowest score of those with ``choices`` stages; of equals, the one with
    fewer. Choices that the chain is too short for are passed over.

    Args:
        times: of the pieces.
        choices: numbers of stages to try.
        score: what to minimise: a measured or simulated latency, as a rule.

    Raises:
        ValueError: no choice fits.
    """
    fitting = sorted({n for n in choices if 1 <= n <= len(times)})
    if not fitting:
        raise ValueError(f"none of the choices fits a chain of {len(times)}")
    return min((slice_evenly(times, n) for n in fitting), key=score)

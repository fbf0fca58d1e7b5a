"""Stages: into how many of even time a policy that works over stages should slice a chain.

DVABatch ("Scheduling Policies of Serving Diversities") tries a few numbers and keeps the best. More
boundaries let newcomers join a batch sooner, and let a batch be split at the better place; each
costs a decision, and where a join or a split never pays, that is all that it does. What is best is
estimated from the measured times; `blockflow simulate` compares slicings under a load of one's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, product

from blockflow.tuning.slicing import Slicing, best_slicing

CHOICES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Numbers of stages that are tried. (The paper found 20 too many.)"""

BOUNDARY_NS = 20_000.0
"""About what a decision between two stages costs: measured in docs/performance.md, with 64 queries
waiting; with fewer it is less."""

Table = Sequence[Sequence[float]]
"""``table[i][b]``: ns of a batch of b rows through block i; ``table[i][0]`` is not looked at."""


def best_stages(table: Table, rows: int, *, joins: bool, splits: bool) -> tuple[int, ...]:
    """How many consecutive blocks make each stage.

    Args:
        table: times of the chain's blocks, for 1 to ``rows`` rows at least.
        rows: of the largest batch.
        joins: the policy lets newcomers join at a boundary.
        splits: it halves batches at a boundary.
    """
    if rows < 2:
        return (len(table),)  # nobody could join, and there is nothing to split
    middle = rows // 2
    sliced = best_slicing(
        [block[middle] for block in table],
        CHOICES,
        lambda s: estimate(table, s, rows, joins=joins, splits=splits),
    )
    return tuple(b - a for a, b in pairwise(sliced.bounds))


def estimate(table: Table, slicing: Slicing, rows: int, *, joins: bool, splits: bool) -> float:
    """Time of rows with this slicing, relative to that with a single stage that costs no decision.
    Arguments as of :func:`best_stages`; ``rows`` are at least 2.

    The mean over a few loads: a small or a half batch is under way, and one or half a batch of
    newcomers come at any moment of it. They join at the next boundary if that is cheaper for all
    together than to wait for the batch's end.
    """
    loads = list(product(sorted({1, rows // 2}), repeat=2))
    scores = [_score(table, slicing, ahead, new, joins, splits) for ahead, new in loads]
    return sum(scores) / len(scores)


def _score(
    table: Table, slicing: Slicing, ahead: int, new: int, joins: bool, splits: bool
) -> float:
    def through(b: int) -> list[float]:
        """Times of the first 0, 1, 2, ... stages at b rows."""
        so_far = list(accumulate((block[b] for block in table), initial=0.0))
        return [so_far[i] for i in slicing.bounds]

    def saved_by_split(stage: int) -> float:
        rest = [way[-1] - way[stage] for way in (together, half, other)]
        if rest[0] < rest[1] + rest[2]:
            return 0.0
        return both * rest[0] - first * rest[1] - (both - first) * (rest[1] + rest[2])

    both = ahead + new
    first = both // 2
    old, fresh, together = through(ahead), through(new), through(both)
    half, other = through(first), through(both - first)
    total = 0.0
    for stage in range(1, slicing.stages + 1):
        # They came while the stage before this boundary ran, with the chance that its time has.
        before = old[stage] - old[stage - 1]
        wait = new * (old[-1] - old[stage] + fresh[-1])
        if joins and stage < slicing.stages:
            finish = fresh[stage] + together[-1] - together[stage]
            delay = finish - (old[-1] - old[stage])
            wait = min(wait, new * finish + ahead * delay)
        total += before / old[-1] * (new * before / 2 + wait)
    if splits:
        total -= max((saved_by_split(s) for s in range(1, slicing.stages)), default=0.0)
    total += both * slicing.stages * BOUNDARY_NS
    return total / (new * (old[-1] / 2 + fresh[-1]))

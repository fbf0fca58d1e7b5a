"""RowCosts: what a row counts for where tasks share a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockflow.batching.policy import Query

_NEW = 0.1
"""How much of a stage's mean the last batch is."""

_ALIKE = 4.0
"""Rows of one model take a few times as long in small batches as in large ones. Counting that would
give less and less to who has the smaller share, and therefore the smaller batches."""


class RowCosts:
    """What a row counts for, from what batches have taken: a mean that forgets.

    It counts one as long as it takes less than :data:`_ALIKE` times as long as the cheapest stage's
    rows do, and from there on in proportion to its time.

    Args:
        stages: in the order of the worker's blocks. At one alone all rows are alike.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self._later: dict[int, tuple[int, ...]] = {}
        self._ns: dict[int, float] = {}
        self._cheapest: int | None = None
        self._found: dict[tuple[int, tuple[int, ...] | None], float] = {}  # since the last batch
        self.count_in(stages)

    def count_in(self, stages: Sequence[int]) -> None:
        """These are the stages: all that are measured, though who asks may be told of some only."""
        self._later = {s: tuple(stages[i + 1 :]) for i, s in enumerate(stages)}
        self._found.clear()

    def measured(self, stage: int, rows: int, ns: int) -> None:
        """A batch of so many rows took so long."""
        if len(self._later) < 2 or ns <= 0:
            return
        if self._found:
            self._found.clear()
        each, known = ns / rows, self._ns
        before = known.get(stage, each)
        now = known[stage] = before + _NEW * (each - before)
        least = self._cheapest
        if least is None or now < known[least]:
            self._cheapest = stage
        elif least == stage and now > before:
            self._cheapest = min(known, key=known.__getitem__)

    @property
    def alike(self) -> bool:
        """Whether all rows count for one."""
        return self._cheapest is None

    def of(self, query: Query) -> float:
        """Of one of its rows, here and at the stages ahead."""
        if self._cheapest is None:
            return 1.0
        way = query.stage, query.ahead
        found = self._found.get(way)
        if found is None:
            known, (first, ahead) = self._ns, way
            ns = known.get(first, 0.0)
            for stage in self._later[first] if ahead is None else ahead:
                ns += known.get(stage, 0.0)
            found = self._found[way] = max(1.0, ns / (_ALIKE * known[self._cheapest]))
        return found

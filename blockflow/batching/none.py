"""NonePolicy: every query runs by itself, oldest first. The baseline, and the default."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from blockflow.batching.facts import StageFacts
from blockflow.batching.options import option_problems
from blockflow.batching.policy import Decision, Policy, Query, Run
from blockflow.batching.shares import TaskShare
from blockflow.core.errors import Problem


class NonePolicy(Policy):
    """No batching beyond what a request brings itself.

    With several stages the oldest query goes first whatever its stage, so that what is under way
    leaves before newcomers start. A stage that is busy keeps only its own queries waiting.
    """

    NAME: ClassVar[str] = "none"

    def __init__(
        self,
        stages: Sequence[int],
        options: Mapping[str, Any],
        facts: Mapping[int, StageFacts] | None = None,
        shares: Sequence[TaskShare] = (),
    ) -> None:
        super().__init__(stages, options, facts, shares)
        # (arrival, key) by stage; keys that are gone, or have gone on, are skipped
        self._order: dict[int, list[tuple[int, int]]] = {s: [] for s in self.stages}
        self._waiting: dict[int, Query] = {}

    @classmethod
    def problems(cls, options: Mapping[str, Any], path: str) -> list[Problem]:
        return option_problems("policy 'none'", options, {}, path)

    def arrive(self, query: Query, now: int) -> None:
        self._waiting[query.key] = query
        heapq.heappush(self._order[query.stage], (query.arrival_ns, query.key))

    def drop(self, key: int, now: int) -> None:
        self._waiting.pop(key, None)

    def done(self, stage: int, keys: Sequence[int], now: int) -> None:
        """Nothing depends on what has run."""

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        oldest: tuple[int, int] | None = None
        chosen = 0
        for stage, order in self._order.items():
            if not order or stage in busy:
                continue
            while order and not self._waits_at(stage, order[0][1]):
                heapq.heappop(order)
            if order and (oldest is None or order[0] < oldest):
                oldest, chosen = order[0], stage
        if oldest is None:
            return None
        _, key = heapq.heappop(self._order[chosen])
        del self._waiting[key]
        return Run(chosen, (key,))

    def _waits_at(self, stage: int, key: int) -> bool:
        query = self._waiting.get(key)
        return query is not None and query.stage == stage

    def waiting(self) -> Iterable[Query]:
        return sorted(self._waiting.values(), key=lambda q: (q.arrival_ns, q.key))

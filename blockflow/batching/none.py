"""NonePolicy: every query runs by itself, oldest first. The baseline, and the default."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from blockflow.batching.facts import StageFacts
from blockflow.batching.options import option_problems
from blockflow.batching.policy import Decision, Policy, Query, Run
from blockflow.batching.shares import TaskShare
from blockflow.core.errors import Problem


class NonePolicy(Policy):
    """No batching beyond what a request brings itself.

    With several stages the oldest query goes first whatever its stage, so that what is under way
    leaves before newcomers start.
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
        self._order: list[tuple[int, int]] = []  # (arrival, key); keys that are gone are skipped
        self._waiting: dict[int, Query] = {}

    @classmethod
    def problems(cls, options: Mapping[str, Any], path: str) -> list[Problem]:
        return option_problems("policy 'none'", options, {}, path)

    def arrive(self, query: Query, now: int) -> None:
        self._waiting[query.key] = query
        heapq.heappush(self._order, (query.arrival_ns, query.key))

    def drop(self, key: int, now: int) -> None:
        self._waiting.pop(key, None)

    def done(self, stage: int, keys: Sequence[int], now: int) -> None:
        """Nothing depends on what has run."""

    def decide(self, now: int) -> Decision:
        while self._order:
            _, key = heapq.heappop(self._order)
            query = self._waiting.pop(key, None)
            if query is not None:
                return Run(query.stage, (key,))
        return None

    def waiting(self) -> Iterable[Query]:
        return sorted(self._waiting.values(), key=lambda q: (q.arrival_ns, q.key))

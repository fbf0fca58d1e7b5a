"""Rules: what a policy may ask for; and a trial of one before any block depends on it.

Policies may be anybody's code. A worker checks each decision; an update that brings a policy tries
it first, with a few queries that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from blockflow.batching.policy import Decision, Policy, Query, Run, WaitUntil

WAITS, LANES = "only what waits runs", "lanes bounded"

_WAYS, _QUERIES, _ASKED = 16, 3, 64
_RUN_NS = 1_000_000
_QUERY_NS = 60_000_000_000


class Waits(Protocol):
    """A query, or what a worker has for it."""

    @property
    def stage(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def broken_rule(
    policy: Policy,
    run: Run,
    busy: Collection[int],
    waiting: Mapping[int, Waits],
    alone: Collection[int] = (),
) -> tuple[str, str] | None:
    """Which rule a decision breaks, and how. (A query would be answered by another task's block.)

    Args:
        policy: that has decided.
        run: what it asks for.
        busy: stages that may run no further batch.
        waiting: by key.
        alone: keys of those that no policy was told of.
    """
    if run.stage in busy:
        # One forward more than the block has engines would share what one of them keeps.
        return LANES, f"runs another batch at stage {run.stage}, which is busy"
    if run.stage not in policy.stages:
        return WAITS, f"runs stage {run.stage}, which is not one of its own: {list(policy.stages)}"
    if not run.keys or len(set(run.keys)) != len(run.keys):
        return WAITS, f"runs a batch of the keys {list(run.keys)}: each once, and one at least"
    for key in run.keys:
        query = waiting.get(key)
        if query is None or key in alone:
            return WAITS, f"runs key {key}, which does not wait for it"
        if query.stage != run.stage:
            return WAITS, f"runs key {key} at stage {run.stage}, it waits at {query.stage}"
        if run.pad_to and not _covers(run.pad_to, query.shape):
            return WAITS, f"pads key {key} of {list(query.shape)} to {list(run.pad_to)}"
    return None


def _covers(whole: Sequence[int], part: Sequence[int]) -> bool:
    return len(whole) == len(part) and all(a >= b for a, b in zip(whole, part, strict=True))


class Trial:
    """A few queries on each way through a new policy, of no use afterwards. One that waits for more
    than these is no worse for it.

    Args:
        policy: on trial.
        told: calls what it is given, which is the policy's method of that name, and lets through
            what that raises, or makes something else of it.
    """

    def __init__(
        self, policy: Policy, told: Callable[[str, Callable[[], Decision]], Decision]
    ) -> None:
        self._policy = policy
        self._told = told
        self._now = _QUERY_NS
        self._waiting: dict[int, Query] = {}

    def run(self, ways: Sequence[Sequence[int]]) -> None:
        """``ways``: which of the policy's stages, by position, a query of each task runs."""
        policy = self._policy
        for n, way in enumerate(ways[:_WAYS]):
            stages = [policy.stages[i] for i in way]
            for key in range(_QUERIES * n, _QUERIES * (n + 1)):
                self._arrive(key, stages)
            self._drop(_QUERIES * n)
            for _ in range(_ASKED):
                decision = self._told("decide", self._decide) if self._waiting else None
                if decision is None:
                    break
                if isinstance(decision, WaitUntil):
                    self._now = max(self._now + 1, decision.at_ns)
                else:
                    self._ran(decision, stages)
            for key in list(self._waiting):
                self._drop(key)

    def _arrive(self, key: int, ahead: Sequence[int], arrival_ns: int | None = None) -> None:
        now, facts = self._now, self._policy.facts[ahead[0]]
        shape = [1] * (1 + max(facts.length_dims, default=-1))
        for i in facts.length_dims:
            shape[i] = facts.lengths[0]
        first = arrival_ns is None
        since = now if arrival_ns is None else arrival_ns
        deadline = since + _QUERY_NS
        query = Query(key, ahead[0], 1, since, now, deadline, tuple(shape), first, 0, (*ahead[1:],))
        self._waiting[key] = query
        self._told("arrive", lambda: self._policy.arrive(query, now))

    def _drop(self, key: int) -> None:
        del self._waiting[key]
        self._told("drop", lambda: self._policy.drop(key, self._now))

    def _decide(self) -> Decision:
        decision: Any = self._policy.decide(self._now, frozenset())
        if isinstance(decision, Run):
            broken = broken_rule(self._policy, decision, (), self._waiting)
            if broken is not None:
                raise ValueError(f"it {broken[1]}")
        elif decision is not None and not isinstance(decision, WaitUntil):
            raise TypeError(f"it says {decision!r}, not Run, WaitUntil or None")
        return decision

    def _ran(self, run: Run, stages: Sequence[int]) -> None:
        self._now += _RUN_NS
        gone = [self._waiting.pop(key) for key in run.keys]
        self._told("done", lambda: self._policy.done(run.stage, run.keys, self._now))
        ahead = stages[stages.index(run.stage) + 1 :]
        for query in gone if ahead else ():
            self._arrive(query.key, ahead, query.arrival_ns)

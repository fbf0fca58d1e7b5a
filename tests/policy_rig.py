"""A worker of plain data that drives a policy as the real one does, and checks what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import pytest

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import Decision, Policy, Query, Run, WaitUntil
from blockflow.batching.queueing import QueueingPolicy
from blockflow.core.profile import Point, StageProfile

MS = 1_000_000
MAX_ROWS = 12
TIMES = {1: 2.0, 2: 3.0, 4: 5.0, 8: 9.0, 16: 17.0}
"""Of a stage, in ms by rows: the time per row falls with the batch."""


def query(
    key: int,
    now: int,
    *,
    stage: int = 1,
    rows: int = 1,
    shape: tuple[int, ...] = (4,),
    task: int = 0,
    deadline_ms: int = 1000,
    first: bool = True,
    ahead: tuple[int, ...] | None = None,
) -> Query:
    end = now + deadline_ms * MS
    return Query(key, stage, rows, now, now, end, shape, first, task, ahead)


def profile(
    times: Mapping[int, float], *, block: str = "block", threads: int = 1, spread: float = 0.0
) -> StageProfile:
    """Made-up times in ms by rows."""
    return StageProfile(
        block,
        "0" * 64,
        "echo",
        "fp32",
        "here",
        tuple(
            Point(threads, rows, None, 10, ms, ms, ms, ms, ms, ms, spread, 0)
            for rows, ms in times.items()
        ),
    )


def facts_for(stages: Sequence[int], times: Mapping[int, float] = TIMES) -> dict[int, StageFacts]:
    """Stages with these times, and with a variable dim that may be padded."""
    return {s: _facts(s, tuple(times.items())) for s in stages}


@cache
def _facts(stage: int, times: tuple[tuple[int, float], ...]) -> StageFacts:
    made = profile(dict(times))
    return StageFacts(f"block{stage}", MAX_ROWS, 1, made, (0,), (1, 64), pads=True)


@dataclass(frozen=True)
class Walk:
    """Stages that a query visits; a tuple at the end is a fork into several."""

    path: tuple[int | tuple[int, ...], ...]

    @cached_property
    def stages(self) -> tuple[int, ...]:
        return tuple(s for step in self.path for s in (step if isinstance(step, tuple) else [step]))

    def after(self, stage: int) -> tuple[int, ...]:
        """The stages right after ``stage``."""
        return self._after.get(stage, ())

    @cached_property
    def _after(self) -> dict[int, tuple[int, ...]]:
        pairs = zip(self.path, self.path[1:], strict=False)
        return {
            step: follower if isinstance(follower, tuple) else (follower,)
            for step, follower in pairs
            if not isinstance(step, tuple)
        }

    def ahead(self, stage: int) -> tuple[int, ...]:
        if isinstance(self.path[-1], tuple) and stage in self.path[-1]:
            return ()
        return self.stages[self.stages.index(stage) + 1 :]


@dataclass
class TinyWorker:
    """``lanes``: how many batches it runs side by side, of different stages. ``knows_ahead``: tells
    where queries go."""

    policy: Policy
    walks: dict[int, Walk]
    lanes: int = 1
    knows_ahead: bool = True
    waiting: dict[int, Query] = field(default_factory=dict)
    running: list[tuple[Run, dict[int, Query]]] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    fail: set[int] = field(default_factory=set)
    runs: list[tuple[int, Run]] = field(default_factory=list)
    _next: int = 1_000_000

    def __post_init__(self) -> None:
        self.waiting.update({q.key: q for q in self.policy.waiting()})

    def enter(
        self, key: int, walk: Walk, rows: int, length: int, task: int, deadline: int, now: int
    ) -> None:
        self.walks[key] = walk
        stage = walk.stages[0]
        ahead = walk.ahead(stage) if self.knows_ahead else None
        q = Query(key, stage, rows, now, now, deadline, (length,), True, task, ahead)
        self.waiting[key] = q
        self.policy.arrive(q, now)

    def decide(self, now: int) -> Decision:
        for key in [k for k, q in self.waiting.items() if q.deadline_ns <= now]:
            self.drop_key(key, now)
        if len(self.running) >= self.lanes:
            return None
        self.policy.lanes = self.lanes
        decision = self.policy.decide(now, {run.stage for run, _ in self.running})
        if isinstance(decision, WaitUntil):
            assert decision.at_ns > now, "told to wait for what is over"
        if isinstance(decision, Run):
            self._take(decision, now)
        return decision

    def _take(self, run: Run, now: int) -> None:
        assert run.keys and len(set(run.keys)) == len(run.keys)
        assert run.stage not in {r.stage for r, _ in self.running}, "a busy stage"
        assert set(run.keys) <= set(self.waiting), "runs what does not wait"
        batch = {key: self.waiting.pop(key) for key in run.keys}
        assert {q.stage for q in batch.values()} == {run.stage}
        shapes = {q.shape for q in batch.values()}
        if run.pad_to:
            assert run.pad_to == tuple(map(max, zip(*shapes, strict=True)))
        else:
            assert len(shapes) == 1
        rows = sum(q.rows for q in batch.values())
        assert rows <= MAX_ROWS or len(batch) == 1, "over-committed"
        for task, share in enumerate(self.policy.shares):
            mine = [q.rows for q in batch.values() if q.task == task]
            limited = share.max_batch_rows and len(mine) > 1
            assert not limited or sum(mine) <= share.max_batch_rows, "over the task's limit"
        self.running.append((run, batch))
        self.runs.append((now, run))

    def finish(self, index: int, now: int, *, fail: bool) -> None:
        if not self.running:
            return
        run, batch = self.running.pop(index % len(self.running))
        gone = {k for k in batch if k in self.fail}
        if fail:
            gone.add(run.keys[index % len(run.keys)])
        self.failed |= gone
        self.policy.done(run.stage, run.keys, now)
        for key, q in batch.items():
            if key in gone:
                continue
            followers = self.walks[key].after(run.stage)
            if not followers:
                self.left.add(key)
            for i, stage in enumerate(followers):
                again = key
                if i:
                    again, self._next = self._next, self._next + 1
                    self.walks[again] = self.walks[key]
                ahead = self.walks[again].ahead(stage) if self.knows_ahead else None
                follower = q._replace(
                    key=again,
                    stage=stage,
                    ready_ns=now,
                    first=False,
                    ahead=ahead,
                    origin=key if i else None,
                )
                self.waiting[again] = follower
                self.policy.arrive(follower, now)

    def drop(self, index: int, now: int) -> None:
        if self.waiting:
            self.drop_key(sorted(self.waiting)[index % len(self.waiting)], now)

    def drop_key(self, key: int, now: int) -> None:
        del self.waiting[key]
        self.failed.add(key)
        self.policy.drop(key, now)

    def change(self, policy: Policy, now: int) -> None:
        """Another policy takes over what waits, as the scheduler does it."""
        self.policy = policy
        for q in sorted(self.waiting.values(), key=lambda q: (q.arrival_ns, q.key)):
            policy.arrive(q, now)

    def check(self) -> None:
        assert {q.key: q for q in self.policy.waiting()} == self.waiting
        order = [(q.arrival_ns, q.key) for q in self.policy.waiting()]
        assert order == sorted(order)

    def run_out(self, now: int, *, ms_per_run: int = 1) -> None:
        """Go on until nothing is left; fails when the policy lets something lie."""
        for _ in range(20_000):
            decision = self.decide(now)
            self.check()
            if isinstance(decision, Run):
                continue
            if self.running:
                now += ms_per_run * MS
                self.finish(0, now, fail=False)
            elif isinstance(decision, WaitUntil):
                now = decision.at_ns
            else:
                break
        assert not self.waiting, f"left lying: {self.waiting}"


def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether all were in time, each time that a policy looks at a batch as a whole."""
    found: list[bool] = []
    look = QueueingPolicy._all_in_time

    def looking(*args: Any) -> bool:
        found.append(look(*args))
        return found[-1]

    monkeypatch.setattr(QueueingPolicy, "_all_in_time", looking)
    return found

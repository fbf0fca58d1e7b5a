"""Policies run for months: what has left, failed, expired or changed its mind leaves nothing."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from random import Random
from types import FunctionType, ModuleType
from typing import Any

import pytest
from policy_rig import MS, TinyWorker, Walk, facts_for

from blockflow.batching.policy import Policy, Run
from blockflow.batching.registry import create_policy
from blockflow.batching.shares import TaskShare

STAGES = (1, 2, 3, 4)
WALKS = [Walk((1, 2, 3, 4)), Walk((1, 2)), Walk((1, 3, 4)), Walk((1, 2, (3, 4)))]
CHAINS = [Walk(STAGES), Walk((1, 2)), Walk((1, 2, 3))]
SHARES = (TaskShare(), TaskShare(priority=1))
SPECS: tuple[Mapping[str, Any], ...] = (
    {"policy": "none"},
    {"policy": "window", "max_rows": 4, "max_delay_ms": 2},
    {"policy": "lbci", "t_opt_ms": 100},
    {"policy": "dvabatch"},
    {"policy": "dvabatch", "policies": ["input"], "bs_max": 6},
    {"policy": "dvabatch", "policies": ["load", "input", "operator"], "join": "always"},
    {"policy": "dvabatch", "stages": [2, 2]},
    {"policy": "lbci", "t_opt_ms": 100, "stages": [2, 2]},
)
LENGTHS = (4, 6)
BUSY, AGAIN = 450, 600
LEARNED = 40
"""What a policy remembers of a way and a length that it has not met before."""


def objects_of(policy: Policy) -> int:
    """How many containers the policy keeps, itself among them; what it knows is not counted."""
    seen: dict[int, object] = {}
    todo: list[object] = [policy]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | FunctionType | ModuleType):
            continue
        seen[id(one)] = one
        todo += gc.get_referents(one)
    sized = (len(one) for one in seen.values() if isinstance(one, dict | list | set))
    return len(seen) + sum(sized)


def drive(worker: TinyWorker, rng: Random, keys: range, walks: list[Walk], now: int) -> int:
    """Queries come, run, fail, expire and are withdrawn; all are gone at the end."""
    for key in keys:
        now += rng.randint(0, 3) * MS
        deadline = now + rng.choice((8, 60, 5000)) * MS
        walk, rows = rng.choice(walks), rng.randint(1, 3)
        worker.enter(key, walk, rows, rng.choice(LENGTHS), rng.randrange(2), deadline, now)
        while isinstance(worker.decide(now), Run):
            pass
        if rng.random() < 0.2:
            worker.drop(rng.randrange(9), now)
        if rng.random() < 0.6:
            worker.finish(rng.randint(0, 2), now, fail=rng.random() < 0.2)
            while isinstance(worker.decide(now), Run):
                pass
    worker.run_out(now)
    return now + 60_000 * MS


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_whoever_has_left_leaves_nothing(spec: Mapping[str, Any]) -> None:
    policy = create_policy(spec, STAGES, facts_for(STAGES), SHARES)
    worker = TinyWorker(policy, {}, lanes=2)
    walks = CHAINS if "stages" in spec else WALKS
    rng = Random(5)
    now = drive(worker, rng, range(BUSY), walks, 0)  # what is learned once and for all
    now = drive(worker, rng, range(BUSY, 2 * BUSY), walks, now)
    before = objects_of(policy)
    drive(worker, rng, range(2 * BUSY, 2 * BUSY + AGAIN), walks, now)
    assert objects_of(policy) - before <= LEARNED

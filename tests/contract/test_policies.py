"""One contract suite for all batching policies: whatever happens, no query is lost or run twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockflow.batching.policy import Policy, Query, Run, WaitUntil
from blockflow.batching.registry import POLICIES, create_policy, policy_problems
from blockflow.core.errors import TopologyError

MS = 1_000_000

# A policy that needs options to be made gets them here; (name, options).
CASES: Sequence[tuple[str, Mapping[str, Any]]] = [("none", {})]

pytestmark = pytest.mark.parametrize(("name", "options"), CASES)


def make(name: str, options: Mapping[str, Any], stages: Sequence[int] = (1,)) -> Policy:
    return create_policy({"policy": name, **options}, stages)


def query(key: int, now: int, *, stage: int = 1, rows: int = 1, shape: Any = (4,)) -> Query:
    return Query(key, stage, rows, now, now, now + 1000 * MS, shape)


def run_out(policy: Policy, now: int) -> list[Run]:
    """Let the policy run what it wants until it wants nothing more, however long that takes."""
    runs: list[Run] = []
    for _ in range(10_000):
        decision = policy.decide(now)
        if isinstance(decision, Run):
            runs.append(decision)
            now += MS
            policy.done(decision.stage, decision.keys, now)
        elif isinstance(decision, WaitUntil):
            assert decision.at_ns > now, "told to wait for what is over"
            now = decision.at_ns
        else:
            break
    return runs


def test_every_policy_has_a_case(name: str, options: Mapping[str, Any]) -> None:
    assert {case for case, _ in CASES} == set(POLICIES)


def test_nothing_to_do(name: str, options: Mapping[str, Any]) -> None:
    policy = make(name, options)
    assert policy.decide(0) is None
    assert list(policy.waiting()) == []
    policy.drop(7, 0)  # was never here
    policy.done(1, [7], 0)  # a batch that another policy has started
    assert policy.decide(0) is None


def test_each_query_runs_once(name: str, options: Mapping[str, Any]) -> None:
    policy = make(name, options)
    for key in range(20):
        policy.arrive(query(key, key * MS, rows=1 + key % 3), key * MS)
    assert [q.key for q in policy.waiting()] == list(range(20))
    runs = run_out(policy, 20 * MS)
    assert sorted(k for r in runs for k in r.keys) == list(range(20))
    assert all(r.stage == 1 and r.keys for r in runs)
    assert list(policy.waiting()) == []


def test_a_dropped_query_never_runs(name: str, options: Mapping[str, Any]) -> None:
    policy = make(name, options)
    for key in range(6):
        policy.arrive(query(key, 0), 0)
    for key in (0, 3, 5):
        policy.drop(key, MS)
    runs = run_out(policy, MS)
    assert sorted(k for r in runs for k in r.keys) == [1, 2, 4]


def test_a_batch_has_one_shape_and_one_stage(name: str, options: Mapping[str, Any]) -> None:
    policy = make(name, options, stages=(1, 2))
    queries = {
        key: query(key, 0, stage=1 + key % 2, shape=(4,) if key % 3 else (8,)) for key in range(12)
    }
    for q in queries.values():
        policy.arrive(q, 0)
    for run in run_out(policy, 0):
        assert {queries[k].stage for k in run.keys} == {run.stage}
        assert len({queries[k].shape for k in run.keys}) == 1


def test_a_query_goes_from_stage_to_stage(name: str, options: Mapping[str, Any]) -> None:
    policy = make(name, options, stages=(1, 2))
    policy.arrive(query(1, 0, stage=1), 0)
    assert run_out(policy, 0) == [Run(1, (1,))]
    policy.arrive(Query(1, 2, 1, 0, MS, 1000 * MS, (9,), first=False), MS)
    assert run_out(policy, MS) == [Run(2, (1,))]


def test_unknown_options_are_found(name: str, options: Mapping[str, Any]) -> None:
    spec = {"policy": name, **options, "no_such_option": 1}
    (problem,) = policy_problems(spec, "$.blocks[2].batching")
    assert problem.path == "$.blocks[2].batching.no_such_option"
    with pytest.raises(TopologyError):
        create_policy(spec, (1,))
    assert policy_problems({"policy": name, **options}, "$") == []


@settings(max_examples=100, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from("aadtx"), st.integers(1, 4), st.integers(0, 30)), max_size=60
    )
)
def test_any_order_of_events(
    name: str, options: Mapping[str, Any], events: list[tuple[str, int, int]]
) -> None:
    policy = make(name, options)
    now = 0
    waiting: set[int] = set()
    running: Run | None = None
    ran: list[int] = []
    for key, (what, rows, dt) in enumerate(events):
        now += dt * MS
        if what == "a":
            policy.arrive(query(key, now, rows=rows), now)
            waiting.add(key)
        elif what == "x" and waiting:
            gone = sorted(waiting)[rows % len(waiting)]
            policy.drop(gone, now)
            waiting.discard(gone)
        elif what == "d" and running is not None:
            policy.done(running.stage, running.keys, now)
            running = None
        elif what == "t" and running is None:
            decision = policy.decide(now)
            if isinstance(decision, Run):
                assert set(decision.keys) <= waiting
                assert len(set(decision.keys)) == len(decision.keys)
                waiting -= set(decision.keys)
                ran += decision.keys
                running = decision
        assert {q.key for q in policy.waiting()} == waiting
    if running is not None:
        policy.done(running.stage, running.keys, now)
    ran += [k for r in run_out(policy, now) for k in r.keys]
    assert len(ran) == len(set(ran))
    assert waiting <= set(ran)

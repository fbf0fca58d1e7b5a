"""One contract suite for all batching policies: whatever happens, no query is lost or run twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_rig import MS, TinyWorker, Walk, facts_for, query

from blockflow.batching.policy import Policy, Query, Run, WaitUntil
from blockflow.batching.registry import POLICIES, RESERVED, create_policy, policy_problems
from blockflow.batching.shares import TaskShare
from blockflow.core.errors import TopologyError

STAGES = (1, 2, 3)
SHARES = (TaskShare(), TaskShare(weight=2.0), TaskShare(priority=1, max_batch_rows=3))

# A policy that needs options to be made gets them here; (name, options).
CASES: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("none", {}),
    ("window", {}),
    ("window", {"max_rows": 4, "max_delay_ms": 7}),
    ("window", {"max_delay_ms": 3, "classes": [4, 8, 64]}),
    ("lbci", {"t_opt_ms": 60}),
    ("lbci", {"t_opt_ms": 25, "n_max": 6, "join": "gain"}),
    ("dvabatch", {}),
    ("dvabatch", {"buffer_pairs": 1, "policies": ["load", "operator"]}),
    ("dvabatch", {"policies": ["load", "input", "operator"], "bs_max": 6, "join": "always"}),
    ("dvabatch", {"policies": ["input"], "window_ms": "stage1", "classes": [4, 8, 64]}),
    (
        "dvabatch",
        {"t_comp_wait_ms": 5, "last_join_stage": 1, "window_ms": 2, "buffer_pairs": 3},
    ),
]
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(CASES)]

pytestmark = pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)


def make(name: str, options: Mapping[str, Any], stages: Sequence[int] = (1,)) -> Policy:
    return create_policy({"policy": name, **options}, stages, facts_for(stages), SHARES)


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
        policy.arrive(query(key, key * MS, rows=1 + key % 3, task=key % 4), key * MS)
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
        key: query(key, 0, stage=1 + key % 2, shape=(4, 7) if key % 3 else (8, 7))
        for key in range(12)
    }
    for q in queries.values():
        policy.arrive(q, 0)
    for run in run_out(policy, 0):
        assert {queries[k].stage for k in run.keys} == {run.stage}
        shapes = {queries[k].shape for k in run.keys}
        if run.pad_to:
            assert "classes" in options and len(shapes) > 1
            assert run.pad_to == tuple(map(max, zip(*shapes, strict=True)))
        else:
            assert len(shapes) == 1


def test_a_query_goes_from_stage_to_stage(name: str, options: Mapping[str, Any]) -> None:
    policy = make(name, options, stages=(1, 2))
    policy.arrive(query(1, 0, stage=1), 0)
    assert run_out(policy, 0) == [Run(1, (1,))]
    policy.arrive(Query(1, 2, 1, 0, MS, 1000 * MS, (9,), first=False), MS)
    assert run_out(policy, MS) == [Run(2, (1,))]


def test_a_query_can_enter_at_any_stage_and_arrive_from_another_policy(
    name: str, options: Mapping[str, Any]
) -> None:
    policy = make(name, options, STAGES)
    policy.arrive(query(1, 0, stage=3), 0)
    policy.arrive(Query(2, 2, 2, 0, 0, 1000 * MS, (4,), first=False), 0)
    policy.arrive(query(3, 0, stage=2, rows=40), 0)  # larger than any batch: runs by itself
    runs = run_out(policy, 0)
    assert sorted((r.stage, r.keys) for r in runs) == [(2, (2,)), (2, (3,)), (3, (1,))]


def test_a_failed_or_expired_batch_mate_is_forgotten(name: str, options: Mapping[str, Any]) -> None:
    policy = make(name, options, stages=(1, 2))
    for key in (1, 2, 3):
        policy.arrive(query(key, 0, deadline_ms=50_000), 0)
    worker = TinyWorker(policy, {k: Walk((1, 2)) for k in (1, 2, 3)})
    worker.fail = {2}
    worker.run_out(0)
    assert worker.left == {1, 3} and worker.failed == {2}


def test_a_whole_batch_can_fail(name: str, options: Mapping[str, Any]) -> None:
    policy = make(name, options, stages=(1, 2))
    policy.arrive(query(1, 0), 0)
    decision = policy.decide(10 * MS)
    if isinstance(decision, WaitUntil):
        decision = policy.decide(decision.at_ns + 10 * MS)
    assert decision == Run(1, (1,))
    policy.done(1, [1], 20 * MS)  # who does not go on does not arrive again
    assert policy.decide(30 * MS) is None
    policy.arrive(query(2, 30 * MS), 30 * MS)
    assert run_out(policy, 60 * MS) == [Run(1, (2,))]


def test_nothing_runs_at_a_busy_stage(name: str, options: Mapping[str, Any]) -> None:
    """Whoever has asked for what runs there: the policy may be a new one."""
    policy = make(name, options, STAGES)
    late = 10_000 * MS
    for key, stage in ((1, 1), (2, 2), (3, 3)):
        policy.arrive(query(key, 0, stage=stage, deadline_ms=50_000), 0)
    assert not isinstance(policy.decide(late, {1, 2, 3}), Run)
    decision = policy.decide(late, {1, 3})
    assert decision == Run(2, (2,))
    assert not isinstance(policy.decide(late, {1, 2, 3}), Run)
    beside = policy.decide(late, {2, 3})
    if options.get("buffer_pairs") == 1:  # it lets no batch overlap, as it says
        assert beside is None
    else:
        assert beside == Run(1, (1,))
        policy.done(1, [1], late)  # before the one that began earlier
    policy.done(2, [2], late)
    left = {key for run in run_out(policy, late) for key in run.keys}
    assert left == ({1, 3} if beside is None else {3})


def test_batches_under_way_at_once_end_in_any_order(name: str, options: Mapping[str, Any]) -> None:
    """Two lanes that are never left idle: the younger batch ends first wherever it can."""
    worker = TinyWorker(make(name, options, STAGES), {}, lanes=2)
    now, most = 0, 0
    for key in range(30):
        now += MS
        worker.enter(key, Walk(STAGES), 1 + key % 3, 4, key % 4, now + 10**12, now)
        while isinstance(worker.decide(now), Run):
            pass
        most = max(most, len(worker.running))
        if key % 3 == 2:
            worker.finish(-1, now, fail=False)
        worker.check()
    worker.run_out(now)
    assert worker.left == set(range(30))
    serial = options.get("buffer_pairs") == 1 or "input" in options.get("policies", ())
    assert most == 2 or serial


WAYS = (
    [(1, 2, 3), (1, 3)],
    [(1, 2, 4), (1, 3, 4)],
    [(1, 2, 4, 5), (1, 3, 4)],
    [(1, 2), (1, 3, 4), (1, 3, 5)],
    [(1, 2, 3, 4), (1, 3), (2, 4), (1, 4), (3,), (2, 3)],
    [(2, 4, 5), (1, 3, 5), (1, 2, 3, 4, 5), (5,)],
    [(3, 1, 2, 4)],
    [(4, 1, 2, 3, 5)],
    [(5, 4, 3, 2, 1)],
    [(2, 4, 1, 3, 5), (1, 2, 3, 4, 5), (5, 1)],
)
"""Of tasks in one worker: they leave blocks out, part and meet again, or visit the worker's blocks
in another order than it lists them."""


SEEDS = (0, 1, 5, 6, 8, 13)
"""Those of the first fourteen that found what was planted: a batch that waits for one that waits
for it, and buffers that are not given back. Where batches do not overlap, the first three do."""


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_ways_that_part_and_meet_again_side_by_side(
    name: str, options: Mapping[str, Any], ways: Sequence[tuple[int, ...]]
) -> None:
    """Nobody waits for somebody who waits for him: all leave, whoever ends first."""
    walks = [Walk(way) for way in ways]
    for seed in SEEDS if name == "dvabatch" else SEEDS[:3]:
        rng = Random(seed)
        worker = TinyWorker(make(name, options, (1, 2, 3, 4, 5)), {}, lanes=rng.choice((2, 2, 3)))
        now = 0
        for key in range(30):
            now += rng.randint(0, 4) * MS
            worker.enter(key, rng.choice(walks), rng.randint(1, 3), 4, 0, now + 10**12, now)
            while isinstance(worker.decide(now), Run):
                pass
            if rng.random() < 0.6:
                worker.finish(rng.randint(0, 2), now, fail=False)
                while isinstance(worker.decide(now), Run):
                    pass
        worker.run_out(now)
        assert worker.left == set(range(30)), f"seed {seed}"


def test_how_many_batches_it_wants_at_once(name: str, options: Mapping[str, Any]) -> None:
    wanted = POLICIES[name].overlap(options)
    assert wanted == (options.get("buffer_pairs", 2) if name == "dvabatch" else 1)


def test_unknown_options_are_found(name: str, options: Mapping[str, Any]) -> None:
    spec = {"policy": name, **options, "no_such_option": 1}
    (problem,) = policy_problems(spec, "$.blocks[2].batching")
    assert problem.path == "$.blocks[2].batching.no_such_option"
    with pytest.raises(TopologyError):
        create_policy(spec, (1,))
    assert policy_problems({"policy": name, **options}, "$") == []


@pytest.mark.parametrize("option", RESERVED)
def test_reserved_options_mean_what_they_mean_everywhere(
    name: str, options: Mapping[str, Any], option: str
) -> None:
    """Who has no such option refuses it; nobody takes a number for a list."""
    found = POLICIES[name].problems({**options, option: 3}, "$")
    assert [p.path for p in found] == [f"$.{option}"]


# --- the order (docs/batching.md, "What holds for all of them") ----------------------------------

FULL = 12
"""Rows of a query that fills a batch by itself, so that runs show the order of queries."""


def order(policy: Policy, queries: Sequence[Query]) -> list[int]:
    """The keys as they run, after all of ``queries`` wait."""
    now = max(q.arrival_ns for q in queries)
    for q in queries:
        policy.arrive(q, now)
    return [key for run in run_out(policy, now) for key in run.keys]


def test_the_earliest_deadline_goes_first(name: str, options: Mapping[str, Any]) -> None:
    late = {1: 9000, 2: 3000, 3: 7000, 4: 5000}
    queries = [query(k, 0, rows=FULL, deadline_ms=ms) for k, ms in late.items()]
    assert order(make(name, options), queries) == [2, 4, 3, 1]


def test_a_higher_priority_goes_first(name: str, options: Mapping[str, Any]) -> None:
    """Whatever the deadlines; task 2 has the higher one."""
    tasks = {1: 0, 2: 2, 3: 1, 4: 2}
    queries = [query(k, 0, rows=FULL, task=t, deadline_ms=9000 - k) for k, t in tasks.items()]
    assert order(make(name, options), queries)[:2] == [4, 2]


def test_tasks_get_their_shares_while_both_wait(name: str, options: Mapping[str, Any]) -> None:
    """Task 1 has twice the weight of task 0; who came first has no advantage."""
    queries = [query(k, k, rows=FULL, task=k // 12, deadline_ms=9000) for k in range(24)]
    ran = [key // 12 for key in order(make(name, options), queries)]
    assert len(ran) == 24
    for n in range(3, 18):
        assert abs(ran[:n].count(1) - 2 * n / 3) <= 1


def test_a_task_that_was_away_has_saved_nothing_up(name: str, options: Mapping[str, Any]) -> None:
    policy = make(name, options)
    before = [query(k, 0, rows=FULL, deadline_ms=9000) for k in range(6)]
    assert order(policy, before) == list(range(6))
    both = [query(k, MS, rows=FULL, task=k % 2, deadline_ms=9000) for k in range(10, 16)]
    ran = [key % 2 for key in order(policy, both)]
    assert sorted(ran[:3]) == [0, 1, 1]


# --- any course of events ------------------------------------------------------------------------

ARRIVAL = st.tuples(
    st.sampled_from([1, 1, 2, 3, 4, 20]),  # rows; the last are more than any batch has
    st.sampled_from([(1, 2, 3), (1, 2, 3), (1, 2), (1, 3), (2, 3), (1, 2, (3, 4)), (1, (3, 4))]),
    st.sampled_from([4, 4, 6, 8]),  # length
    st.integers(0, 3),  # task
    st.sampled_from([1000, 1000, 60, 15]),  # deadline, ms
)
EVENT = st.one_of(
    st.tuples(st.just("arrive"), ARRIVAL),
    st.tuples(st.just("arrive"), ARRIVAL),
    st.tuples(st.just("decide"), st.none()),
    st.tuples(st.just("decide"), st.none()),
    st.tuples(st.just("done"), st.integers(0, 3)),
    st.tuples(st.just("fail"), st.integers(0, 3)),
    st.tuples(st.just("drop"), st.integers(0, 30)),
    st.tuples(st.just("change"), st.integers(0, len(CASES) - 1)),
)


@settings(max_examples=40, deadline=None)
@given(
    events=st.lists(st.tuples(EVENT, st.integers(0, 9)), max_size=70),
    lanes=st.integers(1, 3),
)
def test_any_course_of_events(
    name: str,
    options: Mapping[str, Any],
    events: list[tuple[tuple[str, Any], int]],
    lanes: int,
) -> None:
    """A tree of four stages, early exits, forks, failures, drops, policies changed in flight and
    batches side by side: every query leaves exactly once, no batch is larger than it may be, and
    when nothing comes any more everything has left."""
    stages = (1, 2, 3, 4)
    worker = TinyWorker(make(name, options, stages), {}, lanes=lanes)
    now = 0
    for key, ((what, arg), dt) in enumerate(events):
        now += dt * MS
        if what == "arrive":
            rows, path, length, task, deadline = arg
            worker.enter(key, Walk(path), rows, length, task, now + deadline * MS, now)
        elif what == "decide":
            worker.decide(now)
        elif what in ("done", "fail"):
            worker.finish(arg, now, fail=what == "fail")
        elif what == "drop":
            worker.drop(arg, now)
        elif what == "change":
            worker.change(make(*CASES[arg], stages), now)
        worker.check()
    worker.run_out(now)
    assert not worker.waiting and not worker.running
    assert list(worker.policy.waiting()) == []


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_policy_that_is_left_alone_keeps_its_pace(
    name: str, options: Mapping[str, Any], data: st.DataObject
) -> None:
    """The engine is never left idle for ever: while something waits there is a batch to run now
    or at a stated time."""
    worker = TinyWorker(make(name, options, STAGES), {})
    now = 0
    for key in range(data.draw(st.integers(1, 12))):
        now += data.draw(st.integers(0, 12)) * MS
        worker.enter(key, Walk(STAGES), data.draw(st.integers(1, 3)), 4, 0, now + 10**10, now)
        if not worker.running:
            decision = worker.decide(now)
            assert decision is not None
        elif data.draw(st.booleans()):
            worker.finish(0, now, fail=False)
    worker.run_out(now)
    assert worker.left == set(range(len(worker.walks)))

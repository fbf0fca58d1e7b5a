"""`lbci`: the paper's rules, with numbers that can be checked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_rig import MS, TinyWorker, Walk, profile, query

from blockflow.batching.costs import FittedCosts
from blockflow.batching.facts import StageFacts
from blockflow.batching.lbci import LbciPolicy, n_opt
from blockflow.batching.policy import Query, Run
from blockflow.batching.registry import create_policy
from blockflow.batching.shares import TaskShare

# Each of the two stages takes 5 ms and 5 ms per row, so that g(b) = 10 + 10 b.
TIMES = {b: 5.0 + 5.0 * b for b in (1, 2, 4, 8, 16)}


def facts(spread: float = 0.0, stages: int = 2) -> dict[int, StageFacts]:
    return {
        s: StageFacts(f"block{s}", 16, 1, profile(TIMES, spread=spread))
        for s in range(1, stages + 1)
    }


def make(t_opt_ms: float = 65, **options: object) -> LbciPolicy:
    spec = {"policy": "lbci", "t_opt_ms": t_opt_ms, **options}
    policy = create_policy(spec, (1, 2), facts())
    assert isinstance(policy, LbciPolicy)
    return policy


def go_on(policy: LbciPolicy, run: Run, now: int, queries: dict[int, Query]) -> None:
    """``run`` is done, and those at stage 1 arrive at stage 2."""
    policy.done(run.stage, run.keys, now)
    for key in run.keys if run.stage == 1 else ():
        queries[key] = queries[key]._replace(stage=2, ready_ns=now, first=False)
        policy.arrive(queries[key], now)


def test_n_opt_is_the_largest_batch_within_the_strict_bound() -> None:
    calm, restless = FittedCosts(facts(), 16), FittedCosts(facts(0.25), 16)
    assert n_opt(calm, (1, 2), None, 65 * MS, 16) == 5  # g(5) = 60, g(6) = 70
    assert n_opt(restless, (1, 2), None, 70 * MS, 16) == 4  # 70 / 1.25 = 56
    assert n_opt(calm, (1, 2), None, 65 * MS, 3) == 3
    assert n_opt(calm, (1, 2), None, 15 * MS, 16) == 0  # one row takes 20


def test_as_many_as_n_opt_run_without_a_question() -> None:
    policy, queries = make(), {k: query(k, 0) for k in range(7)}
    for q in queries.values():
        policy.arrive(q, 0)
    run = policy.decide(0)
    assert run == Run(1, (0, 1, 2, 3, 4))
    go_on(policy, run, 30 * MS, queries)
    assert policy.decide(30 * MS) == Run(2, (0, 1, 2, 3, 4))  # two wait and do not join


def under_way(policy: LbciPolicy) -> dict[int, Query]:
    """Two rows have done stage 1 at 15 ms."""
    queries = {k: query(k, 0) for k in (1, 2)}
    for q in queries.values():
        policy.arrive(q, 0)
    run = policy.decide(0)
    assert run == Run(1, (1, 2))
    go_on(policy, run, 15 * MS, queries)
    return queries


def test_newcomers_catch_up_and_go_on_with_the_batch() -> None:
    policy = make()
    queries = under_way(policy)
    for key in (3, 4, 5):
        queries[key] = query(key, 10 * MS)
        policy.arrive(queries[key], 10 * MS)
    # t_wait 5, t_done 15; one more: + 10 + 20 = 50; two: + 15 + 25 = 60; three: + 20 + 30 = 70.
    run = policy.decide(15 * MS)
    assert run == Run(1, (3, 4))
    go_on(policy, run, 30 * MS, queries)
    run = policy.decide(30 * MS)
    assert run == Run(2, (1, 2, 3, 4))
    go_on(policy, run, 55 * MS, queries)
    assert policy.decide(55 * MS) == Run(1, (5,))


def test_just_over_the_bound_is_too_late() -> None:
    policy = make(t_opt_ms=59.9)
    under_way(policy)
    for key in (3, 4):
        policy.arrive(query(key, 10 * MS), 10 * MS)
    assert policy.decide(15 * MS) == Run(1, (3,))  # two would make 60


def test_no_second_join() -> None:
    policy = make(t_opt_ms=200)
    queries = under_way(policy)
    queries[3] = query(3, 15 * MS)
    policy.arrive(queries[3], 15 * MS)
    run = policy.decide(15 * MS)
    assert run == Run(1, (3,))
    go_on(policy, run, 25 * MS, queries)
    policy.arrive(query(4, 25 * MS), 25 * MS)
    assert policy.decide(25 * MS) == Run(2, (1, 2, 3))


def three_stages(t_opt_ms: float) -> LbciPolicy:
    policy = create_policy({"policy": "lbci", "t_opt_ms": t_opt_ms}, (1, 2, 3), facts(stages=3))
    assert isinstance(policy, LbciPolicy)
    return policy


def step(policy: LbciPolicy, run: Run, now: int, q: Query) -> None:
    policy.done(run.stage, run.keys, now)
    policy.arrive(q._replace(stage=run.stage + 1, ready_ns=now, first=False), now)


def test_an_empty_queue_is_asked_again_at_the_next_boundary() -> None:
    policy, q = three_stages(200), query(1, 0)
    policy.arrive(q, 0)
    assert policy.decide(0) == Run(1, (1,))
    step(policy, Run(1, (1,)), 10 * MS, q)
    assert policy.decide(10 * MS) == Run(2, (1,))
    step(policy, Run(2, (1,)), 20 * MS, q)
    policy.arrive(query(2, 20 * MS), 20 * MS)
    assert policy.decide(20 * MS) == Run(1, (2,))


def test_as_many_as_fit_though_fewer_do_not() -> None:
    """Measured times may fall where a kernel changes: 3 + 4 rows take less than 1 + 2."""
    uneven = profile({1: 24.8, 2: 41.0, 4: 28.5, 8: 30.0})
    both = {s: StageFacts(f"block{s}", 8, 1, uneven) for s in (1, 2)}
    policy = create_policy({"policy": "lbci", "t_opt_ms": 90}, (1, 2), both)
    policy.arrive(query(0, 0), 0)
    run = policy.decide(0)
    assert run == Run(1, (0,))
    now = round(24.8 * MS)
    for key in (1, 2, 3):
        policy.arrive(query(key, now), now)
    policy.done(1, (0,), now)
    policy.arrive(query(0, 0, stage=2, first=False), now)
    assert policy.decide(now) == Run(1, (1, 2, 3)), "24.8 + 34.75 + 28.5 < 90; one: + 24.8 + 41"


def test_none_fitting_although_some_wait_ends_the_questions() -> None:
    policy, q = three_stages(60), query(1, 0)
    policy.arrive(q, 0)
    assert policy.decide(0) == Run(1, (1,))
    # A large one: t_done 10 + t_add 25 + t_rest (2 stages of 5 rows) 60 is over the bound.
    policy.arrive(query(2, 10 * MS, rows=4), 10 * MS)
    step(policy, Run(1, (1,)), 10 * MS, q)
    assert policy.decide(10 * MS) == Run(2, (1,))
    policy.drop(2, 12 * MS)
    policy.arrive(query(3, 20 * MS), 20 * MS)
    step(policy, Run(2, (1,)), 20 * MS, q)
    # It would fit, 20 + 20 + 15 = 55 < 60, and is not asked for.
    assert policy.decide(20 * MS) == Run(3, (1,))


def test_rows_are_counted_not_requests() -> None:
    policy = make(t_opt_ms=64.9)
    under_way(policy)
    for key, rows in ((3, 2), (4, 1)):
        policy.arrive(query(key, 15 * MS, rows=rows), 15 * MS)
    # Two rows make 15 + 15 + 25 = 55, three 15 + 20 + 30 = 65.
    assert policy.decide(15 * MS) == Run(1, (3,))


def test_nobody_joins_at_the_cost_of_a_deadline() -> None:
    policy = make(t_opt_ms=200)
    for key in (1, 2):
        policy.arrive(query(key, 0, deadline_ms=45), 0)
    run = policy.decide(0)
    assert run == Run(1, (1, 2))
    policy.done(1, (1, 2), 15 * MS)
    for key in (1, 2):
        q = query(key, 0, stage=2, deadline_ms=45, first=False)
        policy.arrive(q, 15 * MS)
    policy.arrive(query(3, 15 * MS), 15 * MS)
    policy.arrive(query(4, 15 * MS), 15 * MS)
    # One more: 15 + 10 + 20 = 45 is in time; two more: 15 + 15 + 25 = 55 is not.
    assert policy.decide(15 * MS) == Run(1, (3,))


def test_other_shapes_and_other_ways_do_not_join() -> None:
    policy = make(t_opt_ms=200)
    under_way(policy)
    policy.arrive(query(3, 15 * MS, shape=(5,)), 15 * MS)
    policy.arrive(query(4, 15 * MS, ahead=()), 15 * MS)  # leaves after stage 1
    assert policy.decide(15 * MS) == Run(2, (1, 2))


def test_join_by_gain_only() -> None:
    policy = make(t_opt_ms=500, join="gain")
    under_way(policy)
    policy.arrive(query(3, 15 * MS), 15 * MS)
    # Apart: 15 x 2 and 15 + 20; together 3 x (10 + 20): the two would pay more than the one gains.
    assert policy.decide(15 * MS) == Run(2, (1, 2))


def test_who_joins_does_not_count_as_left_behind_as_well() -> None:
    """Nobody is: apart they take 2 + 4, together 2 x (2 + 3), and who comes next waits less."""
    quick = profile({b: 1.0 + b for b in (1, 2, 4, 8)})
    spec = {"policy": "lbci", "t_opt_ms": 40, "join": "gain"}
    policy = create_policy(spec, (1, 2), {s: StageFacts(f"b{s}", 8, 1, quick) for s in (1, 2)})
    assert isinstance(policy, LbciPolicy)
    queries = {1: query(1, 0)}
    policy.arrive(queries[1], 0)
    run = policy.decide(0)
    assert run == Run(1, (1,))
    policy.arrive(query(2, MS // 4), MS // 4)
    go_on(policy, run, 2 * MS, queries)
    assert policy.decide(2 * MS) == Run(1, (2,))


@pytest.mark.parametrize(("lanes", "left", "joins"), [(1, 1, True), (2, 2, False), (2, 1, True)])
def test_nobody_joins_for_a_gain_whom_another_lane_can_take(
    lanes: int, left: int, joins: bool
) -> None:
    """Unless that lane was given up meanwhile (``left`` are there).

    The second stage reads many weights: one batch instead of two saves nearly half of it.
    """
    flat = {1: 100.0, 2: 101.0, 4: 102.0, 8: 103.0}
    both = {1: StageFacts("a", 8, 1, profile({b: 5.0 + b for b in (1, 2, 4, 8)}))}
    both[2] = StageFacts("b", 8, 1, profile(flat))
    spec = {"policy": "lbci", "t_opt_ms": 1000, "join": "gain"}
    w = TinyWorker(create_policy(spec, (1, 2), both), {}, lanes=lanes)
    w.enter(0, Walk((1, 2)), 1, 4, 0, 10**10, 0)
    w.decide(0)
    w.enter(1, Walk((1, 2)), 1, 4, 0, 10**10, MS)
    assert w.decide(MS) is None
    w.lanes = left
    w.finish(0, 6 * MS, fail=False)
    w.decide(6 * MS)
    w.decide(6 * MS)
    ran = [(run.stage, run.keys) for _, run in w.runs[1:]]
    assert ran == ([(1, (1,))] if joins else [(2, (0,)), (1, (1,))])


def test_newcomers_that_all_drop_out_hold_nobody_back() -> None:
    policy = make()
    queries = under_way(policy)
    queries[3] = query(3, 15 * MS)
    policy.arrive(queries[3], 15 * MS)
    run = policy.decide(15 * MS)
    assert run == Run(1, (3,))
    policy.done(1, [3], 25 * MS)  # it failed
    assert policy.decide(25 * MS) == Run(2, (1, 2))


def test_the_tightest_deadline_aboard_counts() -> None:
    policy = make(t_opt_ms=500)
    queries = {1: query(1, 0, deadline_ms=35), 2: query(2, 0)}
    for q in queries.values():
        policy.arrive(q, 0)
    run = policy.decide(0)
    assert run == Run(1, (1, 2))
    go_on(policy, run, 15 * MS, queries)
    policy.arrive(query(3, 15 * MS), 15 * MS)
    assert policy.decide(15 * MS) == Run(2, (1, 2))  # 30 alone; 45 with the newcomer


def test_the_wait_of_a_newcomer_is_that_at_this_stage() -> None:
    policy = make()
    under_way(policy)
    policy.arrive(query(3, 15 * MS)._replace(arrival_ns=-40 * MS), 15 * MS)
    assert policy.decide(15 * MS) == Run(1, (3,))


def test_nobody_catches_up_through_a_busy_stage() -> None:
    policy = make()
    under_way(policy)
    policy.arrive(query(3, 15 * MS), 15 * MS)
    assert policy.decide(15 * MS, {1}) == Run(2, (1, 2))


def test_who_exceeds_the_bound_even_alone_runs_alone() -> None:
    policy = make(t_opt_ms=25)  # one row takes 20, two 30
    for key in (1, 2):
        policy.arrive(query(key, 0, rows=2), 0)
    assert policy.decide(0) == Run(1, (1,))


def test_nobody_joins_a_batch_that_has_left_others_behind() -> None:
    """It is smaller than N_opt only because the next did not fit."""
    policy, queries = make(), {k: query(k, 0, rows=3) for k in (1, 2)}
    for q in queries.values():
        policy.arrive(q, 0)
    run = policy.decide(0)
    assert run == Run(1, (1,))
    policy.arrive(query(3, 15 * MS, deadline_ms=500), 15 * MS)
    go_on(policy, run, 20 * MS, queries)
    assert policy.decide(20 * MS) == Run(2, (1,))


def test_of_several_ways_the_least_n_opt_counts() -> None:
    policy = make()
    for ways in ([(1,), (1, 2)], [(1, 2), (1,)]):
        assert policy._n_opt(ways, None) == 5


def test_side_by_side_a_second_batch_starts() -> None:
    policy = make()
    policy.arrive(query(1, 0), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.arrive(query(2, MS), MS)
    assert policy.decide(MS) == Run(1, (2,))
    assert policy.decide(MS) is None


def test_batches_that_are_over_are_forgotten_though_newcomers_have_each_turn() -> None:
    """Stage 1 computes all the while; at stage 2 one waits who never has his turn."""
    spec = {"policy": "lbci", "t_opt_ms": 65, "n_max": 1}
    policy = create_policy(spec, (1, 2), facts(), [TaskShare(), TaskShare(priority=1)])
    assert isinstance(policy, LbciPolicy)
    policy.lanes, queries = 2, {k: query(k, 0) for k in (1, 2)}
    policy.arrive(queries[1], 0)
    run = policy.decide(0)
    assert run == Run(1, (1,))
    go_on(policy, run, MS, queries)
    policy.arrive(queries[2], MS)
    for key in range(3, 50):
        policy.arrive(query(key, MS, stage=2, task=1), MS)
    assert policy.decide(MS) == Run(2, (3,))
    assert policy.decide(MS, {2}) == Run(1, (2,))
    for key in range(4, 50):
        policy.done(2, (key - 1,), MS)
        assert policy.decide(MS, {1}) == Run(2, (key,))
    assert len(policy._batches) <= 4


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_join_past_the_bound(data: st.DataObject) -> None:
    """Whenever newcomers are taken, the predicted total is within t_opt and no larger than N_opt;
    and one more of those that waited would have been too many."""
    t_opt = data.draw(st.integers(25, 150))
    policy = make(t_opt_ms=t_opt)
    best = n_opt(FittedCosts(facts(), 16), (1, 2), None, t_opt * MS, 16)
    n_d = data.draw(st.integers(1, max(1, best - 1)))
    for key in range(n_d):
        policy.arrive(query(key, 0), 0)
    now = (5 + 5 * n_d) * MS
    run = policy.decide(0)
    assert run == Run(1, tuple(range(n_d)))
    policy.done(1, run.keys, now)
    for key in range(n_d):
        policy.arrive(query(key, 0, stage=2, first=False), now)
    waits = data.draw(st.integers(0, now // MS))
    newcomers = data.draw(st.integers(1, 8))
    for key in range(100, 100 + newcomers):
        policy.arrive(query(key, now - waits * MS), now)
    run = policy.decide(now)
    assert isinstance(run, Run)
    joined = len(run.keys) if run.stage == 1 else 0

    def total(n: int) -> float:
        return waits + now / MS + (5 + 5 * n) + (5 + 5 * (n_d + n))

    full = n_d >= best
    if joined:
        assert not full and total(joined) < t_opt + 0.1 and n_d + joined <= best
    if not full and joined < newcomers and n_d + joined < best:
        assert total(joined + 1) >= t_opt - 0.1

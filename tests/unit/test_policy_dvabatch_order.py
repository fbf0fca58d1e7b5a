"""`dvabatch`: who goes before whom, and how many rows may be under way, on small cases."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest
from policy_rig import MS, TIMES, TinyWorker, Walk, facts_for, profile, query

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import Policy, Run, WaitUntil
from blockflow.batching.registry import create_policy

CHAIN = (1, 2, 3, 4)
FIVE = (1, 2, 3, 4, 5)
CHEAP = {1: 10.0, 2: 11.0, 4: 13.0, 8: 17.0}
ODD = {1: 10.0, 2: 15.0, 3: 26.0, 8: 80.0}
"""Two rows are cheaper together, the third is not."""
FLAT = {1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0}


def make(times: Mapping[int, Mapping[int, float]] | None = None, **options: object) -> Policy:
    facts = facts_for(CHAIN)
    if times is not None:
        facts = {s: StageFacts(f"block{s}", 8, 1, profile(t)) for s, t in times.items()}
    return create_policy({"policy": "dvabatch", **options}, CHAIN, facts)


def come(w: TinyWorker, now: int, *keys: int, rows: int = 1, length: int = 4) -> None:
    for key in keys:
        w.enter(key, Walk(CHAIN), rows, length, 0, now + 10**12, now)


def ran(w: TinyWorker) -> list[tuple[int, tuple[int, ...]]]:
    return [(run.stage, run.keys) for _, run in w.runs]


def step(w: TinyWorker, now: int, index: int = 0) -> None:
    """A batch ends; whatever can start then does."""
    w.finish(index, now, fail=False)
    while isinstance(w.decide(now), Run):
        pass


def test_who_joins_counts_with_all_that_is_under_way() -> None:
    """Four rows and two are under way, of eight: no more than two may join the younger batch."""
    policy = make(policies=["load", "input"], bs_max=8, join="always", buffer_pairs=3)
    w = TinyWorker(policy, {}, lanes=2)
    come(w, 0, 0, rows=4, length=4)
    w.decide(0)
    step(w, MS)
    come(w, MS, 1, rows=2, length=9)
    while isinstance(w.decide(MS), Run):
        pass
    assert ran(w) == [(1, (0,)), (2, (0,)), (1, (1,))]
    come(w, 2 * MS, 2, rows=4, length=9)
    w.decide(2 * MS)
    step(w, 3 * MS, index=1)
    assert (1, (2,)) not in ran(w)
    w.run_out(4 * MS)
    assert w.left == {0, 1, 2}


def test_who_fits_beside_all_that_is_under_way_may_join() -> None:
    """Of four rows two are under way, in the batch that is joined: they count once."""
    for rows, joins in ((2, True), (3, False)):
        w = TinyWorker(make(policies=["load", "input"], bs_max=4, join="always"), {})
        come(w, 0, 0, rows=2)
        w.decide(0)
        step(w, MS)
        assert ran(w) == [(1, (0,)), (2, (0,))]
        come(w, MS, 1, rows=rows)
        step(w, 2 * MS)
        assert ran(w)[-1] == ((1, (1,)) if joins else (3, (0,))), rows
        w.run_out(3 * MS)
        assert w.left == {0, 1}


def test_nobody_is_late_for_company_where_rows_are_under_way_either() -> None:
    """One row takes 2 ms at each stage, two take 3."""
    policy = create_policy({"policy": "dvabatch", "policies": ["input"]}, (1, 2), facts_for((1, 2)))
    policy.arrive(query(1, 0), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.done(1, (1,), MS)
    policy.arrive(query(1, 0, stage=2, first=False), MS)
    assert policy.decide(MS) == Run(2, (1,))
    policy.arrive(query(2, MS, deadline_ms=5), MS)
    policy.arrive(query(3, MS), MS)
    assert policy.decide(MS, {2}) == Run(1, (2,))


def test_the_later_half_goes_before_who_came_after_it() -> None:
    """It has no place in the pipeline before it runs; who comes later must not take its turn."""
    w = TinyWorker(make({**dict.fromkeys(CHAIN, FLAT), 1: CHEAP}, policies=["operator"]), {}, 2)
    come(w, 0, 0, 1)
    w.decide(0)
    step(w, MS)
    assert ran(w) == [(1, (0, 1)), (2, (0,))]
    come(w, 2 * MS, 2)
    w.run_out(2 * MS)
    at_two = [keys for stage, keys in ran(w) if stage == 2]
    assert at_two == [(0,), (1,), (2,)]


def test_the_later_half_goes_before_who_begins_at_its_stage() -> None:
    """It waits for the first one, and its stage is free meanwhile; another lane is, too."""
    w = TinyWorker(make({**dict.fromkeys(CHAIN, FLAT), 1: CHEAP}, policies=["operator"]), {}, 2)
    come(w, 0, 0, 1)
    w.decide(0)
    step(w, MS)
    step(w, 2 * MS)
    assert ran(w) == [(1, (0, 1)), (2, (0,)), (3, (0,))]
    w.enter(2, Walk((2, 3, 4)), 1, 4, 0, 10**12, 3 * MS)
    w.run_out(3 * MS)
    assert [keys for stage, keys in ran(w) if stage == 2] == [(0,), (1,), (2,)]


def test_of_an_odd_number_the_larger_half_goes_first() -> None:
    w = TinyWorker(make({**dict.fromkeys(CHAIN, ODD), 1: CHEAP}, policies=["operator"]), {})
    come(w, 0, 0, 1, 2)
    w.decide(0)
    step(w, MS)
    assert ran(w) == [(1, (0, 1, 2)), (2, (0, 1))]


def test_the_window_that_ends_first_is_waited_for() -> None:
    """Of two groups the older one's, unless the other one has a deadline before: 20 ms, less the
    8 that its way takes."""
    for deadline_ms, until_ms in ((1000, 50), (20, 5 + 12)):
        policy = make(window_ms=50)
        policy.arrive(query(1, 0, shape=(4,)), 0)
        policy.arrive(query(2, 5 * MS, shape=(6,), deadline_ms=deadline_ms), 5 * MS)
        assert policy.decide(5 * MS) == WaitUntil(until_ms * MS)


def test_a_second_batch_is_not_stretched_while_a_first_one_is() -> None:
    """Both would rest for newcomers, each on buffers that the other one's need. (Without a profile:
    with one those that wait for stage 2 would go on as one there.)"""
    facts = {s: StageFacts(f"block{s}", 8) for s in CHAIN}
    policy = create_policy({"policy": "dvabatch", "buffer_pairs": 3}, CHAIN, facts)
    w = TinyWorker(policy, {}, lanes=2)
    come(w, 0, 0)
    w.decide(0)
    step(w, MS)
    assert ran(w)[-1] == (2, (0,))
    come(w, MS, 1)
    w.decide(MS)  # joins the first batch, which runs stage 2 meanwhile
    assert ran(w)[-1] == (1, (1,))
    come(w, 2 * MS, 2, length=6)
    step(w, 2 * MS, index=1)
    assert ran(w)[-1] == (1, (2,)), "a batch of its own"
    step(w, 3 * MS)
    assert ran(w)[-1] == (2, (1,)), "the newcomer catches up"
    come(w, 3 * MS, 3, length=6)
    step(w, 4 * MS)
    w.run_out(5 * MS)
    assert (2, (2, 3)) not in ran(w)
    assert w.left == {0, 1, 2, 3}


def test_a_new_batch_is_no_larger_than_any_block_on_its_way_takes() -> None:
    facts = {1: StageFacts("wide", 16), 2: StageFacts("narrow", 2)}
    policy = create_policy({"policy": "dvabatch"}, (1, 2), facts)
    for key in range(3):
        policy.arrive(query(key, 0), 0)
    assert policy.decide(0) == Run(1, (0, 1))


def test_who_comes_from_another_stage_waits_for_no_window() -> None:
    policy = make(window_ms=50)
    policy.arrive(query(1, 0, stage=2, first=False), 0)
    assert policy.decide(0) == Run(2, (1,))


def test_who_is_late_anyhow_keeps_nobody_from_joining() -> None:
    """Alone it would end at 40 ms, with the newcomer at 53: it is late either way, or neither."""
    for deadline_ms, joins in ((35, True), (45, False), (60, True)):
        w = TinyWorker(make(dict.fromkeys(CHAIN, CHEAP), join="always"), {})
        w.enter(0, Walk(CHAIN), 1, 4, 0, deadline_ms * MS, 0)
        w.decide(0)
        w.finish(0, 10 * MS, fail=False)
        come(w, 10 * MS, 1)
        w.decide(10 * MS)
        assert ran(w)[1] == ((1, (1,)) if joins else (2, (0,))), deadline_ms


def test_who_leaves_out_the_stage_where_a_batch_rests_does_not_catch_up_with_it() -> None:
    """The most urgent one that waits goes there, the next one does not: it starts by itself."""
    w = TinyWorker(make(join="always"), {})
    come(w, 0, 0)
    w.decide(0)
    w.finish(0, MS, fail=False)
    w.enter(1, Walk(CHAIN), 1, 4, 0, 10**11, MS)
    w.enter(2, Walk((1, 3, 4)), 1, 4, 0, 10**11 + 1, MS)
    w.run_out(MS)
    assert ran(w)[:3] == [(1, (0,)), (1, (1,)), (2, (0, 1))]
    assert w.left == {0, 1, 2}


def any_walk(rng: Random) -> Walk:
    """Some stages, in another order than the worker's perhaps, with a fork at the end perhaps."""
    stages = sorted(rng.sample(FIVE, rng.randint(2, 5)))
    kind = rng.random()
    if kind < 0.25:
        rng.shuffle(stages)
    elif kind < 0.6 and len(stages) > 2:
        fork = rng.randint(1, len(stages) - 2)
        return Walk((*stages[:fork], tuple(stages[fork:])))
    return Walk(tuple(stages))


@pytest.mark.parametrize("seed", [*range(30), 72, 503])
def test_whatever_ways_cross_nobody_waits_for_ever(seed: int) -> None:
    """Who has no place and whoever holds the places wait for each other, but for the order: in 3
    those on other pairs have to go first, in 72 and 503 those at the very same stage."""
    rng = Random(seed)
    kinds = rng.choice([["load"], ["load", "operator"], ["operator"], ["load", "input"]])
    pairs = rng.choice([1, 2, 2, 3])
    spec = {"policy": "dvabatch", "join": "always", "policies": kinds, "buffer_pairs": pairs}
    times = rng.choice([TIMES, {b: 2.0 * b for b in (1, 2, 4, 8, 16)}])
    policy = create_policy(spec, FIVE, facts_for(FIVE, times))
    worker = TinyWorker(policy, {}, lanes=rng.choice([1, 2, 3, 4]))
    for n in range(60):
        now, what = n * MS, rng.random()
        if what < 0.35:
            worker.enter(n, any_walk(rng), rng.choice([1, 1, 2]), 4, 0, 10**15, now)
        elif what < 0.6:
            worker.finish(rng.randrange(4), now, fail=rng.random() < 0.05)
        else:
            worker.decide(now)
    worker.run_out(60 * MS)

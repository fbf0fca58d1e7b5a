"""`dvabatch`: the three meta-operations and the three diversities, on small cases."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest
from policy_rig import MS, TinyWorker, Walk, facts_for, profile, query

from blockflow.batching.dvabatch import DvabatchPolicy
from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import Policy, Run, WaitUntil
from blockflow.batching.registry import create_policy
from blockflow.batching.shares import TaskShare
from blockflow.core.profile import Point, StageProfile

CHAIN = (1, 2, 3, 4)
CHEAPER = {1: 10.0, 2: 11.0, 4: 13.0, 8: 17.0}  # batching pays
FLAT = {1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0}  # it does not
WHO_COME_BESIDE = [(1, 69, False), (1, 70, True), (2, 99, False), (2, 100, True)]
"""While the batch runs a stage; its deadline in ms, and whether that allows it: with the newcomers
it ends at 10 + 10 + 50 or 50 + 40 + 10 ms."""


def make(
    times: Mapping[int, Mapping[int, float]] | None = None,
    stages: tuple[int, ...] = CHAIN,
    **options: object,
) -> Policy:
    facts = None
    if times is not None:
        facts = {s: StageFacts(f"block{s}", 8, 1, profile(times[s])) for s in stages}
    return create_policy({"policy": "dvabatch", **options}, stages, facts)


def worker(policy: Policy, lanes: int = 1) -> TinyWorker:
    return TinyWorker(policy, {}, lanes=lanes)


def come(w: TinyWorker, now: int, *keys: int, walk: Walk = Walk(CHAIN), rows: int = 1) -> None:  # noqa: B008
    for key in keys:
        w.enter(key, walk, rows, 4, 0, now + 10**10, now)


def ran(w: TinyWorker) -> list[tuple[int, tuple[int, ...]]]:
    return [(run.stage, run.keys) for _, run in w.runs]


def test_new_stretch_and_split_as_in_the_paper() -> None:
    """Figure 8: two queries; two more stretch the batch while executor 2 works on it, catch up and
    go on through stage 3 with it; before stage 4, which does not gain from four, it is split."""
    times = {1: CHEAPER, 2: CHEAPER, 3: {1: 90.0, 2: 91.0, 4: 92.0, 8: 93.0}}
    times[4] = {1: 10.0, 2: 10.0, 4: 20.0, 8: 40.0}
    w = worker(make(times, policies=["load", "operator"], join="always"), lanes=2)
    come(w, 0, 0, 1)
    w.decide(0)
    w.finish(0, MS, fail=False)
    w.decide(MS)
    come(w, 2 * MS, 2, 3)
    w.decide(2 * MS)
    assert ran(w) == [(1, (0, 1)), (2, (0, 1)), (1, (2, 3))]
    w.run_out(3 * MS)
    assert ran(w)[3:] == [(2, (2, 3)), (3, (0, 1, 2, 3)), (4, (0, 1)), (4, (2, 3))]


def test_newcomers_catch_up_with_the_batch_at_a_boundary() -> None:
    w = worker(make())
    come(w, 0, 0)
    w.decide(0)
    w.finish(0, MS, fail=False)
    come(w, MS, 1, 2)
    w.run_out(MS)
    assert ran(w) == [
        (1, (0,)),
        (1, (1, 2)),
        (2, (0, 1, 2)),
        (3, (0, 1, 2)),
        (4, (0, 1, 2)),
    ]


def test_a_batch_can_be_stretched_again_until_it_is_full() -> None:
    w = worker(make(bs_max=3))
    for key, steps in ((0, 1), (1, 2), (2, 2), (3, 0)):
        come(w, 0, key)
        for _ in range(steps):
            w.decide(0)
            w.finish(0, 0, fail=False)
    w.run_out(0)
    assert ran(w) == [
        (1, (0,)),
        (1, (1,)),
        (2, (0, 1)),
        (1, (2,)),
        (2, (2,)),
        (3, (0, 1, 2)),
        (4, (0, 1, 2)),
        *[(s, (3,)) for s in CHAIN],
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"policies": ["input"]},
        {"buffer_pairs": 1},
        {"t_comp_wait_ms": 3},
        {"last_join_stage": 1},
        {"bs_max": 1},
    ],
    ids=str,
)
def test_who_may_not_stretch_waits_for_a_new_batch(options: Mapping[str, object]) -> None:
    w = worker(make(**options))
    come(w, 0, 0)
    w.decide(0)
    w.finish(0, 2 * MS, fail=False)
    w.decide(2 * MS)
    w.finish(0, 4 * MS, fail=False)  # two stages are done, 4 ms have passed
    come(w, 4 * MS, 1)
    w.run_out(4 * MS)
    assert ran(w) == [(s, (0,)) for s in CHAIN] + [(s, (1,)) for s in CHAIN]


def test_nobody_joins_at_the_cost_of_a_deadline() -> None:
    policy = make(dict.fromkeys(CHAIN, CHEAPER), join="always")
    w = worker(policy)
    w.enter(0, Walk(CHAIN), 1, 4, 0, 45 * MS, 0)
    w.decide(0)
    w.finish(0, 10 * MS, fail=False)
    come(w, 10 * MS, 1)
    # Alone it ends at 40 ms; with the newcomer at 10 + 10 + 33.
    w.run_out(10 * MS)
    assert ran(w)[1] == (2, (0,))
    assert isinstance(policy, DvabatchPolicy)
    assert policy._pipeline.at_rest and not len(policy._table), "nor is a place kept for him"


@pytest.mark.parametrize(("stage", "deadline_ms", "joins"), WHO_COME_BESIDE)
def test_newcomers_in_another_lane_wait_for_the_stage_before(
    stage: int, deadline_ms: int, joins: bool
) -> None:
    """The batch ends at 10 ms at stage 1, 50 at stage 2, 60 at stage 3, alone. Newcomers have stage
    1 from 10 ms on, and stage 2 from 50."""
    ten, forty = dict.fromkeys((1, 2, 4, 8), 10.0), dict.fromkeys((1, 2, 4, 8), 40.0)
    w = worker(make({1: ten, 2: forty, 3: ten}, (1, 2, 3), join="always"), lanes=2)
    walk = Walk((1, 2, 3))
    w.enter(0, walk, 1, 4, 0, deadline_ms * MS, 0)
    w.decide(0)
    for now, running in ((MS, 1), (11 * MS, 2)):
        if running == stage:
            come(w, now, 1, walk=walk)
            w.decide(now)
        if running == 1:
            w.finish(0, 10 * MS, fail=False)
            w.decide(10 * MS)
            w.decide(10 * MS)
    w.run_out(11 * MS)
    assert ((3, (0, 1)) in ran(w)) is joins


def test_with_a_profile_joins_have_to_pay() -> None:
    cheap, heavy = dict.fromkeys(CHAIN, CHEAPER), {1: 100.0, 2: 101.0, 4: 102.0, 8: 103.0}
    for times, second in (
        (dict.fromkeys(CHAIN, FLAT), (2, (0,))),
        ({**cheap, 4: heavy}, (1, (1, 2, 3))),
        ({**cheap, 1: heavy}, (2, (0,))),  # what is left costs less than to catch up with it
    ):
        w = worker(make(times))
        come(w, 0, 0)
        w.decide(0)
        w.finish(0, 10 * MS, fail=False)
        come(w, 10 * MS, 1, 2, 3)
        w.run_out(10 * MS)
        assert ran(w)[1] == second


def test_a_new_policy_knows_how_fast_they_have_come() -> None:
    """A row per 100 ms: to join pays, as there is nobody else to come soon. All at once, as they
    are handed over, it would not."""
    w = worker(make(dict.fromkeys((1, 2, 3), CHEAPER), (1, 2, 3)))
    walk, now = Walk((1, 2, 3)), 300 * MS
    for key in range(3):
        w.enter(key, walk, 1, 8, 0, 10**12, key * 100 * MS)
    w.enter(3, walk, 1, 4, 0, 10**11, now)
    w.change(make(dict.fromkeys((1, 2, 3), CHEAPER), (1, 2, 3)), now)
    w.decide(now)
    now += 10 * MS
    w.finish(0, now, fail=False)
    w.enter(4, walk, 1, 4, 0, 10**11, now)
    w.decide(now)
    assert ran(w) == [(1, (3,)), (1, (4,))]


@pytest.mark.parametrize(("left", "joins"), [(2, False), (1, True)])
def test_nobody_joins_for_a_gain_whom_another_lane_can_take(left: int, joins: bool) -> None:
    """Unless that lane was given up meanwhile: ``left`` are there."""
    times = {**dict.fromkeys(CHAIN, CHEAPER), 4: {1: 100.0, 2: 101.0, 4: 102.0, 8: 103.0}}
    w = worker(make(times), lanes=2)
    come(w, 0, 0)
    w.decide(0)
    come(w, MS, 1)
    assert w.decide(MS) is None
    w.lanes = left
    w.finish(0, 10 * MS, fail=False)
    w.decide(10 * MS)
    w.decide(10 * MS)
    assert ran(w)[1:] == ([(1, (1,))] if joins else [(2, (0,)), (1, (1,))])


@pytest.mark.parametrize("pairs", [1, 2, 3])
@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("join", ["always", "gain"])
def test_the_later_half_of_a_split_finds_its_place(pairs: int, lanes: int, join: str) -> None:
    """It has no buffer pair until it runs: younger batches must not sit on all of them for ever."""
    times = {**dict.fromkeys(CHAIN, FLAT), 1: {1: 30.0, 2: 31.0, 4: 32.0, 8: 33.0}}
    policy = make(times, policies=["load", "operator"], buffer_pairs=pairs, join=join)
    w = worker(policy, lanes)
    rng = Random(pairs * lanes)
    for now in range(150):
        if rng.random() < 0.5:
            come(w, now * MS, now)
        while w.decide(now * MS) is not None:
            pass
        if rng.random() < 0.6:
            w.finish(rng.randrange(lanes), now * MS, fail=False)
    w.run_out(150 * MS)
    assert not w.waiting


def test_halves_run_one_after_the_other() -> None:
    times = {1: {1: 50.0, 2: 51.0, 4: 52.0, 8: 53.0}, 2: FLAT, 3: FLAT, 4: FLAT}
    w = worker(make(times, policies=["operator"]))
    come(w, 0, *range(4))
    w.run_out(0)
    flat = [[(s, (k,)) for s in (2, 3, 4)] for k in range(4)]
    assert ran(w) == [(1, (0, 1, 2, 3)), *flat[0], *flat[1], *flat[2], *flat[3]]


def test_halves_stay_apart_side_by_side() -> None:
    times = {1: {1: 50.0, 2: 51.0, 4: 52.0, 8: 53.0}, 2: FLAT, 3: FLAT, 4: FLAT}
    w = worker(make(times, policies=["operator"]), lanes=2)
    come(w, 0, 0, 1)
    w.run_out(0)
    assert ran(w)[1:] == [(s, (k,)) for k in (0, 1) for s in (2, 3, 4)]


def test_before_the_first_stage_the_second_half_goes_on_waiting() -> None:
    policy = make(dict.fromkeys(CHAIN, FLAT), policies=["load", "operator"])
    for key in range(3):
        policy.arrive(query(key, 0), 0)
    assert policy.decide(0) == Run(1, (0,))


def test_a_split_batch_takes_nobody_in() -> None:
    times = {1: {1: 50.0, 2: 51.0, 4: 52.0, 8: 53.0}, 2: FLAT, 3: FLAT, 4: FLAT}
    w = worker(make(times, policies=["load", "operator"], join="always"))
    come(w, 0, 0, 1)
    w.decide(0)
    w.finish(0, 0, fail=False)
    w.decide(0)
    assert ran(w) == [(1, (0, 1)), (2, (0,))]
    come(w, 0, 2)
    w.run_out(0)
    assert ran(w)[-4:] == [(s, (2,)) for s in CHAIN]


def test_rows_that_fork_are_split_by_their_ways() -> None:
    w = worker(make(stages=(1, 2, 3)))
    come(w, 0, 0, walk=Walk((1, 2)))
    come(w, 0, 1, walk=Walk((1, 3)))
    come(w, 0, 2, walk=Walk((1, (2, 3))))
    w.run_out(0)
    assert ran(w)[0] == (1, (0, 1, 2))
    assert sorted((s, len(keys)) for s, keys in ran(w)[1:]) == [(2, 2), (3, 2)]


def lengthy(*, pads: bool = True) -> dict[int, StageFacts]:
    points = tuple(
        Point(1, rows, n, 5, rows * n / 8, rows * n / 8, *[rows * n / 8] * 4, 0.0, 0)
        for n in (8, 64)
        for rows in (1, 8)
    )
    measured = StageProfile("enc", "0" * 64, "echo", "fp32", "here", points)
    return {s: StageFacts(f"enc{s}", 8, 1, measured, (0,), (1, 64), pads) for s in (1, 2)}


def test_like_lengths_share_a_batch_and_are_padded() -> None:
    spec = {"policy": "dvabatch", "policies": ["input"], "classes": [8, 64]}
    policy = create_policy(spec, (1, 2), lengthy())
    for key, length in enumerate((5, 60, 8, 3)):
        policy.arrive(query(key, key, shape=(length,)), key)
    assert policy.decide(5) == Run(1, (0, 2, 3), (8,))
    policy.done(1, (0, 2, 3), 6)
    for key, length in ((0, 5), (2, 8), (3, 3)):  # cut back to their own lengths
        policy.arrive(query(key, key, stage=2, shape=(length,), first=False), 6)
    assert policy.decide(7) == Run(2, (0, 2, 3), (8,))


def test_no_more_rows_are_under_way_than_one_batch_has() -> None:
    spec = {"policy": "dvabatch", "policies": ["input"], "bs_max": 4}
    policy = create_policy(spec, (1, 2), lengthy())
    for key, (length, rows) in enumerate(((8, 3), (64, 1), (64, 1))):
        policy.arrive(query(key, key, shape=(length,), rows=rows), key)
    assert policy.decide(5) == Run(1, (0,))
    policy.done(1, (0,), 6)
    policy.arrive(query(0, 0, stage=2, shape=(8,), rows=3, first=False), 6)
    assert policy.decide(6) == Run(2, (0,))
    assert policy.decide(6) == Run(1, (1,))  # side by side: one row more, and no further
    assert policy.decide(6) is None


def test_the_papers_window_is_the_first_stage_of_a_full_batch() -> None:
    spec = {"policy": "dvabatch", "policies": ["input"], "window_ms": "stage1", "bs_max": 4}
    policy = create_policy(spec, (1, 2), lengthy())
    policy.arrive(query(1, 0, shape=(8,)), 0)
    # Four rows of length 8 take 4 ms in stage 1.
    assert policy.decide(0) == WaitUntil(4 * MS)
    assert policy.decide(4 * MS) == Run(1, (1,))
    urgent = create_policy(spec, (1, 2), lengthy())
    urgent.arrive(query(1, 0, shape=(8,), deadline_ms=5), 0)
    assert urgent.decide(0) == WaitUntil(3 * MS)  # both stages need 2 ms
    full = create_policy(spec, (1, 2), lengthy())
    full.arrive(query(1, 0, shape=(8,), rows=4), 0)
    assert full.decide(0) == Run(1, (1,))


def test_a_window_ends_when_the_stages_ahead_take_no_more_rows() -> None:
    wide, narrow = (StageFacts(f"b{rows}", rows) for rows in (16, 2))
    spec = {"policy": "dvabatch", "window_ms": 100}
    policy = create_policy(spec, (1, 2), {1: wide, 2: narrow})
    policy.arrive(query(1, 0), 0)
    assert policy.decide(0) == WaitUntil(100 * MS)
    policy.arrive(query(2, MS), MS)  # two rows are all that stage 2 takes
    assert policy.decide(MS) == Run(1, (1, 2))


@pytest.mark.parametrize("asked", [False, True], ids=["landed", "waits"])
def test_a_batch_that_loses_all_its_queries_frees_everything(asked: bool) -> None:
    w = worker(make(buffer_pairs=1))
    come(w, 0, 0)
    w.decide(0)
    w.finish(0, MS, fail=False)
    w.decide(MS)
    w.finish(0, 2 * MS, fail=False)
    if asked:
        assert w.policy.decide(2 * MS, {3}) is None
    w.drop_key(0, 2 * MS)
    come(w, 3 * MS, 1)
    w.run_out(3 * MS)
    assert w.left == {1}


def test_blocks_in_another_order_than_the_path_still_work() -> None:
    policy = create_policy({"policy": "dvabatch"}, (3, 1, 2), facts_for((3, 1, 2)))
    w = TinyWorker(policy, {})
    for key in range(4):
        w.enter(key, Walk((1, 2, 3)), 2, 4, 0, 10**12, key)
    w.run_out(5)
    assert w.left == {0, 1, 2, 3}


def test_input_counts_the_rows_of_whom_it_takes_not_of_the_most_urgent() -> None:
    """The earliest deadline is of one row, which would fit; the turn is another's, who does not."""
    shares = (TaskShare(), TaskShare(priority=1))
    options = {"policy": "dvabatch", "policies": ["load", "input"], "bs_max": 8, "join": "always"}
    policy = create_policy(options, (1, 2), facts_for((1, 2)), shares)
    policy.arrive(query(1, 0, rows=4), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.arrive(query(2, 0, rows=1, shape=(9,), deadline_ms=500), 0)
    policy.arrive(query(3, 0, rows=8, shape=(9,), task=1), 0)
    policy.done(1, [1], MS)
    policy.arrive(query(1, MS, stage=2, rows=4, first=False), MS)
    assert policy.decide(MS) == Run(2, (1,))
    assert policy.decide(MS, {2}) is None, "four rows are under way, of eight"
    policy.done(2, [1], 2 * MS)
    assert policy.decide(2 * MS) == Run(1, (3,))

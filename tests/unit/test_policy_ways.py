"""Predictions for tasks that go different ways through one worker: each ends where its way does."""

from __future__ import annotations

import pytest
from policy_rig import MS, TinyWorker, Walk, profile, query

from blockflow.batching.costs import Costs
from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import Policy, Query, Run
from blockflow.batching.predicting import BatchTimes, JoinTimes, Known
from blockflow.batching.queueing import QueueingPolicy
from blockflow.batching.registry import create_policy
from blockflow.core.profile import Point, StageProfile

STAGES = (1, 2, 3)
FLAT = profile({1: 10.0, 2: 10.0, 3: 12.0, 4: 12.0, 8: 12.0})


def make(**spec: object) -> Policy:
    return create_policy(spec, STAGES, {s: StageFacts(f"b{s}", 8, 1, FLAT) for s in STAGES})


@pytest.mark.parametrize(("t_opt_ms", "joins"), [(36, False), (60, True)])
def test_lbci_counts_the_way_of_those_aboard(t_opt_ms: float, joins: bool) -> None:
    """10 ms have run; the newcomer catches up in 10, and leaves after another 10. Who is aboard
    takes 20 from there."""
    policy = make(policy="lbci", t_opt_ms=t_opt_ms)
    policy.arrive(query(1, 0, ahead=(2, 3)), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.arrive(query(2, 10 * MS, ahead=(2,)), 10 * MS)
    policy.done(1, (1,), 10 * MS)
    policy.arrive(query(1, 0, stage=2, first=False, ahead=(3,)), 10 * MS)
    assert policy.decide(10 * MS) == (Run(1, (2,)) if joins else Run(2, (1,)))


@pytest.mark.parametrize(("t_opt_ms", "joins"), [(36, False), (60, True)])
def test_lbci_counts_the_way_of_newcomers(t_opt_ms: float, joins: bool) -> None:
    """As above, but it is the newcomer that goes on when those aboard have left."""
    policy = make(policy="lbci", t_opt_ms=t_opt_ms)
    policy.arrive(query(1, 0, ahead=(2,)), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.arrive(query(2, 10 * MS, ahead=(2, 3)), 10 * MS)
    policy.done(1, (1,), 10 * MS)
    policy.arrive(query(1, 0, stage=2, first=False, ahead=()), 10 * MS)
    assert policy.decide(10 * MS) == (Run(1, (2,)) if joins else Run(2, (1,)))


def test_who_leaves_before_the_newcomers_are_there_is_not_late_because_of_them() -> None:
    """The first one's batch runs stage 1 until 10, and there it leaves."""
    aboard = [query(1, 0, deadline_ms=12, ahead=()), query(2, 0, ahead=(2, 3))]
    costs = Costs({s: StageFacts(f"b{s}", 8, 1, FLAT) for s in STAGES}, 8)
    position = {stage: i for i, stage in enumerate(STAGES)}

    def route(q: Query) -> tuple[int, ...]:
        return (q.stage, *(q.ahead or ()))

    known = Known(costs, None, route, position, lanes=1)
    times = JoinTimes(known, STAGES, 1, aboard, 5 * MS, 10 * MS)
    assert times.admit(query(3, 5 * MS, ahead=(2, 3)))


JOINERS = [{"policy": "lbci", "t_opt_ms": 300}, {"policy": "dvabatch", "join": "always"}]


@pytest.mark.parametrize("spec", JOINERS)
@pytest.mark.parametrize(("due_ms", "joining"), [(34, (2, 3)), (40, (2,)), (46, (2, 3))])
def test_newcomers_do_not_make_each_other_late(
    spec: dict[str, object], due_ms: int, joining: tuple[int, ...]
) -> None:
    """A stage takes 5 ms and 5 for each row. With the one aboard the first newcomer is done at 35,
    and at 45 if another one joins as well; by itself it would be late, too, if 35 is too late."""
    times = profile({b: 5.0 + 5.0 * b for b in (1, 2, 4, 8)})
    facts = {s: StageFacts(f"b{s}", 8, 1, times) for s in (1, 2)}
    policy = create_policy(spec, (1, 2), facts)
    policy.arrive(query(1, 0), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.done(1, (1,), 10 * MS)
    policy.arrive(query(1, 0, stage=2, first=False), 10 * MS)
    policy.arrive(query(2, 10 * MS, deadline_ms=due_ms - 10), 10 * MS)
    policy.arrive(query(3, 10 * MS), 10 * MS)
    assert policy.decide(10 * MS) == Run(1, joining)


def test_nobody_joins_a_batch_that_a_younger_one_follows() -> None:
    policy = make(policy="lbci", t_opt_ms=1000)
    policy.arrive(query(1, 0), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.done(1, (1,), 0)
    policy.arrive(query(1, 0, stage=2, first=False), 0)
    assert policy.decide(0) == Run(2, (1,))
    policy.arrive(query(2, 0), 0)
    assert policy.decide(0, {2}) == Run(1, (2,))
    for key, stage in ((2, 1), (1, 2)):
        policy.done(stage, (key,), 0)
        policy.arrive(query(key, 0, stage=stage + 1, first=False), 0)
    policy.arrive(query(3, 0), 0)
    assert policy.decide(0) == Run(3, (1,)), "the third would overtake the second"
    assert policy.decide(0, {3}) == Run(1, (3,))


def parted(policy: Policy) -> None:
    """One goes on to stage 2 and leaves there, the other one is at stage 3 at once."""
    for key, ahead in ((1, (2,)), (2, (3,))):
        policy.arrive(query(key, 0, ahead=ahead), 0)
    assert policy.decide(0) == Run(1, (1, 2))
    policy.done(1, (1, 2), 0)
    for key, stage in ((1, 2), (2, 3)):
        policy.arrive(query(key, 0, stage=stage, first=False, ahead=()), 0)


def test_nobody_joins_a_batch_that_has_parted() -> None:
    policy = make(policy="lbci", t_opt_ms=1000)
    parted(policy)
    policy.arrive(query(3, 0, ahead=(2,)), 0)
    assert policy.decide(0) == Run(2, (1,))


def test_a_younger_batch_leaves_a_stage_to_an_older_one_that_waits_for_it() -> None:
    policy = make(policy="lbci", t_opt_ms=1000)
    parted(policy)
    assert policy.decide(0) == Run(2, (1,))
    policy.arrive(query(3, 0, ahead=(3,)), 0)
    assert policy.decide(0, {2}) == Run(1, (3,))
    policy.done(1, (3,), 0)
    policy.arrive(query(3, 0, stage=3, first=False, ahead=()), 0)
    assert policy.decide(0, {2}) is None
    policy.done(2, (1,), 0)
    assert policy.decide(0) == Run(3, (2,))


def test_a_route_begins_where_its_query_waits_and_those_of_several_are_put_together() -> None:
    policy = make(policy="window")
    assert isinstance(policy, QueueingPolicy)
    for stage in (2, 3):
        assert policy._route(query(1, 0, stage=stage, ahead=())) == (stage,)
    assert policy._routes([query(1, 0, ahead=(3,)), query(2, 0, ahead=(2,))]) == (1, 2, 3)


def test_who_comes_another_way_does_not_join_there() -> None:
    """The second one has not run stage 2 when the first waits before stage 3."""
    policy = make(policy="lbci", t_opt_ms=1000)
    policy.arrive(query(1, 0, ahead=(2, 3)), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.done(1, (1,), 10 * MS)
    policy.arrive(query(1, 0, stage=2, first=False, ahead=(3,)), 10 * MS)
    assert policy.decide(10 * MS) == Run(2, (1,))
    for key, ahead in ((2, (2, 3)), (3, (3,))):
        policy.arrive(query(key, 20 * MS, ahead=ahead), 20 * MS)
    policy.done(2, (1,), 20 * MS)
    policy.arrive(query(1, 0, stage=3, first=False, ahead=()), 20 * MS)
    assert policy.decide(20 * MS) == Run(1, (2,))


@pytest.mark.parametrize("spec", [{"policy": "window"}, {"policy": "dvabatch"}], ids=str)
@pytest.mark.parametrize(("deadline_ms", "keys"), [(32, (1, 2)), (37, (1, 2, 3))])
def test_a_deadline_is_held_against_the_own_way(
    spec: dict[str, str], deadline_ms: int, keys: tuple[int, ...]
) -> None:
    """Two rows take 10 ms per stage, three 12. The most urgent leaves after two stages, in time
    either way; the second goes through three."""
    policy = make(**spec)
    policy.arrive(query(1, 0, deadline_ms=25, ahead=(2,)), 0)
    policy.arrive(query(2, 0, deadline_ms=deadline_ms, ahead=(2, 3)), 0)
    policy.arrive(query(3, 0, deadline_ms=900, ahead=(2, 3)), 0)
    assert policy.decide(0) == Run(1, keys)


def make_four(spec: dict[str, object]) -> Policy:
    stages = (1, 2, 3, 4)
    return create_policy(spec, stages, {s: StageFacts(f"b{s}", 8, 1, FLAT) for s in stages})


def two_heads(policy: Policy, first_ms: int, second_ms: int) -> Policy:
    """One goes from the trunk to a head of its own, another to the next one; with these deadlines.
    10 ms for the trunk and for each of the heads."""
    policy.arrive(query(1, 0, deadline_ms=first_ms, ahead=(2,)), 0)
    policy.arrive(query(2, 0, deadline_ms=second_ms, ahead=(3,)), 0)
    return policy


@pytest.mark.parametrize(
    ("t_opt_ms", "lanes", "keys"), [(26, 1, (1,)), (34, 1, (1, 2)), (26, 2, (1, 2))]
)
def test_lbci_counts_all_heads_that_a_batch_runs_one_after_another(
    t_opt_ms: float, lanes: int, keys: tuple[int, ...]
) -> None:
    """In two lanes they run beside each other."""
    policy = two_heads(make(policy="lbci", t_opt_ms=t_opt_ms), 900, 901)
    policy.lanes = lanes
    assert policy.decide(0) == Run(1, keys)


@pytest.mark.parametrize(("t_opt_ms", "keys"), [(36, (1,)), (42, (1, 2))])
def test_the_strict_bound_counts_where_ways_part(t_opt_ms: float, keys: tuple[int, ...]) -> None:
    """The times of one of the heads scatter by a quarter: 30 ms are 37.5."""
    facts = {s: StageFacts(f"b{s}", 8, 1, FLAT) for s in STAGES}
    table = profile({1: 10.0, 2: 10.0, 3: 12.0, 4: 12.0, 8: 12.0}, spread=0.25)
    facts[3] = StageFacts("b3", 8, 1, table)
    policy = create_policy({"policy": "lbci", "t_opt_ms": t_opt_ms}, STAGES, facts)
    assert two_heads(policy, 900, 901).decide(0) == Run(1, keys)


@pytest.mark.parametrize(("t_opt_ms", "joins"), [(45, False), (55, True)])
def test_lbci_counts_the_heads_of_newcomers_and_of_those_aboard(
    t_opt_ms: float, joins: bool
) -> None:
    """10 ms have run, and the newcomer catches up in 10; then stage 2 and two heads."""
    policy = make_four({"policy": "lbci", "t_opt_ms": t_opt_ms})
    policy.arrive(query(1, 0, ahead=(2, 3)), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.arrive(query(2, 10 * MS, ahead=(2, 4)), 10 * MS)
    policy.done(1, (1,), 10 * MS)
    policy.arrive(query(1, 0, stage=2, first=False, ahead=(3,)), 10 * MS)
    assert policy.decide(10 * MS) == (Run(1, (2,)) if joins else Run(2, (1,)))


SPECS = [{"policy": "window"}, {"policy": "dvabatch"}, {"policy": "lbci", "t_opt_ms": 900}]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(
    ("first_ms", "second_ms", "lanes", "keys"),
    [(900, 26, 1, (2,)), (900, 34, 1, (1, 2)), (24, 900, 1, (1, 2)), (900, 26, 2, (1, 2))],
)
def test_a_deadline_is_held_against_what_runs_before(
    spec: dict[str, object], first_ms: int, second_ms: int, lanes: int, keys: tuple[int, ...]
) -> None:
    """In one lane the second one's head runs after the first one's."""
    policy = two_heads(make(**spec), first_ms, second_ms)
    policy.lanes = lanes
    run = policy.decide(0)
    assert isinstance(run, Run) and sorted(run.keys) == list(keys)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_in_one_lane_heads_run_in_the_order_of_the_blocks(spec: dict[str, object]) -> None:
    worker = TinyWorker(make_four(spec), {})
    for key, head in enumerate((4, 2, 3)):
        worker.enter(key, Walk((1, head)), 1, 4, 0, 10**10, 0)
    worker.run_out(0)
    assert [run.stage for _, run in worker.runs] == [1, 2, 3, 4]


def test_what_is_counted_query_by_query_is_what_all_take() -> None:
    """Also where a new way or a longer query comes late."""
    points = tuple(
        Point(1, rows, n, 5, *[2.0 + rows * n / 8] * 6, 0.0, 0) for n in (8, 64) for rows in (1, 8)
    )
    lengthy = StageProfile("enc", "0" * 64, "echo", "fp32", "here", points)
    facts = {s: StageFacts(f"b{s}", 8, 1, lengthy, (0,), (1, 64), True) for s in (1, 2, 3)}
    costs, position = Costs(facts, 8), {1: 0, 2: 1, 3: 2}
    known = Known(costs, lambda q: q.shape[0], lambda q: (1, *(q.ahead or ())), position, 1)
    times, rows = BatchTimes(known), {1: 0, 2: 0, 3: 0}
    longest = 0
    for key, (ahead, n, length) in enumerate(
        [((2,), 1, 8), ((2,), 2, 8), ((3,), 1, 8), ((3,), 1, 40), ((2, 3), 2, 8), ((), 1, 64)]
    ):
        times.add(query(key, 0, rows=n, shape=(length,)), (1, *ahead))
        longest = max(longest, length)
        for stage in (1, *ahead):
            rows[stage] += n
        expected = sum(costs.line((s,), longest)[b] for s, b in rows.items())
        assert times.whole() == expected
        assert times.ns(times.latest()) == expected
        for way in times.ways:
            end = 5 + sum(costs.line((s,), longest)[rows[s]] for s in range(1, way[-1] + 1))
            assert times.late({way: end - 1}, 5) and not times.late({way: end}, 5)

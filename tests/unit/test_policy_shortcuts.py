"""What is not looked at for want of time changes no decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from policy_rig import looks, profile, query

from blockflow.batching.costs import Costs, Route, at
from blockflow.batching.facts import LENGTH, StageFacts
from blockflow.batching.policy import Query, Run
from blockflow.batching.predicting import BatchTimes, Known, in_time
from blockflow.batching.queueing import QueueingPolicy
from blockflow.batching.registry import create_policy
from blockflow.core.profile import Point, StageProfile

STAGES = (1, 2, 3, 4)
WAYS = ((2,), (3,), (4,), (2, 3), (3, 4), (2, 3, 4), ())
SPECS = ({"policy": "window"}, {"policy": "dvabatch"}, {"policy": "lbci", "t_opt_ms": 900})
BY_NAME = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["policy"])


@BY_NAME
def test_a_deadline_is_kept_where_times_fall_and_ways_part(spec: Mapping[str, Any]) -> None:
    """Two rows are dear at the first head, four at the second: the last of six makes one late."""
    dear = {1: 10.0, 2: 10.0, 4: 10.0, 8: 10.0}
    times = {1: dear, 2: {**dear, 2: 30.0}, 3: {**dear, 4: 30.0}}
    facts = {s: StageFacts(f"b{s}", 8, 1, profile(t)) for s, t in times.items()}
    policy = create_policy(spec, (1, 2, 3), facts)
    policy.arrive(query(1, 0, deadline_ms=55, ahead=(3,)), 0)
    for key, ahead in ((2, (2,)), (3, (3,)), (4, (3,)), (5, (3,)), (6, (2,))):
        policy.arrive(query(key, 0, deadline_ms=900 + key, ahead=ahead), 0)
    assert policy.decide(0) == Run(1, (1, 2, 3, 4, 5))


def facts_of(rng: Random) -> dict[int, StageFacts]:
    """Times that fall somewhere, as measured ones may."""
    return {
        s: StageFacts(f"b{s}", 8, 1, profile({b: rng.choice((1.0, 9.0)) for b in (1, 2, 4, 8)}))
        for s in STAGES
    }


def lengthy_facts(carries: str = "length//4") -> dict[int, StageFacts]:
    """Times that grow with the length; behind stage 2 that is another one."""
    points = tuple(
        Point(1, rows, n, 5, *[rows * n / 16] * 6, 0.0, 0) for n in (1, 64) for rows in (1, 8)
    )
    table = StageProfile("enc", "0" * 64, "echo", "fp32", "here", points)
    one = StageFacts("enc", 8, 1, table, (0,), (1, 64), pads=True)
    return {s: replace(one, carries=carries if s == 2 else LENGTH) for s in STAGES}


@BY_NAME
@pytest.mark.parametrize(
    ("carries", "least", "most"),
    [("", 10, 40), ("length//4", 70, 100), ("length*4", 130, 330)],
    ids=["fixed", "shorter", "longer"],
)
def test_where_no_deadline_seems_near_none_is(
    spec: Mapping[str, Any], carries: str, least: int, most: int
) -> None:
    """Beside a policy that looks at each query."""
    rng = Random(7)
    some = [lengthy_facts(carries)] if carries else [facts_of(rng) for _ in range(3)]
    classes = {"classes": [16, 64]} if carries else {}
    near = 0
    for _ in range(40):
        facts = rng.choice(some)
        both = [create_policy({**spec, **classes}, STAGES, facts) for _ in range(2)]
        lanes = rng.choice([1, 1, 2])
        tightest = rng.randint(least, most)
        ways = rng.choice((WAYS, ((3, 4), (3,))))
        queries = [
            query(
                key,
                0,
                shape=(rng.choice((50, 64, 64)) if classes else 4,),
                rows=rng.choice((1, 1, 1, 2)),
                deadline_ms=tightest + rng.choice((0, 1, 1000)),
                ahead=rng.choice(ways),
            )
            for key in range(8)
        ]
        for policy in both:
            policy.lanes = lanes
            for one in queries:
                policy.arrive(one, 0)
        shortened, plain = both
        assert isinstance(plain, QueueingPolicy)
        known = plain._known
        plain._in_time = lambda *_, known=known: in_time(0, known)  # type: ignore[method-assign]
        run = shortened.decide(0)
        assert run == plain.decide(0)
        near += isinstance(run, Run) and len(run.keys) < 8
    assert near > 4


@BY_NAME
def test_who_is_bound_by_deadlines_is_not_looked_at_as_a_whole_each_time(
    spec: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {1: StageFacts("b", 8, 1, profile({1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0}))}
    policy = create_policy(spec, (1,), facts)
    looked = looks(monkeypatch)
    seen = []
    for key in range(0, 60, 3):
        tight = key < 15
        for one in range(3):  # of three, two would be in time
            policy.arrive(query(key + one, 0, deadline_ms=20 if tight else 79), 0)
        run = policy.decide(0)
        assert isinstance(run, Run) and len(run.keys) == (2 if tight else 3)
        policy.done(1, run.keys, 0)
        if tight:
            policy.drop(key + 2, 0)
        seen.append(len(looked))
    assert looked == [False] + [True] * 12
    assert seen == [1] * 8 + list(range(2, 14))


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("lengths", [False, True], ids=["fixed", "lengths"])
def test_times_that_are_counted_query_by_query_are_those_of_all(lengths: bool, lanes: int) -> None:
    """Beside each stage's time for all who come to it, as long as the longest of the batch is there
    on any way."""
    rng = Random(3)
    facts = lengthy_facts() if lengths else facts_of(rng)
    costs, position = Costs(facts, 8), {stage: i for i, stage in enumerate(STAGES)}
    known = Known(costs, (lambda q: q.shape[0]) if lengths else None, lambda _: (), position, lanes)
    for _ in range(20):
        times, added = BatchTimes(known), list[tuple[Query, Route]]()
        for key in range(8):
            one = query(key, 0, rows=rng.choice((1, 1, 3)), shape=(rng.choice((3, 20, 64)),))
            added.append((one, rng.choice(((1,), (1, 2), (1, 3, 4), (1, 2, 3), ()))))
            times.add(*added[-1])
            longest = max(q.shape[0] for q, _ in added) if lengths else None
            lines = {s: [costs.line((s,), 1) if lengths else costs.line((s,))] for s in STAGES}
            for _, way in added:
                for s, line in zip(way, costs.parts(way, longest), strict=True):
                    lines[s].append(line)  # some ways leave the stride out
            spent = {
                s: at(max(lines[s]), sum(q.rows for q, way in added if s in way)) for s in STAGES
            }
            ends = {}
            for way in {way for _, way in added}:
                last = position[way[-1]] if way else -1
                mine = way if lanes > 1 else [s for s in STAGES if position[s] <= last]
                ends[way] = sum(spent[s] for s in mine)
                assert times.ns(way) == ends[way]
            assert times.whole() == sum(spent.values()) and times.rows == sum(
                q.rows for q, _ in added
            )
            assert times.ns(times.latest()) == max(ends.values())
            assert set(times.stages) == {s for way in ends for s in way}
            bounds = {way: end + rng.choice((4, 5, 6)) for way, end in ends.items()}
            late = any(5 + end > bounds[way] for way, end in ends.items())
            assert times.late(bounds, 5) is late
            assert not times.late({}, 5)

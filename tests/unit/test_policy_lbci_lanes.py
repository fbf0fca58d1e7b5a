"""`lbci` in several lanes: batches that wait for one stage go on as one where that is sooner."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from meeting_rig import HEAVY, LINEAR, LONG, QUICK, line_up
from policy_rig import profile, query

from blockflow.batching.facts import StageFacts
from blockflow.batching.joining import Lines, together
from blockflow.batching.meetings import Meetings, Rank
from blockflow.batching.policy import Policy, Query, Run
from blockflow.batching.registry import create_policy
from blockflow.batching.shares import TaskShare
from blockflow.bench.simulation.arrivals import Mix, Poisson
from blockflow.bench.simulation.example import made_up
from blockflow.bench.simulation.outcome import outcome
from blockflow.bench.simulation.simulator import Simulator
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.system import chain
from blockflow.bench.simulation.workload import Workload

BARELY = {1: 10.0, 2: 16.0, 4: 28.0, 8: 52.0}
"""Two as one take 2 ms more in sum than one by one; with one behind them 2 ms less."""


def meet(
    batches: Sequence[tuple[int, ...]],
    *,
    slow: dict[int, float] = HEAVY,
    t_opt_ms: float = 60,
    shares: Sequence[TaskShare] = (),
    late: Sequence[int] = (),
    longer: Sequence[int] = (),
) -> tuple[Policy, int]:
    """In two lanes these batches have run stage 1, one after the other and for so long that nobody
    could join them, and wait for stage 2; with the time.

    Args:
        slow: times of stage 2.
        late: keys of those that have 11.5 ms left.
        longer: keys of those of another shape.
    """
    facts = {s: StageFacts(f"block{s}", 8, 1, profile(t)) for s, t in ((1, QUICK), (2, slow))}
    policy = create_policy({"policy": "lbci", "t_opt_ms": t_opt_ms}, (1, 2), facts, shares)
    policy.lanes = 2
    return policy, line_up(policy, batches, ahead=(2,), late=late, late_ms=11.5, longer=longer)


def runs(policy: Policy, now: int) -> list[tuple[int, ...]]:
    """All that runs at stage 2, batch after batch."""
    found: list[tuple[int, ...]] = []
    while isinstance(run := policy.decide(now, {1}), Run):
        policy.done(2, run.keys, now)
        found.append(run.keys)
    return found


def test_batches_that_wait_for_one_stage_go_on_as_one() -> None:
    assert runs(*meet([(0,), (1,), (2, 3)])) == [(0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("batches", "options", "expected"),
    [
        (
            [(0,), (1,), (2,)],
            {"slow": LINEAR},
            [(0,), (1,), (2,)],
        ),  # two take as long as one by one
        ([(0, 1, 2, 3, 4), (5, 6, 7, 8)], {}, [(0, 1, 2, 3, 4), (5, 6, 7, 8)]),  # 9 of 8 rows
        ([(0, 1, 2, 3, 4), (5, 6, 7, 8), (9,)], {}, [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)]),
        ([(0, 1), (2, 3), (4,)], {"t_opt_ms": 14}, [(0, 1, 2, 3), (4,)]),  # 10 + b ms
        ([(0,), (1,), (2,)], {"late": [0]}, [(0,), (1, 2)]),  # 0 is in time alone, 11 ms
        ([(0,), (1,), (2,)], {"longer": [1]}, [(0, 2), (1,)]),
        ([(0, 1), (2,)], {"shares": [TaskShare(max_batch_rows=2)]}, [(0, 1), (2,)]),
        ([(0,), (1,)], {"slow": BARELY}, [(0,), (1,)]),  # who goes along is not behind as well
    ],
)
def test_batches_stay_apart(
    batches: list[tuple[int, ...]], options: dict[str, object], expected: list[tuple[int, ...]]
) -> None:
    """Where it is no gain, there is no room, the bound or a deadline forbids it, or they may not
    share a batch."""
    assert runs(*meet(batches, **options)) == expected  # type: ignore[arg-type]


def test_whose_turn_it_is_takes_others_along_as_the_oldest_of_them() -> None:
    """The younger batch has a higher priority; what goes on together is the older one."""
    shares = [TaskShare(), TaskShare(priority=1)]
    facts = {s: StageFacts(f"block{s}", 8, 1, profile(HEAVY)) for s in (1, 2, 3)}
    policy = create_policy({"policy": "lbci", "t_opt_ms": 200}, (1, 2, 3), facts, shares)
    policy.lanes = 2
    now = 0
    for key in (0, 1, 2):
        one = query(key, now, task=int(key == 2), ahead=(2, 3))
        policy.arrive(one, now)
        assert policy.decide(now, {2, 3}) == Run(1, (key,))
        now += LONG
        policy.done(1, (key,), now)
        there = (3, ()) if key == 1 else (2, (3,))
        policy.arrive(one._replace(stage=there[0], first=False, ahead=there[1]), now)
    assert policy.decide(now, {1, 3}) == Run(2, (0, 2))
    policy.done(2, (0, 2), now)
    for key in (0, 2):
        policy.arrive(query(key, 0, task=int(key == 2), stage=3, first=False, ahead=()), now)
    assert policy.decide(now, {1, 2}) == Run(3, (0, 2, 1))


def test_nobody_joins_what_goes_on_as_one() -> None:
    """Nobody has waited yet after a block of either, so that somebody might join them."""
    facts = {s: StageFacts(f"block{s}", 8, 1, profile(HEAVY)) for s in (1, 2, 3, 4)}
    policy = create_policy({"policy": "lbci", "t_opt_ms": 200}, (1, 2, 3, 4), facts)
    policy.lanes = 2

    def arrive(key: int, stage: int) -> None:
        ahead = tuple(range(stage + 1, 5))
        policy.arrive(query(key, key, stage=stage, first=stage == 1, ahead=ahead), 0)

    def leave(stage: int, *keys: int) -> None:
        policy.done(stage, keys, 0)
        for key in keys:
            arrive(key, stage + 1)

    arrive(0, 1)
    assert policy.decide(0) == Run(1, (0,))
    leave(1, 0)
    assert policy.decide(0) == Run(2, (0,))
    arrive(1, 1)
    assert policy.decide(0, {2}) == Run(1, (1,))
    leave(2, 0)
    leave(1, 1)
    assert policy.decide(0, {3}) == Run(2, (1,))
    leave(2, 1)
    assert policy.decide(0) == Run(3, (0, 1))
    arrive(2, 1)
    leave(3, 0, 1)
    assert policy.decide(0) == Run(4, (0, 1))
    assert policy.decide(0, {4}) == Run(1, (2,))


def test_what_it_saves_to_go_together() -> None:
    alone, both = [0, 11, 12, 13], [0, 11, 12, 13]
    lines = Lines([0], alone, both, alone)
    assert together(lines, 1, 1, 0) == 11 + 22 - 2 * 12
    assert together(lines, 1, 2, 0) == 11 + 2 * 23 - 3 * 13
    assert together(lines, 1, 1, 5) == 11 + 6 * 22 - 7 * 12, "those behind have to wait as well"


def test_small_batches_do_not_line_up_before_a_slow_stage() -> None:
    """At 0.6 of what full batches of eight can do single rows would take up the second block: they
    took 100 ms and more in two lanes, and a third of the queries were lost."""
    profiles = (
        made_up("quick", lambda rows: 0.5 + 0.05 * rows),
        made_up("slow", lambda rows: 4.0 + rows),
    )
    system = chain(profiles, max_rows=8, lanes=2, cores=2)
    system = system.with_policy({"policy": "lbci", "t_opt_ms": 100})
    simulator = Simulator(
        system, Workload(Poisson(), Mix([("task", 1.0)], parse_sizes("1", "rows")), 400.0, 3.0, 1)
    )
    simulator.run()
    found = outcome(simulator, 0.5, 3.0, 500.0)
    assert found.results == found.offered
    assert found.times.mean_ms < 20


def test_whose_turn_it_is_at_a_busy_stage_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that is free asks again and again while batches line up before a slow stage."""
    policy, now = meet([(key,) for key in range(12)])
    asked: list[int] = []
    rank = Meetings.rank

    def asking(meetings: Meetings, one: Query) -> Rank:
        asked.append(one.key)
        return rank(meetings, one)

    monkeypatch.setattr(Meetings, "rank", asking)
    assert policy.decide(now, {2}) is None
    assert asked == []
    assert isinstance(policy.decide(now, {1}), Run)
    assert asked

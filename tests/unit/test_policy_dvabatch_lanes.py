"""`dvabatch` in several lanes: batches that wait for one stage go on as one if that is sooner."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from meeting_rig import HEAVY, LINEAR, QUICK, line_up
from policy_rig import profile, query

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import Policy, Run
from blockflow.batching.registry import create_policy
from blockflow.batching.shares import TaskShare
from blockflow.bench.simulation.arrivals import Mix, Poisson
from blockflow.bench.simulation.example import made_up
from blockflow.bench.simulation.outcome import outcome
from blockflow.bench.simulation.simulator import Simulator
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.system import chain
from blockflow.bench.simulation.workload import Workload

STAGES = (1, 2, 3)


def meet(
    batches: Sequence[tuple[int, ...]],
    *,
    slow: dict[int, float] | None = HEAVY,
    shares: Sequence[TaskShare] = (),
    late: Sequence[int] = (),
    longer: Sequence[int] = (),
    lanes: int = 2,
) -> tuple[Policy, int]:
    """These batches have run stage 1, one after the other and for so long that nobody could join
    them, and wait for stage 2; with the time.

    Args:
        slow: times of stage 2; None: no stage has a profile.
        late: keys of those that have 12.5 ms left.
        longer: keys of those of another shape.
    """
    times = (QUICK, slow, QUICK)
    facts = {
        s: StageFacts(f"block{s}", 8, 1, profile(t) if slow and t else None)
        for s, t in zip(STAGES, times, strict=True)
    }
    spec = {"policy": "dvabatch", "t_comp_wait_ms": 1, "buffer_pairs": 8}
    policy = create_policy(spec, STAGES, facts, shares)
    policy.lanes = lanes
    return policy, line_up(
        policy, batches, ahead=(2, 3), left_ms=2000, late=late, late_ms=12.5, longer=longer
    )


def runs(policy: Policy, now: int) -> list[tuple[int, ...]]:
    """All that runs at stage 2, batch after batch, while nothing leaves stage 3."""
    found: list[tuple[int, ...]] = []
    while isinstance(run := policy.decide(now, {1, 3}), Run):
        policy.done(2, run.keys, now)
        for key in run.keys:
            policy.arrive(query(key, now, stage=3, first=False, ahead=()), now)
        found.append(run.keys)
    return found


def test_batches_that_wait_for_one_stage_go_on_as_one() -> None:
    policy, now = meet([(0,), (1,), (2, 3)])
    assert runs(policy, now) == [(0, 1, 2, 3)]
    assert policy.decide(now, {1, 2}) == Run(3, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("batches", "options", "expected"),
    [
        ([(0,), (1,), (2,)], {"slow": LINEAR}, [(0,), (1,), (2,)]),
        ([(0,), (1,), (2,)], {"slow": None}, [(0,), (1,), (2,)]),
        ([(0,), (1,), (2,)], {"lanes": 1}, [(0,), (1,), (2,)]),
        ([(0, 1, 2, 3), (4, 5, 6), (7, 8)], {}, [(0, 1, 2, 3, 4, 5, 6), (7, 8)]),  # 9 of 8 rows
        ([(0,), (1,), (2,)], {"late": [0]}, [(0,), (1, 2)]),  # 0 is in time alone, in 12 ms
        ([(0,), (1,), (2,)], {"longer": [1]}, [(0, 2), (1,)]),
        ([(0, 1), (2,)], {"shares": [TaskShare(max_batch_rows=2)]}, [(0, 1), (2,)]),
    ],
)
def test_batches_stay_apart(
    batches: list[tuple[int, ...]], options: dict[str, object], expected: list[tuple[int, ...]]
) -> None:
    """Where it is no gain, or nobody knows; in one lane; where there is no room, a deadline forbids
    it, or they may not share a batch."""
    assert runs(*meet(batches, **options)) == expected  # type: ignore[arg-type]


def test_the_place_of_whoever_goes_along_is_free_again() -> None:
    """Seven of eight pairs were taken before stage 2; when all have left, none is."""
    policy, now = meet([(key,) for key in range(7)])
    assert policy.decide(now, {1}) == Run(2, tuple(range(7)))
    policy.done(2, tuple(range(7)), now)
    for key in range(7):
        policy.arrive(query(key, now, stage=3, first=False, ahead=()), now)
    assert policy.decide(now, {1}) == Run(3, tuple(range(7)))
    policy.done(3, tuple(range(7)), now)
    assert policy.decide(now) is None
    assert policy._pipeline.at_rest  # type: ignore[attr-defined]
    assert not list(policy._table)  # type: ignore[attr-defined]


def test_small_batches_do_not_line_up_before_a_slow_stage() -> None:
    """At 0.85 of what full batches of eight can do they took 35 ms, in three lanes and pairs."""
    profiles = (
        made_up("one", lambda rows: 0.5 + 0.05 * rows),
        made_up("two", lambda rows: 0.5 + 0.3 * rows),
        made_up("three", lambda rows: 0.5 + 0.1 * rows),
        made_up("slow", lambda rows: 6.0 + 0.2 * rows),
    )
    system = chain(profiles, max_rows=8, lanes=3, cores=3)
    system = system.with_policy({"policy": "dvabatch", "buffer_pairs": 3})
    simulator = Simulator(
        system, Workload(Poisson(), Mix([("task", 1.0)], parse_sizes("1", "rows")), 316.0, 2.0, 1)
    )
    simulator.run()
    found = outcome(simulator, 0.2, 2.0, 500.0)
    assert found.results == found.offered
    assert found.times.mean_ms < 22

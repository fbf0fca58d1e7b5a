"""Predictions for batches of several lengths: one takes as long as its longest makes it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_rig import MS

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import Policy, Query, Run, WaitUntil
from blockflow.batching.registry import create_policy
from blockflow.core.profile import Point, StageProfile

# Each of the two stages takes 1 ms per row and 16 of length.
STAGES = (1, 2)
FAR = 10**12
LONG, SHORT = 512, 16
POINTS = tuple(
    Point(1, rows, n, 30, ms, ms, ms, ms, ms, ms, 0.0, 0)
    for n in (SHORT, LONG)
    for rows in (1, 2, 4, 8)
    for ms in (rows * n / SHORT,)
)
FACTS = {
    s: StageFacts(
        f"b{s}",
        max_rows=8,
        profile=StageProfile(f"b{s}", "0" * 64, "exported", "fp32", "here", POINTS),
        length_dims=(0,),
        lengths=(1, LONG),
        pads=True,
    )
    for s in STAGES
}
POLICIES = (
    {"policy": "window"},
    {"policy": "window", "max_delay_ms": 1000},
    {"policy": "dvabatch", "join": "always"},
    {"policy": "dvabatch", "join": "gain", "window_ms": "stage1"},
    {"policy": "dvabatch", "policies": ["load", "input", "operator"]},
    {"policy": "lbci", "t_opt_ms": 60_000},
)


def make(**spec: object) -> Policy:
    return create_policy({**spec, "classes": [LONG]}, STAGES, FACTS)


def query(key: int, length: int, deadline_ns: int = FAR, stage: int = 1, now: int = 0) -> Query:
    return Query(key, stage, 1, now, now, deadline_ns, shape=(length,), first=stage == 1)


def takes(lengths: list[int], stages: int = 2) -> int:
    """What a batch of rows with these lengths takes."""
    return round(stages * len(lengths) * max(lengths) / SHORT * MS)


@pytest.mark.parametrize("spec", POLICIES, ids=str)
def test_long_ones_do_not_make_a_short_one_late(spec: dict[str, object]) -> None:
    policy = make(**spec)
    policy.arrive(query(0, SHORT, 60 * MS), 0)  # with a long one it would take 2 x 2 x 32 ms
    for key in range(1, 8):
        policy.arrive(query(key, LONG), 0)
    now = 45 * MS  # the latest that a quarter of its time is left
    run = policy.decide(now)
    assert run == Run(1, (0,))


@pytest.mark.parametrize("spec", POLICIES, ids=str)
@settings(deadline=None, max_examples=60)
@given(
    queries=st.lists(
        st.tuples(st.integers(SHORT, LONG), st.integers(1, 400)),
        min_size=1,
        max_size=8,
    )
)
def test_nobody_is_late_because_of_who_came_after(
    spec: dict[str, object], queries: list[tuple[int, int]]
) -> None:
    policy, now = make(**spec), 10**10  # all windows are over
    for key, (length, deadline_ms) in enumerate(queries):
        policy.arrive(query(key, length, now + deadline_ms * MS), 0)
    run = policy.decide(now)
    assert isinstance(run, Run)
    lengths = [queries[key][0] for key in run.keys]
    for n, key in enumerate(run.keys, start=1):
        deadline = queries[key][1] * MS
        assert takes(lengths) <= deadline + 10 or takes(lengths[:n]) > deadline - 10


def test_a_window_counts_the_longest_that_waits_and_not_its_class() -> None:
    """The short one takes 2 ms; one of 512 would take 64."""
    policy = make(policy="window", max_delay_ms=1000)
    policy.arrive(query(1, SHORT, 100 * MS), 0)
    assert policy.decide(0) == WaitUntil(75 * MS)


def test_lbci_counts_the_longest_for_n_opt() -> None:
    policy = make(policy="lbci", t_opt_ms=100)
    policy.arrive(query(0, SHORT), 0)
    for key in range(1, 8):
        policy.arrive(query(key, LONG, FAR + 1), 0)
    assert policy.decide(0) == Run(1, (0,)), "two of 512 take 2 x 2 x 32 ms"
    policy = make(policy="lbci", t_opt_ms=300)
    policy.arrive(query(0, SHORT), 0)
    for key in range(1, 8):
        policy.arrive(query(key, LONG, FAR + 1), 0)
    assert policy.decide(0) == Run(1, (0, 1, 2, 3), (LONG,)), "2 x 4 x 32 = 256"


@pytest.mark.parametrize("spec", [{"policy": "lbci"}, {"policy": "dvabatch", "join": "always"}])
@pytest.mark.parametrize(("bound_ms", "joining"), [(34, (1,)), (196, (1, 2)), (1000, (1, 2, 3))])
def test_the_longest_counts_when_newcomers_join(
    spec: dict[str, object], bound_ms: int, joining: tuple[int, ...]
) -> None:
    """One row of 16 has done a stage. The rest takes 1 + 2 ms with another one; with a row of 512,
    too, 2 x 32 + 3 x 32; with both 3 x 32 + 4 x 32."""
    if spec["policy"] == "lbci":
        policy, deadline = make(**spec, t_opt_ms=1 + bound_ms), FAR
    else:
        policy, deadline = make(**spec), MS + bound_ms * MS
    policy.arrive(query(0, SHORT, deadline), 0)
    assert policy.decide(0) == Run(1, (0,))
    for key, length in ((1, SHORT), (2, LONG), (3, LONG)):
        policy.arrive(query(key, length, FAR + key, now=MS), MS)
    policy.done(1, (0,), MS)
    policy.arrive(query(0, SHORT, deadline, stage=2, now=MS), MS)
    run = policy.decide(MS)
    assert isinstance(run, Run) and run.stage == 1 and run.keys == joining


def test_halves_are_as_long_as_their_own_longest() -> None:
    policy = make(policy="dvabatch", policies=["operator"])
    policy.arrive(query(0, SHORT), 0)
    policy.arrive(query(1, LONG, FAR + 1), 0)
    assert policy.decide(0) == Run(1, (0,)), "1 + 32 ms by themselves, 2 x 32 together"

"""The registry's own errors, and what `none` promises beyond the contract."""

from __future__ import annotations

import pytest

from blockflow.batching.policy import Query, Run
from blockflow.batching.registry import create_policy, policy_problems
from blockflow.core.errors import TopologyError


@pytest.mark.parametrize("name", ["nope", "", None, 3, ["none"]])
def test_unknown_policy(name: object) -> None:
    (problem,) = policy_problems({"policy": name}, "$.b")
    assert problem.path == "$.b.policy" and "none" in problem.hint
    with pytest.raises(TopologyError) as err:
        create_policy({"policy": name}, (1,))
    assert err.value.code == "INVALID_TOPOLOGY" and err.value.problems


def test_none_runs_the_oldest_first_whatever_its_stage() -> None:
    policy = create_policy({}, (1, 2))  # none is the default
    policy.arrive(Query(5, 1, 1, 50, 50, 10**12), 50)
    policy.arrive(Query(3, 2, 1, 30, 60, 10**12), 60)  # came earlier, is at its second stage
    policy.arrive(Query(4, 1, 9, 40, 60, 10**12), 60)
    assert [policy.decide(70) for _ in range(4)] == [
        Run(2, (3,)),
        Run(1, (4,)),
        Run(1, (5,)),
        None,
    ]


def test_none_forgets_what_it_has_run() -> None:
    policy = create_policy({}, (1, 2))
    policy.arrive(Query(1, 1, 1, 0, 0, 10**12), 0)
    assert policy.decide(0) == Run(1, (1,))
    policy.arrive(Query(1, 2, 1, 0, 5, 10**12), 5)  # the same key again
    policy.drop(1, 6)
    assert policy.decide(7) is None
    policy.arrive(Query(1, 2, 1, 0, 8, 10**12), 8)
    assert policy.decide(9) == Run(2, (1,))
    assert policy.decide(9) is None

"""What a worker takes from a policy, decision by decision, and what a trial shows it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
from policy_rig import MS, facts_for, query

from blockflow.batching.none import NonePolicy
from blockflow.batching.policy import Decision, Query, Run, WaitUntil
from blockflow.batching.rules import LANES, WAITS, Trial, broken_rule

POLICY = NonePolicy((1, 2, 3), {})
WAITING = {
    1: query(1, 0, shape=(4, 7)),
    2: query(2, 0, shape=(3, 7)),
    3: query(3, 0, stage=2, shape=(4, 7)),
    4: query(4, 0, shape=(4, 7)),
    5: query(5, 0, stage=9),
}


@pytest.mark.parametrize(
    ("run", "rule", "says"),
    [
        (Run(1, (1, 2)), None, ""),
        (Run(1, (2, 1), (4, 7)), None, ""),
        (Run(1, (1, 2), (5, 9)), None, ""),
        (Run(2, (3,)), None, ""),
        (Run(3, (1,)), LANES, "stage 3, which is busy"),
        (Run(9, (5,)), WAITS, "not one of its own: [1, 2, 3]"),
        (Run(1, ()), WAITS, "one at least"),
        (Run(1, (1, 2, 1)), WAITS, "each once"),
        (Run(1, (1, 8)), WAITS, "key 8, which does not wait"),
        (Run(1, (1, 4)), WAITS, "key 4, which does not wait"),
        (Run(1, (1, 3)), WAITS, "key 3 at stage 1, it waits at 2"),
        (Run(1, (2, 1), (3, 7)), WAITS, "key 1 of [4, 7] to [3, 7]"),
        (Run(1, (2, 1), (4, 6)), WAITS, "key 2 of [3, 7] to [4, 6]"),
        (Run(1, (1,), (4,)), WAITS, "key 1 of [4, 7] to [4]"),
        (Run(1, (1,), (4, 7, 1)), WAITS, "key 1 of [4, 7] to [4, 7, 1]"),
    ],
    ids=str,
)
def test_each_decision_is_held_against_what_waits(run: Run, rule: str | None, says: str) -> None:
    """Stage 3 is busy, and of key 4 the policy was not told."""
    found = broken_rule(POLICY, run, {3}, WAITING, {4})
    assert (found is None) == (rule is None)
    if found is not None:
        assert found[0] == rule and says in found[1]


class Watched(NonePolicy):
    """Notes what it is told, and lets everybody wait for ten seconds."""

    def arrive(self, query: Query, now: int) -> None:
        self.seen = [*getattr(self, "seen", ()), query]
        super().arrive(query, now)

    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        if not any(True for _ in self.waiting()):
            return None
        until = min(q.ready_ns for q in self.waiting()) + 10_000 * MS
        return super().decide(now, busy) if now >= until else WaitUntil(until)


def tried(policy: NonePolicy, *ways: tuple[int, ...]) -> list[str]:
    told: list[str] = []

    def call(method: str, ask: Callable[[], Decision]) -> Decision:
        told.append(method)
        return ask()

    Trial(policy, call).run(ways)
    return told


def test_a_trial_goes_each_way_to_its_end_though_the_policy_waits() -> None:
    facts = {s: replace(f, length_dims=(1,), lengths=(5, 64)) for s, f in facts_for((7, 8)).items()}
    policy = Watched((7, 8), {}, facts)
    told = tried(policy, (0, 1), (1,))
    assert list(policy.waiting()) == []
    first, second = policy.seen[:5], policy.seen[5:]
    assert [(q.stage, q.first, q.ahead) for q in first] == [(7, True, (8,))] * 3 + [
        (8, False, ())
    ] * 2
    assert [(q.stage, q.first, q.ahead) for q in second] == [(8, True, ())] * 3
    assert {q.shape for q in policy.seen} == {(1, 5)} and {q.rows for q in policy.seen} == {1}
    assert len({q.key for q in first}) == 3 and not {q.key for q in first} & {q.key for q in second}
    assert all(q.arrival_ns <= q.ready_ns < q.deadline_ns for q in policy.seen)
    arrived, again = first[1], next(q for q in first[3:] if q.key == first[1].key)
    assert again.arrival_ns == arrived.arrival_ns and again.ready_ns > arrived.ready_ns
    assert again.deadline_ns == arrived.deadline_ns
    assert (told.count("drop"), told.count("done")) == (2, 6)


def test_who_still_waits_at_the_end_of_a_trial_is_taken_away() -> None:
    policy = NonePolicy((7, 8), {})
    policy.decide = lambda *_: None  # type: ignore[method-assign]
    assert tried(policy, (0, 1)).count("drop") == 3
    assert list(policy.waiting()) == []

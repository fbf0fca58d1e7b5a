"""Who comes when in a round."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from blockflow.bench.turns import balanced, crossed, in_turn, rotated


def test_ways_take_turns_and_the_warm_up_does_not_count() -> None:
    seen: list[str] = []
    rounds: list[None] = []

    def sample(name: str) -> int:
        seen.append(name)
        return len(seen)

    ways = {name: lambda name=name: sample(name) for name in "abc"}
    found = in_turn(ways, 3, lambda: rounds.append(None), broken=lambda _found: None, warm_up=1)
    assert len(seen) == 12
    assert len(rounds) == 4
    assert [sorted(seen[i : i + 3]) for i in (0, 3, 6, 9)] == [["a", "b", "c"]] * 4
    assert {name: len(samples) for name, samples in found.items()} == {"a": 3, "b": 3, "c": 3}
    assert min(s for samples in found.values() for s in samples) == 4


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_everybody_comes_equally_often_at_each_place_and_after_each_other(count: int) -> None:
    names = "abcdef"[:count]
    orders = [balanced(names, number) for number in range(2 * count)]
    assert all(sorted(order) == list(names) for order in orders)
    assert set(Counter((n, i) for o in orders for i, n in enumerate(o)).values()) == {2}
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert set(pairs.values()) <= {2} and len(pairs) == count * (count - 1)


def test_what_was_measured_before_a_failure_is_handed_over_by_whole_rounds() -> None:
    left = [7]  # samples until the system dies
    kept: list[dict[str, list[int]]] = []

    def sample() -> int:
        left[0] -= 1
        if left[0] < 0:
            raise ConnectionError("it died")
        return left[0]

    with pytest.raises(ConnectionError):
        in_turn({"a": sample, "b": sample, "c": sample}, 5, lambda: None, broken=kept.append)
    assert [{n: len(s) for n, s in found.items()} for found in kept] == [{"a": 2, "b": 2, "c": 2}]
    kept.clear()
    left[0] = 2
    with pytest.raises(ConnectionError):
        in_turn({"a": sample, "b": sample, "c": sample}, 5, lambda: None, broken=kept.append)
    assert kept == []


def test_every_way_is_first_in_turn() -> None:
    assert [rotated("abc", i) for i in range(4)] == [
        *(["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]),
    ]


def test_under_each_condition_all_names_come_next_to_each_other() -> None:
    conditions, names = (1, 2, 3, 4), "abc"
    rounds = [crossed(conditions, names, number) for number in range(24)]
    assert all(len(set(found)) == len(found) == 12 for found in rounds)
    for found in rounds:
        blocks = [found[i : i + 3] for i in range(0, 12, 3)]
        assert all(len({condition for condition, _ in block}) == 1 for block in blocks)
    # Neither a condition nor a name has a place of its own.
    first = Counter(found[0] for found in rounds)
    assert {condition for condition, _ in first} == set(conditions)
    places = Counter((c, i // 3) for found in rounds for i, (c, _) in enumerate(found))
    assert set(places.values()) == {24 // 4 * 3}
    among = Counter((name, i % 3) for found in rounds for i, (_, name) in enumerate(found))
    assert set(among.values()) == {24 // 3 * 4}

"""What all experiments of the thesis share: turns, rounds, and our figure beside its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from blockflow.bench.results import Figure
from blockflow.bench.statistics import Interval
from blockflow.bench.thesis.bars import draw_bars
from blockflow.bench.thesis.beside import (
    AGAIN,
    Rounds,
    balanced,
    beside_grid,
    compared,
    in_turn,
    quoted,
    thesis,
)


def test_the_thesiss_figure_stands_beside_ours() -> None:
    ours = Figure("time", "handles", 1, 2.0, 3.0, 2.0, "ms", 5, low=1.9, high=2.1)
    theirs = thesis(ours, 16.0, "figure 4.3", "a GPU")
    assert theirs.labels == {"thesis": 16.0, "of": "figure 4.3", "note": "a GPU"}
    assert thesis(ours, None, "figure 4.3").labels == {"of": "figure 4.3"}
    grid = beside_grid("Figure 4.3", [theirs, ours])
    assert grid.rows[0] == ("time", "handles", "1", "2.00", "1.90-2.10", "16.0", "ms", "5")
    assert grid.rows[1][5] == ""
    draw_bars([theirs, ours], "ms", log=True)
    for model, there in (("resnet50", True), ("resnet152", False)):
        of = replace(ours, labels={"model": model})
        assert ("thesis" in thesis(of, 16.0, "figure 4.3", unit="MB").labels) == there
        assert ("thesis_unit" in thesis(of, 16.0, "figure 4.3", unit="MB").labels) == there
        assert quoted(of.labels, "2.8 times") == " (thesis: 2.8 times)" * there


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


def test_nothing_is_concluded_inside_the_noise() -> None:
    clear = Interval(2.8, 2.7, 2.9, 20)
    assert compared(clear) == "2.80 times slower (95% 2.70-2.90, n = 20)"
    assert compared(Interval(0.5, 0.4, 0.625, 20)).startswith("2.00 times faster (95% 1.60-2.50")
    assert compared(clear, noise=2.0).startswith("not told apart (2.80 times")
    assert compared(Interval(1.05, 0.98, 1.1, 20)).startswith("not told apart")
    # The noise is what equal things differed by, whatever the interval: each has its own number.
    wide = compared(Interval(1.5, 0.9, 3.0, 20), 0.02)
    assert wide == "not told apart (1.50 times, 95% 0.900-3.00, n = 20; noise 2.0%)"
    assert compared(Interval(1.1, 1.05, 1.15, 20), 0.375).endswith("n = 20; noise 37.5%)")
    assert "too few rounds" in compared(Interval(9.0, 8.0, 10.0, 4))


def test_rounds_know_their_noise_and_leave_enough_for_a_conclusion() -> None:
    rounds = Rounds({"a": [1.0] * 6, "a" + AGAIN: [1.25] * 6, "b": [2.0] * 6})
    assert rounds.noise == pytest.approx(0.25)
    assert rounds.ratio("a", "b").value == 2.0
    assert rounds.compared("a", "b").startswith("2.00 times slower")
    near = Rounds({**rounds.samples, "b": [1.1] * 6})
    assert near.compared("a", "b").endswith("(1.10 times, 95% 1.10-1.10, n = 6; noise 25.0%)")
    warming = Rounds({"a": [9.0, 8.0, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]})
    assert warming.cut == 3
    assert Rounds({"a": [9.0, 9.0, 1.0, 1.0, 1.0, 1.0]}).cut == 1
    assert Rounds({}).cut == 0

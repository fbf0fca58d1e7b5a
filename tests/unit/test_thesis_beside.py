"""What all experiments of the thesis share: turns, rounds, and our figure beside its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockflow.bench.results import Figure
from blockflow.bench.statistics import Interval
from blockflow.bench.thesis.bars import draw_bars
from blockflow.bench.thesis.beside import (
    AGAIN,
    Rounds,
    beside_grid,
    compared,
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

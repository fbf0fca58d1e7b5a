"""What a benchmark may say: percentiles, intervals, ratios of pairs, verdicts, calibration."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockflow.bench.calibration import Steadiness, calibrate, compare
from blockflow.bench.statistics import (
    MIN_PAIRS,
    Interval,
    Verdict,
    difference_interval,
    judge,
    judge_value,
    median_interval,
    noise_of,
    percentile,
    ratio_interval,
    slope,
)

TIMES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=60)


def test_percentiles_are_samples_by_nearest_rank() -> None:
    samples = [float(x) for x in range(100, 0, -1)]
    assert [percentile(samples, p) for p in (0, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert percentile([3.0], 99) == 3.0
    shares = [p / 100 for p in range(1, 101)]
    assert [percentile(samples, 100 * share) for share in shares] == list(range(1, 101))
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


@given(TIMES)
def test_an_interval_holds_its_median_and_stays_in_the_samples(samples: list[float]) -> None:
    found = median_interval(samples)
    assert found.low <= found.value <= found.high
    assert min(samples) <= found.low
    assert found.high <= max(samples)


@pytest.mark.parametrize("n", [6, 7, 8, 15])
@pytest.mark.parametrize("skewed", [False, True])
def test_an_interval_of_a_few_rounds_misses_the_median_in_one_of_twenty_cases(
    n: int, skewed: bool
) -> None:
    chance = np.random.default_rng(n)
    draw = chance.exponential if skewed else chance.normal
    true = math.log(2) if skewed else 0.0
    found = [median_interval(draw(size=n).tolist()) for _ in range(4000)]
    missed = sum(not i.low <= true <= i.high for i in found) / len(found)
    assert 0.035 < missed < 0.065  # the bootstrap's missed it in 7 to 12 of a hundred


def test_of_five_rounds_an_interval_is_their_extremes() -> None:
    assert median_interval([5.0, 1.0, 4.0, 2.0, 3.0]) == Interval(3.0, 1.0, 5.0, 5)


def test_an_interval_of_endless_times_has_no_gap() -> None:
    endless = float("inf")
    assert median_interval([1.0] + [endless] * 5).high == endless
    assert median_interval([endless] * 6) == Interval(endless, endless, endless, 6)


@pytest.mark.parametrize("n", [200, 4000])
def test_an_interval_covers_the_true_median_as_often_as_it_says(n: int) -> None:
    chance = np.random.default_rng(1)
    runs = 200 if n > 1000 else 60
    hits = 0
    for _ in range(runs):
        found = median_interval(chance.normal(10.0, 1.0, n).tolist())
        hits += found.low <= 10.0 <= found.high
        # the median's standard error is 1.25 / sqrt(n)
        assert found.high - found.low == pytest.approx(2 * 1.96 * 1.25 / n**0.5, rel=0.6)
    assert hits / runs > 0.87


def test_few_samples_show_their_extremes() -> None:
    assert median_interval([1.0, 2.0, 9.0]) == Interval(2.0, 1.0, 9.0, 3)


def test_ratios_are_taken_pair_by_pair() -> None:
    # The machine halves its speed on the way: every pair still says 1.1.
    base = [10.0, 11.0, 20.0, 22.0, 21.0]
    found = ratio_interval(base, [b * 1.1 for b in base])
    assert (found.value, found.low, found.high) == pytest.approx((1.1, 1.1, 1.1))
    assert difference_interval(base, [b + 1 for b in base]).value == pytest.approx(1.0)
    with pytest.raises(ValueError, match="not pairs"):
        ratio_interval([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="not pairs"):
        difference_interval([1.0], [])
    with pytest.raises(ValueError, match="positive"):
        ratio_interval([0.0], [1.0])


def test_nothing_is_concluded_inside_the_noise() -> None:
    clear = Interval(1.02, 1.01, 1.03, 50)
    assert judge(clear, 1.05) is Verdict.MET
    assert judge(clear, 1.0) is Verdict.MISSED
    assert judge(clear, 1.025) is Verdict.NOISE  # the interval itself
    # Equal things looked 3% apart: now 1.02 cannot be told from 1.05.
    noise = noise_of(Interval(1.0, 0.97, 1.01, 50))
    assert noise == pytest.approx(0.03)
    assert judge(clear, 1.05, noise) is Verdict.NOISE
    assert judge(clear, 1.2, noise) is Verdict.MET


def test_from_few_samples_nothing_is_concluded() -> None:
    few = Interval(1.0, 1.0, 1.0, MIN_PAIRS - 1)
    assert judge(few, 1.5) is judge(few, 0.5) is Verdict.NOISE
    assert judge(few, 0.5, at_least=True) is Verdict.NOISE
    assert judge(replace(few, n=MIN_PAIRS), 1.5) is Verdict.MET


def test_what_is_counted_needs_no_samples() -> None:
    assert judge_value(1.0, 1.0) is judge_value(1.0, 1.0, at_least=True) is Verdict.MET
    assert judge_value(1.1, 1.0) is judge_value(0.9, 1.0, at_least=True) is Verdict.MISSED


def test_goals_may_be_lower_bounds() -> None:
    share = Interval(0.98, 0.975, 0.985, 20)
    assert judge(share, 0.97, at_least=True) is Verdict.MET
    assert judge(share, 0.99, at_least=True) is Verdict.MISSED
    assert judge(share, 0.98, at_least=True) is Verdict.NOISE
    # A goal that is just reached is reached, from either side.
    exact = Interval(1.0, 1.0, 1.0, 20)
    assert judge(exact, 1.0) is judge(exact, 1.0, at_least=True) is Verdict.MET


def test_a_slope_needs_two_points() -> None:
    assert slope([1, 3, 5], [2.0, 6.0, 10.0]) == pytest.approx(2.0)
    for xs, ys in (([], []), ([1], [1.0]), ([2, 2], [1.0, 3.0])):
        with pytest.raises(ValueError, match=r"points|constant"):
            slope(xs, ys)


def test_calibration_says_when_the_machine_changed() -> None:
    steady = compare([1.0, 1.0, 1.1, 0.9, 1.0], [1.01] * 5)
    assert steady.steady
    assert steady.spread == pytest.approx(0.1)
    drifted = Steadiness(1.0, 1.25, 0.02)
    assert not drifted.steady
    assert "+25.0%" in drifted.sentence()
    assert "ratios" in drifted.sentence()
    assert "ratios" not in steady.sentence()


def test_calibration_times_real_work() -> None:
    times = calibrate(0.0)
    assert len(times) == 5
    assert min(times) > 0

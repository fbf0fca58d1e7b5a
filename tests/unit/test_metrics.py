"""Histograms merge and stay close to the truth; rates follow the window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockflow.core.metrics import Histogram, ProcessKpi, RateMeter, StageKpi

SECOND = 1_000_000_000
durations = st.integers(0, 10**12)


def filled(values: list[int]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


@given(durations)
def test_a_value_lies_in_its_bucket(value: int) -> None:
    (index,) = filled([value]).counts
    lo, hi = Histogram.bounds(index)
    assert lo <= value < hi
    assert hi - lo <= max(1, lo / 16)


@given(st.integers(0, 2000))
def test_buckets_follow_each_other_without_gap(index: int) -> None:
    assert Histogram.bounds(index)[1] == Histogram.bounds(index + 1)[0]
    assert list(filled([Histogram.bounds(index)[0]]).counts) == [index]


@given(st.lists(durations, min_size=1, max_size=200), st.floats(0, 100))
def test_percentiles_are_within_a_sixteenth(values: list[int], p: float) -> None:
    histogram = filled(values)
    exact = sorted(values)[max(1, -(-len(values) * p // 100).__int__()) - 1]
    assert abs(histogram.percentiles(p)[0] - exact) <= max(1, exact / 16)
    assert histogram.maximum == max(values)
    assert histogram.mean == pytest.approx(sum(values) / len(values))


@given(
    st.lists(durations, max_size=200),
    st.lists(st.floats(0, 100), min_size=1, max_size=5).map(sorted),
)
def test_several_percentiles_are_each_as_alone(values: list[int], ps: list[float]) -> None:
    histogram = filled(values)
    assert histogram.percentiles(*ps) == [histogram.percentiles(p)[0] for p in ps]


def test_a_copy_stays_as_it_was() -> None:
    histogram = filled([5, 1000])
    copied = histogram.copy()
    assert copied.summary() == histogram.summary()
    histogram.record(70)
    assert (copied.count, sum(copied.counts.values()), histogram.count) == (2, 2, 3)
    assert (copied.total, copied.maximum) == (1005, 1000)


def test_an_empty_histogram_says_zero() -> None:
    assert set(Histogram().summary().values()) == {0}
    assert Histogram().percentiles(99) == [0.0]


def test_the_summary_is_in_milliseconds() -> None:
    summary = filled([1_000_000, 3_000_000]).summary()
    assert summary["count"] == 2
    assert summary["mean_ms"] == pytest.approx(2)
    assert summary["max_ms"] == pytest.approx(3)
    assert summary["sum_ms"] == pytest.approx(4)
    assert summary["p99_ms"] == pytest.approx(3, rel=0.07)
    many = filled([n * 1_000_000 for n in range(1, 101)]).summary()
    shown = [many["p50_ms"], many["p90_ms"], many["p99_ms"]]
    assert shown == pytest.approx([50, 90, 99], rel=0.07)


def test_a_negative_duration_counts_as_zero() -> None:
    assert filled([-5]).maximum == 0


def test_rates_follow_the_window() -> None:
    meter = RateMeter(window_s=5.0, buckets=20)
    assert meter.rate(0) == 0.0
    for i in range(500):  # 100 a second for five seconds
        meter.add(1, i * SECOND // 100)
    assert meter.rate(5 * SECOND - 1) == pytest.approx(100, rel=0.06)
    assert meter.rate(60 * SECOND) == 0.0


def test_what_comes_seldom_is_not_made_much_of() -> None:
    """One row each two seconds: half a row a second on average, whenever one looks."""
    meter = RateMeter(window_s=5.0, buckets=20)
    seen = []
    for i in range(100):
        meter.add(1, 2 * i * SECOND)
        seen += [meter.rate(2 * i * SECOND + k * SECOND // 10) for k in range(20)]
    assert max(seen) <= 3 / 4.75
    assert sum(seen[100:]) / len(seen[100:]) == pytest.approx(0.5, rel=0.05)


def test_the_pace_of_a_flow_that_has_just_begun() -> None:
    meter = RateMeter(window_s=5.0, buckets=20)
    assert meter.pace(0) == 0.0
    for i in range(100):
        meter.add(1, 60 * SECOND + i * SECOND // 100)
    assert meter.pace(61 * SECOND) == pytest.approx(100, rel=0.01)
    assert meter.rate(61 * SECOND) == pytest.approx(20, rel=0.06)
    meter.add(1, 99 * SECOND)
    assert meter.pace(100 * SECOND) == pytest.approx(1, rel=0.01), "the flow before has ended"


def test_the_window_does_not_grow() -> None:
    meter = RateMeter()
    for i in range(10_000):
        meter.add(3, i * SECOND)
    assert len(meter._buckets) <= 41


def test_records_are_plain_maps() -> None:
    stage = StageKpi(1, "b", 0, 0, 1, 1, 1, 0, 0, 1.0, 2.0, 0.5, 1.0, 1.0)
    assert stage.to_dict()["rho"] == 0.5
    process = ProcessKpi(1, 0.0, 0.0, 1, 1, 1, 1, 1)
    assert process.to_dict()["gpu_memory"] is None

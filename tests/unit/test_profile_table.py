"""core/profile: the table of latencies, between and beyond its points."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.profile import Point, StageProfile, interpolate


def point(rows: int, ms: float, threads: int = 1, length: int | None = None, **kw: Any) -> Point:
    values = {
        "runs": 20,
        "mean_ms": ms,
        "p50_ms": ms,
        "p90_ms": ms * 1.1,
        "p99_ms": ms * 1.2,
        "low_ms": ms * 0.98,
        "high_ms": ms * 1.02,
        "spread": 0.01,
        "outliers": 0,
    }
    return Point(threads, rows, length, **{**values, **kw})


def profile(*points: Point) -> StageProfile:
    return StageProfile("trunk", "ab" * 32, "exported", "fp32", "m1", points)


TABLE = profile(
    point(1, 10.0),
    point(4, 22.0, spread=0.2),
    point(8, 38.0),
    point(1, 6.0, threads=2, spread=0.5),
    point(8, 20.0, threads=2),
)


@pytest.mark.parametrize(
    ("rows", "threads", "ms"),
    [(1, 1, 10), (2, 1, 14), (4, 1, 22), (6, 1, 30), (8, 1, 38), (16, 1, 70), (2, 2, 8)],
)
def test_times_lie_on_straight_lines(rows: int, threads: int, ms: float) -> None:
    assert TABLE.ms(rows, threads) == pytest.approx(ms)


def test_what_was_measured_can_be_asked() -> None:
    assert TABLE.threads_measured() == (1, 2)
    assert TABLE.rows_measured(1) == (1, 4, 8)
    assert TABLE.rows_measured(2) == (1, 8)
    assert TABLE.rows_measured(3) == ()
    assert TABLE.lengths_measured() == ()
    for threads in (*TABLE.threads_measured(), 99):
        only = TABLE.only(threads)
        assert only.points == tuple(p for p in TABLE.points if p.threads == threads)
    assert TABLE.r_max(1) == 0.2
    assert TABLE.r_max(2) == 0.5


def test_what_was_not_measured_is_said() -> None:
    for ask in (lambda: TABLE.ms(1, 3), lambda: TABLE.r_max(3)):
        with pytest.raises(ValueError, match=r"3 threads were not measured for trunk; known: 1, 2"):
            ask()
    with pytest.raises(ValueError, match="rows is 0"):
        TABLE.ms(0)
    with pytest.raises(ValueError, match="known: none"):
        profile().ms(1)


def test_lengths_are_a_second_axis() -> None:
    table = profile(point(1, 4.0, length=16), point(2, 8.0, length=16), point(1, 40.0, length=256))
    assert table.lengths_measured() == (16, 256)
    assert table.ms(1, length=16) == 4.0
    assert table.ms(2, length=16) == 8.0
    assert table.ms(1) == 40.0  # the longest
    assert table.ms(1, length=136) == pytest.approx(22.0)
    assert table.ms(1, length=8) == 4.0  # an upper bound


def test_the_only_length_is_not_that_of_all() -> None:
    table = profile(point(1, 10.0, length=64), point(2, 16.0, length=64))
    assert table.ms(2, length=64) == table.ms(2) == 16.0
    assert table.ms(1, length=512) == 80.0
    assert table.ms(1, length=8) == 10.0  # an upper bound


def test_one_point_goes_on_in_proportion_and_a_fall_does_not_go_on() -> None:
    assert profile(point(2, 5.0)).ms(6) == 15.0
    assert profile(point(2, 5.0)).ms(1) == 5.0
    assert profile(point(1, 5.0), point(2, 4.0)).ms(9) == 4.0


@given(
    st.lists(
        st.tuples(st.integers(1, 99), st.floats(0.1, 1e3)), min_size=1, unique_by=lambda t: t[0]
    ),
    st.integers(1, 500),
)
def test_interpolation_stays_between_its_neighbours(line: list[tuple[int, float]], x: int) -> None:
    line = sorted(line)
    y = interpolate(line, x)
    assert y > 0
    if x <= line[-1][0]:
        assert min(v for _, v in line) * 0.999 <= y <= max(v for _, v in line) * 1.001


def test_points_are_sorted_and_survive_json() -> None:
    shuffled = profile(*reversed(TABLE.points))
    assert shuffled == TABLE
    assert StageProfile.from_dict(json.loads(json.dumps(TABLE.to_dict()))) == TABLE


def test_a_stage_carries_it() -> None:
    spec = TensorSpec("float32", ("rows", 4))
    info = BlockInfo("trunk", "1", "ab" * 32, "pt2", Contract(spec, spec), 0, 0)
    for table in (None, TABLE.to_dict()):
        stage = StageSpec(1, info, profile=table)
        assert StageSpec.from_dict(json.loads(json.dumps(stage.to_dict()))) == stage
    assert StageSpec.from_dict({"stage": 1, "block": info.to_dict()}).profile is None


def test_derived_figures_of_a_point() -> None:
    p = point(4, 20.0)
    assert p.row_ms == 5.0
    assert p.interval == pytest.approx(0.02)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 0},
        {"rows": 1.5},
        {"rows": True},
        {"threads": 0},
        {"runs": 0},
        {"outliers": -1},
        {"length": 0},
        {"p50_ms": 0},
        {"p50_ms": float("nan")},
        {"mean_ms": float("inf")},
        {"mean_ms": 10**400},
        {"p90_ms": "7"},
        {"spread": -0.1},
        {"spread": True},
        {"low_ms": None},
    ],
)
def test_nonsense_is_refused(change: dict[str, Any]) -> None:
    data = TABLE.to_dict()
    data["points"][0].update(change)
    with pytest.raises(ValueError):
        StageProfile.from_dict(data)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {**TABLE.to_dict(), "points": 7},
        {**TABLE.to_dict(), "points": [7]},
        {**TABLE.to_dict(), "points": [{"rows": 1}]},
        {**TABLE.to_dict(), "engine": None},
        {**TABLE.to_dict(), "points": [TABLE.to_dict()["points"][0]] * 2},
    ],
)
def test_what_is_no_profile_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        StageProfile.from_dict(data)


def test_lengths_are_all_there_or_none() -> None:
    with pytest.raises(ValueError, match="some have none"):
        profile(point(1, 1.0), point(1, 1.0, length=16))


def test_unknown_fields_of_a_point_are_passed_over() -> None:
    data = TABLE.to_dict()
    data["points"][0]["later"] = 1
    assert StageProfile.from_dict(data) == TABLE

"""bench/profiling/plan: cells, when a cell is done, what its runs come to."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from blockflow.bench.profiling.plan import (
    VISITS,
    Cell,
    Effort,
    binding_of,
    cells_of,
    doubling,
    expected_s,
    is_warm,
    lengths_of,
    next_visit,
    point_of,
)
from blockflow.core.model import TensorSpec

IMAGE = TensorSpec("float32", ("rows", 3, 8, 8))
TEXT = TensorSpec("int64", ("rows", "length"), {"length": (1, 512)})
SHORT = TensorSpec("int64", ("rows", "length"), {"length": (2, 6)})
TWO = TensorSpec("float32", ("rows", "h", "w"), {"h": (1, 64), "w": (1, 32)})


@pytest.mark.parametrize(
    ("largest", "numbers"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])],
)
def test_doubling(largest: int, numbers: list[int]) -> None:
    assert doubling(largest) == numbers


def test_lengths_are_a_factor_of_four_apart() -> None:
    assert lengths_of(IMAGE) == [None]
    assert lengths_of(TEXT) == [8, 32, 128, 512]
    assert lengths_of(SHORT) == [6]


def test_cells_are_ordered_and_bound() -> None:
    cells = cells_of([2, 1, 1], [4, 1], [16, 64])
    assert cells[0] == Cell(1, 1, 16)
    assert len(cells) == 8
    assert [c.threads for c in cells] == [1] * 4 + [2] * 4
    assert binding_of(TEXT, Cell(1, 4, 16)) == {"rows": 4, "length": 16}
    assert binding_of(IMAGE, Cell(1, 4)) == {"rows": 4}
    assert binding_of(TWO, Cell(1, 2, 16)) == {"rows": 2, "h": 16, "w": 32}


@pytest.mark.parametrize(
    ("times", "warm"),
    [
        ([], False),
        ([9.0, 5.0, 5.0], False),
        ([9.0, 5.0, 5.0, 5.0], False),
        ([9.0, 5.0, 5.0, 5.0, 5.1], True),
        ([9.0, 8.0, 7.0, 6.0, 5.0], False),
        ([5.0, 5.1, 5.2, 4.9], True),
        ([5.0, 9.0, 5.1, 5.0, 5.0], True),
    ],
)
def test_warm_is_when_nothing_gets_better(times: list[float], warm: bool) -> None:
    assert is_warm(times) is warm


def visited(
    sample: random.Random, mean: float, noise: float, effort: Effort, between: float = 0.0
) -> list[list[float]]:
    """The times of a cell by visit, until it is done; ``between``: what a visit has for itself."""
    visits: list[list[float]] = []
    spent = runs = 0.0
    while n := next_visit(visits, effort):
        assert 1 <= n <= effort.max_runs - runs
        pace = mean * sample.lognormvariate(0.0, between)
        visits.append([])
        for _ in range(n):
            visits[-1].append(pace * sample.uniform(1 - noise, 1 + noise))
            spent += visits[-1][-1] / 1e3
            if spent > 2 * effort.seconds:
                break
        runs += len(visits[-1])
        assert len(visits) < 200
    return visits


def play(
    sample: random.Random, mean: float, noise: float, effort: Effort
) -> tuple[int, int, float]:
    """Visit a cell until it is done: runs, visits, seconds."""
    visits = visited(sample, mean, noise, effort)
    return sum(map(len, visits)), len(visits), sum(map(sum, visits)) / 1e3


def test_a_steady_cell_is_soon_sure() -> None:
    runs, visits, _ = play(random.Random(1), 1.0, 0.005, Effort())
    assert visits == VISITS
    assert runs >= Effort().min_runs
    assert next_visit([], Effort(min_runs=3, max_runs=3)) == 3


def test_a_noisy_cell_takes_more_runs_and_ends() -> None:
    effort = Effort()
    steady, _, _ = play(random.Random(1), 1.0, 0.005, effort)
    noisy, _, _ = play(random.Random(1), 1.0, 0.5, effort)
    assert steady < noisy <= effort.max_runs


@pytest.mark.parametrize("between", [0.0, 0.02, 0.05, 0.1])
def test_the_interval_knows_that_visits_differ(between: float) -> None:
    """A machine has moods that outlast a visit: a hundred forwards of one are no hundred looks."""
    sample = random.Random(3)
    points = [
        point_of(Cell(1, 1), visited(sample, 5.0, 0.05, Effort(), between)) for _ in range(60)
    ]
    assert sum(p.low_ms <= 5.0 <= p.high_ms for p in points) >= 40


def test_visits_that_differ_are_followed_by_more() -> None:
    alike = visited(random.Random(1), 1.0, 0.005, Effort())
    apart = visited(random.Random(1), 1.0, 0.005, Effort(), between=0.1)
    assert len(alike) == VISITS < len(apart)


def test_a_slow_cell_ends_by_its_time_with_three_runs_at_least() -> None:
    effort = Effort(seconds=1.0)
    runs, _, seconds = play(random.Random(1), 200.0, 0.5, effort)
    assert runs >= 3
    assert seconds <= 2 * effort.seconds
    runs, _, _ = play(random.Random(1), 5000.0, 0.1, effort)
    assert runs == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"confidence": 0},
        {"confidence": 1.5},
        {"min_runs": 1},
        {"min_runs": 20, "max_runs": 10},
        {"seconds": 0},
        {"seconds": float("nan")},
    ],
)
def test_an_impossible_effort_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Effort(**wrong)  # type: ignore[arg-type]


def test_which_effort_covers_which() -> None:
    asked = Effort(confidence=0.02, seconds=3)
    assert asked.covered_by({"confidence": 0.01, "seconds": 5})
    assert asked.covered_by(asdict(asked))
    assert not asked.covered_by({"confidence": 0.05, "seconds": 5})
    assert not asked.covered_by({"confidence": 0.01, "seconds": 1})
    assert not asked.covered_by({})
    assert not asked.covered_by({"confidence": "x", "seconds": None})


def test_a_point_keeps_its_outliers() -> None:
    times = [10.0, 10.1, 9.9, 10.0, 10.2, 9.8, 10.0, 10.1, 9.9, 30.0]
    point = point_of(Cell(2, 4, 16), [times[:3], times[3:]])
    assert (point.threads, point.rows, point.length, point.runs) == (2, 4, 16, 10)
    assert point.outliers == 1
    assert point.p99_ms == 30.0
    assert point.mean_ms == pytest.approx(12.0)
    assert point.low_ms <= point.p50_ms <= point.high_ms
    mean = sum(times) / 10
    assert point.spread == pytest.approx(sum(abs(t - mean) for t in times) / 10 / mean)


def test_how_long_a_cell_takes() -> None:
    effort = Effort(seconds=3, max_runs=100)
    assert expected_s(Cell(1, 1), 1.0, effort) == pytest.approx(0.1)
    assert expected_s(Cell(1, 10), 10.0, effort) == 3
    assert expected_s(Cell(1, 10), 500.0, effort) == 15

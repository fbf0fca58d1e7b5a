"""core/fit: LBCI's curve, recovered from points of known parameters; bad fits are told."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockflow.core.fit import CurveFit, fit_curve

ROWS = (1, 2, 4, 8, 16, 32)
KNOWN = [
    CurveFit(27.5, 12.3, 6, 1.5),
    CurveFit(10, 2, 16, 3),
    CurveFit(5, 8, 10, 1.2),
    CurveFit(12.2, 10.6, 3, 1),
    CurveFit(100, 0.5, 20, 0.7),
]


def fitted(curve: CurveFit, rows: tuple[int, ...] = ROWS) -> CurveFit:
    return fit_curve(rows, [curve.total(b) for b in rows])


@pytest.mark.parametrize("curve", KNOWN)
def test_known_parameters_are_found(curve: CurveFit) -> None:
    found = fitted(curve)
    for name in ("z1", "z2", "z3", "z4"):
        assert getattr(found, name) == pytest.approx(getattr(curve, name), rel=1e-5), name
    assert found.max_error < 1e-6
    assert found.r2 > 0.999999


def test_the_paper_form() -> None:
    curve = CurveFit(30.0, 10.0, 8.0, 2.0)
    assert curve.per_sample(8) == 20.0  # half-way at z3
    assert curve.total(8) == 160.0
    assert curve.per_sample(1e9) == pytest.approx(10.0)
    assert curve.per_sample(0) == 30.0


@pytest.mark.parametrize("curve", KNOWN)
def test_scipy_finds_the_same(curve: CurveFit) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    noisy = [curve.total(b) * (1 + 0.01 * math.sin(b)) for b in ROWS]
    s = [t / b for t, b in zip(noisy, ROWS, strict=True)]

    def form(b, z1, z2, z3, z4):  # type: ignore[no-untyped-def]
        return (z1 - z2) / (1 + (b / z3) ** z4) + z2

    start = (curve.z1, curve.z2, curve.z3, curve.z4)
    bounds = ([0, 0, 1e-5, 0.25], [1e6, 1e6, 320, 8])
    z, _ = optimize.curve_fit(form, ROWS, s, p0=start, sigma=s, bounds=bounds, max_nfev=20000)
    theirs = sum(((form(b, *z) - v) / v) ** 2 for b, v in zip(ROWS, s, strict=True))
    found = fit_curve(ROWS, noisy)
    ours = sum(((found.per_sample(b) - v) / v) ** 2 for b, v in zip(ROWS, s, strict=True))
    assert ours <= theirs * 1.001 + 1e-12


def test_a_fixed_cost_and_one_per_row_is_fitted() -> None:
    found = fit_curve(ROWS, [5 + 3 * b for b in ROWS])
    assert found.max_error < 1e-4
    assert found.total(64) == pytest.approx(5 + 3 * 64, rel=1e-3)
    assert found.rising


@pytest.mark.parametrize("times", [[10.0], [10.0, 15.0], [10.0, 15.0, 25.0], [4.0, 9.0, 30.0]])
def test_few_points_are_met(times: list[float]) -> None:
    rows = ROWS[: len(times)]
    found = fit_curve(rows, times)
    assert [found.total(b) for b in rows] == pytest.approx(times, rel=0.25)
    assert found.z4 == 1.0
    if len(times) < 3:
        assert found.max_error < 1e-9
        assert found.z3 == pytest.approx(math.prod(rows) ** (1 / len(rows)))


def test_a_constant_time_per_row() -> None:
    found = fit_curve(ROWS, [7.0 * b for b in ROWS])
    assert found.total(48) == pytest.approx(7 * 48)
    assert found.max_error < 1e-9 and found.r2 == 1.0


def test_a_bad_fit_says_so() -> None:
    times = [10, 10, 100, 20, 500, 60]
    found = fit_curve(ROWS, times)
    errors = [abs(found.total(b) - t) / t for b, t in zip(ROWS, times, strict=True)]
    assert found.max_error == pytest.approx(max(errors)) and found.max_error > 0.3
    each = [t / b for b, t in zip(ROWS, times, strict=True)]
    mean = sum(each) / len(each)
    missed = sum((s - found.per_sample(b)) ** 2 for b, s in zip(ROWS, each, strict=True))
    assert found.r2 == pytest.approx(1 - missed / sum((s - mean) ** 2 for s in each))
    assert found.r2 < 0.9


def test_what_would_begin_below_zero_begins_there() -> None:
    found = fit_curve(ROWS, [b * (b - 0.95) for b in ROWS])
    assert found.z1 == 0.0 and found.z2 > 0


def test_rising_is_what_the_curve_does() -> None:
    for curve in KNOWN:
        totals = [curve.total(b / 4) for b in range(1, 2000)]
        falls = any(b < a for a, b in itertools.pairwise(totals))
        assert curve.rising is not falls, curve


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=8))
def test_any_positive_times_give_a_usable_curve(times: list[float]) -> None:
    rows = [2**i for i in range(len(times))]
    found = fit_curve(rows, times)
    assert all(math.isfinite(found.total(b)) and found.total(b) >= 0 for b in range(1, 300))
    assert math.isfinite(found.max_error)


@pytest.mark.parametrize(
    ("rows", "times"),
    [([], []), ([1, 2], [1.0]), ([1, 1], [1.0, 2.0]), ([0, 1], [1.0, 2.0]), ([1], [0.0])],
)
def test_nonsense_is_refused(rows: list[int], times: list[float]) -> None:
    with pytest.raises(ValueError):
        fit_curve(rows, times)
    with pytest.raises(ValueError):
        fit_curve([1, 2], [math.nan, 1.0])

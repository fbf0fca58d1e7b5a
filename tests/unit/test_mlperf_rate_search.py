"""RateSearch: which rates are tried, and what is believed of them. Pure."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from blockflow.bench.mlperf.search import RateSearch

BETWEEN = math.sqrt(200.0)


def searched(limit: float, start: float, **kw: Any) -> RateSearch:
    search = RateSearch(start, **kw)
    while (rate := search.next()) is not None:
        search.tell(rate, rate <= limit)
    return search


@pytest.mark.parametrize("start", [1.0, 90.0, 100.0, 500.0, 1500.0])
def test_the_search_finds_the_limit_from_either_side(start: float) -> None:
    search = searched(100.0, start, runs=30)
    assert search.best is not None
    assert search.precise
    assert 100 / 1.05 <= search.best <= 100


def test_the_search_is_bounded_when_nothing_is_valid() -> None:
    search = searched(0.0, 160.0)
    assert search.best is None
    assert [t.rate for t in search.trials] == [r for r in (160, 80, 40, 20, 10) for _ in range(2)]
    assert len(searched(0.0, 160.0, runs=2).trials) == 2


def test_the_search_is_bounded_when_everything_is_valid() -> None:
    search = searched(1e18, 1.0, runs=5)
    assert search.best == 16.0
    assert not search.precise


def test_a_lucky_run_above_an_invalid_one_is_not_the_result() -> None:
    search = RateSearch(10.0)
    for rate, valid in ((10.0, True), (20.0, False), (20.0, False), (40.0, True)):
        search.tell(rate, valid)
    assert search.best == 10.0
    assert 10.0 < (search.next() or 0) < 20.0


def test_an_invalid_rate_is_tried_again_before_it_is_believed() -> None:
    """A hiccup of the machine must not cap the search for good."""
    hiccups = {10.0: 1, 20.0: 1}
    search = RateSearch(10.0, runs=30)
    while (rate := search.next()) is not None:
        unlucky = hiccups.get(rate, 0) > 0
        hiccups[rate] = hiccups.get(rate, 0) - 1
        search.tell(rate, rate <= 70.0 and not unlucky)
    assert search.precise
    assert search.best is not None
    assert 70 / 1.05 <= search.best <= 70
    # What held at once is not asked again, but for the result.
    tried = [t.rate for t in search.trials]
    assert tried[:4] == [10.0, 10.0, 20.0, 20.0]
    assert tried.count(40.0) == 1
    assert tried.count(80.0) == 2
    assert tried[-1] == search.best
    assert tried.count(search.best) == 2


def tell(search: RateSearch, *trials: tuple[float, bool]) -> None:
    """Each of them is what the search asks for."""
    for rate, valid in trials:
        assert search.next() == pytest.approx(rate)
        search.tell(search.next() or 0.0, valid)


def test_a_rate_that_was_valid_by_luck_is_not_the_result() -> None:
    search = RateSearch(10.0, precision=0.5)
    tell(search, (10.0, True), (20.0, False), (20.0, False), (BETWEEN, True))
    assert search.best == pytest.approx(BETWEEN)
    assert not search.precise  # it held once
    tell(search, (BETWEEN, False))
    assert search.best == pytest.approx(BETWEEN)  # a hiccup, or luck: the third run knows
    tell(search, (BETWEEN, False))
    assert search.best == 10.0
    tell(search, (10.0, True))
    assert search.precise
    assert search.next() is None


def test_a_hiccup_at_the_result_costs_one_run_more() -> None:
    search = RateSearch(10.0, precision=0.5)
    tell(search, (10.0, True), (20.0, False), (20.0, False), (BETWEEN, True), (BETWEEN, False))
    tell(search, (BETWEEN, True))
    assert search.precise
    assert search.best == pytest.approx(BETWEEN)
    assert search.next() is None


def chance(search: RateSearch, limit: float, width: float, seed: int) -> float:
    """What is found where a run's verdict is the more a matter of chance the nearer the limit."""
    generator = random.Random(seed)
    while (rate := search.next()) is not None:
        search.tell(rate, generator.gauss(0.0, width) > math.log(rate / limit))
    assert search.best is not None
    return search.best


def test_a_search_of_chance_leans_to_neither_side() -> None:
    """By a VALID run found once it leaned 4% upwards here, where every second run at the limit is
    VALID and every sixth at a tenth above it."""
    found = [chance(RateSearch(30.0 * 1.01**s, runs=100), 100.0, 0.1, s) for s in range(400)]
    # Without chance it ends between the limit and 5% below.
    assert 0.95 < statistics.median(found) / 100.0 < 1.0


def test_a_search_needs_positive_arguments() -> None:
    with pytest.raises(ValueError):
        RateSearch(0.0)

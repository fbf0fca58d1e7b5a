"""The batching benchmark looks again after every visit: what that costs in errors, and saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from blockflow.bench.batching import figures as f
from blockflow.bench.batching.rig import Further
from blockflow.bench.results import Figure
from blockflow.bench.statistics import Interval, Verdict, median_interval

FIRST, MOST = 5, 15
RUNS = 500
EVER = 3600.0

Draw = Callable[[np.random.Generator], "np.ndarray[tuple[int], np.dtype[np.float64]]"]


def ratio(samples: Sequence[float], goal: float = 1.0) -> Figure:
    return f.ratio_figure(f.TIME_RATIO, "a", "b", median_interval(samples), {}, goal=goal)


@dataclass
class Ended:
    """How many of the runs ended with a verdict, and after how many visits on average."""

    met: float
    missed: float
    visits: float

    @property
    def told(self) -> float:
        return self.met + self.missed


def looked_at(draw: Draw, decided: Callable[[Sequence[Figure]], bool] = f.decided) -> Ended:
    """As a ladder does: more visits while nothing is decided."""
    chance = np.random.default_rng(1)
    verdicts, visits = [], 0
    for _ in range(RUNS):
        samples = draw(chance)
        further = Further(MOST, EVER, lambda found: decided([ratio(found["a"])]))
        turn = FIRST
        while further.wanted(turn, 0.0, {"a": samples[:turn].tolist()}):
            turn += 1
        verdicts.append(ratio(samples[:turn].tolist()).labels["verdict"])
        visits += turn
    met, missed = (verdicts.count(v) / RUNS for v in (Verdict.MET, Verdict.MISSED))
    return Ended(met, missed, visits / RUNS)


def never(_found: Sequence[Figure]) -> bool:
    return False


def bare(found: Sequence[Figure]) -> bool:
    return all(g.labels["verdict"] != Verdict.NOISE for g in found)


def normal(true: float, spread: float) -> Draw:
    return lambda chance: true * (1 + spread * chance.standard_normal(MOST))


def skewed(chance: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return 1 + 0.1 * (chance.exponential(size=MOST) - math.log(2))


@pytest.mark.parametrize("draw", [normal(1.0, 0.04), normal(1.0, 0.2), skewed])
def test_two_equal_things_are_told_apart_no_oftener_than_by_one_look(draw: Draw) -> None:
    assert looked_at(draw).told < 0.065


def test_a_bare_interval_looked_at_again_tells_equal_things_apart() -> None:
    """That is what the rule is for."""
    assert looked_at(normal(1.0, 0.2), bare).told > 0.15


def test_looking_again_costs_no_power_and_ends_early_where_it_is_clear() -> None:
    near = normal(0.95, 0.05)
    assert looked_at(near).met > looked_at(near, never).met - 0.01 > 0.8
    clear = looked_at(normal(0.7, 0.05))
    assert clear.met == 1.0
    assert clear.visits < FIRST + 1


def test_before_the_last_look_more_is_needed_than_a_bare_interval() -> None:
    # Student's for 99.9%: 8.61 standard errors of five samples, 3.31 of a thousand.
    few = f.interim(Interval(1.0, 0.804, 1.1, 5))
    assert (few.low, few.high) == pytest.approx((0.139, 1.861), abs=1e-3)
    assert f.interim(Interval(1.0, 0.804, 1.1, 1000)).low == pytest.approx(1 - 0.33, abs=1e-3)
    assert f.interim(Interval(1.0, 1.0, 1.0, 1)).high == math.inf


def test_the_run_s_own_noise_counts_before_the_last_look_too() -> None:
    found = Interval(0.9, 0.89, 0.91, 60)
    sure = f.ratio_figure(f.ALONE_RATIO, "a", "b", found, {}, goal=1.0)
    unsure = f.ratio_figure(f.ALONE_RATIO, "a", "b", found, {"noise": 0.085}, goal=1.0, noise=0.085)
    assert sure.labels["verdict"] == unsure.labels["verdict"] == Verdict.MET
    assert f.decided([sure])
    assert not f.decided([unsure])


def test_what_was_lost_needs_no_further_look() -> None:
    lost = f._with_losses(ratio([0.5, 1.5, 0.9, 1.1, 1.0]), ours=True, theirs=False)
    assert f.decided([lost])

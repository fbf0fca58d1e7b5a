"""Service: how long a forward takes, from a measured profile, with or without its fluctuation."""

from __future__ import annotations

from math import exp
from random import Random
from statistics import NormalDist

from blockflow.core.profile import StageProfile

_NS = 1_000_000
_NORMAL = NormalDist()


class Service:
    """Forward times of one block on ``threads`` threads.

    The profile's median, times a lognormal factor of median 1 whose mean absolute deviation,
    relative to its mean, is the measured spread (LBCI's ``r_b``) of the nearest measured point: a
    lognormal's is ``2 erf(sigma / sqrt(8))``, which gives sigma.

    Args:
        rng: for the fluctuation; None = every forward takes the median.
    """

    def __init__(self, profile: StageProfile, threads: int, rng: Random | None) -> None:
        self._profile = profile
        self._threads = threads
        self._rng = rng
        self._known: dict[tuple[int, int | None], tuple[int, float]] = {}

    def draw(self, rows: int, length: int | None) -> int:
        """Nanoseconds of one forward."""
        cell = self._known.get((rows, length))
        if cell is None:
            cell = self._known[(rows, length)] = self._cell(rows, length)
        ns, sigma = cell
        if self._rng is None or not sigma:
            return ns
        return max(1, round(ns * exp(sigma * self._rng.gauss(0.0, 1.0))))

    def _cell(self, rows: int, length: int | None) -> tuple[int, float]:
        ms, sigma = _forward(self._profile, rows, self._threads, length)
        return max(1, round(ms * _NS)), sigma


def mean_ms(profile: StageProfile, rows: int, threads: int, length: int | None = None) -> float:
    """Mean of a forward that fluctuates, in milliseconds: a lognormal's is its median times
    ``e^(sigma^2 / 2)``."""
    ms, sigma = _forward(profile, rows, threads, length)
    return ms * exp(sigma * sigma / 2)


def _forward(
    profile: StageProfile, rows: int, threads: int, length: int | None
) -> tuple[float, float]:
    """A forward's median in milliseconds, and sigma of the lognormal factor."""
    near = min(
        (p for p in profile.points if p.threads == threads),
        key=lambda p: (abs((p.length or 0) - (length or 0)), abs(p.rows - rows)),
    )
    return profile.ms(rows, threads, length), sigma_of(near.spread)


def sigma_of(spread: float) -> float:
    """Sigma of the lognormal whose mean absolute deviation is ``spread`` of its mean (0 <= spread
    < 2; what is larger is cut)."""
    return 2.0 * _NORMAL.inv_cdf(0.5 + min(spread, 1.9) / 4.0)

"""RateSearch: the highest rate that runs find VALID: bracket, then bisect. Pure.

A run is expensive and its verdict a matter of chance close to the limit: so the steps are factors,
not differences, the number of runs is bounded, and what counts is the highest rate that was found
VALID below every rate that was found INVALID. One hiccup of a machine shall not cap the search
for good, and one stroke of luck shall not end it too high: what bounds the result on either side
was found twice, in at most three runs at its rate. Only on the way, where a higher rate is about to
be tried or a lower one has held, a single VALID run is enough.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

STEP = 2.0
"""Factor by which the bracket grows or falls."""

LEAST_SHARE = 1 / 16
"""Of the start: nothing below is tried. A run has a fixed number of queries: slow ones are long."""

TRIES = 2
"""Runs at a rate that say the same before it is believed."""

RUNS = 20
"""At most. Halving twice, bisecting four times and repeating the result takes 14 where every other
rate is INVALID; the rest is for those that are VALID once and then not."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A rate in queries per second, and what its run said."""

    rate: float
    valid: bool


class RateSearch:
    """Asks for runs one after the other.

    Args:
        start: the first rate to try, in queries per second; any positive guess.
        precision: the search ends when the lowest INVALID rate is within this share above the
            highest VALID one.
        runs: at most so many.

    Raises:
        ValueError: an argument is not positive.
    """

    def __init__(self, start: float, *, precision: float = 0.05, runs: int = RUNS) -> None:
        if not (start > 0 and precision > 0 and runs > 0):
            raise ValueError(f"start {start}, precision {precision} and runs {runs} are positive")
        self._start = start
        self.floor = start * LEAST_SHARE
        self.precision = precision
        self._runs = runs
        self.trials: list[Trial] = []

    @property
    def best(self) -> float | None:
        """The highest VALID rate below every one that is believed to be INVALID."""
        high = self._high
        good = [t.rate for t in self.trials if t.valid and (high is None or t.rate < high)]
        return max(good, default=None)

    def _found(self, rate: float, *, valid: bool) -> int:
        """How often the rate was found to be so."""
        return sum(t.rate == rate and t.valid is valid for t in self.trials)

    @property
    def _high(self) -> float | None:
        failed = Counter(t.rate for t in self.trials if not t.valid)
        return min((rate for rate, n in failed.items() if n >= TRIES), default=None)

    @property
    def _doubted(self) -> float | None:
        """The last rate, where it was INVALID and that is not yet believed."""
        if not self.trials or self.trials[-1].valid:
            return None
        rate = self.trials[-1].rate
        doubted = self._found(rate, valid=False) < TRIES > self._found(rate, valid=True)
        return rate if doubted else None

    @property
    def _close(self) -> bool:
        """Between the VALID and the INVALID rate nothing is left to try."""
        low, high = self.best, self._high
        return low is not None and high is not None and high <= low * (1 + self.precision)

    @property
    def precise(self) -> bool:
        """The limit is known as closely as asked for, and was not found by luck."""
        return self._close and self._found(self.best or 0.0, valid=True) >= TRIES

    def next(self) -> float | None:
        """The rate to try now; None when the search is over."""
        if len(self.trials) >= self._runs:
            return None
        if self._doubted is not None:
            return self._doubted
        low, high = self.best, self._high
        if self._close:
            return None if self.precise else low
        if low is None and high is None:
            return self._start
        if high is None:
            return (low or self._start) * STEP
        if low is None:
            lower = high / STEP
            return lower if lower >= self.floor else None
        return float((low * high) ** 0.5)

    def tell(self, rate: float, valid: bool) -> None:
        """What the run at ``rate`` said."""
        self.trials.append(Trial(rate, valid))

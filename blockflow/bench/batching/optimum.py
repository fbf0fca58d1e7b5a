"""The best policy there is: what an ideal one would reach on one lane, by dynamic programming.

A worker runs a chain of stages for single-row queries that come as a Poisson process. At every
boundary it may let any of the waiting rows catch up with the batch, once or several times, or wait
for more; when it is free it may start a batch of any size, or wait. The policy sees what waits and
knows all times and the rate, but not the future. Its mean time is found by value iteration over
batches (a semi-Markov decision process, relative to the mean number in the system); by Little's law
that number is the rate times the mean time. Splits are no part of it: :func:`split_gain` of
``oracle.py`` says where they could pay. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockflow.bench.batching.oracle import Lines

Values = NDArray[np.float64]

_ROUNDS = 1000
_CLOSE = 1e-4
_TAIL = 1e-9
_FINE = 4
"""Sizes that are tried for a batch or a join: all up to this one, then in steps of a half."""


def best_mean(lines: Lines, rate: float, longest: int = 0) -> float:
    """Mean time in the system under the best policy, in ms.

    Args:
        lines: ``lines[s][b]``, ms of b rows at stage s.
        rate: arrivals per ms, less than full batches can serve.
        longest: the queue is cut there; 0 = six full batches.
    """
    chain = _Chain(lines, rate, longest or 6 * (len(lines[0]) - 1))
    return chain.solve() / rate


def zerobatch_mean(lines: Lines, rate: float, longest: int = 0) -> float:
    """The same for ZeroBatch: all that waits, up to a full batch, and nobody joins. Beside it the
    best policy's gain has no error of sampling."""
    chain = _Chain(lines, rate, longest or 6 * (len(lines[0]) - 1), plain=True)
    return chain.solve() / rate


class _Chain:
    """The decision process; ``values[q]`` are relative costs with q waiting and the engine free.

    ``plain``: with no decision to make, ZeroBatch's.
    """

    def __init__(self, lines: Lines, rate: float, longest: int, *, plain: bool = False) -> None:
        self._plain = plain
        self._lines = [np.asarray(line) for line in lines]
        self._rate = rate
        self._longest = longest
        self._top = len(lines[0]) - 1
        self._sizes = _sizes(self._top)
        self._waiting = np.arange(longest + 1, dtype=np.float64)
        self._come: dict[float, Values] = {}

    def solve(self) -> float:
        """The mean number in the system."""
        values = np.zeros(self._longest + 1)
        mean = self._rate * sum(float(line[1]) for line in self._lines)
        for _ in range(_ROUNDS):
            new = self._step(values, mean)
            # At the true mean nothing is left over from one return to the empty system to the next.
            drift = float(new[0] - values[0])
            change = new - new[0] - values
            values = new - new[0]
            mean += 0.3 * self._rate * drift
            if np.abs(change).max() < _CLOSE * (1 + np.abs(values).max()) and abs(
                drift
            ) * self._rate < _CLOSE * max(mean, 1e-9):
                break
        return mean

    def _step(self, values: Values, mean: float) -> Values:
        """One batch, from its start to its end, backwards."""
        after = dict.fromkeys(range(1, self._top + 1), values)
        for stage in range(len(self._lines) - 1, 0, -1):
            after = self._boundary(stage, after, mean)
        best = np.full(self._longest + 1, np.inf)
        for m in range(1, self._top + 1) if self._plain else self._sizes:
            spent = self._spend(float(self._lines[0][m]), 0, after[m], mean)
            start = (spent + m * self._lines[0][m])[:-m]
            if self._plain:  # a larger batch takes the place of a smaller one
                best[m:] = start
            else:
                best[m:] = np.minimum(best[m:], start)
        # Waiting for the next query: it is the only choice when nobody is there.
        rest = (self._waiting - mean) / self._rate + np.append(values[1:], values[-1])
        best[0] = rest[0]
        if not self._plain:
            best[1:] = np.minimum(best[1:], rest[1:])
        return best

    def _boundary(self, stage: int, after: dict[int, Values], mean: float) -> dict[int, Values]:
        """Rows before ``stage``, by how many: go on, or let some of those who wait catch up first,
        as often as there is room; or rest until somebody comes. Larger batches first."""
        found: dict[int, Values] = {}
        for n in range(self._top, 0, -1):
            best = self._spend(float(self._lines[stage][n]), n, after[n], mean)
            found[n] = best
            if self._plain:
                continue
            for m in self._sizes:
                if n + m > self._top:
                    break
                catch_up = sum(float(line[m]) for line in self._lines[:stage])
                joined = self._spend(catch_up, n + m, found[n + m], mean)
                best[m:] = np.minimum(best[m:], joined[:-m])
            best[0] = min(best[0], (n - mean) / self._rate + best[1])
        return found

    def _spend(self, time: float, n: int, then: Values, mean: float) -> Values:
        """Costs by those who wait besides n, for a run of so long."""
        chances = self._come.get(time)
        if chances is None:
            chances = self._come[time] = _poisson(self._rate * time)
        full = np.append(then, np.full(len(chances) - 1, then[-1]))
        expected = np.convolve(full, chances[::-1], "valid")
        here: Values = (self._waiting + n - mean + self._rate * time / 2) * time
        return here + expected


def _sizes(top: int) -> Sequence[int]:
    found = [1]
    while found[-1] < top:
        more = 1 if found[-1] < _FINE else found[-1] // 2
        found.append(min(top, found[-1] + more))
    return found


def _poisson(mean: float) -> Values:
    """Chances of 0, 1, 2, ... arrivals, up to where hardly any is left."""
    chances, total, k = [np.exp(-mean)], np.exp(-mean), 0
    while 1 - total > _TAIL and k < 10 * mean + 60:
        k += 1
        chances.append(chances[-1] * mean / k)
        total += chances[-1]
    return np.asarray(chances) / total

"""The best policy there is: what an ideal one would reach on one lane, by dynamic programming.

A worker runs a chain of stages for single-row queries that come as a Poisson process. At every
boundary it may let any of the waiting rows catch up with the batch, once or several times, or wait
for more; when it is free it may start a batch of any size, or wait. The policy sees what waits and
knows all times and the rate, but not the future. It is found by policy iteration over batches (a
semi-Markov decision process: Howard, "Dynamic Programming and Markov Processes", 1960), which ends
at the best one exactly; by Little's law the mean number in the system is the rate times the mean
time. Splits are no part of it: :func:`split_gain` of ``oracle.py`` says where they could pay. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockflow.bench.batching.oracle import Lines

Values = NDArray[np.float64]
Choices = NDArray[np.int64]

_ROUNDS = 100
_CLOSE = 1e-9
_WAIT = -1
"""A choice: neither go on nor take anybody along, but see who comes next."""


def best_mean(lines: Lines, rate: float, longest: int = 0) -> float:
    """Mean time in the system under the best policy, in ms.

    Args:
        lines: ``lines[s][b]``, ms of b rows at stage s.
        rate: arrivals per ms, less than full batches can serve.
        longest: the queue is cut there; 0 = six full batches.

    Raises:
        ArithmeticError: the best policy was not found.
    """
    chain = _Chain(lines, rate, longest or 6 * (len(lines[0]) - 1))
    values, number = chain.worth(chain.zerobatch())
    for _ in range(_ROUNDS):
        values, less = chain.worth(chain.better(values, number))
        if less >= number * (1 - _CLOSE):
            return less / rate
        number = less
    raise ArithmeticError(f"no best policy within {_ROUNDS} rounds")


def zerobatch_mean(lines: Lines, rate: float, longest: int = 0) -> float:
    """The same for ZeroBatch: all that waits, up to a full batch, and nobody joins. Beside it the
    best policy's gain has no error of sampling."""
    chain = _Chain(lines, rate, longest or 6 * (len(lines[0]) - 1))
    return chain.worth(chain.zerobatch())[1] / rate


@dataclass(frozen=True, slots=True)
class _Policy:
    """What is done, by the number of those who wait.

    Attributes:
        start: when the engine is free: rows of a batch, or ``_WAIT``.
        join: before a stage, with so many rows in the batch: who catches up, 0 or ``_WAIT``.
    """

    start: Choices
    join: dict[tuple[int, int], Choices] = field(default_factory=dict)


class _Chain:
    """The decision process. Its states are how many wait when the engine is free, between which a
    batch passes; what happens within one is worked out backwards, from its end.
    """

    def __init__(self, lines: Lines, rate: float, longest: int) -> None:
        self._lines = [np.asarray(line) for line in lines]
        self._rate = rate
        self._longest = longest
        self._top = len(lines[0]) - 1
        self._waiting = np.arange(longest + 1)
        self._come: dict[float, Values] = {}

    def zerobatch(self) -> _Policy:
        start = np.minimum(self._waiting, self._top)
        start[0] = _WAIT
        return _Policy(start)

    def worth(self, policy: _Policy) -> tuple[Values, float]:
        """A policy's relative costs by state, and the mean number in the system.

        What it costs from each state to the next one is a row: chances of the next states, the time
        until then, and the rows in the system added up over that time.
        """
        states = self._longest + 1
        end = np.hstack([np.eye(states), np.zeros((states, 2))])
        after = dict.fromkeys(range(1, self._top + 1), end)
        for stage in range(len(self._lines) - 1, 0, -1):
            after = self._rows_before(stage, after, policy)
        rows = np.empty_like(end)
        for m in np.unique(policy.start):
            here = np.flatnonzero(policy.start == m)
            if m == _WAIT:
                rows[here] = end[np.minimum(here + 1, self._longest)] + self._rest(here)
            else:
                rows[here] = self._spend(float(self._lines[0][m]), m, after[m], here - m)
        chances, time, cost = rows[:, :-2], rows[:, -2], rows[:, -1]
        # The first state is worth nothing; in its place the mean number is what is unknown.
        equations = np.eye(states) - chances
        equations[:, 0] = time
        values: Values = np.linalg.solve(equations, cost).astype(np.float64)
        number, values[0] = float(values[0]), 0.0
        return values, number

    def better(self, values: Values, number: float) -> _Policy:
        """The policy that is best if all that comes after a batch is worth ``values``."""
        worth = np.append(values, [-number, 1.0])
        policy = _Policy(self.zerobatch().start)
        after = dict.fromkeys(range(1, self._top + 1), values)
        for stage in range(len(self._lines) - 1, 0, -1):
            found: dict[int, Values] = {}
            for n in range(self._top, 0, -1):
                best, chosen = self._cost(self._lines[stage][n], n, after[n], worth), self._none()
                for m in range(1, self._top - n + 1):
                    catch_up = sum(float(line[m]) for line in self._lines[:stage])
                    joined = self._cost(catch_up, n + m, found[n + m], worth)
                    self._take(best, chosen, m, joined[:-m])
                found[n] = self._or_wait(best, chosen, n, worth)
                policy.join[stage, n] = chosen
            after = found
        best, chosen = np.full(self._longest + 1, np.inf), self._none()
        for m in range(1, self._top + 1):
            self._take(best, chosen, m, self._cost(self._lines[0][m], m, after[m], worth)[:-m])
        rest = np.append(values[1:], values[-1]) + self._rest(self._waiting) @ worth
        waits = rest < best
        waits[-1] = False
        policy.start[:] = np.where(waits, _WAIT, chosen)
        return policy

    def _rows_before(
        self, stage: int, after: dict[int, Values], policy: _Policy
    ) -> dict[int, Values]:
        """Rows of costs before a stage, by the batch's size. Larger ones first: they are joined
        to."""
        found: dict[int, Values] = {}
        for n in range(self._top, 0, -1):
            chosen = policy.join.get((stage, n), self._none())
            rows = np.empty_like(after[n])
            for m in np.unique(chosen):
                here = np.flatnonzero(chosen == m)
                if m == 0:
                    rows[here] = self._spend(float(self._lines[stage][n]), n, after[n], here)
                elif m != _WAIT:
                    catch_up = sum(float(line[m]) for line in self._lines[:stage])
                    rows[here] = self._spend(catch_up, n + m, found[n + m], here - m)
            for q in np.flatnonzero(chosen == _WAIT)[::-1]:
                rows[q] = rows[q + 1] + self._rest(np.array([n + q]))[0]
            found[n] = rows
        return found

    def _or_wait(self, best: Values, chosen: Choices, n: int, worth: Values) -> Values:
        """The same where it may be better to wait for the next query, and then do what is best."""
        rest = self._rest(self._waiting + n) @ worth
        for q in range(self._longest - 1, -1, -1):
            if rest[q] + best[q + 1] < best[q]:
                best[q], chosen[q] = rest[q] + best[q + 1], _WAIT
        return best

    def _take(self, best: Values, chosen: Choices, m: int, costs: Values) -> None:
        """Let m of those who wait come along wherever that costs less."""
        less = costs < best[m:]
        best[m:][less] = costs[less]
        chosen[m:][less] = m

    def _none(self) -> Choices:
        return np.zeros(self._longest + 1, dtype=np.int64)

    def _rest(self, number: Choices) -> Values:
        """Rows of costs until the next query comes, with so many in the system."""
        out = np.zeros((len(number), self._longest + 3))
        out[:, -2], out[:, -1] = 1 / self._rate, number / self._rate
        return out

    def _cost(self, time: float, n: int, then: Values, worth: Values) -> Values:
        """Of a run of so long with n rows in it, by those who wait."""
        here = (self._waiting + n + self._rate * time / 2 + worth[-2]) * time
        cost: Values = self._chances(float(time)) @ then + here
        return cost

    def _spend(self, time: float, n: int, then: Values, waiting: Choices) -> Values:
        """The same as rows, for these numbers of those who wait."""
        rows: Values = self._chances(time)[waiting] @ then
        rows[:, -2] += time
        rows[:, -1] += (waiting + n + self._rate * time / 2) * time
        return rows

    def _chances(self, time: float) -> Values:
        """How likely so many wait after a run of so long (columns) who were so many before."""
        found = self._come.get(time)
        if found is None:
            states = self._longest + 1
            come = _poisson(self._rate * time, states)
            found = np.zeros((states, states))
            for q in range(states):
                found[q, q:] = come[: states - q]
            found[:, -1] += 1 - found.sum(axis=1)  # the queue is cut there
            self._come[time] = found
        return found


def _poisson(mean: float, count: int) -> Values:
    """Chances of 0, 1, ... arrivals, so many of them."""
    steps = np.log(mean) * np.arange(count) - mean
    steps[1:] -= np.cumsum(np.log(np.arange(1, count)))
    return np.exp(steps)

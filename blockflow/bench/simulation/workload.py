"""Workload: one seed's queries, with the same randomness whatever policy serves them."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from blockflow.bench.simulation.arrivals import Arrival, Arrivals, Closed, Mix

_NS = 1_000_000_000


class Workload:
    """The queries of one run.

    Args:
        rate: queries per second (open arrivals that have no rate of their own).
        duration_s: no query comes after that.
        seed: of the times and the draws. Times and draws have streams of their own, so that two
            policies meet the same queries and can be compared pair by pair.
    """

    def __init__(
        self, arrivals: Arrivals, mix: Mix, rate: float, duration_s: float, seed: int
    ) -> None:
        self._arrivals = arrivals
        self._mix = mix
        self._rate = rate
        self._duration_s = duration_s
        self._seed = str(seed)
        self.end_ns = round(duration_s * _NS)
        self.closed = isinstance(arrivals, Closed)
        self._draw = mix.drawer(Random(f"{seed}/again"))

    def queries(self) -> Iterator[Arrival]:
        """All queries of open arrivals; of a closed loop, each client's first one."""
        return self._arrivals.queries(self._rate, self._duration_s, self._mix, self._seed)

    def again(self, now: int) -> Arrival | None:
        """A client's next query, at ``now``; None when the time is over."""
        return None if now >= self.end_ns else self._draw(now)

    def noise(self) -> Random:
        """The randomness of service times."""
        return Random(f"{self._seed}/service")

"""Allowance: the late answers that a server run may have; with more it cannot become VALID. Pure.

A run of full length asks hundreds of thousands of queries, hours of them at a low rate. LoadGen
cannot be told to end one that is lost, and does not itself notice before the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from blockflow.bench.mlperf.counts import most_by_chance
from blockflow.bench.mlperf.settings import Mode, RunSettings, Scenario, required_queries
from blockflow.bench.numerals import given


@dataclass(slots=True)
class _Bound:
    """``most`` of ``queries`` answers may take longer than ``ms``; ``late`` ones did."""

    who: str
    ms: float
    percentile: float
    queries: float
    late: int = 0

    @property
    def most(self) -> float:
        return (1 - self.percentile) * self.queries


class Allowance:
    """Counts answers that are late for LoadGen's bound, and for each task's own.

    It knows the latencies that are measured here, which begin later than LoadGen's own and end
    earlier: what is late here is late there. And it reckons with the most queries that the run may
    come to, so that no run is given up that could still have been VALID.
    """

    def __init__(self, settings: RunSettings) -> None:
        queries = most_queries(settings)
        bounds: list[tuple[str | None, float | None, float, float]]
        bounds = [(None, settings.bound_ms, settings.percentile, queries)]
        for task, target in settings.targets.items():
            share = settings.asked.get(task, 1.0)
            asking = most_by_chance(queries * share, sqrt(queries * share * (1 - share)))
            bounds.append((task, target.latency_ms, target.percentile, asking))
        self._bounds = {
            task: _Bound("" if task is None else f" of {task}", ms, share, n)
            for task, ms, share, n in bounds
            if ms is not None
        }

    def spent(self, task: str, samples: int, latency_ms: float) -> str:
        """Count an answer; why the run cannot become VALID any more, '' while it can."""
        for name in (None, task):
            bound = self._bounds.get(name)
            if bound is None or latency_ms <= bound.ms:
                continue
            bound.late += samples
            if bound.late > bound.most:
                return (
                    f"{bound.late:,} answers{bound.who} took longer than {given(bound.ms)} ms; "
                    f"p{100 * bound.percentile:g} allows {int(bound.most):,} of at most "
                    f"{int(bound.queries):,}"
                )
        return ""


def most_queries(settings: RunSettings) -> float:
    """Of a server run: LoadGen goes on for its count and its time, whichever ends later."""
    mean = settings.rate * settings.min_duration_s
    return max(settings.min_queries, most_by_chance(mean, sqrt(mean)))


def allowance_of(settings: RunSettings) -> Allowance | None:
    """Of a run that is of full length, or asks as many queries as the rules want in less time:
    others go to their end, for what they show beyond the verdict."""
    judged = settings.scenario is Scenario.SERVER and settings.mode is Mode.PERFORMANCE
    many = settings.min_queries >= required_queries(settings.scenario, settings.percentile)
    return Allowance(settings) if judged and (settings.full_length or many) else None

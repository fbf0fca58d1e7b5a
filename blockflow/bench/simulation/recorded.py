"""Recorded: what the queries of a trace are like, taken together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from blockflow.bench.simulation.sizes import Sizes
from blockflow.bench.simulation.system import SystemModel
from blockflow.bench.simulation.trace import Entry


class Queries(NamedTuple):
    """Of one task."""

    rows: Sizes
    lengths: Sizes | None


def recorded(
    system: SystemModel, entries: Sequence[Entry], rows: Sizes, lengths: Sizes | None
) -> tuple[SystemModel, Mapping[str, Queries]]:
    """``system`` with the traffic of a trace, without the tasks that have none in it, and what the
    queries of each are like.

    Args:
        rows, lengths: of queries that do not say it, as they are drawn for them. So are tasks, by
            their traffic.
    """
    total = sum(t.traffic for t in system.tasks)
    traffic = {t.name: 0.0 for t in system.tasks}
    tall = {t.name: _Weights() for t in system.tasks}
    long = {t.name: _Weights() for t in system.tasks}
    for (named, height, length), count in Counter(e[1:] for e in entries).items():
        for task in system.tasks:
            part = task.traffic / total if named is None else float(named == task.name)
            if part > 0.0:
                traffic[task.name] += count * part
                tall[task.name].add(height, rows, count * part)
                long[task.name].add(length, lengths, count * part)
    tasks = tuple(replace(t, traffic=traffic[t.name]) for t in system.tasks if traffic[t.name])
    queries = {
        t.name: Queries(
            Sizes.of(list(tall[t.name].items())),
            Sizes.of(list(long[t.name].items())) if long[t.name] else None,
        )
        for t in tasks
    }
    return replace(system, tasks=tasks), queries


class _Weights(dict[int, float]):
    def add(self, said: int | None, drawn: Sizes | None, weight: float) -> None:
        if said is not None:
            self[said] = self.get(said, 0.0) + weight
        elif drawn is not None:
            for value, share in zip(drawn.values, drawn.shares, strict=True):
                self[value] = self.get(value, 0.0) + weight * share

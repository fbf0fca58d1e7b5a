"""What an input costs that is for several tasks: of the cores' time, who had how much.

Beside the bound it says where the rest went: to processes that compute nothing, to smaller batches,
to what a block costs besides its forward, or to nobody.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.bench.batching.plan import PER_TASK
from blockflow.bench.sampler import cpu_seconds
from blockflow.bench.statistics import percentile

WORKER, DISPATCHER, CLIENT = "the worker", "the Dispatcher", "the client"


@dataclass(frozen=True, slots=True)
class Look:
    """What has been spent until now.

    Attributes:
        at_s: when.
        cpu_s: CPU time by process.
        trunk, head: of the trunk's first block and of all heads: rows, batches, and milliseconds of
            their forwards and of what they cost besides, as the KPIs have them.
    """

    at_s: float
    cpu_s: Mapping[str, float]
    trunk: Sequence[float]
    head: Sequence[float]


def look(status: Mapping[str, Any], worker: str, trunk: str, heads: Iterable[str]) -> Look:
    """Now.

    Args:
        status: of the system.
        worker: that hosts all these blocks.
        trunk, heads: names of the trunk's first block, and of the heads.
    """
    mine = next(w for w in status["workers"] if w["worker"] == worker)
    pids = {
        WORKER: mine["pid"],
        DISPATCHER: status["dispatcher"]["pid"],
        CLIENT: os.getpid(),
    }
    kpis = {stage["block"]: stage["kpi"] for stage in mine["stages"]}

    def of(names: Iterable[str]) -> list[float]:
        those = [kpis[name] for name in names]
        return [
            sum(kpi["rows"] for kpi in those),
            sum(kpi["batches"] for kpi in those),
            sum(kpi["compute"]["sum_ms"] for kpi in those),
            sum(kpi["overhead"]["sum_ms"] for kpi in those),
        ]

    return Look(time.monotonic(), cpu_seconds(pids), of([trunk]), of(heads))


@dataclass(frozen=True, slots=True)
class Spent:
    """Of a visit.

    Attributes:
        cores: that were there.
        inputs_per_s: that had all their answers.
        before, after: the visit.
    """

    cores: int
    inputs_per_s: float
    before: Look
    after: Look

    def input_ms(self) -> dict[str, float]:
        """Of the cores' time per input: each process's share."""
        inputs = self.inputs_per_s * (self.after.at_s - self.before.at_s)
        return {
            name: (self.after.cpu_s[name] - cpu) * 1e3 / inputs
            for name, cpu in self.before.cpu_s.items()
        }


def line(own: str, visits: Sequence[Spent | None], bound_ms: float, bound_head_ms: float) -> str:
    """In words, over all visits.

    Args:
        own: from which submodule on each task has blocks of its own.
        visits: what each of them cost.
        bound_ms: of the cores' time that an input takes in the bound.
        bound_head_ms: one head's forward there.
    """
    spent = [one for one in visits if one is not None]
    shares = [one.input_ms() for one in spent]
    means = {name: percentile([share[name] for share in shares], 50) for name in shares[0]}
    whole = percentile([one.cores * 1e3 / one.inputs_per_s for one in spent], 50)
    nobody = whole - sum(means.values())
    trunk, head = (
        _sums([(getattr(s.before, of), getattr(s.after, of)) for s in spent])
        for of in ("trunk", "head")
    )
    parts = ", ".join(f"{name} {ms:.1f}" for name, ms in means.items())
    text = (
        f"{own}: an input takes {whole:.1f} ms of the cores, {bound_ms:.1f} in the bound: {parts}, "
        f"nobody and all others {nobody:.1f}"
    )
    if not trunk[1] or not head[1]:  # counts come with heartbeats: a short visit may see none
        return text
    return (
        f"{text}; a forward of the trunk has {trunk[0] / trunk[1]:.2f} rows, {PER_TASK} in the "
        f"bound; one of a head takes {head[2] / head[1]:.2f} ms, {bound_head_ms:.2f} in the bound, "
        f"and {head[3] / head[0]:.2f} besides"
    )


def _sums(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[float]:
    return [sum(after[i] - before[i] for before, after in pairs) for i in range(len(pairs[0][0]))]

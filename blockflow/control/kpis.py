"""KpiBook: the latest figures of every process and a short history of them."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from blockflow.core import limits
from blockflow.wire.control import Stats

HISTORY = 1024
"""Samples kept over all processes: about half a minute of eight processes at 4 Hz."""
HISTORY_FIGURES = 16_384
"""Stages and tasks in them, at most: each is a kilobyte or three."""

_MAX_DEPTH = 6
_PLAIN = frozenset({type(None), bool, int, str})
"""Most of what the decoder makes, which makes no subclasses of them."""

SUMS = (
    "queue",
    "queue_rows",
    "requests",
    "rows",
    "batches",
    "failures",
    "expired",
    "lam",
    "mu",
    "rows_per_s",
    "bytes_out",
    "copies_out",
    "bytes_copied_in",
    "copies_in",
    "elements_in",
    "elements_padded",
    "failed_rows",
)
TIMES = ("wait", "overhead", "compute")
NOW = frozenset({"queue", "queue_rows", "lam", "mu", "rho", "rows_per_s", "per_s"})
"""Of a stage and a task: what is of the moment of the sample, or of the seconds before it."""
PROCESS_NOW = frozenset(
    {
        "cpu_percent",
        "cpu_mhz",
        "gpu_util_percent",
        "gpu_clock_mhz",
        "gpu_temperature_c",
        "gpu_memory_clock_mhz",
        "gpu_power_w",
    }
)
"""Of a process: what is of the seconds before the sample. Its memory, threads and descriptors stay,
as they are of ``kpi_age_s`` ago: what an idle process has hardly changes."""
PROCESS_SUMS = (
    "cpu_percent",
    "rss",
    "pss",
    "uss",
    "threads",
    "fds",
    "arena_bytes",
    "arena_used",
    "arena_committed",
    "slots",
    "slots_used",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One process's figures; ``time_ns`` is the monotonic clock, ``wall_s`` the wall clock.

    Where there are many stages or tasks, it has some of them (:mod:`blockflow.core.roster`).
    """

    incarnation: int
    name: str
    time_ns: int
    wall_s: float
    stages: list[dict[str, Any]]
    process: dict[str, Any]
    extra: dict[str, Any]

    @property
    def tasks(self) -> dict[str, Any]:
        """Of a Dispatcher: the tasks whose figures are in it."""
        tasks = self.extra.get("tasks")
        return tasks if isinstance(tasks, dict) else {}

    @property
    def figures(self) -> int:
        """How much there is in it, roughly."""
        return len(self.stages) + len(self.tasks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "time": self.wall_s,
            "time_ns": self.time_ns,
            "worker": self.name,
            "incarnation": self.incarnation,
            "stages": self.stages,
            "process": self.process,
            "extra": self.extra,
        }


class KpiBook:
    """Samples by incarnation. What a process sent is made plain JSON here: no NaN, no odd types."""

    def __init__(self) -> None:
        self._latest: dict[int, Sample] = {}
        self._stages: dict[int, dict[int, dict[str, Any]]] = {}
        self._tasks: dict[int, dict[str, Any]] = {}
        self._history: deque[Sample] = deque()
        self._figures = 0  # in the history

    def add(
        self,
        incarnation: int,
        name: str,
        stats: Stats,
        wall_s: float,
        published: Collection[str] = (),
    ) -> None:
        """Take a sample.

        Args:
            published: the tasks in force; a Dispatcher's figures of others are not kept.
        """
        sample = Sample(
            incarnation,
            name,
            stats.time_ns,
            wall_s,
            [plain(s) for s in stats.stages if isinstance(s, dict)],
            plain(stats.process),
            plain(stats.extra),
        )
        self._latest[incarnation] = sample
        self._add_stages(sample)
        if sample.tasks:
            known = self._tasks.setdefault(incarnation, {})
            known |= sample.tasks
            if len(known) > len(published):
                self._tasks[incarnation] = {n: k for n, k in known.items() if n in published}
        self._history.append(sample)
        self._figures += sample.figures
        while len(self._history) > HISTORY or self._figures > HISTORY_FIGURES:
            self._figures -= self._history.popleft().figures

    def forget(self, incarnation: int) -> None:
        """The process is gone; its history stays until it is pushed out."""
        self._latest.pop(incarnation, None)
        self._stages.pop(incarnation, None)
        self._tasks.pop(incarnation, None)

    def tasks(self, incarnation: int) -> Mapping[str, Any]:
        """The latest figures of each task that this Dispatcher has told of; not to be kept."""
        return self._tasks.get(incarnation, {})

    def latest(self, incarnation: int) -> Sample | None:
        return self._latest.get(incarnation)

    def stage(self, incarnation: int, stage: int) -> dict[str, Any] | None:
        """The latest StageKpi of one stage."""
        return self._stages.get(incarnation, {}).get(stage)

    def lines(self) -> list[str]:
        """The history as JSON lines, oldest first."""
        return [json.dumps(s.to_dict(), separators=(",", ":")) for s in self._history]

    def _add_stages(self, sample: Sample) -> None:
        told = {n: s for s in sample.stages if isinstance(n := s.get("stage"), int)}
        known = self._stages.setdefault(sample.incarnation, {})
        known |= told
        if len(known) > limits.MAX_BLOCKS:  # more than a worker can have: it makes numbers up
            self._stages[sample.incarnation] = told


def without_now(kpi: Mapping[str, Any], now: Collection[str] = NOW) -> dict[str, Any]:
    """Figures of a sample that is too old to tell of the present, without those of ``now``: counts
    and times stay."""
    return {name: value for name, value in kpi.items() if name not in now}


def aggregate(kpis: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of one block over its replicas.

    Counts and rates are sums, rho is lam/mu of the sums; where no replica tells of the present,
    none. Of the time summaries, counts and sums add up and the mean follows from them; p50 and p90
    are means weighted by count (exact for a single replica), p99 and the maximum are the worst
    replica's.
    """
    found = list(kpis)
    if not found:
        return {}
    out: dict[str, Any] = {name: sum(_number(k.get(name)) for k in found) for name in SUMS}
    out["rho"] = out["lam"] / out["mu"] if out["mu"] else 0.0
    if all(NOW.isdisjoint(k) for k in found):
        out = without_now(out)
    rows = out["rows"] + out["failed_rows"]
    out["mean_batch_rows"] = rows / out["batches"] if out["batches"] else 0.0
    for part in TIMES:
        out[part] = _merge([k[part] for k in found if isinstance(k.get(part), dict)])
    on_device = [k["device"] for k in found if isinstance(k.get("device"), dict) and k["device"]]
    out["device"] = _merge(on_device) if on_device else {}
    return out


def totals(processes: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """System totals over processes: cpu in percent of one core, memory in bytes. A rate that none
    of them has is left out: nobody tells of the present."""
    found = list(processes)
    return {
        n: sum(_number(p.get(n)) for p in found)
        for n in PROCESS_SUMS
        if n not in PROCESS_NOW or any(n in p for p in found)
    }


def _merge(parts: list[dict[str, Any]]) -> dict[str, float]:
    count = sum(_number(p.get("count")) for p in parts)
    total = sum(_number(p.get("sum_ms")) for p in parts)

    def weighted(name: str) -> float:
        return sum(_number(p.get(name)) * _number(p.get("count")) for p in parts) / count

    def worst(name: str) -> float:
        return max(_number(p.get(name)) for p in parts)

    if not count:
        return dict.fromkeys(
            ("count", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms", "sum_ms"), 0.0
        )
    return {
        "count": count,
        "mean_ms": total / count,
        "p50_ms": weighted("p50_ms"),
        "p90_ms": weighted("p90_ms"),
        "p99_ms": worst("p99_ms"),
        "max_ms": worst("max_ms"),
        "sum_ms": total,
    }


def _number(value: Any) -> float:
    """``value`` if it is a finite number, else 0: a process's odd figure is not our crash."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return 0


def plain(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """``value`` as JSON can carry it: finite numbers, text, lists and string-keyed objects."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth and isinstance(value, dict):
        return {str(k): plain(v, depth - 1) for k, v in value.items()}
    if depth and isinstance(value, list | tuple):
        return [plain(v, depth - 1) for v in value]
    return None

"""KpiBook: the latest figures of every process and a short history of them."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from blockflow.wire.control import Stats

HISTORY = 1024
"""Samples kept over all processes: about half a minute of eight processes at 4 Hz."""

_MAX_DEPTH = 6
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
)
TIMES = ("wait", "overhead", "compute")
PROCESS_SUMS = (
    "cpu_percent",
    "rss",
    "pss",
    "uss",
    "threads",
    "fds",
    "arena_bytes",
    "arena_used",
    "slots",
    "slots_used",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One process's figures; ``time_ns`` is the monotonic clock, ``wall_s`` the wall clock."""

    incarnation: int
    name: str
    time_ns: int
    wall_s: float
    stages: list[dict[str, Any]]
    process: dict[str, Any]
    extra: dict[str, Any]

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
        self._history: deque[Sample] = deque(maxlen=HISTORY)

    def add(self, incarnation: int, name: str, stats: Stats, wall_s: float) -> None:
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
        self._history.append(sample)

    def forget(self, incarnation: int) -> None:
        """The process is gone; its history stays until it is pushed out."""
        self._latest.pop(incarnation, None)

    def latest(self, incarnation: int) -> Sample | None:
        return self._latest.get(incarnation)

    def stage(self, incarnation: int, stage: int) -> dict[str, Any] | None:
        """The latest StageKpi of one stage."""
        sample = self._latest.get(incarnation)
        for kpi in sample.stages if sample is not None else ():
            if kpi.get("stage") == stage:
                return kpi
        return None

    def lines(self) -> list[str]:
        """The history as JSON lines, oldest first."""
        return [json.dumps(s.to_dict(), separators=(",", ":")) for s in self._history]


def aggregate(kpis: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of one block over its replicas.

    Counts and rates are sums, rho is lam/mu of the sums. Of the time summaries, counts and sums add
    up and the mean follows from them; p50 and p90 are means weighted by count (exact for a single
    replica), p99 and the maximum are the worst replica's.
    """
    found = list(kpis)
    if not found:
        return {}
    out: dict[str, Any] = {name: sum(_number(k.get(name)) for k in found) for name in SUMS}
    out["rho"] = out["lam"] / out["mu"] if out["mu"] else 0.0
    out["mean_batch_rows"] = out["rows"] / out["batches"] if out["batches"] else 0.0
    for part in TIMES:
        out[part] = _merge([k[part] for k in found if isinstance(k.get(part), dict)])
    on_device = [k["device"] for k in found if isinstance(k.get("device"), dict) and k["device"]]
    out["device"] = _merge(on_device) if on_device else {}
    return out


def totals(samples: Iterable[Sample]) -> dict[str, float]:
    """System totals over processes: cpu in percent of one core, memory in bytes."""
    found = list(samples)
    return {n: sum(_number(s.process.get(n)) for s in found) for n in PROCESS_SUMS}


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
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth and isinstance(value, dict):
        return {str(k): plain(v, depth - 1) for k, v in value.items()}
    if depth and isinstance(value, list | tuple):
        return [plain(v, depth - 1) for v in value]
    return None

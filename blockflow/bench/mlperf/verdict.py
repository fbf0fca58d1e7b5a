"""What a run says: LoadGen's own log, read and joined with what it cannot see. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blockflow.bench.mlperf.settings import Mode, RunSettings, Scenario
from blockflow.bench.mlperf.tally import Counts
from blockflow.bench.statistics import percentile

_MARK = ":::MLLOG "
_SUFFIXES = ("_percentile_per_query_latency_ns", "_percentile_latency_ns")
_LAST = {Mode.PERFORMANCE: "num_errors", Mode.ACCURACY: "power_end"}
"""LoadGen's last entry: a log without it broke off."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The scenario's figure."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """VALID or INVALID, and why.

    Attributes:
        valid: LoadGen says VALID, nothing failed, and every task keeps its target.
        reasons: what stands against it; empty if valid.
        metric: None where the run broke off.
        too_short: the only thing against it is that LoadGen had prepared too few queries.
        latency_ms: percentile ("50.00") -> LoadGen's own figure.
    """

    valid: bool
    reasons: tuple[str, ...]
    metric: Metric | None
    too_short: bool
    latency_ms: Mapping[str, float]

    @property
    def word(self) -> str:
        return "VALID" if self.valid else "INVALID"

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.word,
            "reasons": list(self.reasons),
            "metric": None if self.metric is None else asdict(self.metric),
            "latency_ms": dict(self.latency_ms),
        }


def read_log(text: str) -> dict[str, Any]:
    """LoadGen's detail log as key -> last value; lines that broke off are passed over."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if not line.startswith(_MARK):
            continue
        try:
            entry = json.loads(line.removeprefix(_MARK))
            found[str(entry["key"])] = entry["value"]
        except (ValueError, KeyError, TypeError):
            continue
    return found


def is_whole(log: Mapping[str, Any], mode: Mode) -> bool:
    """LoadGen has written its log to the end."""
    return _LAST[mode] in log


def judge(
    settings: RunSettings,
    log: Mapping[str, Any],
    counts: Counts,
    latencies: Mapping[str, Sequence[float]],
    broken: str = "",
) -> RunVerdict:
    """The verdict of a run.

    Args:
        settings: of the run.
        log: of :func:`read_log`.
        counts: of its samples.
        latencies: ms per task.
        broken: why the run broke off, if it did.
    """
    reasons = [broken] if broken else []
    if counts.failures:
        codes = ", ".join(f"{n} {code}" for code, n in sorted(counts.failed.items()))
        reasons.append(f"{counts.failures} of {counts.issued} samples failed: {codes}")
    if counts.lost:
        reasons.append(f"{counts.lost} of {counts.issued} samples have no answer")
    if not counts.issued:
        reasons.append("LoadGen asked for nothing")
    if not broken and not is_whole(log, settings.mode):
        reasons.append("LoadGen's log breaks off before its end")
    percentiles = _percentiles(log)
    if settings.mode is Mode.ACCURACY:
        return RunVerdict(not reasons, tuple(reasons), None, False, percentiles)
    metric = _metric(settings, log)
    reasons += [*_late(settings, latencies), *_late_queries(settings, metric)]
    own = len(reasons)
    reasons += _loadgen(log)
    short = own == 0 and log.get("result_min_duration_met") is False
    others = ("result_perf_constraints_met", "early_stopping_met")
    too_short = short and all(log.get(key) is not False for key in others)
    return RunVerdict(not reasons, tuple(reasons), metric, too_short, percentiles)


def _loadgen(log: Mapping[str, Any]) -> list[str]:
    """What LoadGen holds against the run."""
    if log.get("result_validity", "VALID") == "VALID":
        return []
    told = {
        "result_perf_constraints_met": "the latency bound is not kept",
        "result_min_duration_met": "the run was too short",
        "result_min_queries_met": "there were too few queries",
        "early_stopping_met": "too many queries were late for so few of them (early stopping)",
    }
    found = [f"LoadGen: {why}" for key, why in told.items() if log.get(key) is False]
    return found or ["LoadGen: INVALID, see its log"]


def _late(settings: RunSettings, latencies: Mapping[str, Sequence[float]]) -> list[str]:
    """Tasks that miss their own target; LoadGen knows one for all of them, and not always that."""
    found = []
    for task, target in settings.targets.items():
        samples = latencies.get(task, ())
        if target.latency_ms is None or not samples:
            continue
        seen = percentile(samples, target.percentile * 100)
        if seen > target.latency_ms:
            found.append(
                f"{task}: p{target.percentile * 100:g} is {seen:.3g} ms, "
                f"the bound is {target.latency_ms:g} ms"
            )
    return found


def _late_queries(settings: RunSettings, metric: Metric | None) -> list[str]:
    """Multistream's bound is that of a query, which may part into several requests; LoadGen
    measures queries there, but knows no bound."""
    bound = settings.bound_ms
    if settings.scenario is not Scenario.MULTISTREAM or bound is None or metric is None:
        return []
    if metric.value <= bound:
        return []
    return [f"{metric.name} of a query is {metric.value:.3g} ms, the bound is {bound:g} ms"]


def _percentiles(log: Mapping[str, Any]) -> dict[str, float]:
    # Multistream's are a query's.
    suffix = next(
        (s for s in _SUFFIXES if any(k.startswith("result_") and k.endswith(s) for k in log)),
        _SUFFIXES[-1],
    )
    return {
        key.removeprefix("result_").removesuffix(suffix): float(value) / 1e6
        for key, value in log.items()
        if key.startswith("result_") and key.endswith(suffix) and key[7:8].isdigit()
    }


def _metric(settings: RunSettings, log: Mapping[str, Any]) -> Metric | None:
    share = settings.percentile * 100
    tail = f"result_{share:.2f}_percentile"
    key, name, unit, scale = {
        Scenario.OFFLINE: ("result_samples_per_second", "throughput", "samples/s", 1.0),
        Scenario.SERVER: ("result_completed_samples_per_sec", "completed", "queries/s", 1.0),
        Scenario.SINGLE_STREAM: (f"{tail}_latency_ns", f"p{share:g} latency", "ms", 1e-6),
        Scenario.MULTISTREAM: (f"{tail}_per_query_latency_ns", f"p{share:g} latency", "ms", 1e-6),
    }[settings.scenario]
    value = log.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return Metric(name, float(value) * scale, unit)

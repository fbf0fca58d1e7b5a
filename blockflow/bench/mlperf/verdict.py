"""What a run says: LoadGen's own log, joined with what it cannot see. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from blockflow.bench.mlperf.detail_log import DetailLog
from blockflow.bench.mlperf.settings import (
    Mode,
    RunSettings,
    Scenario,
    Target,
    needed_queries,
)
from blockflow.bench.mlperf.tally import Counts
from blockflow.bench.statistics import percentile

WHOLE_QUERY = "(whole query)"
"""In the place of a task: multistream's bound is that of a query, whatever it asks for."""


class Kept(StrEnum):
    """How a task stands to its target."""

    KEPT = "kept"
    MISSED = "missed"
    FREE = "no bound"
    FEW = "too few"
    """Kept, or no bound, by fewer queries than can tell."""
    UNASKED = "never asked"
    UNANSWERED = "no answer"


@dataclass(frozen=True, slots=True)
class TaskVerdict:
    """One task's own target, and what was seen of it.

    Attributes:
        task: its name, or :data:`WHOLE_QUERY`.
        percentile: 0..1.
        bound_ms: at this percentile; None: there is none.
        seen_ms: at this percentile, from LoadGen's call to the response; None: nothing was seen.
        samples: behind ``seen_ms``.
        queries: of LoadGen that asked for it.
        needed: queries before its verdict says something.
        verdict: how it stands.
    """

    task: str
    percentile: float
    bound_ms: float | None
    seen_ms: float | None
    samples: int
    queries: int
    needed: int
    verdict: Kept

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": str(self.verdict)}


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
        valid: LoadGen says VALID, nothing failed, and every task was asked and keeps its target.
        reasons: what stands against it; empty if valid.
        metric: None where the run broke off.
        too_short: the only thing against it is that LoadGen had prepared too few queries.
        latency_ms: percentile ("50.00") -> LoadGen's own figure.
        judged_ms: latency of all tasks at LoadGen's one percentile; None where nothing was seen.
        tasks: each one's own verdict, in performance mode.
    """

    valid: bool
    reasons: tuple[str, ...]
    metric: Metric | None
    too_short: bool
    latency_ms: Mapping[str, float]
    judged_ms: float | None = None
    tasks: tuple[TaskVerdict, ...] = ()

    @property
    def word(self) -> str:
        return "VALID" if self.valid else "INVALID"

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.word,
            "reasons": list(self.reasons),
            "metric": None if self.metric is None else asdict(self.metric),
            "latency_ms": dict(self.latency_ms),
            "judged_ms": self.judged_ms,
            "tasks": [t.to_dict() for t in self.tasks],
        }


def judge(
    settings: RunSettings,
    log: DetailLog,
    counts: Counts,
    latencies: Mapping[str, Sequence[float]],
    broken: str = "",
    queries_ms: Sequence[float] = (),
) -> RunVerdict:
    """The verdict of a run.

    Args:
        settings: of the run.
        log: LoadGen's.
        counts: of its samples.
        latencies: ms per task.
        broken: why the run broke off, if it did.
        queries_ms: ms of each query, where a query has several samples.
    """
    reasons = [broken] if broken else []
    if counts.failures:
        codes = ", ".join(f"{n} {code}" for code, n in sorted(counts.failed.items()))
        reasons.append(f"{counts.failures} of {counts.issued} samples failed: {codes}")
    if counts.lost:
        reasons.append(f"{counts.lost} of {counts.issued} samples have no answer")
    if not counts.issued:
        reasons.append("LoadGen asked for nothing")
    if not broken and not log.is_whole(settings.mode):
        reasons.append("LoadGen's log breaks off before its end")
    if settings.mode is Mode.ACCURACY:
        reasons += [f"LoadGen: error: {text}" for text in log.complaints]
        return RunVerdict(not reasons, tuple(reasons), None, False, log.latency_ms)
    judged_ms = _judged_ms(settings, log, latencies, queries_ms)
    metric = _metric(settings, log, judged_ms) if log.is_whole(settings.mode) else None
    tasks = _tasks(settings, counts, latencies)
    if settings.scenario is Scenario.MULTISTREAM:
        tasks = (*tasks, _whole_query(settings, counts, judged_ms))
    reasons += [_missed(t) for t in tasks if t.verdict is Kept.MISSED]
    if metric is None and not broken and log.is_whole(settings.mode):
        reasons.append("LoadGen's log has no figure of this scenario")
    own = len(reasons)
    if not broken and counts.issued:
        reasons += _too_rare(settings, tasks)
    reasons += _loadgen(log)
    others = ("result_perf_constraints_met", "early_stopping_met")
    too_short = (
        own == 0
        and log.values.get("result_min_duration_met") is False
        and all(log.values.get(key) is not False for key in others)
        and log.only_ran_out
    )
    return RunVerdict(
        not reasons, tuple(reasons), metric, too_short, log.latency_ms, judged_ms, tasks
    )


def _loadgen(log: DetailLog) -> list[str]:
    """What LoadGen holds against the run. A log that says nothing is no VALID one."""
    found = [f"LoadGen: error: {text}" for text in log.complaints]
    validity = log.values.get("result_validity")
    if validity == "VALID":
        return found
    if validity is None:
        return [*found, "LoadGen's log has no verdict"]
    told = {
        "result_perf_constraints_met": "the latency bound is not kept",
        "result_min_duration_met": "the run was too short",
        "result_min_queries_met": "there were too few queries",
        "early_stopping_met": "too many queries were late for so few of them (early stopping)",
    }
    said = [f"LoadGen: {why}" for key, why in told.items() if log.values.get(key) is False]
    return [*(said or ["LoadGen: INVALID, see its log"]), *found]


# --- each task -----------------------------------------------------------------------------------


def _tasks(
    settings: RunSettings, counts: Counts, latencies: Mapping[str, Sequence[float]]
) -> tuple[TaskVerdict, ...]:
    """Every task and its own target; LoadGen knows one for all of them, and not always that."""
    return tuple(
        _stand(
            task,
            target,
            percentile(samples, target.percentile * 100) if samples else None,
            len(samples),
            counts.queries.get(task, 0),
            needed_queries(settings, task),
        )
        for task, target in settings.targets.items()
        for samples in (latencies.get(task, ()),)
    )


def _whole_query(settings: RunSettings, counts: Counts, seen_ms: float | None) -> TaskVerdict:
    """Multistream's query may part into several requests; LoadGen measures it, but knows no
    bound."""
    queries = counts.issued // settings.samples_per_query
    needed = min(needed_queries(settings, task) for task in settings.targets)
    target = Target(settings.percentile, settings.bound_ms)
    return _stand(WHOLE_QUERY, target, seen_ms, counts.issued, queries, needed)


def _stand(
    task: str, target: Target, seen_ms: float | None, samples: int, queries: int, needed: int
) -> TaskVerdict:
    bound_ms = target.latency_ms
    if not queries:
        stands = Kept.UNASKED
    elif seen_ms is None:
        stands = Kept.UNANSWERED
    elif bound_ms is not None and seen_ms > bound_ms:
        stands = Kept.MISSED
    elif queries < needed:
        stands = Kept.FEW
    else:
        stands = Kept.FREE if bound_ms is None else Kept.KEPT
    return TaskVerdict(task, target.percentile, bound_ms, seen_ms, samples, queries, needed, stands)


def _missed(task: TaskVerdict) -> str:
    name = "a whole query" if task.task == WHOLE_QUERY else task.task
    return (
        f"{name}: p{task.percentile * 100:g} is {task.seen_ms:.3g} ms, "
        f"the bound is {task.bound_ms:g} ms"
    )


def _too_rare(settings: RunSettings, tasks: Sequence[TaskVerdict]) -> list[str]:
    """Tasks that the run says nothing about; in a short run few queries are no fault."""
    found = [f"{t.task}: never asked" for t in tasks if t.verdict is Kept.UNASKED]
    found += [f"{t.task}: no answer was timed" for t in tasks if t.verdict is Kept.UNANSWERED]
    if settings.full_length:
        found += [
            f"{t.task}: {t.queries} queries asked for it, p{t.percentile * 100:g} needs {t.needed}"
            for t in tasks
            if t.verdict is Kept.FEW
        ]
    return found


# --- the figure ----------------------------------------------------------------------------------


def _judged_ms(
    settings: RunSettings,
    log: DetailLog,
    latencies: Mapping[str, Sequence[float]],
    queries_ms: Sequence[float],
) -> float | None:
    """LoadGen's latency at the percentile that it was given, and our own where it logs none."""
    share = settings.percentile * 100
    found = log.percentile_ms(share)
    if found is not None:
        return found
    one_by_one = settings.per_query == 1
    seen = [ms for of_task in latencies.values() for ms in of_task] if one_by_one else queries_ms
    return percentile(seen, share) if seen else None


def _metric(settings: RunSettings, log: DetailLog, judged_ms: float | None) -> Metric | None:
    match settings.scenario:
        case Scenario.OFFLINE:
            value, name, unit = log.number("result_samples_per_second"), "throughput", "samples/s"
        case Scenario.SERVER:
            key = "result_completed_samples_per_sec"
            value, name, unit = log.number(key), "completed", "queries/s"
        case Scenario.SINGLE_STREAM | Scenario.MULTISTREAM:
            value, name, unit = judged_ms, f"p{settings.percentile * 100:g} latency", "ms"
    return None if value is None else Metric(name, value, unit)

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
from blockflow.bench.numerals import beside, given
from blockflow.bench.statistics import percentile

_SAME = 1e-9
"""Percentiles that differ by less are the same."""

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
    UNTIMED = "not timed"


@dataclass(frozen=True, slots=True)
class TaskVerdict:
    """One task's own target, and what was seen of it.

    Attributes:
        task: its name, or :data:`WHOLE_QUERY`.
        percentile: 0..1.
        bound_ms: at this percentile; None: there is none.
        seen_ms: at this percentile, from LoadGen's call to the response or the failure, and in the
            server scenario what that lacks; None: nothing was seen.
        samples: latencies behind ``seen_ms``: of a whole query there is one.
        queries: of LoadGen that asked for it.
        needed: queries before its verdict says something.
        added_ms: of ``seen_ms``, what the time from LoadGen's call lacks.
    """

    task: str
    percentile: float
    bound_ms: float | None
    seen_ms: float | None
    samples: int
    queries: int
    needed: int
    verdict: Kept
    added_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Metric:
    """The scenario's figure: a rate counts answered samples alone, a latency is of all of them."""

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
        latency_ms: percentile ("50.00") -> LoadGen's own figure, in which a failure, at the moment
            when it came, is an answer like another.
        judged_ms: latency of all tasks at LoadGen's one percentile; None where nothing was seen.
        tasks: each one's own verdict, in performance mode.
        only_early: the only thing against it is LoadGen's early stopping: of more queries with as
            many late ones it would be VALID.
        estimate_ms: below which LoadGen's one percentile lies with 99% confidence; None where
            LoadGen does not say.
    """

    valid: bool
    reasons: tuple[str, ...]
    metric: Metric | None
    too_short: bool
    latency_ms: Mapping[str, float]
    judged_ms: float | None = None
    tasks: tuple[TaskVerdict, ...] = ()
    only_early: bool = False
    estimate_ms: float | None = None

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
            "estimate_ms": self.estimate_ms,
            "tasks": [asdict(t) for t in self.tasks],
        }


_DURATION, _QUERIES, _EARLY = (
    "result_min_duration_met",
    "result_min_queries_met",
    "early_stopping_met",
)
_MORE = {_DURATION, _QUERIES}
"""What a run with more queries prepared would meet."""

_TOLD = {
    "result_perf_constraints_met": "the latency bound is not kept",
    _DURATION: "the run was too short",
    _QUERIES: "there were too few queries",
    _EARLY: "too many queries were late for so few of them (early stopping)",
}
_TOO_FEW = "there were too few queries to estimate the percentile (early stopping)"
"""Where nothing was late, or LoadGen knows no bound."""

_LATE = "result_overlatency_query_count"


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
    metric = _metric(settings, log, counts, judged_ms) if log.is_whole(settings.mode) else None
    tasks = _tasks(settings, log, counts, latencies)
    if settings.scenario is Scenario.MULTISTREAM:
        tasks = (*tasks, _whole_query(settings, counts, judged_ms))
    reasons += [_missed(t) for t in tasks if t.verdict is Kept.MISSED]
    if metric is None and not broken and log.is_whole(settings.mode):
        reasons.append("LoadGen's log has no figure of this scenario")
    own = len(reasons)
    if not broken and counts.issued:
        reasons += _too_rare(settings, tasks)
    only_early = (
        not reasons
        and log.values.get("result_validity") == "INVALID"
        and log.missed == {_EARLY}
        and not log.complaints
    )
    reasons += _loadgen(log, settings.scenario)
    too_short = own == 0 and _DURATION in log.missed <= _MORE and log.only_ran_out
    return RunVerdict(
        not reasons,
        tuple(reasons),
        metric,
        too_short,
        log.latency_ms,
        judged_ms,
        tasks,
        only_early,
        log.estimate_ms,
    )


def _loadgen(log: DetailLog, scenario: Scenario) -> list[str]:
    """What LoadGen holds against the run. A log that says nothing is no VALID one."""
    found = [f"LoadGen: error: {text}" for text in log.complaints]
    validity = log.values.get("result_validity")
    if validity is None:
        return [*found, "LoadGen's log has no verdict"]
    known = [key for key in _TOLD if key in log.missed]
    other = sorted(log.missed - set(_TOLD))
    # Also of a VALID run: LoadGen's verdict passes over too few queries, where no rule enforces it.
    some_late = scenario is Scenario.SERVER and log.number(_LATE) != 0
    told = _TOLD if some_late else {**_TOLD, _EARLY: _TOO_FEW}
    said = [f"LoadGen: {why}" for why in (*map(told.get, known), *(f"no {k}" for k in other))]
    if validity != "VALID" and not said:
        said = ["LoadGen: INVALID, see its log"]
    return [*said, *found]


# --- each task -----------------------------------------------------------------------------------


def _tasks(
    settings: RunSettings,
    log: DetailLog,
    counts: Counts,
    latencies: Mapping[str, Sequence[float]],
) -> tuple[TaskVerdict, ...]:
    """Every task and its own target; LoadGen knows one for all of them, and not always that."""
    every = sorted(ms for of_task in latencies.values() for ms in of_task)
    found = []
    for task, target in settings.targets.items():
        samples, share = latencies.get(task, ()), target.percentile * 100
        added = _lacking_ms(settings, log, every, share)
        seen = percentile(samples, share) + added if samples else None
        queries, needed = counts.queries.get(task, 0), needed_queries(settings, task)
        found.append(_stand(task, target, seen, len(samples), queries, needed, added))
    return tuple(found)


def _lacking_ms(
    settings: RunSettings, log: DetailLog, every: Sequence[float], share: float
) -> float:
    """What LoadGen's latency at a percentile (0..100) has more than ours, over all tasks.

    In the server scenario LoadGen's clock begins when a query was to be sent, and ours when it has
    called us: a machine that is busy is late with that, for one task as for another. LoadGen's
    log does not tell the tasks apart, so what it saw of them together goes on top of each. Where it
    does not log the percentile it is the larger one of those that it logs on either side.
    """
    if settings.scenario is not Scenario.SERVER or not every:
        return 0.0
    logged = {float(p): ms for p, ms in log.latency_ms.items()}
    near = {
        *sorted(p for p in logged if p <= share + _SAME)[-1:],
        *sorted(p for p in logged if p >= share - _SAME)[:1],
    }
    return max((0.0, *(logged[p] - percentile(every, p) for p in near)))


def _whole_query(settings: RunSettings, counts: Counts, seen_ms: float | None) -> TaskVerdict:
    """Multistream's query may part into several requests; LoadGen measures it, but knows no
    bound."""
    queries = counts.issued // settings.samples_per_query
    needed = min(needed_queries(settings, task) for task in settings.targets)
    target = Target(settings.percentile, settings.bound_ms)
    return _stand(WHOLE_QUERY, target, seen_ms, queries, queries, needed)


def _stand(
    task: str,
    target: Target,
    seen_ms: float | None,
    samples: int,
    queries: int,
    needed: int,
    added_ms: float = 0.0,
) -> TaskVerdict:
    bound_ms = target.latency_ms
    if not queries:
        stands = Kept.UNASKED
    elif seen_ms is None:
        stands = Kept.UNTIMED
    elif bound_ms is not None and seen_ms > bound_ms:
        stands = Kept.MISSED
    elif queries < needed:
        stands = Kept.FEW
    else:
        stands = Kept.FREE if bound_ms is None else Kept.KEPT
    return TaskVerdict(
        task, target.percentile, bound_ms, seen_ms, samples, queries, needed, stands, added_ms
    )


def _missed(task: TaskVerdict) -> str:
    name = "a whole query" if task.task == WHOLE_QUERY else task.task
    seen_ms, bound_ms = task.seen_ms or 0.0, task.bound_ms or 0.0  # nothing is missed without them
    return (
        f"{name}: p{task.percentile * 100:g} is {beside(seen_ms, bound_ms)} ms, "
        f"the bound is {given(bound_ms)} ms"
    )


def _too_rare(settings: RunSettings, tasks: Sequence[TaskVerdict]) -> list[str]:
    """Tasks that the run says nothing about; in a short run few queries are no fault."""
    found = [f"{t.task}: never asked" for t in tasks if t.verdict is Kept.UNASKED]
    found += [f"{t.task}: no answer was timed" for t in tasks if t.verdict is Kept.UNTIMED]
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
    return percentile(seen, share) + _lacking_ms(settings, log, seen, share) if seen else None


def _metric(
    settings: RunSettings, log: DetailLog, counts: Counts, judged_ms: float | None
) -> Metric | None:
    # To LoadGen a sample that failed is completed: its rates have all that were issued.
    answered = counts.answered / counts.issued if counts.issued else 0.0
    match settings.scenario:
        case Scenario.OFFLINE:
            key, name, unit = "result_samples_per_second", "throughput", "samples/s"
        case Scenario.SERVER:
            key, name, unit = "result_completed_samples_per_sec", "completed", "queries/s"
        case Scenario.SINGLE_STREAM | Scenario.MULTISTREAM:
            name = f"p{settings.percentile * 100:g} latency"
            return None if judged_ms is None else Metric(name, judged_ms, "ms")
    rate = log.number(key)
    return None if rate is None else Metric(name, rate * answered, unit)

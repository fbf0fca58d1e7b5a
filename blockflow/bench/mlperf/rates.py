"""The server scenario's own loop: run after run, until the highest VALID rate is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from blockflow.bench.mlperf.job import Job
from blockflow.bench.mlperf.run import RunResult, ScenarioResult, broken_off
from blockflow.bench.mlperf.search import STEP, RateSearch
from blockflow.bench.mlperf.settings import RunSettings, Scenario, make_settings
from blockflow.core.errors import BlockFlowError

PROBE_S = 20.0
"""Length of the search's runs where the rate that it finds is confirmed by one of full length."""

Run = Callable[[Job, str, str], RunResult]
"""Does one run: what to do, its folder's name, and a line that tells people what it is."""


def search_rate(job: Job, search: RateSearch, run: Run) -> ScenarioResult:
    """Find the highest VALID rate; of full length, it is confirmed by such a run.

    Where no rate is VALID, the slowest run is the result and says why. A run that broke off ends
    the search, and is the result; one that was given up because the rate was far too high is only
    INVALID. Where one cannot even begin, the result is what was found before, marked as partial.

    Raises:
        BlockFlowError: the first run could not begin.
    """
    runs: list[RunResult] = []
    try:
        result = _search(job, search, run, runs)
    except BlockFlowError as exc:
        if not runs:
            raise
        result = broken_off(_best(search, runs), exc)
    return ScenarioResult(result, runs, precision=search.precision)


def _search(job: Job, search: RateSearch, run: Run, runs: list[RunResult]) -> RunResult:
    """The result; ``runs`` takes those of the search."""
    probe = _probe(job.settings) if job.settings.full_length else job.settings
    while (rate := search.next()) is not None:
        what = f"server: run {len(runs) + 1}, {rate:.4g} queries/s"
        if search.best is not None:
            what += f"; {search.best:.4g} was VALID"
        tried = replace(job, settings=replace(probe, rate=rate))
        runs.append(run(tried, f"server-{len(runs) + 1:02}", what))
        if _broke_off(runs[-1]):
            return runs[-1]
        search.tell(rate, runs[-1].verdict.valid)
    if search.best is not None and job.settings.full_length:
        return _confirm(job, search, search.best, run, runs)
    return _best(search, runs)


def _best(search: RateSearch, runs: Sequence[RunResult]) -> RunResult:
    """The highest VALID run below every INVALID one; the slowest where there is none, or where it
    was to be confirmed and was not."""
    confirming = [r for r in runs if r.settings.full_length]
    if confirming or search.best is None:
        return min(confirming or runs, key=lambda r: r.settings.rate)
    return next(r for r in runs if r.settings.rate == search.best)


def _probe(full: RunSettings) -> RunSettings:
    return make_settings(
        Scenario.SERVER,
        full.mode,
        full.targets,
        short=True,
        duration_s=PROBE_S,
        asked=full.asked,
        seed=full.seed,
        deadline_s=full.deadline_s,
    )


def _confirm(
    job: Job, search: RateSearch, rate: float, run: Run, runs: list[RunResult]
) -> RunResult:
    """Runs of full length from ``rate`` downwards, until one is VALID or the search's floor.

    Ten minutes know better than twenty seconds. The first step is the search's precision; each one
    after it is twice as large, as far as a bracket's step, for every run is a long one.
    """
    step, number = 1 + search.precision, 1
    while True:
        what = f"server: {rate:.4g} queries/s, run {number} of full length"
        full = replace(job, settings=replace(job.settings, rate=rate))
        runs.append(run(full, f"server-full-{number}", what))
        if runs[-1].verdict.valid or _broke_off(runs[-1]) or rate <= search.floor:
            return runs[-1]
        rate, step, number = max(rate / step, search.floor), min(step * step, STEP), number + 1


def _broke_off(result: RunResult) -> bool:
    """Something went wrong; a rate far too high is refused, which is no more than INVALID."""
    error = result.error
    return error is not None and error.code not in ("OVERLOADED", "DEADLINE_EXCEEDED")

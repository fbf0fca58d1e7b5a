"""The server scenario's own loop: run after run, until the highest VALID rate is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from blockflow.bench.mlperf.job import Job
from blockflow.bench.mlperf.run import RunResult, ScenarioResult
from blockflow.bench.mlperf.search import RateSearch
from blockflow.bench.mlperf.settings import RunSettings, Scenario, make_settings
from blockflow.core.errors import BlockFlowError

PROBE_S = 20.0
"""Length of the search's runs where the rate that it finds is confirmed by an official one."""

CONFIRMATIONS = 4
"""Official runs after a search, each a step below the one before, until one is VALID."""

Run = Callable[[Job, str, str], RunResult]
"""Does one run: what to do, its folder's name, and a line that tells people what it is."""


def search_rate(job: Job, search: RateSearch, run: Run) -> ScenarioResult:
    """Find the highest VALID rate; an official one is confirmed by a run of full length.

    Where no rate is VALID, the slowest run is the result and says why. A run that broke off ends
    the search, and is the result.
    """
    probe = _probe(job.settings) if job.settings.official else job.settings
    runs: list[RunResult] = []
    while (rate := search.next()) is not None:
        what = f"server: run {len(runs) + 1}, {rate:.4g} queries/s"
        if search.best is not None:
            what += f"; {search.best:.4g} was VALID"
        tried = replace(job, settings=replace(probe, rate=rate))
        runs.append(run(tried, f"server-{len(runs) + 1:02}", what))
        if runs[-1].error is not None and not _is_overload(runs[-1].error):
            return ScenarioResult(runs[-1], runs)
        search.tell(rate, runs[-1].verdict.valid)
    if search.best is None:
        return ScenarioResult(min(runs, key=lambda r: r.settings.rate), runs)
    if job.settings.official:
        return ScenarioResult(_confirm(job, search, run), runs)
    (chosen,) = [r for r in runs if r.settings.rate == search.best]
    return ScenarioResult(chosen, runs)


def _probe(official: RunSettings) -> RunSettings:
    return make_settings(
        Scenario.SERVER,
        official.mode,
        official.targets,
        short=True,
        duration_s=PROBE_S,
        seed=official.seed,
        deadline_s=official.deadline_s,
    )


def _confirm(job: Job, search: RateSearch, run: Run) -> RunResult:
    rate = search.best or 0.0
    for number in range(1, CONFIRMATIONS + 1):
        what = f"server: {rate:.4g} queries/s, run {number} of full length"
        full = replace(job, settings=replace(job.settings, rate=rate))
        result = run(full, f"server-full-{number}", what)
        if result.verdict.valid or result.error is not None:
            break
        rate /= 1 + search.precision
    return result


def _is_overload(error: BlockFlowError) -> bool:
    """A rate far too high is refused; that is INVALID, and no reason to stop a search."""
    return error.code in ("OVERLOADED", "DEADLINE_EXCEEDED")

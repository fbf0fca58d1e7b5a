"""The server scenario's own loop: run after run, until the highest VALID rate is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from blockflow.bench.mlperf.job import Job
from blockflow.bench.mlperf.run import RunResult, ScenarioResult, broken_off
from blockflow.bench.mlperf.search import RateSearch
from blockflow.bench.mlperf.settings import RunSettings, Scenario, make_settings
from blockflow.core.errors import BlockFlowError

PROBE_S = 20.0
"""Length of the search's runs where the rate that it finds is confirmed by one of full length."""

CONFIRMATIONS = 4
"""Runs of full length after a search, each a step below the one before, until one is VALID."""

Run = Callable[[Job, str, str], RunResult]
"""Does one run: what to do, its folder's name, and a line that tells people what it is."""


def search_rate(job: Job, search: RateSearch, run: Run) -> ScenarioResult:
    """Find the highest VALID rate; of full length, it is confirmed by such a run.

    Where no rate is VALID, the slowest run is the result and says why. A run that broke off ends
    the search, and is the result. Where one cannot even begin, the result is what was found before,
    marked as partial.

    Raises:
        BlockFlowError: the first run could not begin.
    """
    runs: list[RunResult] = []
    try:
        return ScenarioResult(_search(job, search, run, runs), runs)
    except BlockFlowError as exc:
        if not runs:
            raise
        return ScenarioResult(broken_off(_best(search, runs), exc), runs)


def _search(job: Job, search: RateSearch, run: Run, runs: list[RunResult]) -> RunResult:
    """The result; ``runs`` takes those of the search."""
    probe = _probe(job.settings) if job.settings.full_length else job.settings
    while (rate := search.next()) is not None:
        what = f"server: run {len(runs) + 1}, {rate:.4g} queries/s"
        if search.best is not None:
            what += f"; {search.best:.4g} was VALID"
        tried = replace(job, settings=replace(probe, rate=rate))
        runs.append(run(tried, f"server-{len(runs) + 1:02}", what))
        if runs[-1].error is not None and not _is_overload(runs[-1].error):
            return runs[-1]
        search.tell(rate, runs[-1].verdict.valid)
    if search.best is not None and job.settings.full_length:
        return _confirm(job, search, run)
    return _best(search, runs)


def _best(search: RateSearch, runs: Sequence[RunResult]) -> RunResult:
    """The highest VALID run below every INVALID one; the slowest where there is none."""
    if search.best is None:
        return min(runs, key=lambda r: r.settings.rate)
    return next(r for r in runs if r.settings.rate == search.best)


def _probe(full: RunSettings) -> RunSettings:
    return make_settings(
        Scenario.SERVER,
        full.mode,
        full.targets,
        short=True,
        duration_s=PROBE_S,
        seed=full.seed,
        deadline_s=full.deadline_s,
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

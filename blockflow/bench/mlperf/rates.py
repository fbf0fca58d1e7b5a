"""The server scenario's own loop: run after run, until the highest VALID rate is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from blockflow.bench.mlperf.job import Job
from blockflow.bench.mlperf.result import RunResult, ScenarioResult, as_error, broken_off
from blockflow.bench.mlperf.search import STEP, RateSearch
from blockflow.bench.mlperf.settings import RunSettings, Scenario, make_settings
from blockflow.bench.numerals import plain

PROBE_S = 20.0
"""Length of a probe: a run of a search that would take hours with runs as long as was asked for."""

PROBES_FROM = 2.0
"""Times the length of a probe, from which the search goes by probes."""

CONFIRMATIONS = 4
"""Runs at most that confirm what probes have found: each may take hours. The steps double: the
fourth is at seven tenths of the rate that the search has found."""

SERVER_RUNS = 1
"""Runs of the result's rate, by MLCommons' present rules; the paper (section 4.6) wants five."""

Run = Callable[[Job, str, str], RunResult]
"""Does one run: what to do, its folder's name, and a line that tells people what it is."""


def search_rate(
    job: Job,
    search: RateSearch,
    run: Run,
    confirmations: int = CONFIRMATIONS,
    server_runs: int = SERVER_RUNS,
) -> ScenarioResult:
    """Find the highest VALID rate. Where runs are long the search goes by short ones, and what it
    finds is confirmed by those that were asked for, at so many rates at most. Where several runs
    are wanted, all of them have to be VALID, and the result is the least.

    Where no rate is VALID, the slowest run is the result and says why. A run that broke off ends
    the search, and is the result; one that was given up because the rate was too high is only
    INVALID. Whatever else ends it, the result is what was found before, marked as partial.

    Raises:
        BlockFlowError: the first run could not begin.
    """
    runs: list[RunResult] = []
    try:
        result = _search(job, search, run, (confirmations, server_runs), runs)
    except (Exception, KeyboardInterrupt) as exc:
        if not runs:
            raise
        result = broken_off(_best(search, runs), as_error(exc))
    return ScenarioResult(result, runs, precision=search.precision, server_runs=server_runs)


def repeat_rate(job: Job, run: Run, server_runs: int) -> ScenarioResult:
    """So many runs at the job's own rate: the first one that is not VALID, or the least of all.
    Whatever else ends it, the result is what was found before, marked as partial.

    Raises:
        BlockFlowError: the first run could not begin.
    """
    runs: list[RunResult] = []
    try:
        result = _all_of(job, run, server_runs, ("server", ""), runs)
    except (Exception, KeyboardInterrupt) as exc:
        if not runs:
            raise
        result = broken_off(_least(runs), as_error(exc))
    return ScenarioResult(result, runs, server_runs=server_runs)


def _search(
    job: Job, search: RateSearch, run: Run, full: tuple[int, int], runs: list[RunResult]
) -> RunResult:
    """The result; ``runs`` takes those of the search. ``full``: as :func:`_confirm` has it."""
    probe = _probe(job.settings)
    confirmed = job.settings.server_s > PROBES_FROM * probe.server_s
    if not confirmed:
        probe = job.settings
    while (rate := search.next()) is not None:
        what = f"server: run {len(runs) + 1}, {plain(rate)} queries/s"
        if search.best is not None:
            what += f"; {plain(search.best)} held"
        tried = replace(job, settings=replace(probe, rate=rate))
        runs.append(run(tried, f"server-{len(runs) + 1:02}", what))
        if runs[-1].broke_off:
            return runs[-1]
        verdict = runs[-1].verdict
        # Early stopping wants more of so few queries than of the run that confirms: by it, the
        # bracket would end below the rate that is looked for.
        search.tell(rate, verdict.valid or (confirmed and verdict.only_early))
    if search.best is not None and (confirmed or full[1] > 1):
        return _confirm(job, search, search.best, run, full, runs)
    return _best(search, runs)


def _best(search: RateSearch, runs: Sequence[RunResult]) -> RunResult:
    """The highest VALID run below every INVALID one; the slowest where there is none, or where it
    was to be confirmed and was not."""
    whole = [r for r in runs if not r.settings.probe]
    confirming = whole if len(whole) < len(runs) else []  # else there are no probes
    if confirming or search.best is None:
        return min(confirming or runs, key=lambda r: r.settings.rate)
    at_best = [r for r in runs if r.settings.rate == search.best]
    # Of several that held the last; a probe may hold without being VALID.
    return next((r for r in reversed(at_best) if r.verdict.valid), at_best[-1])


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
        rate=full.rate,
        probe=True,
    )


def _confirm(
    job: Job,
    search: RateSearch,
    rate: float,
    run: Run,
    full: tuple[int, int],
    runs: list[RunResult],
) -> RunResult:
    """Runs as they were asked for, from ``rate`` downwards until all of a rate are VALID, the
    search's floor is reached or there were enough.

    Ten minutes know better than twenty seconds. The first step is the search's precision; each one
    after it is twice as large, as far as a bracket's step, for every run is a long one.

    Args:
        full: rates at most, and runs of each.
    """
    step = 1 + search.precision
    confirmations, server_runs = full
    for number in range(1, confirmations + 1):
        at_rate = replace(job, settings=replace(job.settings, rate=rate))
        names = (f"server-full-{number}", f", run {number} to confirm it")
        result = _all_of(at_rate, run, server_runs, names, runs)
        if result.verdict.valid or result.broke_off or rate <= search.floor:
            break
        rate, step = max(rate / step, search.floor), min(step * step, STEP)
    return result


def _all_of(
    job: Job, run: Run, server_runs: int, names: tuple[str, str], runs: list[RunResult]
) -> RunResult:
    """The first run that is not VALID, else the least of so many; ``runs`` takes them all.

    Args:
        names: of the folder, and the end of the line that tells people.
    """
    name, end = names
    what = f"server: {plain(job.settings.rate)} queries/s{end}"
    several = server_runs > 1
    mine = []
    for number in range(1, server_runs + 1):
        folder = f"{name}-of{server_runs}-{number}" if several else name
        told = f"{what}, {number} of {server_runs}" if several else what
        mine.append(run(job, folder, told))
        runs.append(mine[-1])
        if not mine[-1].verdict.valid:
            return mine[-1]
    return _least(mine)


def _least(runs: Sequence[RunResult]) -> RunResult:
    """Of runs at one rate the one in which the fewest were completed per second."""
    return min(runs, key=lambda r: 0.0 if r.verdict.metric is None else r.verdict.metric.value)

"""``blockflow bench``: the search for the highest rate, and what is kept of it; no LoadGen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockflow.bench.mlperf.job import Job
from blockflow.bench.mlperf.rates import CONFIRMATIONS, Run, search_rate
from blockflow.bench.mlperf.run import RunResult
from blockflow.bench.mlperf.search import RateSearch
from blockflow.bench.mlperf.session import Plan, Session
from blockflow.bench.mlperf.settings import Mode, Scenario, Target, make_settings
from blockflow.bench.mlperf.tally import Counts
from blockflow.bench.mlperf.verdict import RunVerdict
from blockflow.core.errors import BlockFlowError, make_error


def searched(limit: float, start: float, **kw: Any) -> RateSearch:
    search = RateSearch(start, **kw)
    while (rate := search.next()) is not None:
        search.tell(rate, rate <= limit)
    return search


@pytest.mark.parametrize("start", [1.0, 90.0, 100.0, 500.0, 1500.0])
def test_the_search_finds_the_limit_from_either_side(start: float) -> None:
    search = searched(100.0, start, runs=30)
    assert search.best is not None
    assert search.precise
    assert 100 / 1.05 <= search.best <= 100


def test_the_search_is_bounded_when_nothing_is_valid() -> None:
    search = searched(0.0, 160.0)
    assert search.best is None
    assert [t.rate for t in search.trials] == [160.0, 80.0, 40.0, 20.0, 10.0]
    assert len(searched(0.0, 160.0, runs=2).trials) == 2


def test_the_search_is_bounded_when_everything_is_valid() -> None:
    search = searched(1e18, 1.0, runs=5)
    assert search.best == 16.0
    assert not search.precise


def test_a_lucky_run_above_an_invalid_one_is_not_the_result() -> None:
    search = RateSearch(10.0)
    for rate, valid in ((10.0, True), (20.0, False), (40.0, True)):
        search.tell(rate, valid)
    assert search.best == 10.0
    assert 10.0 < (search.next() or 0) < 20.0


def test_a_search_needs_positive_arguments() -> None:
    with pytest.raises(ValueError):
        RateSearch(0.0)


def runner(limit: float, seen: list[tuple[str, float, bool]]) -> Run:
    """Runs that are VALID up to a rate."""

    def run(job: Job, name: str, what: str) -> RunResult:
        rate = job.settings.rate
        seen.append((name, rate, job.settings.full_length))
        verdict = RunVerdict(rate <= limit, (), None, False, {})
        return RunResult(Path(name), job.settings, verdict, Counts(), (), {})

    return run


def server_job(short: bool) -> Job:
    targets = {"a": Target(0.99, 10.0)}
    settings = make_settings(Scenario.SERVER, Mode.PERFORMANCE, targets, short=short)
    return Job("tcp://127.0.0.1:1", "", "", {"a": 1}, {"a": 1}, settings)


def test_a_short_search_ends_in_its_best_run() -> None:
    seen: list[tuple[str, float, bool]] = []
    found = search_rate(server_job(short=True), RateSearch(50.0), runner(100.0, seen))
    assert found.result.verdict.valid
    assert found.result.settings.rate == max(r for _, r, _ in seen if r <= 100)
    assert len(found.search) == len(seen)


def test_a_rate_of_full_length_is_confirmed_by_such_runs() -> None:
    seen: list[tuple[str, float, bool]] = []
    short, full = runner(100.0, seen), runner(93.0, seen)

    def run(job: Job, name: str, what: str) -> RunResult:
        return (full if job.settings.full_length else short)(job, name, what)

    found = search_rate(server_job(short=False), RateSearch(50.0), run)
    confirmed = [(rate, whole) for name, rate, whole in seen if "full" in name]
    assert all(whole for _, whole in confirmed)
    assert 1 < len(confirmed) <= CONFIRMATIONS
    assert found.result.settings.rate == confirmed[-1][0] <= 93
    assert not any(r.settings.full_length for r in found.search)


def test_a_search_without_a_valid_rate_shows_its_slowest_run() -> None:
    seen: list[tuple[str, float, bool]] = []
    found = search_rate(server_job(short=False), RateSearch(8.0, runs=3), runner(0.1, seen))
    assert not found.result.verdict.valid
    assert found.result.settings.rate == 2.0


def test_a_run_that_broke_off_ends_the_search() -> None:
    seen: list[tuple[str, float, bool]] = []

    def run(job: Job, name: str, what: str) -> RunResult:
        result = runner(0.0, seen)(job, name, what)
        return replace(result, error=make_error("CONNECTION_LOST", "gone"))

    found = search_rate(server_job(short=True), RateSearch(8.0), run)
    assert len(seen) == 1
    assert found.result.error is not None


def full_disk(runs: int, seen: list[tuple[str, float, bool]]) -> Run:
    """Has no room left for the logs after so many runs."""

    def run(job: Job, name: str, what: str) -> RunResult:
        if len(seen) == runs:
            raise make_error("NO_SPACE", "0 MiB free")
        return runner(100.0, seen)(job, name, what)

    return run


@pytest.mark.parametrize("short", [True, False])
def test_a_search_keeps_what_it_has_found_when_the_next_run_cannot_begin(short: bool) -> None:
    seen: list[tuple[str, float, bool]] = []
    found = search_rate(server_job(short), RateSearch(50.0), full_disk(4, seen))
    assert len(found.search) == 4
    assert found.result.settings.rate == 100.0  # the highest VALID one so far
    assert found.result.error is not None
    assert found.result.error.code == "NO_SPACE"
    assert not found.result.verdict.valid  # nobody knows whether it is the highest
    with pytest.raises(BlockFlowError, match="0 MiB"):
        search_rate(server_job(short), RateSearch(50.0), full_disk(0, []))


def test_a_run_that_was_too_short_is_kept_when_the_longer_one_cannot_begin(tmp_path: Path) -> None:
    plan = Plan({"a": 1}, [Scenario.OFFLINE], [Mode.PERFORMANCE], tmp_path)
    session = Session(plan, lambda what, counts: None)
    tries = iter([RunVerdict(False, ("too short",), None, True, {})])

    def run(job: Job, name: str, what: str) -> RunResult:
        try:
            verdict = next(tries)
        except StopIteration:
            raise make_error("NO_SPACE", "0 MiB free") from None
        return RunResult(Path(name), job.settings, verdict, Counts(9, 9), (), {})

    session._run = run  # type: ignore[method-assign]
    found = session._lengthened(server_job(short=True), "offline")
    assert found.counts.answered == 9
    assert found.error is not None
    assert found.verdict.reasons[0] == "too short"

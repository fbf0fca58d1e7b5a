"""``blockflow bench``: the search for the highest rate, and what is kept of it; no LoadGen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from mlperf_rig import server_job

from blockflow.bench.mlperf.job import Job
from blockflow.bench.mlperf.pictures import rate_points
from blockflow.bench.mlperf.rates import CONFIRMATIONS, PROBE_S, Run, repeat_rate, search_rate
from blockflow.bench.mlperf.result import RunResult, ScenarioResult
from blockflow.bench.mlperf.search import LEAST_SHARE, RateSearch
from blockflow.bench.mlperf.settings import Mode, Scenario, Target, make_settings
from blockflow.bench.mlperf.tally import Counts
from blockflow.bench.mlperf.verdict import Kept, Metric, RunVerdict, TaskVerdict
from blockflow.core.errors import BlockFlowError, make_error


def runner(limit: float, seen: list[tuple[str, float, bool]], early: float = 0.0) -> Run:
    """Runs that are VALID up to a rate, and up to another one only too few for early stopping."""

    def run(job: Job, name: str, what: str) -> RunResult:
        rate = job.settings.rate
        seen.append((name, rate, job.settings.full_length))
        only_early = limit < rate <= early
        verdict = RunVerdict(rate <= limit, (), None, False, {}, only_early=only_early)
        return RunResult(Path(name), job.settings, verdict, Counts(), (), {})

    return run


def test_a_short_search_ends_in_its_best_run() -> None:
    seen: list[tuple[str, float, bool]] = []
    found = search_rate(server_job(short=True), RateSearch(50.0), runner(100.0, seen))
    assert found.result.verdict.valid
    assert found.result.settings.rate == max(r for _, r, _ in seen if r <= 100)
    assert len(found.search) == len(seen)


def test_the_result_is_the_run_that_was_valid_and_not_the_one_that_had_a_hiccup() -> None:
    tries: list[float] = []

    def run(job: Job, name: str, what: str) -> RunResult:
        tries.append(job.settings.rate)
        return runner(100.0 if tries.count(job.settings.rate) > 1 else 0.0, [])(job, name, what)

    found = search_rate(server_job(short=True), RateSearch(50.0), run)
    assert found.result.verdict.valid
    assert 100 / 1.05 <= found.result.settings.rate <= 100


def test_a_rate_of_full_length_is_confirmed_by_such_runs() -> None:
    seen: list[tuple[str, float, bool]] = []
    short, full = runner(100.0, seen), runner(93.0, seen)

    def run(job: Job, name: str, what: str) -> RunResult:
        return (full if job.settings.full_length else short)(job, name, what)

    found = search_rate(server_job(short=False), RateSearch(50.0), run)
    confirmed = [(rate, whole) for name, rate, whole in seen if "full" in name]
    assert all(whole for _, whole in confirmed)
    assert len(confirmed) == 3
    assert found.result.settings.rate == confirmed[-1][0] <= 93
    # Those that were INVALID are on record: they say how near the limit is.
    assert [r.settings.rate for r in found.search if r.settings.full_length] == [
        rate for rate, _ in confirmed
    ]
    assert found.limit is not None
    assert found.limit.settings.rate == confirmed[-2][0]
    assert found.limit.settings.full_length
    told = found.to_dict()
    assert [run["folder"] for run in told["search"]] == [name for name, _, _ in seen]
    assert [run["verdict"] for run in told["search"][-3:]] == ["INVALID", "INVALID", "VALID"]
    assert told["search"][-1]["kind"] == "official"
    assert told["search"][0]["kind"] == "short"


def completing(*per_second: float) -> Run:
    """Runs that are VALID where they complete anything, in turn."""
    left = list(per_second)

    def run(job: Job, name: str, what: str) -> RunResult:
        value = left.pop(0)
        verdict = RunVerdict(value > 0, (), Metric("completed", value, "queries/s"), False, {})
        return RunResult(Path(name), job.settings, verdict, Counts(), (), {})

    return run


def test_of_several_runs_at_a_given_rate_the_least_counts() -> None:
    found = repeat_rate(server_job(short=True), completing(50.0, 48.0, 49.0), 3)
    assert (found.result.verdict.valid, found.result.folder.name) == (True, "server-of3-2")
    told = found.to_dict()
    assert (told["least_of"], told["found"], len(told["search"])) == (3, None, 3)


def test_of_several_runs_one_that_is_not_valid_decides() -> None:
    found = repeat_rate(server_job(short=True), completing(50.0, 0.0), 5)
    assert (found.result.verdict.valid, found.result.folder.name) == (False, "server-of5-2")
    assert found.to_dict()["least_of"] == 1


def test_several_runs_that_are_interrupted_are_kept_and_invalid() -> None:
    whole = completing(50.0, 48.0)

    def run(job: Job, name: str, what: str) -> RunResult:
        if name.endswith("3"):
            raise KeyboardInterrupt
        return whole(job, name, what)

    found = repeat_rate(server_job(short=True), run, 3)
    assert (found.result.folder.name, found.result.verdict.valid) == ("server-of3-2", False)
    assert found.result.error is not None and found.result.error.code == "CANCELLED"
    with pytest.raises(KeyboardInterrupt):
        repeat_rate(server_job(short=True), lambda job, _, what: run(job, "3", what), 3)


@pytest.mark.parametrize("short", [True, False])
def test_what_a_search_finds_is_run_as_often_as_was_asked_for(short: bool) -> None:
    """Below a rate of which one of the runs is INVALID all of them are run again."""
    seen: list[tuple[str, float, bool]] = []
    usual = runner(100.0, seen)

    def run(job: Job, name: str, what: str) -> RunResult:
        return (runner(0.0, seen) if name == "server-full-1-of3-2" else usual)(job, name, what)

    found = search_rate(server_job(short=short), RateSearch(50.0), run, server_runs=3)
    repeated = [name for name, _, _ in seen if "full" in name]
    ends = ("1-of3-1", "1-of3-2", "2-of3-1", "2-of3-2", "2-of3-3")
    assert repeated == [f"server-full-{end}" for end in ends]
    assert found.result.verdict.valid
    assert found.result.folder.name == "server-full-2-of3-1"
    high, low = (next(r for n, r, _ in seen if f"full-{i}" in n) for i in (1, 2))
    assert high / low == pytest.approx(1.05)
    told = found.to_dict()
    assert (told["least_of"], told["found"]["invalid_at"]) == (3, high)


def full_length(
    limit: float, job: Job, seen: list[float], confirmations: int = 20
) -> ScenarioResult:
    """A search that finds 100, where runs of full length are VALID up to another rate."""
    short, full = runner(100.0, []), runner(limit, [])

    def run(job: Job, name: str, what: str) -> RunResult:
        if job.settings.full_length:
            seen.append(job.settings.rate)
            return full(job, name, what)
        return short(job, name, what)

    return search_rate(job, RateSearch(100.0), run, confirmations)


@pytest.mark.parametrize("limit", [99.0, 80.0, 50.0, 12.1])
def test_confirming_goes_on_in_larger_steps_until_a_rate_is_valid(limit: float) -> None:
    rates: list[float] = []
    found = full_length(limit, server_job(short=False), rates)
    assert found.result.verdict.valid
    assert limit / 2 < found.result.settings.rate <= limit
    steps = [a / b for a, b in pairwise(rates)]
    assert steps == sorted(steps)
    assert steps[0] == pytest.approx(1.05)
    assert all(step <= 2.0 for step in steps)
    # Only the first step is as small as what was asked for, and nobody is told otherwise.
    assert found.precise is (limit == 99.0)
    assert found.to_dict()["found"]["bracketed"]
    assert found.to_dict()["found"]["invalid_s"] is None


def test_runs_of_full_length_are_bounded_for_each_may_take_hours() -> None:
    rates: list[float] = []
    found = full_length(12.1, server_job(short=False), rates, confirmations=3)
    assert len(rates) == 3
    assert not found.result.verdict.valid
    assert found.result.settings.rate == rates[-1]
    rates.clear()
    full_length(0.0, server_job(short=False), rates, CONFIRMATIONS)
    assert len(rates) == CONFIRMATIONS
    assert rates[-1] == pytest.approx(70, abs=2)


def test_what_only_early_stopping_denies_holds_where_a_longer_run_confirms_it() -> None:
    """Twenty seconds are so few queries that early stopping wants p99.5 of them where p99 was asked
    for: the rates that full length keeps would never be tried."""
    for limit in (80.0, 0.0):  # of VALID probes; with none of them there is something to confirm
        seen: list[tuple[str, float, bool]] = []
        short, full = runner(limit, seen, early=100.0), runner(100.0, seen)

        def run(job: Job, name: str, what: str, short: Run = short, full: Run = full) -> RunResult:
            return (full if job.settings.full_length else short)(job, name, what)

        found = search_rate(server_job(short=False), RateSearch(50.0), run)
        assert found.result.verdict.valid
        assert found.result.settings.full_length
        assert 100 / 1.05 <= found.result.settings.rate <= 100
        # The INVALID rate is one of another kind of run, and that is said.
        told = found.to_dict()["found"]
        assert told["invalid_s"] == PROBE_S
        assert told["invalid_at"] > 100
        assert told["precise"]
    # Nothing follows that would know better.
    found = search_rate(server_job(short=True), RateSearch(50.0), runner(80.0, [], early=100.0))
    assert found.result.verdict.valid
    assert 80 / 1.05 <= found.result.settings.rate <= 80
    assert found.precise


def test_runs_that_would_take_hours_are_searched_for_by_probes_whatever_they_are_called() -> None:
    for more, probed in (
        ({"duration_s": 60.0}, True),  # of 270,336 queries all the same
        ({"duration_s": 60.0, "queries": 700}, True),
        ({"duration_s": 30.0, "queries": 700}, False),
        ({"duration_s": 10.0, "queries": 100_000}, True),
        ({"duration_s": 10.0, "queries": 3_000}, False),
    ):
        settings = make_settings(
            Scenario.SERVER, Mode.PERFORMANCE, {"a": Target(0.99, 10.0)}, short=False, rate=100.0,
            **more,
        )  # fmt: skip
        assert settings.kind == "short"
        job = replace(server_job(short=True), settings=settings)
        found = search_rate(job, RateSearch(100.0), runner(100.0, []))
        assert any(r.settings.probe for r in found.search) is probed
        assert not found.result.settings.probe
        assert found.result.verdict.valid
        assert found.result.settings.min_queries == settings.min_queries


@pytest.mark.parametrize("exc", [ZeroDivisionError("what"), KeyboardInterrupt()])
def test_whatever_ends_a_search_its_runs_are_kept(exc: BaseException) -> None:
    seen: list[tuple[str, float, bool]] = []

    def run(job: Job, name: str, what: str) -> RunResult:
        if len(seen) == 3:
            raise exc
        return runner(100.0, seen)(job, name, what)

    found = search_rate(server_job(short=True), RateSearch(50.0), run)
    assert len(found.search) == 3
    assert found.result.error is not None
    expected = "CANCELLED" if isinstance(exc, KeyboardInterrupt) else "INTERNAL"
    assert found.result.error.code == expected
    if expected == "INTERNAL":
        assert "raise exc" in found.result.error.details["traceback"]


def test_confirming_ends_at_the_floor() -> None:
    rates: list[float] = []
    found = full_length(0.0, server_job(short=False), rates)
    assert not found.result.verdict.valid
    assert found.result.settings.rate == rates[-1] == 100.0 * LEAST_SHARE
    assert not found.to_dict()["found"]["bracketed"]


@pytest.mark.parametrize(("code", "runs"), [("OVERLOADED", 2), ("CONNECTION_LOST", 1)])
def test_a_run_of_full_length_that_is_given_up_for_its_rate_is_only_invalid(
    code: str, runs: int
) -> None:
    seen: list[tuple[str, float, bool]] = []

    def run(job: Job, name: str, what: str) -> RunResult:
        result = runner(97.0 if job.settings.full_length else 100.0, seen)(job, name, what)
        given_up = job.settings.full_length and not result.verdict.valid
        return replace(result, error=make_error(code, "given up") if given_up else None)

    found = search_rate(server_job(short=False), RateSearch(100.0), run)
    assert sum(whole for _, _, whole in seen) == runs
    assert found.result.verdict.valid is (code == "OVERLOADED")
    assert (found.result.error is None) is (code == "OVERLOADED")


@pytest.mark.parametrize(("runs", "bracketed", "precise"), [(2, False, False), (5, True, False)])
def test_a_search_that_ends_early_says_what_it_does_not_know(
    runs: int, bracketed: bool, precise: bool
) -> None:
    found = search_rate(server_job(short=True), RateSearch(20.0, runs=runs), runner(100.0, []))
    assert found.result.verdict.valid
    assert found.to_dict()["found"] == {
        "bracketed": bracketed,
        "precise": precise,
        "precision": 0.05,
        "invalid_at": 160.0 if bracketed else None,
        "invalid_s": None,
    }


def test_the_plot_is_of_what_was_completed_and_of_the_percentile_that_is_judged() -> None:
    def run(job: Job, name: str, what: str) -> RunResult:
        rate = job.settings.rate
        valid = rate <= (80.0 if job.settings.full_length else 100.0)
        metric = Metric("completed", min(rate, 110.0), "queries/s")
        known = None if rate > 180 else rate / 10
        tasks = tuple(
            TaskVerdict(task, 0.99, 10.0, seen, 1, 1, 1, Kept.KEPT)
            for task, seen in (("a", known), ("b", 2 * rate))
        )
        verdict = RunVerdict(valid, (), metric, False, {"99.00": 0.0}, 0.0, tasks)
        return RunResult(Path(name), job.settings, verdict, Counts(), (), {})

    found = search_rate(server_job(short=False), RateSearch(50.0, runs=4), run)
    offered = sorted(r.settings.rate for r in found.search)
    points = rate_points(found)
    assert [(x, ms) for x, ms, _ in points["a"]] == [
        (min(rate, 110.0), rate / 10) for rate in offered if rate <= 180
    ]
    assert [(x, ms) for x, ms, _ in points["b"]] == [(min(r, 110.0), 2 * r) for r in offered]
    assert [valid for _, _, valid in points["b"]] == [
        r.verdict.valid for r in sorted(found.search, key=by_rate)
    ]
    assert sum(r.settings.full_length for r in found.search) > 1


def by_rate(run: RunResult) -> float:
    return run.settings.rate


def test_a_search_without_a_valid_rate_shows_its_slowest_run() -> None:
    seen: list[tuple[str, float, bool]] = []
    found = search_rate(server_job(short=False), RateSearch(8.0, runs=5), runner(0.1, seen))
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

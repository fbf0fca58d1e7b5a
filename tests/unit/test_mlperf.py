"""``blockflow bench``: counts, search, settings, library and verdict; no LoadGen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockflow.bench.mlperf.counts import early_stopping_count, query_count, rounded_count
from blockflow.bench.mlperf.job import Job
from blockflow.bench.mlperf.library import Library
from blockflow.bench.mlperf.presets import PRESETS, numbers, parse_weights, per_task, presets
from blockflow.bench.mlperf.rates import CONFIRMATIONS, Run, search_rate
from blockflow.bench.mlperf.run import RunResult
from blockflow.bench.mlperf.search import RateSearch
from blockflow.bench.mlperf.session import Plan, Session
from blockflow.bench.mlperf.settings import (
    Mode,
    RunSettings,
    Scenario,
    Target,
    make_settings,
    required_queries,
    targets_of,
)
from blockflow.bench.mlperf.tally import Counts
from blockflow.bench.mlperf.verdict import RunVerdict, is_whole, judge, read_log
from blockflow.core.errors import BlockFlowError, make_error

FREE = {"a": Target(0.9)}


# --- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percentile", "exact", "rounded"),
    [(0.90, 23_886, 24_576), (0.95, 50_425, 57_344), (0.99, 262_742, 270_336)],
)
def test_query_counts_are_those_of_the_papers_table(
    percentile: float, exact: int, rounded: int
) -> None:
    assert query_count(percentile) == exact
    assert rounded_count(percentile) == rounded


def test_machine_translation_needs_ninety_thousand() -> None:
    assert rounded_count(0.97) == 90_112


def test_less_confidence_needs_fewer_queries() -> None:
    counts = [query_count(0.99, c) for c in (0.5, 0.9, 0.95, 0.99, 0.999)]
    assert counts == sorted(counts)
    assert len(set(counts)) == 5


def test_early_stopping_begins_where_loadgen_says() -> None:
    # LoadGen's own texts: "Need to process at least 64 queries", "at least 662 total queries".
    assert early_stopping_count(0.90) == 64
    assert early_stopping_count(0.99) == 662


@pytest.mark.parametrize(("percentile", "confidence"), [(0, 0.9), (1, 0.9), (0.9, 1), (1.5, 0.9)])
def test_nonsense_has_no_count(percentile: float, confidence: float) -> None:
    with pytest.raises(ValueError, match="outside"):
        query_count(percentile, confidence)


# --- the search ----------------------------------------------------------------------------------


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


# --- options and settings ------------------------------------------------------------------------


def test_presets_are_those_of_table_3() -> None:
    figures = [(p.multistream_ms, p.server_ms, p.percentile) for p in PRESETS.values()]
    heavy, light, objects = (50, 15, 0.99), (50, 10, 0.99), (66, 100, 0.99)
    assert figures == [heavy, light, objects, light, (100, 250, 0.97)]


def test_weights() -> None:
    assert parse_weights(["digit=2,parity", "high=3"]) == {"digit": 2, "parity": 1, "high": 3}


@pytest.mark.parametrize("text", ["", "a=0", "a=x", "a,a", "=2", "a=1001", "a=-1", "a=1.5"])
def test_nonsense_is_no_weight(text: str) -> None:
    with pytest.raises(BlockFlowError) as caught:
        parse_weights([text])
    assert caught.value.code == "INVALID_REQUEST"


def test_values_for_all_tasks_or_for_some() -> None:
    assert per_task("15", ["a", "b"], "x") == {"a": "15", "b": "15"}
    assert per_task("b=10", ["a", "b"], "x") == {"b": "10"}
    assert per_task("", ["a"], "x") == {}
    with pytest.raises(BlockFlowError) as caught:
        per_task("c=10", ["a", "b"], "x")
    assert caught.value.code == "UNKNOWN_TASK"
    with pytest.raises(BlockFlowError):
        per_task("a=1,a=2", ["a"], "x")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "100"])
def test_nonsense_is_no_percentile(text: str) -> None:
    with pytest.raises(BlockFlowError) as caught:
        numbers({"a": text}, "--percentile", 0.0, 100.0)
    assert caught.value.code == "INVALID_REQUEST"


def test_own_figures_go_over_the_preset() -> None:
    chosen = presets({"a": "image-classification-heavy", "b": "machine-translation"}, "x")
    weights = {"a": 1, "b": 1, "c": 1}
    found = targets_of(Scenario.SERVER, weights, chosen, {"a": 20.0}, {"c": 95.0})
    assert found == {
        "a": Target(0.99, 20.0, 0.99),
        "b": Target(0.97, 250, 0.97),
        "c": Target(0.95, None, 0.99),
    }
    found = targets_of(Scenario.MULTISTREAM, weights, chosen, {}, {})
    assert [t.latency_ms for t in found.values()] == [50, 100, None]
    found = targets_of(Scenario.OFFLINE, weights, chosen, {"a": 20.0}, {})
    assert not any(t.latency_ms for t in found.values())
    with pytest.raises(BlockFlowError):
        presets({"a": "cats"}, "x")


def test_official_settings_and_what_makes_a_run_short() -> None:
    def made(scenario: Scenario, **kw: Any) -> RunSettings:
        targets = {"a": Target(0.97, 10), "b": Target(0.99, 15)}
        return make_settings(scenario, Mode.PERFORMANCE, targets, **{"short": False, **kw})

    counts = {s: made(s).min_queries for s in Scenario}
    assert counts == {
        Scenario.SINGLE_STREAM: 1024,
        Scenario.MULTISTREAM: 270_336,
        Scenario.SERVER: 270_336,
        Scenario.OFFLINE: 24_576,
    }
    assert all(made(s).official and made(s).min_duration_s == 600 for s in Scenario)
    assert made(Scenario.SERVER).bound_ms == 15
    assert made(Scenario.SERVER).percentile == 0.97
    assert not made(Scenario.SERVER, short=True).official
    assert not made(Scenario.SERVER, duration_s=599).official
    assert not made(Scenario.SERVER, queries=270_335).official
    assert made(Scenario.SERVER, duration_s=900, queries=300_000).official


@pytest.mark.parametrize("scenario", [Scenario.SERVER, Scenario.MULTISTREAM])
def test_a_percentile_below_the_rules_is_full_length_and_not_official(scenario: Scenario) -> None:
    def made(preset: str, percentile: float | None, **more: Any) -> RunSettings:
        own = {} if percentile is None else {"a": percentile}
        targets = targets_of(scenario, {"a": 1}, {"a": PRESETS[preset]}, {}, own)
        return make_settings(scenario, Mode.PERFORMANCE, targets, short=False, **more)

    light, words = "image-classification-light", "machine-translation"
    kinds = [made(light, p).kind for p in (None, 99.9, 97.0, 50.0)]
    assert kinds == ["official", "official", "full length", "full length"]
    assert [made(words, p).kind for p in (None, 97.0, 95.0)] == ["official"] * 2 + ["full length"]
    assert made(light, 97.0, duration_s=5.0).kind == "short"
    single = made(light, None, samples_per_query=1)
    assert single.official is (scenario is Scenario.SERVER)


def test_a_lone_stream_has_as_many_queries_as_its_percentile_needs() -> None:
    counts = [required_queries(Scenario.SINGLE_STREAM, p) for p in (0.5, 0.9, 0.99, 0.999)]
    assert counts[:3] == [1024] * 3
    assert counts[3] == early_stopping_count(0.999) > 1024


def test_confidence_sets_the_counts_and_less_of_it_is_not_official() -> None:
    def made(confidence: float) -> RunSettings:
        targets = {"a": Target(0.99, 10)}
        return make_settings(
            Scenario.SERVER, Mode.PERFORMANCE, targets, short=False, confidence=confidence
        )

    assert made(0.9).min_queries == rounded_count(0.99, 0.9) < 270_336
    assert not made(0.9).official
    assert made(0.999).min_queries > 270_336
    assert made(0.999).official


def test_a_job_survives_json() -> None:
    settings = make_settings(Scenario.SERVER, Mode.ACCURACY, {"a": Target(0.9, 2)}, short=True)
    job = Job("tcp://127.0.0.1:1", "", "/data", {"a": 2}, {"a": 8}, settings)
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job


# --- the library ---------------------------------------------------------------------------------


def test_tasks_are_mixed_by_their_weights_and_no_row_is_left_out() -> None:
    rows, weights = {"a": 5, "b": 7}, {"a": 2, "b": 1}
    library = Library.weighted(rows, weights)
    assert library.task.count(0) == 2 * library.task.count(1)
    pairs = set(zip(library.task, library.row, strict=True))
    assert pairs == {(0, r) for r in range(5)} | {(1, r) for r in range(7)}


def test_an_accuracy_run_has_every_row_once() -> None:
    library = Library.once({"a": 2, "b": 1})
    assert list(zip(library.task, library.row, strict=True)) == [(0, 0), (0, 1), (1, 0)]


def test_samples_of_one_task_and_shape_travel_together() -> None:
    library = Library.once({"a": 4, "b": 2})
    kinds = {"a": [0, 1, 0, 0], "b": [0, 0]}
    groups = list(library.groups([0, 1, 2, 3, 4, 5, 0], {"a": 2, "b": 8}, kinds))
    assert groups == [("a", [0, 2]), ("a", [3, 6]), ("a", [1]), ("b", [4, 5])]


# --- the verdict ---------------------------------------------------------------------------------


def log_of(**values: Any) -> dict[str, Any]:
    entries = {"result_validity": "VALID", "num_errors": 0, **values}
    lines = (":::MLLOG " + json.dumps({"key": k, "value": v}) for k, v in entries.items())
    return read_log("\n".join(lines))


def settings_of(scenario: Scenario = Scenario.SINGLE_STREAM, **targets: Target) -> RunSettings:
    return make_settings(scenario, Mode.PERFORMANCE, targets or FREE, short=True)


def test_a_valid_run_with_its_figure() -> None:
    log = log_of(**{"result_90.00_percentile_latency_ns": 2_500_000})
    found = judge(settings_of(), log, Counts(10, 10), {"a": [1.0] * 10})
    assert found.valid
    assert found.reasons == ()
    assert found.metric is not None
    assert (found.metric.value, found.metric.unit) == (2.5, "ms")
    assert found.latency_ms == {"90.00": 2.5}


@pytest.mark.parametrize(
    "counts", [Counts(10, 9, 0, {"BLOCK_FAILED": 1}), Counts(10, 9), Counts(0, 0)]
)
def test_a_single_failed_or_lost_sample_makes_it_invalid(counts: Counts) -> None:
    found = judge(settings_of(), log_of(), counts, {})
    assert found.word == "INVALID"
    assert len(found.reasons) == 1


def test_a_task_that_misses_its_own_target_makes_it_invalid() -> None:
    settings = settings_of(a=Target(0.9, 10.0), b=Target(0.5, 10.0))
    slow = {"a": [1.0] * 8 + [11.0] * 2, "b": [1.0] * 8 + [11.0] * 2}
    found = judge(settings, log_of(), Counts(20, 20), slow)
    assert not found.valid
    assert [r.partition(":")[0] for r in found.reasons] == ["a"]


def test_multistream_s_bound_is_that_of_a_query_and_not_of_its_parts() -> None:
    """Most requests are quick: but in 6% of the queries one of the eight is late."""
    settings = settings_of(Scenario.MULTISTREAM, a=Target(0.99, 50.0))
    parts = {"a": [5.0] * 7_940 + [100.0] * 60}
    key = "result_99.00_percentile_per_query_latency_ns"
    late = judge(settings, log_of(**{key: 100_000_000}), Counts(8_000, 8_000), parts)
    assert late.reasons == ("p99 latency of a query is 100 ms, the bound is 50 ms",)
    assert late.latency_ms == {"99.00": 100.0}
    assert judge(settings, log_of(**{key: 50_000_000}), Counts(8_000, 8_000), parts).valid
    free = settings_of(Scenario.MULTISTREAM, a=Target(0.99))
    assert judge(free, log_of(**{key: 100_000_000}), Counts(8_000, 8_000), parts).valid


def test_loadgens_invalid_is_told_with_its_reason() -> None:
    log = log_of(
        result_validity="INVALID",
        result_min_duration_met=False,
        result_perf_constraints_met=False,
    )
    found = judge(settings_of(), log, Counts(5, 5), {})
    assert len(found.reasons) == 2
    assert not found.too_short
    log = log_of(result_validity="INVALID", result_min_duration_met=False)
    assert judge(settings_of(), log, Counts(5, 5), {}).too_short
    assert not judge(settings_of(), log, Counts(5, 4), {}).too_short


def test_a_log_that_breaks_off_is_noticed() -> None:
    text = ':::MLLOG {"key": "result_validity", "value": "VALID"}\n:::MLLOG {"key": "num_err'
    log = read_log(text)
    assert not is_whole(log, Mode.PERFORMANCE)
    assert not judge(settings_of(), log, Counts(5, 5), {}).valid


def test_a_run_that_broke_off_is_invalid_whatever_the_log_says() -> None:
    found = judge(settings_of(), log_of(), Counts(5, 5), {}, "the system is gone")
    assert found.reasons == ("the system is gone",)

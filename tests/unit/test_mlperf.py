"""``blockflow bench``: counts, settings, library and verdict; no LoadGen."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blockflow.bench.mlperf.counts import early_stopping_count, query_count, rounded_count
from blockflow.bench.mlperf.job import Job
from blockflow.bench.mlperf.library import Library
from blockflow.bench.mlperf.presets import PRESETS, numbers, parse_weights, per_task, presets
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
from blockflow.bench.mlperf.verdict import is_whole, judge, read_log
from blockflow.core.errors import BlockFlowError

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

"""``blockflow bench``: counts, settings and library; no LoadGen."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockflow.bench.mlperf.counts import (
    count_for_share,
    early_stopping_count,
    query_count,
    rounded_count,
)
from blockflow.bench.mlperf.job import Job
from blockflow.bench.mlperf.library import MANY, Library, shares
from blockflow.bench.mlperf.presets import PRESETS, numbers, parse_weights, per_task, presets
from blockflow.bench.mlperf.settings import (
    Mode,
    RunSettings,
    Scenario,
    Target,
    make_settings,
    needed_queries,
    required_queries,
    targets_of,
)
from blockflow.core.errors import BlockFlowError, RequestError

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
        "a": Target(0.99, 20.0, 0.99, 15),
        "b": Target(0.97, 250, 0.97, 250),
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
        both = {"a": 1.0, "b": 1.0}  # as if every query asked for both
        return make_settings(
            scenario, Mode.PERFORMANCE, targets, **{"short": False, "asked": both, **kw}
        )

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


@pytest.mark.parametrize("scenario", [Scenario.SERVER, Scenario.MULTISTREAM])
def test_a_bound_looser_than_the_presets_is_full_length_and_not_official(
    scenario: Scenario,
) -> None:
    def made(bound_ms: float | None) -> str:
        own = {} if bound_ms is None else {"a": bound_ms}
        chosen = {"a": PRESETS["image-classification-light"]}
        targets = targets_of(scenario, {"a": 1}, chosen, own, {})
        return make_settings(scenario, Mode.PERFORMANCE, targets, short=False).kind

    assert [made(b) for b in (None, 5.0, 60_000.0)] == ["official", "official", "full length"]


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


# --- tasks that are mixed ------------------------------------------------------------------------


def mixed(scenario: Scenario, weights: dict[str, int], **kw: Any) -> RunSettings:
    targets = dict.fromkeys(weights, Target(0.99, 10.0))
    asked = shares(weights, 8 if scenario is Scenario.MULTISTREAM else 1)
    return make_settings(scenario, Mode.PERFORMANCE, targets, asked=asked, **{"short": False, **kw})


def test_there_are_more_queries_than_the_mean_lest_chance_leave_a_task_short() -> None:
    assert count_for_share(270_336, 1.0) == 270_336
    chance = np.random.default_rng(1)
    for count, share in ((1, 0.001), (64, 0.25), (1024, 0.5), (270_336, 1 / 3)):
        queries = count_for_share(count, share)
        seen = chance.binomial(queries, share, 100_000)
        assert seen.min() >= count
        assert queries < (count + 12 * (count + 5) ** 0.5 + 27) / share


@pytest.mark.parametrize("scenario", [Scenario.SINGLE_STREAM, Scenario.SERVER])
def test_the_rarest_task_is_asked_as_often_as_the_rules_want(scenario: Scenario) -> None:
    needed = required_queries(scenario, 0.99)
    lone, three = mixed(scenario, {"a": 7}), mixed(scenario, {"a": 2, "b": 1, "c": 1})
    assert lone.min_queries == needed
    assert three.min_queries == count_for_share(needed, 0.25) > 4 * needed
    assert three.official
    assert needed_queries(three, "b") == needed
    # What was enough for the sum of them is not enough for each.
    assert mixed(scenario, {"a": 2, "b": 1, "c": 1}, queries=needed).kind == "short"
    assert mixed(scenario, {"a": 2, "b": 1, "c": 1}, queries=three.min_queries).official


def test_a_short_run_leaves_no_task_out_and_offline_has_one_figure_for_all() -> None:
    rare = {"a": 1000, "b": 1}
    assert mixed(Scenario.SERVER, rare, short=True).min_queries > 20 * 1001
    assert mixed(Scenario.SERVER, {"a": 2, "b": 1}, short=True).min_queries == 662
    assert mixed(Scenario.OFFLINE, {"a": 2, "b": 1}).min_queries == 24_576
    assert needed_queries(mixed(Scenario.OFFLINE, {"a": 2, "b": 1}), "b") == 1


def test_a_task_that_is_asked_too_rarely_to_be_judged_is_refused() -> None:
    with pytest.raises(BlockFlowError, match="'b'") as caught:
        mixed(Scenario.SERVER, {"a": 1000, "b": 1})
    assert (caught.value.code, caught.value.where) == ("INVALID_REQUEST", "--task")
    # A task by itself is not to be mixed otherwise: its percentile asks for so many.
    rare = {"a": Target(0.999999999)}
    with pytest.raises(BlockFlowError, match="queries would be needed") as caught:
        make_settings(Scenario.SERVER, Mode.PERFORMANCE, rare, short=True)
    assert (caught.value.where, caught.value.hint) == ("--percentile", "choose a lower percentile")


def test_queries_of_several_samples_ask_for_neighbours_of_a_shuffled_library() -> None:
    """As LoadGen draws them: whole queries only, from anywhere on, around the end."""
    chance = np.random.default_rng(1)
    for weights in ({"a": 1, "b": 1}, {"a": 2, "b": 1, "c": 1}, {"a": 99, "b": 1}):
        library = Library.weighted(dict.fromkeys(weights, 3), weights, 8)
        assert len(library) % 8 == 0
        assert len(library) >= MANY
        for task, share in enumerate(shares(weights, 8).values()):
            assert library.task.count(task) * sum(weights.values()) == (
                list(weights.values())[task] * len(library)
            )
            has = chance.permutation(np.asarray(library.task) == task)
            around = np.concatenate([has, has[:7]])
            seen = np.lib.stride_tricks.sliding_window_view(around, 8).any(axis=1).mean()
            assert 0.8 * seen < share <= seen


def test_a_job_survives_json() -> None:
    settings = make_settings(Scenario.SERVER, Mode.ACCURACY, {"a": Target(0.9, 2)}, short=True)
    job = Job("tcp://127.0.0.1:1", "", "/data", {"a": 2}, {"a": 8}, settings)
    assert Job.from_dict(json.loads(json.dumps(asdict(job)))) == job


def test_more_queries_are_prepared_but_a_server_is_not_asked_for_more_per_second() -> None:
    def more(scenario: Scenario) -> RunSettings:
        found = make_settings(scenario, Mode.PERFORMANCE, {"a": Target(0.9, 20.0)}, short=True)
        found = replace(found, rate=100.0, expected_ms=4.0, min_duration_s=5.0, min_queries=30)
        return found.scaled(2.0)

    single, offline, server = map(more, (Scenario.SINGLE_STREAM, Scenario.OFFLINE, Scenario.SERVER))
    assert (single.expected_ms, single.min_queries) == (2.0, 30)
    assert (offline.rate, offline.min_queries) == (200.0, 30)
    assert (server.rate, server.min_queries) == (100.0, 1000)


# --- the library ---------------------------------------------------------------------------------


def test_tasks_are_mixed_by_their_weights_and_no_row_is_left_out() -> None:
    rows, weights = {"a": 5, "b": 7}, {"a": 2, "b": 1}
    library = Library.weighted(rows, weights)
    assert library.task.count(0) == 2 * library.task.count(1)
    pairs = set(zip(library.task, library.row, strict=True))
    assert pairs == {(0, r) for r in range(5)} | {(1, r) for r in range(7)}


def test_a_library_that_no_process_should_hold_is_refused() -> None:
    with pytest.raises(RequestError, match="40,040,000 samples") as caught:
        Library.weighted({"a": 40_000, "b": 40_000}, {"a": 1000, "b": 1})
    assert "a=1000: 40000" in caught.value.message


def test_the_docs_count_of_a_rare_task_is_ours() -> None:
    text = (Path(__file__).parents[2] / "docs" / "mlperf.md").read_text(encoding="utf-8")
    rarest = count_for_share(rounded_count(0.99), 0.25)
    assert f"weights 2, 1 and 1 need {rarest:,} queries" in text
    assert f"needs {rounded_count(0.99):,}" in " ".join(text.split())


def test_an_accuracy_run_has_every_row_once() -> None:
    library = Library.once({"a": 2, "b": 1})
    assert list(zip(library.task, library.row, strict=True)) == [(0, 0), (0, 1), (1, 0)]


def test_samples_of_one_task_and_shape_travel_together() -> None:
    library = Library.once({"a": 4, "b": 2})
    kinds = {"a": [0, 1, 0, 0], "b": [0, 0]}
    groups = list(library.groups([0, 1, 2, 3, 4, 5, 0], {"a": 2, "b": 8}, kinds))
    assert groups == [("a", [0, 2]), ("a", [3, 6]), ("a", [1]), ("b", [4, 5])]

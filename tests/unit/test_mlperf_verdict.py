"""``blockflow bench``: LoadGen's log and the verdict of a run; no LoadGen."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blockflow.bench.mlperf.detail_log import DetailLog, read_log
from blockflow.bench.mlperf.settings import Mode, RunSettings, Scenario, Target, make_settings
from blockflow.bench.mlperf.tally import Counts
from blockflow.bench.mlperf.verdict import WHOLE_QUERY, Kept, RunVerdict, judge

FREE = {"a": Target(0.9)}
P90 = "result_90.00_percentile_latency_ns"


def line(key: str, value: Any, **metadata: Any) -> str:
    return ":::MLLOG " + json.dumps({"key": key, "value": value, "metadata": metadata})


def log_of(*more: str, without: str = "", **values: Any) -> DetailLog:
    """A whole log that holds nothing against the run."""
    whole = {
        P90: 2_500_000,
        "result_completed_samples_per_sec": 100.0,
        "result_samples_per_second": 100.0,
        "result_validity": "VALID",
        **values,
        "num_errors": values.get("num_errors", 0),
    }
    whole.pop(without, None)
    return read_log("\n".join([*more, *(line(k, v) for k, v in whole.items())]))


def settings_of(
    scenario: Scenario = Scenario.SINGLE_STREAM,
    *,
    short: bool = True,
    mode: Mode = Mode.PERFORMANCE,
    **targets: Target,
) -> RunSettings:
    asked = dict.fromkeys(targets or FREE, 1.0)
    return make_settings(scenario, mode, targets or FREE, short=short, asked=asked)


def counts_of(samples: int, *tasks: str, **more: Any) -> Counts:
    queries = dict.fromkeys(tasks or ("a",), samples)
    return Counts(samples, **{"answered": samples, **more}, queries=queries)


def test_loadgens_own_estimate_stands_beside_the_percentile() -> None:
    """MLCommons' present rules have it as the result: the percentile with 99% confidence."""
    single = {"early_stopping_latency_ss": 4_000_000, "early_stopping_latency_ms": 0}
    assert judged(log_of(**single)).to_dict()["estimate_ms"] == 4.0
    several = settings_of(Scenario.MULTISTREAM)
    found = judge(several, log_of(early_stopping_latency_ms=5_000_000), counts_of(100), {"a": [1]})
    assert found.estimate_ms == 5.0
    none = {"early_stopping_latency_ss": 0, "early_stopping_latency_ms": 0}
    assert judged(log_of(**none)).estimate_ms is None
    assert judged(log_of()).estimate_ms is None


def test_without_a_bound_nothing_is_late_for_early_stopping() -> None:
    log = log_of(result_validity="INVALID", early_stopping_met=False)
    (why,) = judged(log).reasons
    assert why == "LoadGen: there were too few queries to estimate the percentile (early stopping)"
    bounded = settings_of(Scenario.SERVER, a=Target(0.9, 10.0))
    assert any("were late" in why for why in judged(log, bounded).reasons)


@pytest.mark.parametrize(
    ("late", "said"), [(0, "too few queries to"), (1, "too many queries were")]
)
def test_early_stopping_blames_late_queries_only_where_there_were_some(
    late: int, said: str
) -> None:
    no = {"result_validity": "INVALID", "early_stopping_met": False}
    log = log_of(**no, result_overlatency_query_count=late)
    (why,) = judged(log, settings_of(Scenario.SERVER, a=Target(0.5, 1000.0))).reasons
    assert said in why


def judged(
    log: DetailLog, settings: RunSettings | None = None, latencies: Any = None, **more: Any
) -> RunVerdict:
    found = {"a": [1.0] * 100} if latencies is None else latencies
    counts = counts_of(sum(map(len, found.values())), *found)
    return judge(settings or settings_of(), log, counts, found, **more)


# --- LoadGen's word ------------------------------------------------------------------------------


def test_a_valid_run_with_its_figure() -> None:
    found = judged(log_of())
    assert found.valid
    assert found.reasons == ()
    assert found.metric is not None
    assert (found.metric.value, found.metric.unit) == (2.5, "ms")
    assert found.latency_ms == {"90.00": 2.5}
    assert not found.too_short


def test_loadgens_invalid_is_told_with_its_reason() -> None:
    no = {"result_validity": "INVALID", "result_min_duration_met": False}
    found = judged(log_of(**no, result_perf_constraints_met=False))
    assert len(found.reasons) == 2
    assert not found.too_short
    assert judged(log_of(**no)).too_short
    counts = Counts(100, 99, queries={"a": 100})
    assert not judge(settings_of(), log_of(**no), counts, {"a": [1.0] * 99}).too_short


@pytest.mark.parametrize("validity", ["VALID", "INVALID"])
def test_whatever_loadgen_says_was_not_met_is_a_reason(validity: str) -> None:
    """LoadGen only notes too few queries where nothing enforces their number."""
    found = judged(log_of(result_validity=validity, result_min_queries_met=False))
    assert found.reasons == ("LoadGen: there were too few queries",)
    found = judged(log_of(result_validity=validity, something_new_met=False))
    assert found.reasons == ("LoadGen: no something_new_met",)
    assert judged(log_of(result_min_queries_met=True, something_new_met=None)).valid


def test_early_stopping_alone_is_told_from_all_else() -> None:
    no = {"result_validity": "INVALID", "early_stopping_met": False}
    found = judged(log_of(**no, result_perf_constraints_met=True))
    assert found.only_early
    assert not found.valid
    assert not judged(log_of(**no, result_perf_constraints_met=False)).only_early
    assert not judged(log_of(**no, result_min_queries_met=False)).only_early
    error = line("error_runtime", "Attempted to complete a sample twice.", is_error=True)
    assert not judged(log_of(error, num_errors=1, **no)).only_early
    late = judged(log_of(**no), settings_of(a=Target(0.9, 0.5)))  # a reason of our own
    assert not late.only_early
    assert not judged(log_of(early_stopping_met=False, without="result_validity")).only_early
    assert not judged(log_of()).only_early


def test_a_log_without_a_verdict_is_not_valid() -> None:
    found = judged(log_of(without="result_validity"))
    assert found.reasons == ("LoadGen's log has no verdict",)
    assert judged(log_of(result_validity="maybe")).reasons == ("LoadGen: INVALID, see its log",)


@pytest.mark.parametrize("mode", list(Mode))
def test_any_error_of_loadgen_makes_a_run_invalid_with_its_text(mode: Mode) -> None:
    twice = line("error_runtime", "Attempted to complete a sample twice.", is_error=True)
    end = line("power_end", "now")
    found = judged(log_of(twice, twice, end, num_errors=2), settings_of(mode=mode))
    assert found.reasons == ("LoadGen: error: Attempted to complete a sample twice.",)
    found = judged(log_of(end, num_errors=3), settings_of(mode=mode))
    assert found.reasons == ("LoadGen: error: 3 errors, see its log",)


def test_only_a_run_that_had_too_few_queries_is_tried_again() -> None:
    """LoadGen calls that an error; another one beside it is no reason to try once more."""
    no = {"result_validity": "INVALID", "result_min_duration_met": False}
    ran_out = line("error_runtime", "Ending early: Ran out of generated queries", is_error=True)
    other = line("error_runtime", "Attempted to complete a sample twice.", is_error=True)
    found = judged(log_of(ran_out, num_errors=1, **no))
    assert found.too_short
    assert any("Ran out" in r for r in found.reasons)
    assert not judged(log_of(ran_out, other, num_errors=2, **no)).too_short
    assert not judged(log_of(ran_out, num_errors=2, **no)).too_short


def test_a_log_that_breaks_off_is_noticed() -> None:
    log = read_log(line("result_validity", "VALID") + '\n:::MLLOG {"key": "num_err')
    assert not log.is_whole(Mode.PERFORMANCE)
    found = judged(log)
    assert found.reasons == ("LoadGen's log breaks off before its end",)
    assert found.metric is None


def test_a_run_that_broke_off_is_invalid_whatever_the_log_says() -> None:
    found = judge(settings_of(), log_of(), Counts(5, 5), {}, "the system is gone")
    assert found.reasons == ("the system is gone",)


# --- samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counts",
    [
        counts_of(100, answered=99, failed={"BLOCK_FAILED": 1}),
        counts_of(100, answered=99),
        Counts(0, 0),
    ],
)
def test_a_single_failed_or_lost_sample_makes_it_invalid(counts: Counts) -> None:
    found = judge(settings_of(), log_of(), counts, {"a": [1.0] * counts.answered})
    assert found.word == "INVALID"
    assert len(found.reasons) == 1


@pytest.mark.parametrize(
    ("scenario", "unit"), [(Scenario.SERVER, "queries/s"), (Scenario.OFFLINE, "samples/s")]
)
def test_only_answered_samples_are_throughput(scenario: Scenario, unit: str) -> None:
    """To LoadGen a failed sample is completed: its own log says 100 per second in each case."""
    settings = settings_of(scenario, a=Target(0.9, 10.0))

    def rate(answered: int, **failed: int) -> float:
        counts = counts_of(1500, answered=answered, failed=failed)
        found = judge(settings, log_of(), counts, {"a": [1.0] * 1500}).to_dict()["metric"]
        assert found["unit"] == unit
        return float(found["value"])

    assert rate(397, OVERLOADED=1103) == pytest.approx(100 * 397 / 1500)
    assert rate(750, BLOCK_FAILED=750) == 50.0
    assert rate(0, OVERLOADED=1500) == 0.0
    assert rate(1500) == 100.0


# --- percentiles ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", [Scenario.SINGLE_STREAM, Scenario.MULTISTREAM])
@pytest.mark.parametrize("percent", [98.0, 90.004, 99.99])
def test_a_percentile_that_loadgen_does_not_log_is_taken_from_the_latencies(
    scenario: Scenario, percent: float
) -> None:
    """A figure of another percentile close by is not the one that was asked for."""
    logged = {f"result_{p}_percentile_latency_ns": 1 for p in ("90.00", "99.90", "99.99")}
    del logged["result_99.99_percentile_latency_ns"]
    several = scenario is Scenario.MULTISTREAM
    samples = [1.0] * 800 if several else [float(i) for i in range(1, 101)]
    found = judged(
        log_of(**logged),
        settings_of(scenario, a=Target(percent / 100)),
        {"a": samples},
        queries_ms=[float(i) for i in range(1, 101)] if several else [],
    )
    assert found.valid
    assert found.metric is not None
    assert found.metric.value == found.judged_ms == {98.0: 98, 90.004: 91, 99.99: 100}[percent]


def test_a_performance_run_without_its_figure_is_invalid() -> None:
    for scenario, key in (
        (Scenario.OFFLINE, "result_samples_per_second"),
        (Scenario.SERVER, "result_completed_samples_per_sec"),
    ):
        assert judged(log_of(), settings_of(scenario)).valid
        found = judged(log_of(without=key), settings_of(scenario))
        assert found.reasons == ("LoadGen's log has no figure of this scenario",)
    silent = judged(log_of(), settings_of(Scenario.MULTISTREAM, a=Target(0.98)))
    assert "LoadGen's log has no figure of this scenario" in silent.reasons


@pytest.mark.parametrize("percent", [98, 99])
def test_multistream_s_bound_is_that_of_a_query_and_not_of_its_parts(percent: int) -> None:
    """Most requests are quick: but in 6% of the queries one of the eight is late. LoadGen logs p99
    and not p98."""
    settings = settings_of(Scenario.MULTISTREAM, a=Target(percent / 100, 50.0))
    parts = {"a": [5.0] * 7_940 + [100.0] * 60}
    key = "result_99.00_percentile_per_query_latency_ns"

    def run(query_ms: float, settings: RunSettings = settings) -> RunVerdict:
        late = [5.0] * 940 + [query_ms] * 60
        log = log_of(**{key: round(query_ms * 1e6)})
        return judged(log, settings, parts, queries_ms=late)

    assert run(100.0).reasons == (f"a whole query: p{percent} is 100 ms, the bound is 50 ms",)
    assert run(100.0).latency_ms == {"99.00": 100.0}
    whole = run(100.0).tasks[-1]
    assert (whole.task, whole.samples, whole.queries) == (WHOLE_QUERY, 1000, 1000)
    assert run(50.0).valid
    assert run(100.0, settings_of(Scenario.MULTISTREAM, a=Target(percent / 100))).valid


@pytest.mark.parametrize(
    ("seen_ms", "bound_ms", "said"),
    [
        (200.4, 200.0, "p90 is 200.4 ms, the bound is 200 ms"),
        (1004.0, 1000.0, "p90 is 1004 ms, the bound is 1000 ms"),
        (200.0004, 200.0, "p90 is 200.0004 ms, the bound is 200 ms"),
        (12345.678, 2e6 / 200, "p90 is 12346 ms, the bound is 10000 ms"),
        (1234567.4, 1e6, "p90 is 1234567 ms, the bound is 1000000 ms"),
        (15.31, 15.305, "p90 is 15.31 ms, the bound is 15.305 ms"),
        (0.00002, 0.00001, "p90 is 0.00002 ms, the bound is 0.00001 ms"),
    ],
)
def test_a_missed_bound_is_told_so_that_a_reader_sees_it(
    seen_ms: float, bound_ms: float, said: str
) -> None:
    found = judged(log_of(), settings_of(a=Target(0.9, bound_ms)), {"a": [seen_ms] * 100})
    assert found.reasons == (f"a: {said}",)


# --- each task -----------------------------------------------------------------------------------


def test_a_task_that_misses_its_own_target_makes_it_invalid() -> None:
    settings = settings_of(a=Target(0.9, 10.0), b=Target(0.5, 10.0))
    slow = {"a": [1.0] * 80 + [11.0] * 20, "b": [1.0] * 80 + [11.0] * 20}
    found = judged(log_of(), settings, slow)
    assert [r.partition(":")[0] for r in found.reasons] == ["a"]
    a, b = found.tasks
    assert (a.verdict, a.seen_ms, a.bound_ms, a.samples) == (Kept.MISSED, 11.0, 10.0, 100)
    assert (b.verdict, b.seen_ms) == (Kept.KEPT, 1.0)


def test_what_loadgen_s_clock_has_more_of_all_tasks_is_added_to_each_in_the_server_scenario() -> (
    None
):
    """Our clock begins when LoadGen has called us, its own when the query was to be sent. LoadGen's
    bound is the loosest: of the stricter one it knows nothing."""
    targets = {"strict": Target(0.9, 10.0), "loose": Target(0.95, 50.0), "odd": Target(0.92, 50.0)}
    ours = {t: [9.0] * 100 for t in targets}
    logged = {
        "result_50.00_percentile_latency_ns": 9_000_000,
        P90: 11_500_000,
        "result_95.00_percentile_latency_ns": 13_000_000,
        "result_99.00_percentile_latency_ns": 40_000_000,
    }
    found = judged(log_of(**logged), settings_of(Scenario.SERVER, **targets), ours)
    assert found.reasons == ("strict: p90 is 11.5 ms, the bound is 10 ms",)
    assert [(t.seen_ms, t.added_ms) for t in found.tasks] == [
        (11.5, 2.5),
        (13.0, 4.0),
        (13.0, 4.0),  # LoadGen logs p90 and p95: the larger one
    ]
    quick = {**logged, P90: 8_000_000}
    found = judged(log_of(**quick), settings_of(Scenario.SERVER, **targets), ours)
    assert [t.added_ms for t in found.tasks] == [0.0, 4.0, 4.0]  # nothing is ever taken away
    lone = judged(log_of(**logged), settings_of(Scenario.SINGLE_STREAM, **targets), ours)
    assert lone.valid
    assert not any(t.added_ms for t in lone.tasks)


@pytest.mark.parametrize("bound_ms", [None, 10.0])
@pytest.mark.parametrize("scenario", list(Scenario))
def test_a_task_that_was_never_asked_makes_the_run_invalid(
    scenario: Scenario, bound_ms: float | None
) -> None:
    settings = settings_of(scenario, a=Target(0.9, bound_ms), b=Target(0.9, bound_ms))
    counts = Counts(800, 800, queries={"a": 800})
    latencies: Any = {"a": [1.0] * 800, "b": []}
    found = judge(settings, log_of(), counts, latencies, queries_ms=[1.0] * 100)
    assert found.reasons == ("b: never asked",)
    assert [t.verdict for t in found.tasks][1] is Kept.UNASKED


def test_few_queries_of_a_task_are_said_and_in_full_length_make_the_run_invalid() -> None:
    targets = {"a": Target(0.99, 10.0), "b": Target(0.99, 10.0)}
    latencies = {"a": [1.0] * 2000, "b": [1.0] * 600}
    counts = Counts(2600, 2600, queries={"a": 2000, "b": 600})
    short = judge(settings_of(Scenario.SERVER, **targets), log_of(), counts, latencies)
    assert short.valid
    assert [(t.verdict, t.needed) for t in short.tasks] == [(Kept.KEPT, 662), (Kept.FEW, 662)]
    full = settings_of(Scenario.SINGLE_STREAM, short=False, **targets)
    found = judge(full, log_of(), counts, latencies)
    assert found.reasons == ("b: 600 queries asked for it, p99 needs 1024",)
    assert judged(log_of(), full, {"a": [1.0] * 1024, "b": [1.0] * 1024}).valid


def test_a_verdict_survives_json() -> None:
    told = json.loads(json.dumps(judged(log_of()).to_dict()))
    assert told["tasks"] == [
        {
            "task": "a",
            "percentile": 0.9,
            "bound_ms": None,
            "seen_ms": 1.0,
            "samples": 100,
            "queries": 100,
            "needed": 64,
            "verdict": "no bound",
            "added_ms": 0.0,
        }
    ]

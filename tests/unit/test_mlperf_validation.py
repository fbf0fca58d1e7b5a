"""``blockflow bench --validate``: what is concluded from answers and times, and fresh inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockflow.bench.mlperf.accuracy import decode
from blockflow.bench.mlperf.data import Inputs
from blockflow.bench.mlperf.fresh import FreshRows
from blockflow.bench.mlperf.job import Job
from blockflow.bench.mlperf.result import RunResult
from blockflow.bench.mlperf.settings import Mode, Scenario, Target, make_settings
from blockflow.bench.mlperf.tally import Counts
from blockflow.bench.mlperf.validation import (
    LOOKS,
    Check,
    Outcome,
    compare_answers,
    compare_speed,
)
from blockflow.bench.mlperf.validator import Validator, cost_ms
from blockflow.bench.mlperf.verdict import Metric, RunVerdict
from blockflow.core.errors import make_error

FLOATS = {"a": "float32"}
WEIGHTS = {"a": 1}


def elements(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


REFERENCE = {"a": {0: elements(1, -4, 2), 1: elements(0, 0, 8)}}


# --- answers -------------------------------------------------------------------------------------


def test_the_same_answers_pass_also_when_they_are_rounded_otherwise() -> None:
    near = elements(1.1, -4, 2)  # of another batch: 0.1 beside the 4 of the largest element
    found = compare_answers([("a", 0, near), ("a", 1, REFERENCE["a"][1])], REFERENCE, FLOATS)
    assert (found.outcome, found.compared, found.differing) == (Outcome.PASSED, 2, 0)
    assert found.largest == pytest.approx(0.025)


@pytest.mark.parametrize(
    "answer",
    [
        elements(2, -4, 2),
        elements(0, 0, 0),
        elements(1, -4),
        elements(1, -4, 2, 0),
        elements(float("nan"), -4, 2),
        elements(1, -4, float("inf")),
        b"",
    ],
)
def test_a_single_other_answer_fails(answer: bytes) -> None:
    logged = [("a", 1, REFERENCE["a"][1]), ("a", 0, answer), ("a", 1, REFERENCE["a"][1])]
    found = compare_answers(logged, REFERENCE, FLOATS)
    assert (found.outcome, found.differing) == (Outcome.FAILED, 1)
    assert "a, row 0" in found.sentence()
    json.dumps(found.figures(), allow_nan=False)


def test_every_answer_counts_when_a_row_was_asked_twice() -> None:
    good = REFERENCE["a"][0]
    found = compare_answers([("a", 0, elements(9, 9, 9)), ("a", 0, good)], REFERENCE, FLOATS)
    assert (found.compared, found.differing) == (2, 1)


def test_nothing_that_is_not_finite_is_taken_for_the_same_by_chance() -> None:
    reference = {"a": {0: elements(float("nan"), 1), 1: elements(0, 0)}}
    same = elements(float("nan"), 1.01)
    assert compare_answers([("a", 0, same)], reference, FLOATS).outcome is Outcome.PASSED
    assert compare_answers([("a", 0, elements(1, 1))], reference, FLOATS).differing == 1
    assert compare_answers([("a", 1, elements(0, 1e-9))], reference, FLOATS).differing == 1
    assert compare_answers([("a", 1, elements(0, -0.0))], reference, FLOATS).differing == 0


def test_whole_numbers_and_bfloat16_are_compared_as_numbers() -> None:
    def tokens(*values: int) -> bytes:
        return np.array(values, np.int64).tobytes()

    assert not compare_answers(
        [("a", 0, tokens(7))], {"a": {0: tokens(7)}}, {"a": "int64"}
    ).differing
    assert compare_answers([("a", 0, tokens(8))], {"a": {0: tokens(7)}}, {"a": "int64"}).differing
    one = (np.array([1.0], np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    assert decode(one, "bfloat16").tolist() == [1.0]


def test_without_answers_nothing_is_concluded() -> None:
    assert compare_answers([], REFERENCE, FLOATS).outcome is Outcome.UNDECIDED


def test_a_task_of_which_no_answer_was_logged_is_not_passed_by_the_others() -> None:
    reference, dtypes = {**REFERENCE, "b": {0: elements(5)}}, {**FLOATS, "b": "float32"}
    good = [("a", 0, REFERENCE["a"][0])] * 100
    found = compare_answers(good, reference, dtypes)
    assert (found.outcome, found.compared, found.unseen) == (Outcome.UNDECIDED, 100, ("b",))
    assert "no answer of b" in found.sentence()
    both = compare_answers([*good, ("b", 0, elements(5))], reference, dtypes)
    assert (both.outcome, both.unseen) == (Outcome.PASSED, ())
    wrong = compare_answers([("a", 0, elements(9, 9, 9))], reference, dtypes)
    assert wrong.outcome is Outcome.FAILED  # one that differs needs no others


# --- speed ---------------------------------------------------------------------------------------


def test_ways_that_are_equally_quick_pass() -> None:
    found = compare_speed([10, 10.2, 9.9, 10.1, 10], [10, 10, 10.1, 9.9, 10.1], 0.1)
    assert found.outcome is Outcome.PASSED


def test_a_machine_that_drifts_does_not_spoil_the_pairs() -> None:
    found = compare_speed([10, 20, 30, 15, 12], [10.1, 19.9, 30.2, 15, 12.1], 0.1)
    assert found.noise > 0.2
    assert found.outcome is Outcome.PASSED


def test_a_way_that_is_much_quicker_fails() -> None:
    found = compare_speed([10, 10.2, 9.9, 10.1, 10], [8, 8.1, 8.2, 7.9, 8], 0.1)
    assert found.outcome is Outcome.FAILED
    assert "1.25 times" in found.sentence("new", "old")


def test_a_way_that_is_slower_is_no_cheat() -> None:
    assert compare_speed([8, 8, 8, 8, 8], [10, 10, 10, 10, 10], 0.1).outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("slow", "quick"),
    [
        ([10, 14, 9, 15, 10], [10, 10, 10, 10, 10]),  # too wide to pass
        ([13, 24, 12, 39, 14], [10, 20, 10, 30, 11]),  # all above, and the noise as large
    ],
)
def test_nothing_is_concluded_inside_the_noise(slow: list[float], quick: list[float]) -> None:
    found = compare_speed(slow, quick, 0.1)
    assert found.outcome is Outcome.UNDECIDED
    assert "noise" in found.sentence("new", "old")


def test_three_looks_together_mislead_in_less_than_5_of_100_tests() -> None:
    """Two ways that differ by just what is allowed: each verdict is wrong on one side."""
    beyond = {n: 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n for n, k in LOOKS.items()}
    assert sum(beyond.values()) < 0.05
    drawn = chance()
    ends = dict.fromkeys(Outcome, 0)
    for _ in range(2000):
        slow = (1.1 * np.exp(drawn.normal(0, 0.05, max(LOOKS)))).tolist()
        for n, k in LOOKS.items():
            outcome = compare_speed(slow[:n], [1.0] * n, 0.1, k).outcome
            if outcome is not Outcome.UNDECIDED:
                break
        ends[outcome] += 1
    assert ends[Outcome.PASSED] < 0.025 * 2000
    assert ends[Outcome.FAILED] < 0.025 * 2000


def test_the_interval_leaves_out_what_the_look_says() -> None:
    slow = [1.0, 5.0, 2.0, 4.0, 3.0]
    found = compare_speed(slow, [1.0] * 5, 0.1, beyond=1).ratio
    assert (found.value, found.low, found.high, found.n) == (3.0, 2.0, 4.0, 5)
    for bad in ({"slow": [1.0, 1.0], "beyond": 1}, {"slow": [1.0, 0.0]}, {"slow": []}):
        pairs: Any = {"tolerance": 0.1, "quick": [1.0] * len(bad["slow"]), **bad}
        with pytest.raises(ValueError):
            compare_speed(**pairs)


def test_a_speed_is_told_with_what_parts_it_from_what_is_allowed() -> None:
    narrow = compare_speed([1.10004] * 6, [1.0] * 6, 0.1)
    assert "takes 1.1 times as long as old (1.10004-1.10004, 6 pairs" in narrow.sentence(
        "new", "old"
    )
    huge = compare_speed([1004.0] * 6, [1.0] * 6, 0.1).sentence("new", "old")
    assert "takes 1004 times" in huge


def result_of(
    scenario: Scenario, latencies: dict[str, list[float]], metric: Any = None
) -> RunResult:
    targets = {task: Target(0.9) for task in latencies}
    settings = make_settings(scenario, Mode.PERFORMANCE, targets, short=True)
    verdict = RunVerdict(True, (), metric, False, {})
    return RunResult(Path("x"), settings, verdict, Counts(), (), latencies)


def test_costs_of_mixed_tasks_are_theirs_by_weight() -> None:
    latencies = {"a": [1.0, 1.0, 9.0, 9.0], "b": [4.0] * 4, "c": []}
    found = cost_ms(result_of(Scenario.SERVER, latencies), {"a": 3, "b": 1, "c": 1})
    assert found == pytest.approx((3 * 1 + 4) / 4)
    offline = result_of(Scenario.OFFLINE, latencies, Metric("throughput", 500.0, "samples/s"))
    assert cost_ms(offline, {"a": 1}) == pytest.approx(2.0)


# --- the tests themselves, of systems whose times are made up ------------------------------------


def honest(job: Job) -> float:
    """Milliseconds that a sample costs."""
    return 10.0


def caching(job: Job) -> float:
    return 5.0 if Path(job.data).name == "repeated" else 10.0


def tuned(job: Job) -> float:
    return 5.0 if job.settings.seed == 1 else 10.0


def validator(
    scenario: Scenario,
    folder: Path,
    cost: Callable[[Job], float],
    room: int = 1000,
    weights: Mapping[str, int] = WEIGHTS,
) -> Validator:
    """Runs ask for the task ``a`` alone; after ``room`` runs the disk is full."""
    targets = dict.fromkeys(weights, Target(0.9, 1e3))
    settings = make_settings(scenario, Mode.PERFORMANCE, targets, short=True, rate=100.0, seed=1)
    rows = [np.full((1, 4), i, np.float32) + chance().random((1, 4), np.float32) for i in range(8)]
    left = iter(range(room))

    def run(job: Job, name: str, what: str) -> RunResult:
        if next(left, None) is None:
            raise make_error("NO_SPACE", "0 MiB free")
        took = cost(job)
        verdict = RunVerdict(True, (), Metric("throughput", 1e3 / took, "samples/s"), False, {})
        counts = Counts(64, 64)
        return RunResult(folder / name, job.settings, verdict, counts, (), {"a": [took] * 64})

    return Validator(
        Job(
            *("tcp://127.0.0.1:1", "", str(folder / "data"), weights, dict.fromkeys(weights, 8)),
            settings,
        ),
        dict.fromkeys(weights, Inputs(rows, "float32", None, "a test")),
        dict.fromkeys(weights, ("float32", 16)),
        folder,
        run,
        seconds=0.5,
        chance=chance(),
    )


@pytest.mark.parametrize("scenario", list(Scenario))
@pytest.mark.parametrize(
    ("cost", "caught"), [(honest, set()), (caching, {Check.CACHING}), (tuned, {Check.SEEDS})]
)
def test_a_cheat_is_caught_in_every_scenario_and_by_its_own_test(
    tmp_path: Path, scenario: Scenario, cost: Callable[[Job], float], caught: set[Check]
) -> None:
    test = validator(scenario, tmp_path, cost)
    found = {c: test.check(c).outcome for c in (Check.CACHING, Check.SEEDS)}
    assert {c for c, outcome in found.items() if outcome is Outcome.FAILED} == caught
    assert {c for c, outcome in found.items() if outcome is Outcome.PASSED} == set(found) - caught


@pytest.mark.parametrize("scenario", [Scenario.SERVER, Scenario.OFFLINE])
def test_runs_that_did_not_ask_for_every_task_are_not_compared(
    tmp_path: Path, scenario: Scenario
) -> None:
    """A run of other tasks costs something else: that is neither a cheat nor an honest system."""
    test = validator(scenario, tmp_path, honest, weights={"a": 1000, "rare": 1})
    found = test.check(Check.SEEDS)
    assert found.outcome is Outcome.UNDECIDED
    assert "no latency of rare" in found.why
    assert len(found.runs) == 1


def test_a_test_whose_next_run_cannot_begin_keeps_its_pairs(tmp_path: Path) -> None:
    found = validator(Scenario.SERVER, tmp_path, honest, room=5).check(Check.SEEDS)
    assert found.outcome is Outcome.UNDECIDED
    assert found.error is not None
    assert found.error.code == "NO_SPACE"
    assert found.to_dict()["cost_ms"] == {"alternate": [10.0, 10.0, 10.0], "official": [10.0, 10.0]}


# --- fresh inputs --------------------------------------------------------------------------------


def chance() -> np.random.Generator:
    return np.random.default_rng(5)


def test_fresh_rows_are_like_the_data_and_all_different() -> None:
    data = [np.linspace(0, 1, 6, dtype=np.float32).reshape(1, 2, 3) * (i + 1) for i in range(4)]
    maker = FreshRows(data, chance())
    first, second = maker.draw(50), maker.draw(50)
    assert {r.shape for r in first} == {(1, 2, 3)}
    assert {r.dtype for r in first} == {np.dtype(np.float32)}
    assert all(r.min() >= 0 and r.max() <= 4 for r in first)
    contents = {r.tobytes() for r in (*data, *first, *second)}
    assert len(contents) == 104


def test_rows_of_several_shapes_keep_their_turn() -> None:
    data = [np.zeros((1, n), np.float32) for n in (2, 5)]
    maker = FreshRows(data, chance())
    different = maker.draw(6)
    same = maker.like(different)
    assert [r.shape for r in different] == [r.shape for r in same] == [(1, 2), (1, 5)] * 3
    assert len({r.tobytes() for r in different}) == 6
    assert len({r.tobytes() for r in same}) == 2
    assert not {r.tobytes() for r in same} & {r.tobytes() for r in different}


def test_tokens_are_drawn_from_those_of_the_data() -> None:
    data = [np.array([[3, 900, 17, 4]], np.int64)]
    rows = FreshRows(data, chance()).draw(20)
    assert set(np.concatenate(rows).reshape(-1).tolist()) <= {3, 900, 17, 4}
    assert rows[0].dtype == np.int64


def test_where_there_are_no_more_contents_there_are_fewer_rows() -> None:
    data = [np.array([[0]], np.uint8), np.array([[1]], np.uint8)]
    maker = FreshRows(data, chance())
    assert maker.draw(5) == []
    assert maker.like([data[0]]) == []

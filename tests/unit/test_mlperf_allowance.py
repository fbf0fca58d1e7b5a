"""``blockflow bench``: a long server run is given up when it cannot become VALID any more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockflow.bench.mlperf.allowance import Allowance, allowance_of, most_queries
from blockflow.bench.mlperf.driver import GIVEN_UP, leave
from blockflow.bench.mlperf.run import read_run
from blockflow.bench.mlperf.settings import Mode, RunSettings, Scenario, Target, make_settings
from blockflow.bench.mlperf.tally import Counts, Tally


def server(rate: float = 100.0, **kw: Any) -> RunSettings:
    targets = kw.pop("targets", {"a": Target(0.99, 10.0)})
    kw = {"short": False, "rate": rate, **kw}
    return make_settings(Scenario.SERVER, Mode.PERFORMANCE, targets, **kw)


def late_until_given_up(settings: RunSettings, task: str, ms: float, most: int) -> int | None:
    """How many late answers it takes; None: not even ``most`` are enough."""
    allowance = Allowance(settings)
    return next((n for n in range(1, most + 1) if allowance.spent(task, 1, ms)), None)


def test_a_run_is_lost_with_one_late_answer_more_than_the_percentile_allows() -> None:
    settings = server()
    assert settings.min_queries == 270_336  # 600 s at 100 a second are less
    assert late_until_given_up(settings, "a", 10.1, 10_000) == 2_704
    assert late_until_given_up(settings, "a", 10.0, 10_000) is None  # just kept
    why = Allowance(settings).spent("a", 3_000, 11.0)
    assert why == "3,000 answers took longer than 10 ms; p99 allows 2,703 of at most 270,336"


def test_a_run_that_goes_on_for_its_time_may_have_more_late_answers() -> None:
    """No run is given up that could still have been VALID, however many queries chance brings."""
    settings = server(rate=1000.0)
    assert 600_000 < most_queries(settings) < 605_000
    found = late_until_given_up(settings, "a", 10.1, 10_000)
    assert found is not None
    assert 6_000 < found < 6_050


def test_the_stricter_bound_of_a_single_task_can_be_lost_as_well() -> None:
    """LoadGen's bound is the loosest: by that, the run would go on to its end."""
    targets = {"strict": Target(0.99, 10.0), "loose": Target(0.9, 100.0)}
    settings = server(targets=targets, asked={"strict": 0.25, "loose": 0.75})
    asking = most_queries(settings) * 0.25
    found = late_until_given_up(settings, "strict", 50.0, 100_000)
    assert found is not None
    assert asking * 0.01 < found < asking * 0.0101 + 5
    assert late_until_given_up(settings, "loose", 50.0, 100_000) is None


def test_only_runs_that_take_long_to_become_valid_are_given_up() -> None:
    assert allowance_of(server()) is not None
    assert allowance_of(server(short=True)) is None
    assert allowance_of(replace(server(), mode=Mode.ACCURACY)) is None
    brief = server(duration_s=60.0)  # but all the queries that the rules want
    assert not brief.full_length
    assert allowance_of(brief) is not None
    lone = make_settings(
        Scenario.SINGLE_STREAM, Mode.PERFORMANCE, {"a": Target(0.9, 1.0)}, short=False
    )
    assert allowance_of(lone) is None


def test_a_run_that_is_given_up_is_invalid_and_partial_and_nothing_has_broken(
    tmp_path: Path,
) -> None:
    settings = server(targets={"a": Target(0.99, 10.0), "b": Target(0.99, 10.0)})
    tally = Tally(["a", "b"], 1.0, allowance=allowance_of(settings))
    tally.issued(9_000, ["a", "b"])
    tally.answered("b", 1, 5.0, ())
    late = 0
    while not tally.given_up.is_set():
        tally.answered("a", 1, 20.0, ())
        late += 1
        assert late < 9_000
    assert tally.code == "DEADLINE_EXCEEDED"
    assert leave(tmp_path, tally) == GIVEN_UP
    found = read_run(settings, tmp_path, GIVEN_UP, Counts())
    assert not found.verdict.valid
    assert "cannot become VALID" in found.verdict.reasons[0]
    assert found.kind == "partial"
    assert not found.broke_off
    assert (found.counts.answered, len(found.latencies["a"])) == (late + 1, late)


@pytest.mark.parametrize(
    ("code", "given_up"), [("OVERLOADED", True), ("DEADLINE_EXCEEDED", True), ("POISON", False)]
)
def test_one_request_that_is_refused_for_the_rate_is_enough(code: str, given_up: bool) -> None:
    tally = Tally(["a"], 1.0, allowance=allowance_of(server()))
    tally.failed("a", 1, 1.0, code, "no")
    assert tally.given_up.is_set() is given_up
    assert tally.code == (code if given_up else "")
    short = Tally(["a"], 1.0, allowance=allowance_of(server(short=True)))
    short.failed("a", 1, 1.0, code, "no")
    assert not short.given_up.is_set()

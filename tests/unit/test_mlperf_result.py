"""``blockflow bench``: what is said of a rate that was found, and what is kept; no LoadGen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlperf_rig import server_job

from blockflow.bench.mlperf.job import Job
from blockflow.bench.mlperf.plan import Plan
from blockflow.bench.mlperf.result import RunResult, ScenarioResult
from blockflow.bench.mlperf.session import Session
from blockflow.bench.mlperf.settings import Mode, Scenario
from blockflow.bench.mlperf.tally import Counts
from blockflow.bench.mlperf.verdict import RunVerdict
from blockflow.core.errors import make_error


def result_at(
    rate: float, valid: bool, probe: bool = False, only_early: bool = False, error: Any = None
) -> RunResult:
    job = server_job(short=probe)
    verdict = RunVerdict(valid, (), None, False, {}, only_early=only_early)
    settings = replace(job.settings, rate=rate, probe=probe)
    return RunResult(Path("x"), settings, verdict, Counts(), (), {}, error)


def test_a_limit_is_one_of_the_results_kind_or_says_how_short_its_run_was() -> None:
    best = result_at(100.0, True)
    stricter = result_at(102.0, False, probe=True, only_early=True)
    probe = result_at(104.0, False, probe=True)

    def found(*more: RunResult) -> tuple[float | None, float | None, bool]:
        told = ScenarioResult(best, [best, *more], precision=0.05).to_dict()["found"]
        return told["invalid_at"], told["invalid_s"], told["precise"]

    assert found(stricter) == (None, None, False)
    assert found(stricter, stricter, probe, probe) == (104.0, 5.0, True)
    assert found(probe) == (104.0, 5.0, False)  # tried once: nobody believes it yet
    assert found(probe, result_at(104.0, False)) == (104.0, None, True)
    given_up = result_at(104.0, False, error=make_error("DEADLINE_EXCEEDED", "late"))
    assert found(result_at(90.0, True, probe=True), given_up) == (104.0, None, True)
    gone = result_at(104.0, False, error=make_error("CONNECTION_LOST", "gone"))
    assert found(gone) == (None, None, False)
    strict = replace(stricter, settings=replace(best.settings, rate=102.0))
    told = ScenarioResult(best, [best, best, strict, strict], precision=0.05)
    assert told.precise  # by its own rules
    assert not ScenarioResult(best, [best, best, strict], precision=0.05).precise
    assert not ScenarioResult(best, [best, strict, strict], precision=0.05).precise


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

"""Which metrics two revisions are compared by, what a run says of itself, and what is refused."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from blockflow.bench.compare.arms import values_of
from blockflow.bench.compare.choice import ONLY, check_choice, check_verdicts, chosen
from blockflow.bench.compare.judgement import Arm, Metric
from blockflow.bench.compare.run import Run, parse_args
from blockflow.bench.mlperf.job import disk
from blockflow.bench.pipeline_figures import AGAIN, APART, IN_PROCESS, Sample, Series
from blockflow.bench.pipeline_ways import WAYS
from blockflow.bench.results import Figure, ResultFile
from blockflow.bench.worker_start import start_figures
from blockflow.core.errors import BlockFlowError, make_error
from tests.unit.test_bench_compare import RATE, RESULTS, SIZE, TIME, one, reported

CHOSEN = {
    *("latency to in-process, tensormq", "latency to in-process, one-worker"),
    *("latency, tensormq", "latency, one-worker"),
    *("overhead per hop, tensormq", "overhead per hop, one-worker"),
    *("worker ready, tensormq", "worker USS without state, tensormq"),
}
"""What ``make bench-compare`` compares, as docs/measuring.md says it."""


def emitted() -> list[Figure]:
    """Every latency and start of ``make bench``, by the code that names them."""
    series = Series(1, {"engine": "exported", "precision": "fp32", "model": "resnet18"})
    sample = Sample(10.0, ((0.1, 0.1, 0.1, 9.0),))
    series.latency = {way: [sample] * 5 for way in (IN_PROCESS, AGAIN, APART, *WAYS)}
    starts = start_figures([{"start_ms": 9.0, "load_ms": 1.0, "uss_mib": 5.0}])
    return [*series.figures(), *starts]


@pytest.mark.parametrize("source", ["code", "stored results"])
def test_the_default_choice_finds_what_the_benchmark_really_writes(source: str) -> None:
    if source == "code":
        found = emitted()
    else:
        found = [
            Figure.from_dict(line) for line in ResultFile(RESULTS / "bench.jsonl", "bench").read()
        ]
    texts = [m.text for m in chosen(values_of(found), re.compile(ONLY))]
    assert {", ".join(text.split(", ")[:2]) for text in texts} == CHOSEN


def test_whatever_is_compared_by_default_is_better_when_it_is_less() -> None:
    metrics = chosen(values_of(emitted()), re.compile(ONLY))
    assert {m.more_is_better for m in metrics} == {False}


def refused(base: Mapping[Metric, float], tree: Mapping[Metric, float], only: str) -> str:
    with pytest.raises(BlockFlowError) as error:
        check_choice({Arm.BASE: base, Arm.TREE: tree}, re.compile(only))
    assert error.value.code == "INVALID_REQUEST"
    return str(error.value)


def test_a_choice_that_finds_nothing_in_both_arms_is_refused() -> None:
    some = {TIME: 1.0, SIZE: 2.0}
    check_choice({Arm.BASE: some, Arm.TREE: {TIME: 1.0, RATE: 1.0}}, re.compile(""))
    text = refused(some, some, "^renamed")
    assert "'^renamed' finds 0 of 2 in the base and 0 of 2 in the tree" in text
    assert "the tree measures latency, x; USS, x" in text
    # A metric that the tree has renamed: each arm has one, but none can be compared.
    assert "1 of 1 in the base and 1 of 1 in the tree" in refused({TIME: 1.0}, {RATE: 1.0}, "")
    assert "the tree measures nothing" in refused(some, {}, "")
    many = {Metric(f"m{i}", "ms", False): 1.0 for i in range(20)}
    assert "m11; and 8 more" in refused(many, many, "none")


def test_a_comparison_without_any_verdict_is_an_error() -> None:
    assert check_verdicts(reported()) is None
    few = check_verdicts([one(2, TIME, [1.0] * 2, [2.0] * 2)])
    assert few is not None and "none of 1 metrics has a verdict" in str(few)
    empty = check_verdicts([])
    assert empty is not None and empty.code == "INVALID_REQUEST"


def test_every_flaw_of_a_run_is_told() -> None:
    run = Run(16)
    assert (run.flaw, run.interrupted) == ("", False)
    run.broken = make_error("TIMEOUT", "too long")
    assert run.flaw == "partial result, ended early after 0 of 16 visits: TIMEOUT: too long"
    assert not run.interrupted
    run.broken, run.moved = make_error("CANCELLED", "interrupted"), True
    assert run.interrupted
    assert "CANCELLED" in run.flaw and "the working tree changed" in run.flaw


def test_what_the_disk_refuses_is_a_typed_error_and_other_errors_pass() -> None:
    for number, code in ((errno.ENOSPC, "NO_SPACE"), (errno.EACCES, "INVALID_REQUEST")):
        with pytest.raises(BlockFlowError) as error, disk(Path("x"), "a remedy"):
            raise OSError(number, "refused")
        assert (error.value.code, error.value.hint) == (code, "a remedy")
    with pytest.raises(BlockFlowError, match="other") as error, disk(Path("x"), "a remedy"):
        raise make_error("TIMEOUT", "other", hint="its own")
    assert error.value.hint == "its own"


def test_the_metrics_of_another_benchmark_are_all_compared() -> None:
    plan, _ = parse_args(["HEAD~1"])
    assert plan.only.pattern == ONLY
    plan, _ = parse_args(["HEAD~1", "--bench", "blockflow.bench.hops --quick"])
    assert plan.only.pattern == ""
    assert plan.bench == ("blockflow.bench.hops", "--quick")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["A", "--rounds", "0"],
        ["A", "--only", "("],
        ["A", "--bench", ""],
        ["A", "--timeout", "-5"],
        ["A", "--timeout", "nan"],
        ["A", "--timeout", "inf"],
    ],
)
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(arguments)

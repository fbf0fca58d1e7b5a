"""``blockflow bench``: what is kept of a call, whatever happens in it; no LoadGen, no system."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from blockflow.bench.mlperf import session as session_module
from blockflow.bench.mlperf.calibrate import Calibration
from blockflow.bench.mlperf.document import make_document
from blockflow.bench.mlperf.job import Job
from blockflow.bench.mlperf.plan import Plan
from blockflow.bench.mlperf.report import HTML, MARKDOWN, SUMMARY, write_report, write_summary
from blockflow.bench.mlperf.result import RunResult
from blockflow.bench.mlperf.run import _follow, patience_of, read_counts
from blockflow.bench.mlperf.session import Session
from blockflow.bench.mlperf.settings import Mode, Scenario, Target, make_settings
from blockflow.bench.mlperf.tally import Counts
from blockflow.bench.mlperf.verdict import RunVerdict
from blockflow.cli import bench as bench_module
from blockflow.cli.main import main
from blockflow.core.errors import BlockFlowError, make_error
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import TaskRoute

SPEC = TensorSpec("float32", ("rows", 4))
ROUTE = TaskRoute("a", ("trunk",), Contract(SPEC, SPEC))
ALL = [Scenario.SINGLE_STREAM, Scenario.SERVER, Scenario.OFFLINE]

Runs = Callable[[Job, Path], RunResult]


class FakeClient:
    """Of a system with one task."""

    address = "tcp://nowhere"

    def __init__(self, *args: Any, **kw: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def wait_ready(self, **kw: Any) -> dict[str, TaskRoute]:
        return {"a": ROUTE}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Runs], None]:
    """A system whose lone request takes 5 ms, and the runs that LoadGen would do of it."""
    monkeypatch.setattr(session_module, "Client", FakeClient)
    calibrated = Calibration({"a": 5.0}, 100.0, 100.0)
    monkeypatch.setattr(session_module, "calibrate", lambda *args: calibrated)
    steady = SimpleNamespace(calibrate=lambda s: None, compare=lambda *args: None)
    monkeypatch.setattr(session_module, "calibration", steady)
    monkeypatch.setattr(session_module, "check_loadgen", lambda: None)
    monkeypatch.setattr(bench_module, "check_loadgen", lambda: None)

    def plant(runs: Runs) -> None:
        monkeypatch.setattr(session_module, "run", lambda job, folder, progress: runs(job, folder))

    return plant


def result(job: Job, folder: Path, error: BlockFlowError | None = None) -> RunResult:
    verdict = RunVerdict(error is None, () if error is None else ("it",), None, False, {})
    return RunResult(folder, job.settings, verdict, Counts(9, 9), (), {"a": [1.0]}, error)


def server_ends_with(code: str) -> Runs:
    def run(job: Job, folder: Path) -> RunResult:
        failed = job.settings.scenario is Scenario.SERVER
        return result(job, folder, make_error(code, "it broke off") if failed else None)

    return run


def defect_in_server(job: Job, folder: Path) -> RunResult:
    if job.settings.scenario is Scenario.SERVER:
        raise KeyError("kpi")
    return result(job, folder)


def plan_of(out: Path, **kw: Any) -> Plan:
    kw = {"latency_ms": {"a": 20.0}, "rate": 50.0, "short": True, **kw}
    return Plan({"a": 1}, ALL, [Mode.PERFORMANCE], out, data="synthetic:2", **kw)


def quiet(what: str, counts: Counts | None) -> None:
    pass


def test_an_impossible_bound_of_a_later_scenario_is_refused_before_the_first_run(
    fake: Callable[[Runs], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def run(job: Job, folder: Path) -> RunResult:
        begun.append(folder.name)
        return result(job, folder)

    fake(run)

    def calibrate(client: Any, library: Any, data: Any, settings: Any) -> Calibration:
        slow = settings.scenario is Scenario.SERVER
        return Calibration({"a": 50.0 if slow else 5.0}, 100.0, 100.0)

    monkeypatch.setattr(session_module, "calibrate", calibrate)
    with pytest.raises(BlockFlowError, match="no load can keep 20 ms"):
        Session(plan_of(tmp_path), quiet).run()
    assert begun == []


def test_more_rows_than_a_request_brings_are_refused_and_not_quietly_fewer(
    fake: Callable[[Runs], None], tmp_path: Path
) -> None:
    most: list[int] = []

    def run(job: Job, folder: Path) -> RunResult:
        most.append(job.most["a"])
        return result(job, folder)

    fake(run)
    limit = ROUTE.max_rows
    asked = f"a request of 'a' brings at most {limit} rows, not {limit + 1}"
    with pytest.raises(BlockFlowError, match=asked) as told:
        Session(plan_of(tmp_path, rows=limit + 1), quiet).run()
    assert told.value.where == "--rows"
    assert most == []
    for rows in (limit, 0, limit - 1):
        Session(plan_of(tmp_path, rows=rows), quiet).run()
    assert most == [1, 1, limit, 1, 1, limit, 1, 1, limit - 1]  # offline is the last


@pytest.mark.parametrize(
    ("code", "begun"),
    [
        ("TIMEOUT", 3),
        ("INTERNAL", 3),
        ("CONNECTION_LOST", 2),
        ("NO_SPACE", 2),
        ("CANCELLED", 2),
    ],
)
def test_a_scenario_that_failed_keeps_no_other_from_being_run_unless_nobody_is_there(
    fake: Callable[[Runs], None], tmp_path: Path, code: str, begun: int
) -> None:
    fake(server_ends_with(code))
    session = Session(plan_of(tmp_path), quiet)
    session.run()
    assert len(session.results) == begun
    assert session.error is not None
    assert session.error.code == code
    document = make_document(session, "a test")
    assert (document["partial"], document["valid"]) == (True, False)


def test_two_calls_never_write_to_one_folder(fake: Callable[[Runs], None], tmp_path: Path) -> None:
    """The runs have the same names: one call would read the other's logs as its own."""
    refused: list[BlockFlowError] = []

    def run(job: Job, folder: Path) -> RunResult:
        fake(result)  # the second call's runs
        with pytest.raises(BlockFlowError, match="another call") as caught:
            Session(plan_of(tmp_path / "out"), quiet).run()
        fake(run)
        refused.append(caught.value)
        return result(job, folder)

    fake(run)
    session = Session(plan_of(tmp_path / "out"), quiet)
    session.run()
    assert session.error is None
    assert {(e.code, e.where) for e in refused} == {("INVALID_REQUEST", str(tmp_path / "out"))}
    fake(result)
    Session(plan_of(tmp_path / "out"), quiet).run()  # the first one has ended


@pytest.mark.parametrize("code", ["OVERLOADED", "DEADLINE_EXCEEDED"])
def test_a_rate_that_is_too_high_is_invalid_and_no_failure_of_the_call(
    fake: Callable[[Runs], None], tmp_path: Path, code: str
) -> None:
    fake(server_ends_with(code))
    session = Session(plan_of(tmp_path), quiet)
    session.run()
    assert session.error is None
    document = make_document(session, "a test")
    assert [(r["verdict"], r["kind"]) for r in document["results"]] == [
        ("VALID", "short"),
        ("INVALID", "partial"),
        ("VALID", "short"),
    ]
    assert (document["partial"], document["valid"]) == (False, False)


def test_a_defect_is_an_error_of_the_call_and_what_was_measured_stays(
    fake: Callable[[Runs], None], tmp_path: Path
) -> None:
    fake(defect_in_server)
    session = Session(plan_of(tmp_path), quiet)
    session.run()
    assert [r.result.settings.scenario for r in session.results] == [ALL[0], ALL[2]]
    assert session.error is not None
    assert (session.error.code, session.error.message) == ("INTERNAL", "KeyError: 'kpi'")
    assert "raise KeyError" in session.error.details["traceback"]

    def broken(job: Job, folder: Path) -> RunResult:
        raise KeyError("kpi")

    fake(broken)
    with pytest.raises(KeyError):  # nothing is lost
        Session(plan_of(tmp_path), quiet).run()


def test_after_each_run_there_is_a_summary_that_says_it_is_not_the_last(
    fake: Callable[[Runs], None], tmp_path: Path
) -> None:
    """What a call leaves that is killed."""
    for name in (SUMMARY, MARKDOWN, HTML):
        (tmp_path / name).write_text("of an older call")
    seen: list[tuple[bool, str, int]] = []

    def run(job: Job, folder: Path) -> RunResult:
        told = json.loads((tmp_path / SUMMARY).read_text())
        seen.append((told["partial"], told["error"]["code"], len(told["results"])))
        assert not (tmp_path / MARKDOWN).exists()
        assert not (tmp_path / HTML).exists()
        return result(job, folder)

    def keep(session: Session) -> None:
        write_summary(make_document(session, "a test"), tmp_path)

    fake(run)
    plan = replace(plan_of(tmp_path), modes=[Mode.PERFORMANCE, Mode.ACCURACY])
    session = Session(plan, quiet, keep=keep)
    session.run()
    assert seen == [(True, "CANCELLED", n) for n in range(6)]
    document = make_document(session, "a test")
    assert (document["partial"], document["valid"]) == (False, True)
    write_report(document, session.results, tmp_path)
    assert (tmp_path / MARKDOWN).exists()


def test_the_summary_of_a_call_that_goes_on_tells_what_has_failed(
    fake: Callable[[Runs], None], tmp_path: Path
) -> None:
    told: list[Any] = []

    def keep(session: Session) -> None:
        told.append(make_document(session, "a test")["error"]["code"])

    fake(defect_in_server)
    Session(plan_of(tmp_path), quiet, keep=keep).run()
    assert told[-1] == "INTERNAL"
    assert told[:4] == ["CANCELLED", "CANCELLED", "CANCELLED", "INTERNAL"]


# --- the command ---------------------------------------------------------------------------------

ASKED = ("bench", "--task", "a", "--address", "tcp://127.0.0.1:1", "--short", "--rate", "50")
SCENARIOS = tuple(x for s in ALL for x in ("--scenario", str(s)))


def test_the_command_writes_what_it_has_measured_before_a_defect(
    fake: Callable[[Runs], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[int] = []

    def run(job: Job, folder: Path) -> RunResult:
        kept.append(len(json.loads((tmp_path / SUMMARY).read_text())["results"]))
        if job.settings.scenario is Scenario.OFFLINE:
            raise ZeroDivisionError("what")
        return result(job, folder)

    fake(run)
    bound = ("--target-latency-ms", "20", "--data", "synthetic:2", "--out", str(tmp_path))
    assert main([*ASKED, *SCENARIOS, *bound]) != 0
    assert kept == [0, 1, 2]
    found = json.loads((tmp_path / SUMMARY).read_text())
    assert (len(found["results"]), found["partial"]) == (2, True)
    assert found["error"]["code"] == "INTERNAL"
    assert "PARTIAL: INTERNAL: ZeroDivisionError: what" in (tmp_path / MARKDOWN).read_text()
    assert "Verdicts of LoadGen" in capsys.readouterr().out


def test_what_goes_wrong_at_the_end_of_the_system_costs_no_result(
    fake: Callable[[Runs], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stubborn(FakeClient):
        def __exit__(self, *args: object) -> None:
            raise RuntimeError("it does not stop")

    fake(result)
    monkeypatch.setattr(session_module, "Client", Stubborn)
    bound = ("--target-latency-ms", "20", "--data", "synthetic:2", "--out", str(tmp_path))
    assert main([*ASKED, *SCENARIOS, *bound]) != 0
    found = json.loads((tmp_path / SUMMARY).read_text())
    assert len(found["results"]) == 3
    assert found["error"]["message"] == "RuntimeError: it does not stop"


MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"


@pytest.mark.parametrize(
    ("command", "status", "gathered"),
    [
        ("echo new > results/mlperf/summary.json", 0, "new"),
        ("echo new > results/mlperf/summary.json; exit 5", 2, "new"),
        ("exit 2", 2, None),
    ],
)
def test_make_gathers_no_older_summary_than_that_of_its_own_call(
    tmp_path: Path, command: str, status: int, gathered: str | None
) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make")
    old = tmp_path / "results" / "mlperf" / SUMMARY
    old.parent.mkdir(parents=True)
    old.write_text("old")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    figures = "cat results/mlperf/summary.json > gathered"
    for name, text in (("blockflow", command), ("python", figures)):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "venv" / ".ready").touch()
    call = [make, "-C", str(tmp_path), "-f", str(MAKEFILE), "VENV=venv", "bench-mlperf"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    found = subprocess.run(call, env=clean, capture_output=True, text=True, timeout=60)
    assert found.returncode == status, found.stderr
    target = tmp_path / "gathered"
    assert (target.read_text().strip() if target.exists() else None) == gathered


# --- LoadGen's process ---------------------------------------------------------------------------


def test_lines_of_loadgens_process_that_are_no_counts_go_into_its_log(tmp_path: Path) -> None:
    counts = json.dumps(Counts(5, 3, queries={"a": 5}).to_dict())
    lines = ["W0102 a warning of C++", "{", "17", "[]", '{"issued": 1}', counts, "", "an end"]
    log = tmp_path / "driver.log"
    log.write_text("before\n")
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    process = subprocess.Popen(["cat", str(tmp_path / "lines")], stdout=subprocess.PIPE)
    found, hung = _follow(process, lambda counts: None, 30.0, log)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    assert not hung
    assert (found.issued, found.answered) == (5, 3)
    assert log.read_text().splitlines() == ["before", *(s for s in lines if s != counts)]
    assert read_counts(counts.encode()) == found


def test_a_server_run_is_given_the_time_in_which_nobody_asks() -> None:
    """At one query in 200 s nothing is answered for minutes, and nothing hangs."""

    def patience_s(scenario: Scenario, rate: float) -> float:
        targets = {"a": Target(0.5, 100.0)}
        more = {"short": True, "deadline_s": 1.0, "rate": rate}
        return patience_of(make_settings(scenario, Mode.PERFORMANCE, targets, **more))

    assert patience_s(Scenario.SERVER, 0.005) == 62.0 + 20 * 200.0
    assert patience_s(Scenario.SERVER, 1000.0) == pytest.approx(62.02)
    assert patience_s(Scenario.OFFLINE, 0.005) == 62.0

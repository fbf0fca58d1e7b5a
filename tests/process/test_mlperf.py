"""``blockflow bench`` with the real LoadGen and a real system of echo blocks, in its short form."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlperf_rig
import numpy as np
import pytest
import typer
from control_rig import save_echoes
from fake_dispatcher import FakeDispatcher
from mlperf_rig import SystemHere, job_of
from rich.console import Console
from safetensors.numpy import save_file
from system_rig import served
from up_rig import without_torch

from blockflow.bench.mlperf import calibrate
from blockflow.bench.mlperf.accuracy import Truth, measure, save_truth
from blockflow.bench.mlperf.batch_sizes import BatchWatch
from blockflow.bench.mlperf.document import make_document
from blockflow.bench.mlperf.plan import Plan
from blockflow.bench.mlperf.report import write_report
from blockflow.bench.mlperf.run import run
from blockflow.bench.mlperf.session import Session
from blockflow.bench.mlperf.settings import Mode, Scenario, Target
from blockflow.bench.mlperf.tally import Counts
from blockflow.bench.mlperf.verdict import WHOLE_QUERY
from blockflow.cli import bench as bench_command
from blockflow.cli.bench import _finish
from blockflow.cli.main import main
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.launch.base import Launcher

pytestmark = pytest.mark.usefixtures("forks")
forks, no_pictures = mlperf_rig.forks, mlperf_rig.no_pictures
TOPOLOGY = {
    "blocks": ["trunk", "head", "picky"],
    "tasks": {
        "a": ["trunk", "head"],
        "b": ["trunk"],
        "picky": ["picky"],
    },
}
# A bound and a percentile that no busy machine misses: what is tested is not how fast it is.
SURE = ("--short", "--duration", "0.1", "--queries", "30", "--percentile", "50")


@pytest.fixture(autouse=True)
def rough_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system can do needs to be known roughly only, where no result depends on it."""
    monkeypatch.setattr(calibrate, "LEAST_S", 0.03)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("system")
    blocks = {"head": {"delay_ms": 1}, "picky": {"fail_on_value": 99.0}}
    save_echoes(folder / "blocks", "trunk", **blocks)
    with served(folder, TOPOLOGY, launcher) as running:
        yield running


def bench(
    system: System, out: Path, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[int, Any]:
    where = ("--address", system.client_endpoint, "--url", system.rest_url)
    status = main(["bench", "--json", "--out", str(out), *where, *args])
    return status, json.loads(capsys.readouterr().out)


def test_scenarios_end_in_a_verdict_and_a_report(
    system: System, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenarios = ("single-stream", "offline")
    chosen = [x for s in scenarios for x in ("--scenario", s)]
    args = ("--task", "a=2,b", "--data", "synthetic:8", *SURE)
    status, found = bench(system, tmp_path, capsys, *args, *chosen)
    assert [(r["scenario"], r["verdict"], r["reasons"]) for r in found["results"]] == [
        (s, "VALID", []) for s in scenarios
    ]
    assert status == 0
    assert (found["official"], found["partial"], found["valid"]) == (False, False, True)
    single, offline = found["results"]
    assert single["metric"]["name"] == "p50 latency"
    assert single["metric"]["value"] > 0
    assert single["samples"]["answered"] == single["samples"]["issued"] >= 30
    asked = {t["task"]: t["queries"] for t in single["tasks"]}
    assert sum(asked.values()) == single["samples"]["issued"]
    assert 0 < asked["b"] < asked["a"]
    assert [t["queries"] for t in offline["tasks"]] == [1, 1]
    blocks = {b["block"]: b["count"] for b in single["blocks"]}
    assert blocks["trunk"] == single["samples"]["answered"]
    assert 0 < blocks["head"] < blocks["trunk"]
    assert offline["metric"]["unit"] == "samples/s"
    assert found["machine"]["mlcommons-loadgen"]
    assert {b["name"] for b in found["system"]["blocks"]["blocks"]} == set(TOPOLOGY["blocks"])

    assert json.loads((tmp_path / "summary.json").read_text()) == found
    for folder in scenarios:
        assert (tmp_path / folder / "mlperf_log_summary.txt").read_text()
    for name in ("latency.png", "blocks.png"):
        assert (tmp_path / name).stat().st_size
        assert name in (tmp_path / "report.md").read_text()
        assert name in (tmp_path / "report.html").read_text()
    assert "Not an MLPerf result" in (tmp_path / "report.md").read_text()


def test_the_server_scenario_searches_its_rate(
    system: System, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--task", "a", "--scenario", "server", "--target-latency-ms", "20000")
    status, found = bench(system, tmp_path, capsys, *SURE, *args, "--search-runs", "2")
    (result,) = found["results"]
    rates = [run["rate"] for run in result["search"]]
    # Which of them are VALID is this machine's business; a busy one may refuse some requests, and
    # what is INVALID is tried again.
    first = result["search"][0]["verdict"]
    assert rates[1] == pytest.approx(rates[0] if first == "INVALID" else 2 * rates[0])
    assert result["settings"]["rate"] in rates
    assert status == (0 if result["verdict"] == "VALID" else 5)
    assert (tmp_path / "rate.png").stat().st_size


@pytest.mark.usefixtures("no_pictures")
def test_a_given_rate_is_run_several_times(
    system: System, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--task", "a", "--scenario", "server", "--target-latency-ms", "20000", "--rate", "20")
    status, found = bench(system, tmp_path, capsys, *SURE, *args, "--server-runs", "2")
    (result,) = found["results"]
    assert (status, result["verdict"], result["least_of"]) == (0, "VALID", 2)
    folders = [run["folder"] for run in result["search"]]
    assert folders == ["server-of2-1", "server-of2-2"]
    assert min(run["metric"]["value"] for run in result["search"]) == result["metric"]["value"]
    assert "all of 2 runs at 20 queries/s were VALID" in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("no_pictures")
def test_a_single_failing_row_makes_the_run_invalid(
    system: System, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = np.zeros((4, 4), np.float32)
    rows[2] = 99.0
    np.save(tmp_path / "x.npy", rows)
    args = ("--task", "picky", "--data", str(tmp_path / "x.npy"), "--queries", "40")
    status, found = bench(system, tmp_path / "out", capsys, *SURE, *args)
    (result,) = found["results"]
    assert status == 5
    assert (result["verdict"], found["valid"], result["partial"]) == ("INVALID", False, False)
    samples = result["samples"]
    assert samples["failed"].keys() == {"BLOCK_FAILED"}
    assert samples["answered"] + samples["failed"]["BLOCK_FAILED"] == samples["issued"]
    assert samples["lost"] == 0


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("--task", "nobody"), "UNKNOWN_TASK"),
        (("--task", "a", "--target-latency-ms", "0.0001"), "INVALID_REQUEST"),
        (("--task", "a", "--scenario", "server"), "INVALID_REQUEST"),
        (("--task", "a", "--data", "digits"), "CONTRACT_MISMATCH"),
        (("--task", "a", "--validate", "everything"), "INVALID_REQUEST"),
    ],
)
def test_bad_input_is_refused_before_a_run(
    system: System,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    code: str,
) -> None:
    status, found = bench(system, tmp_path / "out", capsys, "--short", *args)
    assert status == 2
    assert found["error"]["code"] == code
    assert not (tmp_path / "out").exists()


def test_a_system_that_answers_nothing_does_not_hang_the_run(tmp_path: Path) -> None:
    with FakeDispatcher() as fake:
        job = job_of(fake, "silent", tmp_path)
        found = run(job, tmp_path / "run", lambda counts: None, patience_s=1.0)
    assert found.error is not None
    assert found.error.code == "TIMEOUT"
    assert not found.verdict.valid
    assert found.to_dict()["partial"]


def test_a_long_server_run_is_given_up_when_too_many_answers_are_late(tmp_path: Path) -> None:
    """Its verdict is known long before LoadGen has asked everything."""
    with FakeDispatcher() as fake:
        job = job_of(fake, "slow", tmp_path)
        settings = replace(
            job.settings,
            scenario=Scenario.SERVER,
            targets={"slow": Target(0.5, 1.0)},
            min_queries=1200,
            rate=200.0,
            full_length=True,
        )
        found = run(replace(job, settings=settings), tmp_path / "run", lambda counts: None)
    assert found.error is not None
    assert found.error.code == "DEADLINE_EXCEEDED"
    assert "cannot become VALID" in found.verdict.reasons[0]
    assert not found.verdict.valid
    assert not found.broke_off
    assert 600 < found.counts.answered < 1200
    assert len(found.latencies["slow"]) == found.counts.answered


def test_an_interrupted_run_keeps_what_was_measured(tmp_path: Path) -> None:
    def progress(counts: Counts) -> None:
        if counts.answered:
            raise KeyboardInterrupt

    with FakeDispatcher() as fake:
        job = job_of(fake, "echo", tmp_path, duration_s=60.0)
        found = run(job, tmp_path / "run", progress)
    assert found.error is not None
    assert found.error.code == "CANCELLED"
    assert found.to_dict()["kind"] == "partial"
    assert found.counts.answered > 0
    assert found.latencies["echo"]


def test_an_accuracy_run_is_never_judged_by_the_labels_of_an_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    save_truth(folder, {"echo": 1}, {"echo": Truth([0], "float32")})
    with FakeDispatcher() as fake:
        job = job_of(fake, "echo", tmp_path)
        settings = replace(job.settings, mode=Mode.ACCURACY)
        assert run(replace(job, settings=settings), folder, lambda counts: None).verdict.valid
    with pytest.raises(BlockFlowError, match="no accuracy run with labels"):
        measure(folder)


@pytest.mark.usefixtures("no_pictures")
def test_sigterm_ends_the_command_with_a_partial_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    follow = BatchWatch.look

    def look(self: BatchWatch, begun: bool) -> None:
        if begun:
            os.kill(os.getpid(), signal.SIGTERM)
        follow(self, begun)

    monkeypatch.setattr(BatchWatch, "look", look)
    with FakeDispatcher() as fake:
        where = ("--address", fake.endpoint, "--out", str(tmp_path))
        asked = ("--task", "echo", "--duration", "60", "--data", "synthetic:1")
        status = main(["bench", "--short", *where, *asked])
    assert status == 130
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["partial"], found["valid"]) == (True, False)
    assert found["error"]["code"] == "CANCELLED"
    assert found["results"][0]["samples"]["answered"] > 0
    assert "Verdicts of LoadGen" in capsys.readouterr().out


def test_verdicts_are_shown_also_where_the_report_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latency.png").symlink_to("/dev/full")
    with FakeDispatcher() as fake:
        where = ("--address", fake.endpoint, "--out", str(tmp_path))
        status = main(["bench", *where, "--task", "echo", "--data", "synthetic:1", *SURE])
    told = capsys.readouterr()
    assert status == 5
    assert "VALID" in told.out
    assert "NO_SPACE" in told.err


@pytest.mark.usefixtures("no_pictures")
def test_a_system_of_its_own_from_a_topology_and_accuracy_of_known_answers(
    tmp_path: Path,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That it is a process of its own is for the next test."""
    monkeypatch.setattr(bench_command, "Server", partial(SystemHere, launcher))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    save_echoes(tmp_path / "blocks", "trunk")
    topology = {"blocks": ["trunk"], "tasks": {"b": ["trunk"]}}
    (tmp_path / "topology.json").write_text(json.dumps(topology))
    (tmp_path / "own_hook.py").write_text("def scale(x):\n    return (x / 255).astype('float32')\n")
    save_file({"x": 255 * np.eye(4, dtype=np.uint8)}, tmp_path / "x.safetensors")
    np.save(tmp_path / "labels.npy", np.array([0, 1, 2, 0]))  # the last one is wrong
    where = ("--topology", "topology.json", "--repository", "blocks", "--out", "out")
    data = ("--data", "x.safetensors", "--preprocess", "b=own_hook:scale")
    asked = ("--task", "b", "--scenario", "multistream")
    modes = ("--mode", "performance", "--mode", "accuracy")
    odd = ("--percentile", "55", "--target-latency-ms", "20000")  # LoadGen logs no 55th
    assert main(["bench", *where, *asked, "--url", "http://127.0.0.1:1"]) == 2
    assert "a system of its own (at --url)" in capsys.readouterr().err
    monkeypatch.setenv("BLOCKFLOW_URL", "http://127.0.0.1:1")  # of another system
    status = main(["bench", "--json", *where, *data, *asked, *modes, *SURE, *odd])
    found = json.loads(capsys.readouterr().out)
    assert status == 0, found
    assert found["system"]["topology"]
    assert found["system"]["blocks"]["blocks"][0]["digest"]
    performance, accuracy = found["results"]
    samples = performance["samples"]
    assert samples["issued"] >= 8 * 30
    assert samples["queries"] == {"b": samples["issued"] / 8}
    assert performance["metric"]["name"] == "p55 latency"
    latency = performance["latency_ms"]
    assert latency["50.00"] * 0.9 <= performance["metric"]["value"] <= latency["90.00"] * 1.1
    assert [t["task"] for t in performance["tasks"]] == ["b", WHOLE_QUERY]
    assert accuracy["samples"]["issued"] == 8  # LoadGen fills up its one query
    expected = {"task": "b", "rows": 4, "missing": 0, "top1": 0.75, "top5": None}
    assert accuracy["accuracy"] == [expected]
    again = measure(tmp_path / "out" / "multistream-accuracy")
    assert [asdict(a) for a in again] == [expected]


def test_a_bad_topology_is_told_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system that it starts is a real one, which gets no worker."""
    monkeypatch.chdir(tmp_path)
    for name, value in without_torch(tmp_path).items():
        monkeypatch.setenv(name, value)
    where = ("--topology", "mine.json", "--repository", "blocks", "--out", "out", "--task", "b")
    for text, told in (
        ('{"blocks": [', ("it is no JSON: ", "mine.json")),
        ('{"blocks": ["nobody"], "tasks": {"b": ["nobody"]}}', ("nobody", "mine.json")),
    ):
        (tmp_path / "mine.json").write_text(text)
        assert main(["bench", *where]) == 2
        error = capsys.readouterr().err
        assert all(part in error for part in told), error
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_pictures")
def test_a_system_that_dies_ends_the_run_and_what_was_measured_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeDispatcher()
    fake.delay_s = 0.01  # LoadGen prepares fewer queries for a slow system
    alive = [fake]

    def show(what: str, counts: Counts | None) -> None:
        if counts is not None and counts.answered and alive:
            alive.pop().stop()

    plan = Plan(
        {"slow": 1},
        [Scenario.SINGLE_STREAM, Scenario.OFFLINE],
        [Mode.PERFORMANCE],
        tmp_path / "out",
        address=fake.endpoint,
        short=True,
        duration_s=60.0,  # it cannot end by itself before
        data="synthetic:1",
    )
    session = Session(plan, show)
    try:
        session.run()
    finally:
        for left in alive:
            left.stop()
    assert session.error is not None
    assert session.error.code == "CONNECTION_LOST"
    (result,) = session.results  # the offline scenario was not begun
    assert not result.result.verdict.valid
    assert result.result.counts.answered > 0
    assert result.result.latencies["slow"]
    document = make_document(session, "a test")
    assert (document["partial"], document["valid"]) == (True, False)
    write_report(document, session.results, plan.out)
    assert "PARTIAL" in (plan.out / "report.md").read_text()
    with pytest.raises(typer.Exit) as ended:  # with --json: what was measured, and why no more
        _finish(document, session.error, None, plan.out, Console(stderr=True), True)
    assert ended.value.exit_code == 3
    printed = json.loads(capsys.readouterr().out)
    assert printed["error"]["code"] == "CONNECTION_LOST"
    assert printed["results"][0]["samples"] == document["results"][0]["samples"]

"""``blockflow simulate``: what it prints and stores."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockflow.bench.numerals import significant
from blockflow.bench.simulation.example import example_profiles
from blockflow.cli.main import main
from tests.simulate_rig import POLICIES, SHORT, document, refused, simulate


def test_policies_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *SHORT, *POLICIES, "--load", "0.5,1.1", "--check")
    assert found["made_up"] is True
    assert [(e["policy"], e["load"]) for e in found["entries"]] == [
        ("none", pytest.approx(0.5)),
        ("window:max_rows=8,max_delay_ms=5", pytest.approx(0.5)),
        ("none", pytest.approx(1.1)),
        ("window:max_rows=8,max_delay_ms=5", pytest.approx(1.1)),
    ]
    crowded = found["entries"][3]
    assert found["entries"][2]["versus_first"] is None
    assert crowded["versus_first"]["value"] < 1.0
    assert crowded["rows_per_batch"]["value"] > 1.0
    assert crowded["mean_ms"]["low"] <= crowded["mean_ms"]["value"] <= crowded["p99_ms"]["value"]
    profile = found["experiment"]["system"]["workers"][0]["stages"][0]["profile"]
    assert profile["engine"] == "example"


def test_tables_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    tasks = ("--task", "a@3=stem,middle", "--task", "b=stem,head", "--share", "b:priority=1")
    status, out = simulate(capsys, *SHORT, *POLICIES, *tasks, "--rate", "30", "--batches")
    assert status == 0
    assert "made-up profiles" in out
    for text in ("2. window:max_rows=8,max_delay_ms=5", "30/s", "by task", "batches by rows"):
        assert text in out


def test_of_what_did_not_come_or_had_no_result_nothing_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No share of it was served, no time was spent in queues: that is not 0."""
    tasks = ("--task", "often=stem", "--task", "never@0.000001=stem", "--rate", "10")
    status, out = simulate(capsys, *SHORT, *tasks)
    assert status == 0
    assert re.findall(r"never +(\d+) +(\S+) +(\S+) +(\S+)", out) == [("0", "-", "-", "-")]
    (none,) = document(capsys, *SHORT, "--load", "1e-9")["entries"]
    assert [none[name] for name in ("over_bound", "expired", "rejected")] == [None] * 3
    assert simulate(capsys, *SHORT, "--load", "1e-9")[1].split().count("-") == 6
    (late,) = document(capsys, *SHORT, "--load", "1", "--deadline-ms", "1")["entries"]
    assert [late[name] for name in ("mean_ms", "wait_ms", "compute_ms")] == [None] * 3


def test_a_plot_without_a_result_is_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "figures.png"
    status, out = simulate(capsys, *SHORT, *POLICIES, "--load", "1e-9", "--plot", str(picture))
    assert (status, picture.read_bytes()[:4]) == (0, b"\x89PNG")
    assert "none" in out, "the table is printed as well"


def test_figures_and_plot_are_stored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines, picture = tmp_path / "r" / "s.jsonl", tmp_path / "p" / "s.png"
    wanted = ("--results", str(lines), "--plot", str(picture), "--rate", "10,30")
    assert simulate(capsys, *SHORT, *POLICIES, *wanted)[0] == 0
    figures = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {f["benchmark"] for f in figures} == {"simulate"}
    latency = [f for f in figures if f["name"] == "simulated latency"]
    assert [(f["mode"], f["labels"]["rate"]) for f in latency] == [
        ("none", 10.0),
        ("window:max_rows=8,max_delay_ms=5", 10.0),
        ("none", 30.0),
        ("window:max_rows=8,max_delay_ms=5", 30.0),
    ]
    assert all(f["low"] <= f["value"] <= f["high"] for f in latency)
    (command,) = {f["command"] for f in figures}
    blockflow, *repeated = shlex.split(command)
    assert blockflow == "blockflow"
    lines.unlink()
    assert main(repeated) == 0
    assert [json.loads(line) for line in lines.read_text().splitlines()] == figures
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("width", "times"), [(80, 1.0), (80, 1e-3), (40, 1e-3), (80, 30.0)])
def test_no_figure_is_cut_off(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    width: int,
    times: float,
) -> None:
    """Times of blocks of microseconds have the most letters: 0.0231-0.0240."""
    monkeypatch.setenv("COLUMNS", str(width))
    found = example_profiles()[0]
    points = tuple(replace(p, p50_ms=p.p50_ms * times) for p in found.points)
    file = tmp_path / "p.json"
    file.write_text(json.dumps(replace(found, points=points).to_dict()))
    wanted = ("--profile", str(file), "--seeds", "5", "--duration", str(0.05 * max(times, 0.02)))
    policies = ("--policy", "none", "--policy", "dvabatch", "--hop-ms", "0", "--turn-ms", "0")
    loads = ("--load", "0.5,1.2", "--processes", "1", "--warmup", "0")
    lines = tmp_path / "s.jsonl"
    asked = ("--batches", "--results", str(lines))
    status, out = simulate(capsys, *wanted, *policies, *loads, *asked)
    assert status == 0
    out = out.replace(str(lines), "")
    assert "…" not in out and not re.search(r"\de[+-]\d", out)
    assert max(map(len, out.splitlines())) <= width
    stored = map(json.loads, lines.read_text().splitlines())
    figures = [f for f in stored if f["name"] in ("simulated latency", "latency ratio")]
    assert len(figures) == 4 + 2
    assert {f["n"] for f in figures} == {5}
    for f in figures:
        value, low, high = (significant(f[k], 3) for k in ("value", "low", "high"))
        assert value in out.split() and f"{low}-{high}" in out.split()


def test_few_seeds_have_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    for count in (1, 4, 5):
        wanted = (*SHORT, "--seeds", str(count), "--load", "0.5")
        out = simulate(capsys, *wanted, *POLICIES)[1]
        assert bool(re.search(r"\d-\d", out)) is (count == 5), out
        assert ("too few seeds for a 95% interval" in out) is (count < 5)
    entry = document(capsys, *wanted, *POLICIES)["entries"][1]
    for name in ("mean_ms", "versus_first", "throughput", "over_bound"):
        assert entry[name]["n"] == 5


def test_a_short_trace_is_not_lost_in_its_warm_up(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("time\n0\n")
    wanted = ("--example", "--arrivals", str(trace), "--seeds", "1")
    found = document(capsys, *wanted)
    assert found["experiment"]["warmup_s"] == 0.0
    assert found["entries"][0]["mean_ms"] is not None
    assert document(capsys, *wanted, "--duration", "60")["experiment"]["warmup_s"] == 0.0
    error = refused(capsys, *wanted, "--warmup", "0.0005")
    assert (error["where"], "all queries" in error["message"]) == ("--warmup", True)
    trace.write_text("time\n0\n5\n")
    assert document(capsys, *wanted)["experiment"]["warmup_s"] == pytest.approx(0.5001)
    trace.write_text("time\n5\n")
    assert refused(capsys, *wanted, "--duration", "2")["where"] == "--duration"


@pytest.mark.parametrize("ms", [1e308, 1e10, 1e-300])
def test_times_that_virtual_time_cannot_hold_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, ms: float
) -> None:
    found = example_profiles()[0]
    one, two = (p for p in found.points if p.threads == 1 and p.rows <= 2)
    file = tmp_path / "p.json"
    wanted = ("--profile", str(file), "--seeds", "1", "--duration", "1", "--rate", "1")
    points = (replace(one, p50_ms=1.0), replace(two, p50_ms=ms))
    file.write_text(json.dumps(replace(found, points=points).to_dict()))
    error = refused(capsys, *wanted, "--policy", "dvabatch")
    assert (error["code"], error["where"]) == ("INVALID_REQUEST", str(file))
    points = (replace(one, p50_ms=1e-6, spread=1e308), replace(two, p50_ms=1e9))
    file.write_text(json.dumps(replace(found, points=points).to_dict()))
    assert document(capsys, *wanted, "--policy", "dvabatch")["entries"]


def test_one_thread_that_was_not_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = example_profiles()[0]
    points = tuple(p for p in found.points if p.threads == 2)
    file = tmp_path / "p.json"
    file.write_text(json.dumps(replace(found, points=points).to_dict()))
    error = refused(capsys, "--profile", str(file))
    assert error["message"] == "1 thread was not measured for stem; known: 2"
    assert error["hint"].startswith("blockflow profile stem")

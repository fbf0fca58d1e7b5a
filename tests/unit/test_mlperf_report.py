"""``blockflow bench``: the report, its pictures, batch sizes, and the figures for documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blockflow.bench.calibration import steadiness_of
from blockflow.bench.mlperf.batch_sizes import EVERY_S, BatchSizes, BatchWatch
from blockflow.bench.mlperf.document import FORMAT
from blockflow.bench.mlperf.figures import (
    accuracy_grid,
    block_grid,
    gather,
    main,
    run_grid,
    validation_grid,
)
from blockflow.bench.mlperf.report import SUMMARY, Table, Text, sections, to_html, to_markdown
from blockflow.bench.results import Figure, ResultFile
from blockflow.core.errors import BlockFlowError, make_error

MACHINE = {"cpu": "a CPU", "cores": 2, "memory_gib": 4, "kernel": "6", "python": "3"}


def result(scenario: str, **more: Any) -> dict[str, Any]:
    return {
        "scenario": scenario,
        "mode": "performance",
        "kind": "short",
        "partial": False,
        "verdict": "VALID",
        "reasons": [],
        "settings": {
            "rate": 120.0,
            "targets": {"a": {"percentile": 0.99, "latency_ms": 15.0}},
            "min_duration_s": 5.0,
            "min_queries": 662,
        },
        "metric": {"name": "p90 latency", "value": 2.5, "unit": "ms"},
        "latency_ms": {"50.00": 2.0, "90.00": 2.5, "99.00": 3.0},
        "samples": {"issued": 700, "failed": {"BLOCK_FAILED": 1}, "lost": 1},
        "blocks": [
            {
                "block": "trunk",
                "count": 700,
                "transit_ms": 0.1,
                "wait_ms": 0.2,
                "overhead_ms": 0.3,
                "compute_ms": 1.4,
            }
        ],
        "batches": [
            {"block": "trunk", "batches": 200, "rows": 700, "looks": [3.0, 4.0], "mean": 3.5}
        ],
        "accuracy": [],
        "search": [],
        **more,
    }


def document(**more: Any) -> dict[str, Any]:
    top = {"task": "a", "rows": 360, "missing": 0, "top1": 0.975, "top5": None}
    return {
        "format": FORMAT,
        "command": "blockflow bench --task a",
        "date": "2026-01-02",
        "official": False,
        "full_length": False,
        "partial": False,
        "error": None,
        "machine": MACHINE,
        "fixed_work": {"begin_ms": 1.0, "end_ms": 1.02, "spread": 0.03},
        "system": {},
        "data": {"a": {"origin": "somewhere", "rows": 360, "labels": True}},
        "plan": {"weights": {"a": 2, "b": 1}, "seed": 1},
        "results": [
            result("single-stream"),
            result("server", accuracy=[top]),
            result("server", mode="accuracy", accuracy=[top], blocks=[], batches=[]),
        ],
        "validation": [
            {
                "test": "accuracy",
                "scenario": "server",
                "outcome": "FAILED",
                "why": "3 of 30 answers",
                "compared": 30,
                "differing": 3,
            },
            {
                "test": "caching",
                "scenario": "server",
                "outcome": "PASSED",
                "why": "as quick",
                "ratio": {"value": 1.01, "low": 0.98, "high": 1.04, "n": 5},
            },
            {"test": "seeds", "scenario": "server", "outcome": "UNDECIDED", "why": "it broke off"},
        ],
        **more,
    }


# --- the report ----------------------------------------------------------------------------------


def test_a_report_escapes_what_comes_from_outside() -> None:
    parts = [Text("<b>"), Table("t", ("a|b",), [("<script>\nx|y",)])]
    page = to_html(parts)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "| <script> x\\|y |" in to_markdown(parts)


def test_a_report_tells_verdicts_tests_blocks_and_batches() -> None:
    tables = {p.title: p for p in sections(document()) if isinstance(p, Table)}
    assert [row[0] for row in tables["Verdicts of LoadGen"].rows] == [
        "single-stream",
        "server",
        "server (accuracy)",
    ]
    assert [row[2] for row in tables["Validation tests"].rows] == ["FAILED", "PASSED", "UNDECIDED"]
    assert tables["Batch sizes, server"].rows == [("trunk", "200", "3.50", "4.00")]
    assert tables["Where the time went, server: means per request"].rows
    machine = dict(tables["Machine, versions and blocks"].rows)
    assert machine["fixed work"] == "spread 3.0%, drift +2.0% from begin to end"


def test_a_report_says_what_its_rules_were() -> None:
    def said(**more: Any) -> str:
        first = sections(document(**more))[0]
        assert isinstance(first, Text)
        return first.text

    assert said().startswith("Short runs")
    assert "lower percentile" in said(full_length=True)
    assert "percentiles of the rules" in said(full_length=True, official=True)


# --- figures -------------------------------------------------------------------------------------


def figures(tmp_path: Path) -> list[Figure]:
    lines = ResultFile(tmp_path / "mlperf.jsonl", "mlperf").read()
    return [Figure.from_dict(line) for line in lines]


def write(folder: Path, found: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / SUMMARY).write_text(json.dumps(found))
    return folder


def test_summaries_become_figures_and_tables(tmp_path: Path) -> None:
    other = document(validation=[], command="blockflow bench --task b")
    outs = [write(tmp_path / "one", document()), write(tmp_path / "two", other)]
    target = tmp_path / "mlperf.jsonl"
    assert main([*map(str, outs), "--results", str(target)]) == 0
    calls = ResultFile(target, "mlperf").runs()
    assert [c.command for c in calls] == ["blockflow bench --task a", "blockflow bench --task b"]
    assert {(c.date, c.machine["cpu"]) for c in calls} == {("2026-01-02", "a CPU")}
    assert all(steadiness_of(c.figures) for c in calls)
    found = figures(tmp_path)
    runs = run_grid(found).rows
    assert len(runs) == 4
    assert runs[0][:6] == (
        *("single-stream", "a=2, b=1", "VALID", "short", "p99 <= 15 ms: 3.00"),
        "p90 latency 2.50 ms",
    )
    assert runs[1][5] == "offered 120 queries/s"
    assert runs[0][-2:] == ("700", "2")
    assert accuracy_grid(found).rows == [("a", "97.50", "", "360")]
    assert [row[2:4] for row in validation_grid(found).rows] == [
        ("FAILED", "90.0% the same"),
        ("PASSED", "1.010 (0.980-1.04) as long"),
        ("UNDECIDED", ""),
    ]
    assert block_grid(found).rows[0] == (
        *("single-stream", "trunk", "0.100", "0.200", "0.300", "1.40"),
        *("3.50", "700"),
    )


def test_tables_without_figures_are_empty() -> None:
    for grid in (run_grid, accuracy_grid, validation_grid, block_grid):
        assert not grid([]).rows


def test_a_run_that_broke_off_has_a_row_without_a_result(tmp_path: Path) -> None:
    told = {"metric": None, "latency_ms": {}, "verdict": "INVALID", "kind": "partial"}
    broken = document(results=[result("offline", **told)], fixed_work=None)
    gather([write(tmp_path / "one", broken)], tmp_path / "mlperf.jsonl")
    (row,) = run_grid(figures(tmp_path)).rows
    assert row[2:6] == ("INVALID", "partial", "p99 <= 15 ms", "")


def test_a_rate_stands_beside_the_lowest_that_was_not_valid(tmp_path: Path) -> None:
    rates = {60.0: "VALID", 100.0: "INVALID", 160.0: "INVALID", 126.0: "INVALID"}
    search = [{"rate": r, "verdict": v} for r, v in rates.items()]
    (folder,) = [write(tmp_path / "one", document(results=[result("server", search=search)]))]
    gather([folder], tmp_path / "mlperf.jsonl")
    (row,) = run_grid(figures(tmp_path)).rows
    assert row[5] == "offered 120 queries/s (INVALID at 126)"


def test_what_is_no_summary_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "mlperf.jsonl"
    (tmp_path / "none").mkdir()
    other = write(tmp_path / "other", document(machine={**MACHINE, "cpu": "another"}))
    old = write(tmp_path / "old", document(format=FORMAT - 1))
    good = write(tmp_path / "good", document())
    for outs in ([tmp_path / "none"], [old], [good, other]):
        with pytest.raises(BlockFlowError) as caught:
            gather(outs, target)
        assert caught.value.code == "INVALID_REQUEST"
        assert main([*map(str, outs), "--results", str(target)]) == 2
    assert not target.exists()


# --- batch sizes ---------------------------------------------------------------------------------


class Workers:
    """What REST tells of two replicas of a block, look by look: (requests, rows, batches) each."""

    def __init__(self, *looks: dict[str, tuple[int, int, int]]) -> None:
        self.looks = list(looks)

    def get(self, path: str) -> Any:
        if len(self.looks) == 1:
            raise make_error("NOT_RUNNING", "gone")
        counts = self.looks.pop(0)
        return {
            "workers": [
                {
                    "name": name,
                    "incarnation": 1,
                    "stages": [
                        {
                            "block": "trunk",
                            "kpi": dict(zip(("requests", "rows", "batches"), c, strict=True)),
                        },
                        {"block": "idle", "kpi": {}},
                    ],
                }
                for name, c in counts.items()
            ]
        }

    def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        raise NotImplementedError


def test_batch_sizes_are_the_growth_of_all_replicas() -> None:
    rest = Workers(
        {"trunk#0": (60, 60, 60)},
        {"trunk#0": (100, 100, 100)},
        {"trunk#0": (110, 120, 102)},
        {"trunk#0": (120, 140, 106), "trunk#1": (6, 8, 4)},
        {},
    )
    clock = iter(float(i) * EVERY_S for i in range(100))
    watch = BatchWatch(rest, lambda: next(clock))
    watch.look(False)  # requests before the run come in late
    watch.look(True)
    found = watch.finish({"trunk": 26})
    assert found == (BatchSizes("trunk", 10, 48, (10.0, 28 / 8)),)
    assert found[0].to_dict()["mean"] == 4.8


def test_without_rest_or_when_it_goes_nothing_is_told() -> None:
    assert BatchWatch(None).finish({"trunk": 1}) == ()
    gone = Workers({})
    watch = BatchWatch(gone)
    watch.look(True)
    assert watch.finish({"trunk": 1}) == ()

"""``blockflow bench``: summaries become figures, and figures the tables of documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlperf_documents import MACHINE, document, result, searched, target

from blockflow.bench.calibration import steadiness_of
from blockflow.bench.mlperf.document import FORMAT
from blockflow.bench.mlperf.figures import RUN, TARGET, gather, main
from blockflow.bench.mlperf.report import SUMMARY
from blockflow.bench.mlperf.tables import (
    accuracy_grid,
    block_grid,
    run_grid,
    target_grid,
    validation_grid,
)
from blockflow.bench.mlperf.verdict import WHOLE_QUERY
from blockflow.bench.results import Figure, ResultFile
from blockflow.core.errors import BlockFlowError, make_error


def figures(tmp_path: Path) -> list[Figure]:
    lines = ResultFile(tmp_path / "mlperf.jsonl", "mlperf").read()
    return [Figure.from_dict(line) for line in lines]


def write(folder: Path, found: Any) -> Path:
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
        *("single-stream, short, p99 <= 15 ms", "trunk", "0.100", "0.200", "0.300", "1.40"),
        *("3.50", "700"),
    )


def test_a_whole_query_s_latency_counts_once(tmp_path: Path) -> None:
    """Multistream's percentiles are of queries, and each of them has several samples."""
    whole = target(WHOLE_QUERY, 15.0, 3.0, samples=90, queries=90)
    run = result("multistream", tasks=[target("a", None, 3.0, samples=720, queries=90), whole])
    run["samples"]["issued"] = 720
    made = document(results=[run, result("server")])
    out = write(tmp_path / "one", made)
    assert main([str(out), "--results", str(tmp_path / "mlperf.jsonl")]) == 0
    found = figures(tmp_path)
    assert [f.n for f in found if f.name == RUN] == [90, 700]
    assert [f.n for f in found if f.name == TARGET][:2] == [720, 90]


def test_a_folder_that_is_named_twice_is_one_call(tmp_path: Path) -> None:
    out, target = write(tmp_path / "one", document()), tmp_path / "mlperf.jsonl"
    assert gather([out], target) == gather([out, out], target)


def test_runs_of_one_scenario_are_told_apart(tmp_path: Path) -> None:
    def batches(mean: float) -> list[dict[str, Any]]:
        return [{"block": "trunk", "batches": 9, "rows": 9, "looks": [], "mean": mean}]

    runs = {"short": 1.5, "official": 4.5}
    outs = [
        write(tmp_path / kind, document(results=[result("server", kind=kind, batches=batches(m))]))
        for kind, m in runs.items()
    ]
    gather(outs, tmp_path / "mlperf.jsonl")
    assert [(row[0], row[6]) for row in block_grid(figures(tmp_path)).rows] == [
        ("server, short, p99 <= 15 ms", "1.50"),
        ("server, official, p99 <= 15 ms", "4.50"),
    ]


def test_calls_that_differ_in_their_bounds_alone_keep_their_own_batches(tmp_path: Path) -> None:
    bounds = {15.0: 1.5, 50.0: 4.5}
    outs = [
        write(
            tmp_path / str(bound),
            document(
                results=[
                    result(
                        "server",
                        tasks=[target("a", bound, 3.0), target("b", bound, 4.0)],
                        batches=[
                            {"block": "trunk", "batches": 9, "rows": 9, "looks": [], "mean": m}
                        ],
                    )
                ]
            ),
        )
        for bound, m in bounds.items()
    ]
    gather(outs, tmp_path / "mlperf.jsonl")
    assert [(row[0], row[6]) for row in block_grid(figures(tmp_path)).rows] == [
        ("server, short, p99 <= 15 ms", "1.50"),
        ("server, short, p99 <= 50 ms", "4.50"),
    ]


def test_each_of_several_bounds_is_named_once(tmp_path: Path) -> None:
    bounds = {"a": 10.0, "b": 10.0, "c": 50.0, "d": None}
    run = result("server", tasks=[target(name, bound, 3.0) for name, bound in bounds.items()])
    gather([write(tmp_path / "one", document(results=[run]))], tmp_path / "mlperf.jsonl")
    (row,) = block_grid(figures(tmp_path)).rows
    assert row[0] == "server, short, p99 <= 10 ms, p99 <= 50 ms"


def test_other_calls_stay_in_the_file_and_one_that_was_made_again_does_not(tmp_path: Path) -> None:
    target = tmp_path / "mlperf.jsonl"

    def commands() -> list[tuple[str, str]]:
        return [(r.command, r.date) for r in ResultFile(target, "mlperf").runs()]

    first, second, again = (
        document(command=f"blockflow bench --task {task}", date=date)
        for task, date in (("a", "2026-01-02"), ("b", "2026-01-02"), ("a", "2026-01-03"))
    )
    for n, made in enumerate((first, second, again)):
        gather([write(tmp_path / str(n), made)], target)
    assert commands() == [
        ("blockflow bench --task b", "2026-01-02"),
        ("blockflow bench --task a", "2026-01-03"),
    ]
    elsewhere = document(machine={**MACHINE, "cpu": "another"}, command="blockflow bench --task c")
    gather([write(tmp_path / "elsewhere", elsewhere)], target)
    assert commands() == [("blockflow bench --task c", "2026-01-02")]


@pytest.mark.parametrize("text", ["no JSON\n", '["a list"]\n', '{"name": "alone"}\n'])
def test_a_file_of_something_else_is_not_written_over(tmp_path: Path, text: str) -> None:
    target = tmp_path / "mlperf.jsonl"
    target.write_text(text)
    with pytest.raises(BlockFlowError) as info:
        gather([write(tmp_path / "one", document())], target)
    assert (info.value.code, info.value.where) == ("INVALID_REQUEST", str(target))
    assert target.read_text() == text


def test_tables_without_figures_are_empty() -> None:
    for grid in (run_grid, target_grid, accuracy_grid, validation_grid, block_grid):
        assert not grid([]).rows


def test_a_run_that_broke_off_has_a_row_without_a_result(tmp_path: Path) -> None:
    told = {
        "metric": None,
        "latency_ms": {},
        "verdict": "INVALID",
        "kind": "partial",
        "tasks": [target("a", 15.0, None)],
    }
    broken = document(results=[result("offline", **told)], fixed_work=None)
    gather([write(tmp_path / "one", broken)], tmp_path / "mlperf.jsonl")
    (row,) = run_grid(figures(tmp_path)).rows
    assert row[2:6] == ("INVALID", "partial", "p99 <= 15 ms", "")


def test_a_rate_stands_beside_the_lowest_that_was_not_valid(tmp_path: Path) -> None:
    open_end = searched(bracketed=False, precise=False, invalid_at=None)
    brief = searched(invalid_s=20.0)
    none = searched(bracketed=False, precise=False) | {"verdict": "INVALID"}
    runs = [result("server", **found) for found in (searched(), open_end, brief, none)]
    gather([write(tmp_path / "one", document(results=runs))], tmp_path / "mlperf.jsonl")
    assert [row[5] for row in run_grid(figures(tmp_path)).rows] == [
        "offered 120 queries/s (INVALID at 126)",
        "offered 120 queries/s (no INVALID rate was found: not the highest)",
        "offered 120 queries/s (INVALID at 126 in a run of 20 s)",
        "offered 120 queries/s",
    ]


def test_a_row_shows_on_which_side_of_its_bound_a_latency_lies(tmp_path: Path) -> None:
    seen = [result("server", tasks=[target("a", 200.0, ms)]) for ms in (200.4, 199.8, 150.0)]
    gather([write(tmp_path / "one", document(results=seen))], tmp_path / "mlperf.jsonl")
    assert [row[4] for row in run_grid(figures(tmp_path)).rows] == [
        "p99 <= 200 ms: 200.4",
        "p99 <= 200 ms: 199.8",
        "p99 <= 200 ms: 150",
    ]


def test_the_page_shows_the_task_that_is_nearest_to_its_bound_and_every_one(
    tmp_path: Path,
) -> None:
    tasks = [
        target("loose", 100.0, 20.0, verdict="kept"),
        target("tight", 10.0, 9.0, verdict="kept"),
        target("free", None, 500.0, verdict="no bound"),
    ]
    run = result("server", tasks=tasks, latency_ms={"99.00": 42.0})
    gather([write(tmp_path / "one", document(results=[run]))], tmp_path / "mlperf.jsonl")
    found = figures(tmp_path)
    (row,) = run_grid(found).rows
    assert row[4] == "p99 <= 10 ms: 9.00 (tight)"
    assert target_grid(found).rows == [
        ("server, short", "loose", "kept", "99", "100", "20.0", "700"),
        ("server, short", "tight", "kept", "99", "10", "9.00", "700"),
        ("server, short", "free", "no bound", "99", "", "500", "700"),
    ]


def test_what_a_call_measured_before_it_broke_off_is_marked_in_every_line(tmp_path: Path) -> None:
    error = make_error("NO_SPACE", "the disk is full").to_dict()
    broken = document(partial=True, error=error)
    gather([write(tmp_path / "one", broken)], tmp_path / "mlperf.jsonl")
    found = figures(tmp_path)
    assert all(f.labels["partial"] is True and f.labels["error"] == error for f in found)
    assert steadiness_of(found)
    marked = (run_grid, target_grid, accuracy_grid, validation_grid, block_grid)
    for grid in marked:
        rows = grid(found).rows
        assert rows
        assert all("(partial: NO_SPACE)" in " ".join(row) for row in rows)
    gather([write(tmp_path / "two", document())], tmp_path / "mlperf.jsonl")
    found = figures(tmp_path)
    assert not any("partial" in f.labels for f in found)
    assert not any("partial" in cell for g in marked for row in g(found).rows for cell in row)


def test_what_is_no_summary_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "mlperf.jsonl"
    (tmp_path / "none").mkdir()
    other = write(tmp_path / "other", document(machine={**MACHINE, "cpu": "another"}))
    old = write(tmp_path / "old", document(format=FORMAT - 1))
    good = write(tmp_path / "good", document())
    killed = write(tmp_path / "killed", document(results=[], validation=[]))
    listed = write(tmp_path / "listed", [1])
    hollow = write(tmp_path / "hollow", {"format": FORMAT, "results": [{}], "validation": []})
    for outs in ([tmp_path / "none"], [old], [good, other], [killed], [listed], [good, hollow]):
        with pytest.raises(BlockFlowError) as caught:
            gather(outs, target)
        assert caught.value.code == "INVALID_REQUEST"
        assert main([*map(str, outs), "--results", str(target)]) == 2
    assert not target.exists()

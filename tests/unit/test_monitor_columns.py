"""Each figure stands in the column that bears its name: all of a document's differ here."""

from __future__ import annotations

from typing import Any

from blockflow.monitor.grids import Grid, load_grid, process_grid, task_grid
from blockflow.monitor.room import busiest


def times(first: float) -> dict[str, float]:
    return {"count": 1, "mean_ms": first, "p50_ms": first + 0.1, "p99_ms": first + 0.2}


def rows(grid: Grid) -> list[dict[str, str]]:
    names = [c.name for c in grid.columns]
    return [dict(zip(names, row, strict=True)) for row in grid.rows]


TASK: dict[str, Any] = {
    "name": "digit",
    "path": ["trunk", "head"],
    "kpi": {
        "per_s": 7.5,
        "ok": 90,
        "failed": {"WORKER_LOST": 2, "BLOCK_FAILED": 3},
        "rejected": {"OVERLOADED": 40, "INVALID_REQUEST": 1},
        "latency": times(5.0),
        "ingress": times(6.0),
        "egress": times(7.0),
        "rows": 360,
    },
}


def test_a_task() -> None:
    assert rows(task_grid({"tasks": [TASK]})) == [
        {
            "task": "digit",
            "path": "trunk > head",
            "req/s": "7.5",
            "ok": "90",
            "failed": "5, 3 BLOCK_FAILED",
            "rejected": "41, 40 OVERLOADED",
            "p50 ms": "5.10",
            "p99 ms": "5.20",
            "in ms": "6.10",
            "out ms": "7.10",
            "rows": "360",
        }
    ]


def canary() -> dict[str, Any]:
    tried = {"path": ["trunk", "head2"], "share": 0.25}
    variants = {
        "stable": {"ok": 30, "failed": {"EXPIRED": 1}, "latency": times(1.0)},
        "canary": {"ok": 10, "failed": {}, "latency": times(2.0)},
    }
    return {**TASK, "canary": tried, "kpi": {**TASK["kpi"], "variants": variants}}


def test_a_canary_beside_what_it_is_compared_with() -> None:
    _, stable, tried = rows(task_grid({"tasks": [canary()]}))
    columns = ("task", "path", "ok", "failed", "p50 ms", "p99 ms")
    assert [stable[c] for c in columns] == [
        "  stable 75%",
        "trunk > head",
        "30",
        "1 EXPIRED",
        "1.10",
        "1.20",
    ]
    assert [tried[c] for c in columns] == [
        "  canary 25%",
        "trunk > head2",
        "10",
        "0",
        "2.10",
        "2.20",
    ]


def test_a_canary_takes_its_lines_out_of_the_room() -> None:
    tasks = [{**canary(), "name": f"t{i}"} for i in range(4)]
    grid = busiest({"tasks": tasks}, None, 9 + 9 + 2)[2]  # and a line for each of the empty ones
    assert len(grid.rows) == 9 and grid.title == "Tasks (the busiest 9 of 4)"


def test_a_block() -> None:
    kpi = {
        "queue": 3,
        "mean_batch_rows": 4.5,
        "batches": 2,
        "wait": times(1.0),
        "overhead": times(2.0),
        "compute": times(3.0),
        "rho": 0.25,
        "rows_per_s": 8.5,
        "failures": 6,
        "requests": 70,
        "expired": 9,
    }
    (row,) = rows(load_grid({"blocks": [{"name": "trunk", "state": "ready", "kpi": kpi}]}))
    assert row == {
        "block": "trunk",
        "state": "ready",
        "queue": "3",
        "batch": "4.5",
        "wait ms": "1.00",
        "ovh ms": "2.00",
        "comp ms": "3.00",
        "rho": "0.25",
        "rows/s": "8.5",
        "fail": "6",
        "requests": "70",
        "wait p99": "1.20",
        "comp p99": "3.20",
        "expired": "9",
    }


def test_a_process() -> None:
    process = {
        "cpu_percent": 51.0,
        "rss": 1024,
        "pss": 2048,
        "uss": 3072,
        "threads": 11,
        "fds": 12,
        "slots": 16,
        "slots_used": 5,
        "arena_used": 4096,
        "arena_committed": 6144,
        "arena_bytes": 8192,
    }
    worker = {
        "name": "trunk#0",
        "state": "ready",
        "pid": 77,
        "threads": 2,
        "restarts": 3,
        "uptime_s": 60.0,
        "start_ms": 250.0,
        "process": process,
    }
    (row,) = rows(process_grid({"workers": [worker]}))
    assert row == {
        "process": "trunk#0",
        "state": "ready",
        "pid": "77",
        "comp": "2",
        "cpu": "51%",
        "rss": "1.0K",
        "pss": "2.0K",
        "uss": "3.0K",
        "slots": "5/16",
        "starts": "4",
        "arena": "4.0K/6.0K/8.0K",
        "thr": "11",
        "fds": "12",
        "up": "60 s",
        "start ms": "250",
    }

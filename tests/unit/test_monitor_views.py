"""Views of a recorded status document: figures, widths, and documents with parts missing."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from blockflow.core.errors import make_error
from blockflow.monitor import text
from blockflow.monitor.grids import (
    Column,
    Grid,
    block_grid,
    contract_grid,
    load_grid,
    process_grid,
    task_grid,
)
from blockflow.monitor.screen import show, status_screen, top_screen
from blockflow.monitor.top import Top
from blockflow.monitor.view import (
    endpoints,
    headline,
    legs,
    notices,
    ping_lines,
    ping_ok,
    recent_mean,
    reruns,
    slices,
    update_lines,
)

RECORDED = Path(__file__).parent.parent / "data" / "status.json"


@pytest.fixture
def status() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(RECORDED.read_text())
    return document


def printed(renderable: Any, width: int) -> str:
    out = io.StringIO()
    show(renderable, Console(file=out, width=width, highlight=False))
    return out.getvalue()


def column(grid: Grid, name: str) -> list[str]:
    i = [c.name for c in grid.columns].index(name)
    return [row[i] for row in grid.rows]


def test_headline_and_endpoints(status: dict[str, Any]) -> None:
    assert headline(status).startswith("BlockFlow 0.1.0: ready, epoch 1, up ")
    assert headline(status).endswith("3 tasks on 5 blocks")
    one = status | {"tasks": status["tasks"][:1], "blocks": status["blocks"][:1]}
    assert headline(one).endswith("1 task on 1 block")
    assert endpoints(status)[:2] == [
        "rest     http://127.0.0.1:5780",
        "clients  tcp://127.0.0.1:5755",
    ]
    assert notices(status) == []


def test_legs_are_told_once_there_are_any(status: dict[str, Any]) -> None:
    assert legs(status) == []
    nothing = {"slot": 0, "slot_bytes": 0, "message": 0, "message_bytes": 0, "copies": 0}
    some = {**nothing, "slot": 12_345, "slot_bytes": 3 << 30, "message": 7, "message_bytes": 600}
    kpi = status["dispatcher"]["kpi"]
    kpi["legs"] = {"in": some, "out": nothing}
    kpi["grants"] = {"clients": 2, "segments": 5, "bytes": 64 << 20, "events": {}}
    assert legs(status) == [
        "inputs   12.3k by slot (3.0G), 7 in messages (600B)",
        "granted  64.0M to 2 clients",
    ]
    assert "12.3k by slot" in printed(status_screen(status, 80), 80)


def test_the_slicing_of_a_worker_is_shown(status: dict[str, Any]) -> None:
    assert slices(status) == []
    policy = {"policy": "dvabatch", "stages": [2, 1]}
    stages = [{"block": b, "batching": policy} for b in "abc"]
    plain = {"block": "d", "batching": {"policy": "dvabatch"}}
    workers = [{"name": "w#0", "stages": [*stages, plain]}, {"name": "x#0", "stages": [plain]}]
    assert slices({"workers": workers}) == ["stages   w#0: a+b, c"]


def test_reruns_are_told_once_there_are_any(status: dict[str, Any]) -> None:
    assert reruns(status) == []
    kpi = status["dispatcher"]["kpi"]
    kpi["recovery"] = {"rerun": 12_345, "waiting": 2, "poisoned": 1, "suspects": 1, "budget": 500}
    assert reruns(status) == ["deaths   12.3k run again, 2 waiting for a worker, 1 poison"]
    assert "12.3k run again" in printed(status_screen(status, 80), 80)


def test_the_engine_is_shown_with_its_precision(status: dict[str, Any]) -> None:
    status["blocks"][0] |= {"engine": "openvino", "precision": "int8"}
    status["blocks"][1] |= {"engine": "exported", "precision": "fp32"}
    assert column(block_grid(status), "engine")[:2] == ["openvino int8", "exported"]


def test_grids_show_the_recorded_figures(status: dict[str, Any]) -> None:
    blocks = [b["name"] for b in status["blocks"]]
    assert column(block_grid(status), "block") == blocks
    assert column(block_grid(status), "tasks")[0] == "digit, parity, high"
    load = load_grid(status)
    kpi = status["blocks"][1]["kpi"]
    assert column(load, "comp ms")[1] == text.ms(kpi["compute"]["mean_ms"])
    assert column(load, "rho")[1] == text.ratio(kpi["rho"])
    names = column(process_grid(status), "process")
    assert names[:4] == ["control", "template", "dispatcher", "trunk1#0"]
    assert "gpu" not in [c.name for c in process_grid(status).columns]
    assert column(task_grid(status), "path")[0] == "trunk1 > trunk2 > head_digit"
    assert column(contract_grid(status["tasks"]), "deadline")[0] == "10.0s"


def test_gpu_columns_appear_with_a_gpu(status: dict[str, Any]) -> None:
    status["workers"][0]["process"] |= {
        "gpu_util_percent": 41.0,
        "gpu_memory": 3 * 2**30,
        "gpu_power_w": 230.0,
    }
    grid = process_grid(status)
    at = column(grid, "process").index("trunk1#0")
    assert column(grid, "gpu")[at] == "41%"
    assert column(grid, "gpu mem")[at] == "3.0G"
    assert column(grid, "gpu")[0] == "-"


def test_top_shows_means_of_the_interval(status: dict[str, Any]) -> None:
    before = copy.deepcopy(status)
    kpi = status["blocks"][0]["kpi"]
    kpi["compute"]["count"] += 10
    kpi["compute"]["sum_ms"] += 70.0
    kpi["rows"] += 30
    kpi["batches"] += 10
    grid = load_grid(status, before)
    assert column(grid, "comp ms")[0] == "7.00"
    assert column(grid, "batch")[0] == "3.0"
    assert column(grid, "wait ms")[0] == "-"  # nothing new
    # A replaced worker counts from nought again: all it has is recent.
    fresh = {"compute": {"count": 2, "sum_ms": 8.0, "mean_ms": 4.0}}
    assert recent_mean(fresh, before["blocks"][0]["kpi"], "compute") == 4.0
    assert recent_mean(fresh, {}, "compute") == 4.0


def test_top_shows_means_of_those_that_are_still_there_when_a_replica_has_died() -> None:
    def document(*replicas: tuple[int, int, float]) -> dict[str, Any]:
        """Of one block: pid, requests and their milliseconds."""
        stages = [
            (pid, {"rows": n, "batches": n, "compute": {"count": n, "sum_ms": ms}})
            for pid, n, ms in replicas
        ]
        workers = [{"pid": pid, "stages": [{"block": "a", "kpi": k}]} for pid, k in stages]
        n, ms = sum(n for _, n, _ in replicas), sum(ms for _, _, ms in replicas)
        kpi = {"rows": n, "batches": n, "compute": {"count": n, "sum_ms": ms, "mean_ms": ms / n}}
        return {"blocks": [{"name": "a", "kpi": kpi}], "workers": workers}

    before = document((1, 100, 1000.0), (2, 100, 100.0))
    # The slow one has died; the other one has computed 150 more, of a millisecond each, and a new
    # one 10 of 2. All of them together, from 200 in 1100 ms to 260 in 270: less than no time.
    grid = load_grid(document((2, 250, 250.0), (3, 10, 20.0)), before)
    assert column(grid, "comp ms") == ["1.06"]
    assert column(grid, "batch") == ["1.0"]
    assert column(load_grid(before, before), "comp ms") == ["-"]


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_screens_fit_the_width(status: dict[str, Any], width: int) -> None:
    for screen in (status_screen(status, width), top_screen(status, None, width)):
        lines = printed(screen, width).splitlines()
        assert max(len(line) for line in lines) <= width
        assert any("trunk1" in line and "ready" in line for line in lines)
        # One line per row: nothing was wrapped.
        assert sum(line.startswith("head_parity#0") for line in lines) == 1
    wide = printed(top_screen(status, None, 200), 200)
    assert "comp p99" in wide
    assert "trunk1 > trunk2 > head_parity" in wide


def test_a_grid_gives_up_wide_columns_then_names_then_figures() -> None:
    columns = (Column("name", right=False), Column("a"), Column("b"), Column("c", wide=True))
    grid = Grid("t", columns, (("x" * 20, "123456", "1234567", "1"),))
    assert [c.name for c in grid.fitted(40).columns] == ["name", "a", "b", "c"]
    assert [c.name for c in grid.fitted(38).columns] == ["name", "a", "b"]
    assert grid.fitted(30).rows[0] == ("x" * 6 + "…" + "x" * 6, "123456", "1234567")
    assert grid.fitted(20).rows[0] == ("xxxx…xxx", "123456")
    assert grid.fitted(1).rows[0] == ("xxxx…xxx",)
    assert Grid("t", columns, ()).fitted(80).rows == ()


def test_a_restart_of_the_control_plane_is_told(status: dict[str, Any]) -> None:
    status["manager"] = {"pid": 7, "restarts": 0, "adopted": [], "away_ms": None, "cause": ""}
    assert notices(status) == []
    status["manager"] |= {
        "restarts": 2,
        "since": "2026-01-02T03:04:05+00:00",
        "cause": "killed by SIGKILL",
        "adopted": ["a#0", "dispatcher"],
        "away_ms": 812.4,
    }
    assert notices(status) == [
        "control plane restarted 2 x, last 2026-01-02T03:04:05+00:00 (killed by SIGKILL): "
        "2 processes taken over after 0.8 s"
    ]


def test_notices_name_what_is_wrong(status: dict[str, Any]) -> None:
    status["ready"], status["reasons"] = False, ["block trunk1 has no ready worker (failed)"]
    status["warnings"] = ["the state was restored from its former generation"]
    status["workers"][0]["crash"] = {"age_s": 3.0, "cause": "killed by SIGKILL"}
    status["workers"][0]["given_up"] = "5 crashes in 60 s"
    status["last_update"] = {
        "id": 2,
        "kind": "apply",
        "error": {"code": "LOAD_FAILED", "message": "bad artifact"},
    }
    assert notices(status) == [
        "not ready: block trunk1 has no ready worker (failed)",
        "warning: the state was restored from its former generation",
        "update 2 (apply) failed: LOAD_FAILED: bad artifact",
        "trunk1#0 crashed 3 s ago: killed by SIGKILL; not restarted: 5 crashes in 60 s",
    ]
    status["workers"][0]["crash"]["work"] = [
        {"block": "trunk1", "requests": 2},
        {"block": "trunk2", "requests": 1},
    ]
    assert (
        "trunk1#0 crashed 3 s ago: killed by SIGKILL, while it computed trunk1 for 2 requests, "
        "trunk2 for 1 request; not restarted: 5 crashes in 60 s"
    ) in notices(status)
    status["workers"][0]["crash"] |= {"work": [], "log": ["1", "2", "", "3", "Traceback", "4"]}
    assert [n for n in notices(status) if n.startswith(" ")] == ["    3", "    Traceback", "    4"]
    report = ["Fatal Python error: Aborted", "Current thread 0x1 (most recent call first):"]
    report += ['  File "engine.py", line 7 in run', '  File "worker.py", line 9 in turn']
    status["workers"][0]["crash"]["log"] = report
    assert [n[4:] for n in notices(status) if n.startswith(" ")] == report[:3]
    status["updating"] = {"id": 3, "kind": "apply", "state": "preparing"}
    assert "update 3 (apply): preparing" in notices(status)


def strip(value: Any, depth: int) -> Any:
    """The document with everything below ``depth`` replaced by None."""
    if depth == 0:
        return None
    if isinstance(value, dict):
        return {k: strip(v, depth - 1) for k, v in value.items()}
    return [strip(v, depth - 1) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_missing_parts_are_dashes_not_crashes(status: dict[str, Any], depth: int) -> None:
    partial = strip(status, depth)
    printed(status_screen(partial, 100), 100)
    printed(top_screen(partial, status, 100), 100)
    printed(top_screen(status, partial, 100), 100)
    printed(status_screen({}, 80), 80)


@pytest.mark.parametrize(
    ("told", "now", "shown"),
    [
        ((2, 1), (2, 1), "2"),
        ((2, 1), (1, 1), "1>2"),
        ((1, 2), (1, 2), "2x1"),
        ((1, 2), (2, 1), "2>2x1"),
        ((1, 2), (None, None), "2x1"),
    ],
)
def test_threads_and_lanes_that_compute(told: Any, now: Any, shown: str) -> None:
    worker = {"name": "w#0", "state": "ready", "threads": told[0], "lanes": told[1]}
    worker |= {"threads_now": now[0], "lanes_now": now[1]}
    grid = process_grid({"workers": [worker]})
    assert column(grid, "comp")[-1] == shown


def test_ping_and_update_lines() -> None:
    answer = {
        "ok": False,
        "pings": [
            {"worker": "trunk1#0", "ok": True, "rtt_ms": 1.25, "state": "ready"},
            {"worker": "h#0", "ok": False},
        ],
    }
    assert ping_lines(answer) == ["trunk1#0  1.25 ms  ready", "h#0       no answer"]
    assert not ping_ok(answer)
    assert ping_ok({"pings": []})
    plan = {
        "start": [{"replica": "a#0", "blocks": ["a"]}],
        "keep": ["b#0"],
        "stop": [],
        "threads": {"a": 2, "b": 1},
        "lanes": {"a": 1, "b": 2},
        "tasks": {"add": ["t"], "remove": [], "change": []},
    }
    update = {"id": 4, "state": "done", "duration_ms": 151.2, "plan": plan, "notes": ["n"]}
    assert update_lines({"epoch": 2, "update": update}) == [
        "update 4: done in 151 ms",
        "  start  a#0",
        "  keep   b#0",
        "  threads a 2",
        "  lanes   b 2",
        "  tasks  add t",
        "  note   n",
        "epoch 2",
    ]
    assert update_lines({"epoch": 2, "changed": False, "plan": {}}) == [
        "nothing would change",
        "epoch 2",
    ]
    # A plan that is only shown does not look like one that was carried out.
    assert update_lines({"epoch": 3, "changed": True, "plan": plan | {"lanes": {}}}) == [
        "not applied; it would",
        "  start  a#0",
        "  keep   b#0",
        "  threads a 2",
        "  tasks  add t",
        "it would be epoch 3",
    ]


@pytest.mark.parametrize(
    ("shown", "want"),
    [
        (text.ms(0.1234), "0.12"),
        (text.ms(12.34), "12.3"),
        (text.ms(1234.5), "1234"),
        (text.ms(12_345), "12.3s"),
        (text.ms(None), "-"),
        (text.size(0), "0B"),
        (text.size(1536), "1.5K"),
        (text.size(200 * 2**20), "200M"),
        (text.size(5 * 2**40), "5120G"),
        (text.amount(1234), "1,234"),
        (text.amount(25_600_000), "25.6M"),
        (text.age(30), "30 s"),
        (text.age(600), "10 min"),
        (text.age(3 * 86400), "3 d"),
        (text.count(True), "-"),
    ],
)
def test_numbers(shown: str, want: str) -> None:
    assert shown == want


class Script:
    """A fetch that gives documents and errors in turn."""

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)

    def __call__(self) -> Any:
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step


def test_top_goes_on_through_an_outage_and_ends_on_q(status: dict[str, Any]) -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, height=60, force_terminal=True, highlight=False)
    fetch = Script(status, make_error("NOT_RUNNING", "refused"), status)
    keys = iter(["", "x", "q"])
    Top(fetch, 0.1, console, lambda seconds: next(keys)).run()
    assert "refused" in out.getvalue()
    assert fetch.steps == []


def test_top_ends_on_ctrl_c(status: dict[str, Any]) -> None:
    def interrupted(seconds: float) -> str:
        raise KeyboardInterrupt

    console = Console(file=io.StringIO(), force_terminal=True)
    Top(Script(status), 0.1, console, interrupted).run()


def test_top_without_a_terminal_prints_once(status: dict[str, Any]) -> None:
    out = io.StringIO()
    Top(Script(status), 0.1, Console(file=out, width=100)).run()
    assert out.getvalue().count("BlockFlow 0.1.0") == 1
    assert "\x1b" not in out.getvalue()

"""What a trace says of its queries: how many the system could serve without batching."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from blockflow.bench.simulation.plan import Order, plan_experiment
from blockflow.bench.simulation.recorded import recorded
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.system import StageModel, SystemModel, TaskModel, WorkerModel
from tests.simulation_rig import profile

LONG = (8, 64)
SYSTEM = SystemModel(
    tuple(
        WorkerModel(b, (StageModel(b, profile(b, cost, lengths), max_rows=8),))
        for b, cost, lengths in (
            ("quick", lambda rows, n: float(rows), (None,)),
            ("slow", lambda rows, n: 10.0 * rows, (None,)),
        )
    ),
    (TaskModel("quick", ("quick",)), TaskModel("slow", ("slow",), traffic=3.0)),
)


def able(tmp_path: Path, lines: str, rows: str = "1", duration: float | None = None) -> float:
    file = tmp_path / "t.csv"
    file.write_text(lines)
    order = Order(arrivals=str(file), rows=rows, noisy=False, seeds=1, duration_s=duration)
    return plan_experiment(SYSTEM, order)[1]


@pytest.mark.parametrize(
    ("lines", "per_s"),
    [
        ("time,task,rows\n1,quick,8\n2,quick,8\n", 1000 / 8),
        ("time,task,rows\n1,quick,8\n2,quick,2\n", 1000 / 5),
        ("time,task\n1,slow\n", 1000 / 20),  # its rows are drawn
        # Each worker's cores are one: what both compute counts.
        ("time,task,rows\n1,quick,8\n2,slow,1\n", 1000 / 9),
        ("time,rows\n1,4\n", 1000 / (0.25 * 4 + 0.75 * 40)),  # its task is drawn
        ("time,task,rows\n1,quick,4\n2,quick,\n", 1000 / 3),
    ],
)
def test_the_capacity_is_that_of_the_trace_s_queries(
    tmp_path: Path, lines: str, per_s: float
) -> None:
    assert able(tmp_path, lines, rows="2") == pytest.approx(per_s, rel=1e-6)


def test_only_what_is_replayed_counts(tmp_path: Path) -> None:
    lines = "time,task,rows\n1,quick,2\n9,quick,8\n"
    assert able(tmp_path, lines, duration=5.0) == pytest.approx(1000 / 2)


def test_each_task_s_queries_have_their_own_rows_and_lengths() -> None:
    rows, lengths = parse_sizes("choice:1=0.5,3=0.5", ""), parse_sizes("9", "")
    entries = [(0, "quick", None, None), (1, "slow", 2, 5), (2, "slow", 2, 7), (3, "slow", 4, 7)]
    served, queries = recorded(SYSTEM, entries, rows, lengths)
    assert [(t.name, t.traffic) for t in served.tasks] == [("quick", 1.0), ("slow", 3.0)]
    assert (queries["quick"].rows, queries["quick"].lengths) == (rows, lengths)
    assert queries["slow"].rows == parse_sizes("choice:2=2,4=1", "")
    assert queries["slow"].lengths == parse_sizes("choice:5=1,7=2", "")
    one, only = recorded(replace(SYSTEM), entries[:1], rows, None)
    assert [t.name for t in one.tasks] == ["quick"] and only["quick"].lengths is None

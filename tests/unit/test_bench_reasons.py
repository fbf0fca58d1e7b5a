"""The reasons: bounds and the best policy on chains whose answers are known; what is shown."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from blockflow.bench.batching import figures as f
from blockflow.bench.batching import reason_grids, reasons
from blockflow.bench.batching.optimum import best_mean, zerobatch_mean
from blockflow.bench.batching.oracle import (
    least_alone,
    least_end,
    least_mean,
    least_per_row,
    lines_of,
    split_gain,
)
from blockflow.bench.batching.plan import (
    DELAYBATCH,
    DELAYS,
    DVABATCH,
    DVABATCH_LOADS,
    FULL,
    LOAD,
    OPERATOR,
    TINY,
    ZEROBATCH,
)
from blockflow.bench.batching.run import parse_args
from blockflow.bench.batching.sharing import (
    batch_line,
    counts,
    own_bytes,
    weight_lines,
    weight_ratio,
)
from blockflow.bench.simulation.arrivals import Mix, Recorded
from blockflow.bench.simulation.example import made_up
from blockflow.bench.simulation.experiment import Cell, Runner
from blockflow.bench.simulation.simulator import Simulator
from blockflow.bench.simulation.sizes import parse_sizes
from blockflow.bench.simulation.system import chain
from blockflow.bench.simulation.workload import Workload

FLAT = [0.0, 10.0, 20.0, 30.0, 40.0]
DEVICE = [0.0, 10.0, 10.0, 10.0, 10.0]
POLICIES: list[dict[str, Any]] = [
    {"policy": "none"},
    {"policy": "window", "max_rows": 4},
    {"policy": "dvabatch", "bs_max": 4},
    {"policy": "dvabatch", "bs_max": 4, "join": "always"},
]


def line(rows: int, fixed: float, each: float) -> float:
    return fixed + each * rows


def test_bounds_of_known_chains() -> None:
    assert (least_per_row([FLAT, DEVICE]), least_alone([FLAT, DEVICE])) == (10 + 2.5, 20)
    # One by one, as they come: 10, 15, 20 ms.
    assert least_mean([FLAT], [0, 5, 10]) == pytest.approx(15)
    assert least_mean([FLAT], [0, 5, 10], lanes=2) == pytest.approx(10)
    assert least_mean([DEVICE], [0, 1, 2]) == pytest.approx(10)
    # What comes first is hidden behind the gap; the rows from the second on are not.
    assert least_end([FLAT], [0, 100], [1, 3]) == 130
    assert least_end([FLAT], [0, 10], [3, 1]) == 40
    assert split_gain([FLAT], 0, 4) == 1
    assert split_gain([FLAT, DEVICE], 1, 4) == 0.5


@pytest.mark.parametrize(("load", "longest"), [(0.3, 60), (0.7, 60), (0.95, 240)])
def test_the_best_policy_where_theory_knows_it(load: float, longest: int) -> None:
    """M/D/1: with rows that cost the same in any batch nothing beats one by one."""
    mean = 10 + load * 10 / (2 * (1 - load))
    assert best_mean([FLAT], load / 10, longest) == pytest.approx(mean, rel=1e-4)
    one = [[0.0, 10.0]]
    assert best_mean(one, load / 10, longest) == pytest.approx(mean, rel=1e-4)
    assert zerobatch_mean(one, load / 10, longest) == pytest.approx(mean, rel=1e-4)


LOADS = (0.3, 0.6, 0.95)


@pytest.mark.parametrize("load", LOADS)
def test_the_best_policy_is_no_worse_than_zerobatch_nor_better_than_the_bound(load: float) -> None:
    """A network whose last stage reads its weights once per batch."""
    rows = range(1, 17)
    lines = [[0.0, *(6.0 * b for b in rows)], [0.0, *(20 + 0.5 * b for b in rows)]]
    rate = load * 16 / (lines[0][16] + lines[1][16])
    rng = Random(1)
    arrivals = list(accumulate(rng.expovariate(rate) for _ in range(20_000)))
    best, zero = best_mean(lines, rate), zerobatch_mean(lines, rate)
    assert least_mean(lines, arrivals) < best < 0.95 * zero
    if load == max(LOADS):  # A queue that is cut farther away changes nothing, even the longest.
        assert best_mean(lines, rate, 10 * 16) == pytest.approx(best, rel=5e-3)


def test_zerobatch_is_what_the_simulator_serves() -> None:
    blocks = [made_up("a", lambda b: 2 + 3.0 * b, 4), made_up("b", lambda b: 8 + 1.0 * b, 4)]
    lines = lines_of(blocks, 4)
    rate = 0.5 * 4 / sum(line[4] for line in lines)
    case = reasons.Case("x", blocks, 4, {ZEROBATCH: ({"policy": "window", "max_rows": 4}, 1)})
    run = Runner(reasons._experiment(case, *case.arms[ZEROBATCH], 1e3 * rate, 2000)).run(
        Cell(0, 0, 1)
    )
    assert run.times.mean_ms == pytest.approx(zerobatch_mean(lines, rate), rel=0.1)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_policy_beats_the_bound(data: st.DataObject) -> None:
    costs = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=3)
    blocks = [
        made_up(f"b{i}", partial(line, fixed=fixed, each=each), 4)
        for i, (fixed, each) in enumerate(data.draw(costs))
    ]
    gaps = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=30))
    arrivals = list(accumulate(gaps))
    policy = data.draw(st.sampled_from(POLICIES))
    system = chain(blocks, max_rows=4, credits=1000, adaptive_limit=False).with_policy(policy)
    trace = Recorded(tuple((a * 10**6, "task", 1, None) for a in arrivals))
    mix = Mix([("task", 1.0)], parse_sizes("1", ""))
    run = Simulator(system, Workload(trace, mix, 0.0, arrivals[-1] / 1e3 + 1, 1), noisy=False)
    run.run()
    times = [(r.left_ns - r.came_ns) / 1e6 for r in run.requests]
    lines = lines_of(blocks, 4)
    at = [float(a) for a in arrivals]
    assert sum(times) / len(times) >= least_mean(lines, at) - 1e-3
    assert run.last_exit_ns / 1e6 >= least_end(lines, at, [1] * len(at)) - 1e-3


def test_everything_is_measured_and_shown() -> None:
    measured = {
        LOAD: [made_up("a", lambda b: 1.0 * b, 4), made_up("b", lambda b: 4.0 + b, 4)],
        OPERATOR: [made_up("c", lambda b: 2.0 * b, 4), made_up("d", lambda b: 3.0 + b, 4)],
    }
    called: list[None] = []
    found = reasons.measure(measured, TINY, lambda: called.append(None))
    assert len(called) == reasons.steps(measured, TINY)
    assert {g.labels["experiment"] for g in found} == {"reasons"}
    grid = reason_grids.gain_grid(found)
    arms = {(row[0], row[1], row[2]) for row in grid.rows}
    assert {(LOAD, load, DVABATCH) for load in DVABATCH_LOADS} < arms
    assert {(LOAD, load, DELAYBATCH) for load in DVABATCH_LOADS} < arms
    assert (reasons.DEVICE, "high", reasons.BOTH_LANES) in arms
    peaks = {row[1] for row in reason_grids.peak_grid(found).rows if row[0] == LOAD}
    assert {p.partition(",")[0] for p in peaks} == {ZEROBATCH, DELAYBATCH, DVABATCH}
    assert len(peaks) == 2 + len(DELAYS) - 1
    by = {(g.labels["model"], g.labels["load"], g.mode): g for g in found if g.name == f.TIME_RATIO}
    for (model, load, arm), ratio in by.items():
        if arm == f.BEST:
            assert ratio.value <= 1.001, (model, load)
    for make in (reason_grids.row_grid, reason_grids.split_grid, reason_grids.test_grid):
        grid = make(found)
        assert grid.rows
        assert all(len(row) == len(grid.heads) for row in grid.rows)
        assert make([]).rows == []
    gaps = [float(row[2]) for row in reason_grids.test_grid(found).rows]
    assert all(a <= b for a, b in pairwise(gaps))


def test_reasons_are_run_by_their_name() -> None:
    assert parse_args(["--only", "reasons"]).experiments == ["reasons"]
    assert "reasons" not in parse_args([]).experiments


def test_where_a_shared_trunk_saves() -> None:
    assert weight_ratio(100, 10, 8) == pytest.approx((90 + 80) / 800)
    model = nn.Sequential(OrderedDict(a=nn.Linear(3, 3), b=nn.Linear(3, 5), c=nn.Linear(5, 1)))
    assert own_bytes(model, "b") == 4 * (3 * 5 + 5 + 5 + 1)
    lines = weight_lines(FULL)
    ratios = [float(line.rpartition(" tasks ")[2].split()[0]) for line in lines]
    # Of ResNet-50 only a classifier of one's own keeps the weights below a quarter.
    assert [r <= 0.25 for r in ratios] == [False, False, True]


def test_batches_are_counted_between_two_moments() -> None:
    def status(rows: int, batches: int) -> dict[str, Any]:
        kpi = {"rows": rows, "batches": batches}
        stages = [
            {"block": "trunk", "kpi": kpi},
            {"block": "h1", "kpi": kpi},
            {"block": "x", "kpi": {}},
        ]
        return {"workers": [{"stages": stages}, {}]}

    names = {"trunk": "trunk", "h1": "heads", "x": "x"}
    pair = counts(status(10, 10), names), counts(status(50, 20), names)
    assert batch_line("batched", [pair]) == "batched: rows per batch at trunk 4.0, heads 4.0"
    assert batch_line("batched", []) == ""

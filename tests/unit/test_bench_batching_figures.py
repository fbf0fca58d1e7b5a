"""The batching benchmark's figures: ratios, verdicts, and the tables that show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batching_rig import cell, searched

from blockflow.bench.batching import figures as f
from blockflow.bench.batching import grids
from blockflow.bench.batching.peaks import peak_figures
from blockflow.bench.batching.plan import (
    BATCHSIZE,
    COST,
    DELAYBATCH,
    DVABATCH,
    HEADS,
    LBCI,
    LBCI_ARM,
    LOAD,
    SERIAL,
    SHARED,
    ZEROBATCH,
)
from blockflow.bench.batching.run import GRIDS
from blockflow.bench.batching.traffic import Cell
from blockflow.bench.decisions import DECISION, TURN
from blockflow.bench.results import Figure, ResultFile, latency_figure
from blockflow.bench.statistics import Interval, Verdict

LABELS: Mapping[str, Any] = {"experiment": LBCI, "load": "1", "rate": 20.0, "x_serial": 0.6}


# --- figures --------------------------------------------------------------------------------------


def test_an_arm_at_a_load_pools_its_visits() -> None:
    found = {
        g.name: g
        for g in f.time_figures(SERIAL, [cell(1.0, 3.0), cell(5.0, 7.0, over=0.5)], LABELS)
    }
    time = found[f.TIME]
    assert (time.value, time.n, time.p99_ms) == (4.0, 4, 7.0)
    assert (time.low, time.high) == (2.0, 6.0)  # of the visits' means
    assert found[f.OVER].value == 25.0
    assert "failed" not in time.labels


def test_a_mean_lies_in_its_own_interval() -> None:
    """Two visits with a long queue move the mean of all queries, but not the median visit."""
    cells = [cell(*[10.0 + i / 10] * 80) for i in range(9)] + [cell(*[60.0] * 80)] * 2
    (time,) = [g for g in f.time_figures(SERIAL, cells, LABELS) if g.name == f.TIME]
    assert time.value == pytest.approx((9 * 10.4 + 120) / 11)
    assert time.interval.low < time.value < time.interval.high
    assert time.interval.low > 0


def test_a_few_visits_hold_the_share_of_all_queries_nearly_as_often_as_they_say() -> None:
    chance = np.random.default_rng(5)
    missed = 0
    for _ in range(2000):
        offered = chance.poisson(80, 5)
        found = f.pooled(chance.binomial(offered, chance.beta(4, 30, 5)).tolist(), offered.tolist())
        missed += not found.low <= 4 / 34 <= found.high
    assert missed / 2000 < 0.08  # the bootstrap missed it in 18 of a hundred


def test_a_load_without_answers_has_no_time() -> None:
    found = f.time_figures(SERIAL, [cell(failed=("OVERLOADED",), over=1.0)], LABELS)
    assert {g.name for g in found} == {f.RATE, f.OVER}
    assert all(g.labels["failed"] == "OVERLOADED" for g in found)


def compare(ours: Sequence[Cell], others: Sequence[Cell], base: str, load: str) -> list[Figure]:
    labels = {**LABELS, "load": load}
    return f.against(LBCI_ARM, ours, base, others, labels, f.LBCI_PAPER, f.LBCI_PAPER)


def test_ratios_are_paired_by_visit() -> None:
    found = {
        g.name: g
        for g in compare(
            [*[cell(7.0), cell(70.0)] * 3, cell(1.0)],
            [*[cell(10.0), cell(100.0)] * 3, cell()],
            SERIAL,
            "1",
        )
    }
    ratio = found[f.TIME_RATIO]
    assert (ratio.value, ratio.n) == (pytest.approx(0.7), 6)
    assert ratio.labels["paper"] == ratio.labels["goal"] == pytest.approx(0.7388)
    assert ratio.labels["verdict"] == Verdict.MET
    assert "verdict" not in found[f.TAIL_RATIO].labels
    assert compare([cell(1.0)], [cell()], SERIAL, "1") == []


@pytest.mark.parametrize(
    ("serial", "static", "verdict"),
    [(10.0, 30.0, "met"), (10.0, 15.0, "missed"), (8.0, 30.0, "missed")],
)
def test_a_load_is_met_when_both_aims_are(serial: float, static: float, verdict: str) -> None:
    """At the second load: no slower than serial, and 52% below the static batch."""
    ours = [cell(9.0)] * 5
    found = compare(ours, [cell(serial)] * 5, SERIAL, "2")
    found += compare(ours, [cell(static)] * 5, BATCHSIZE, "2")
    assert f.load_verdicts(found, LBCI, LBCI_ARM) == {"2": verdict}


def test_a_load_that_nobody_can_tell_is_noise() -> None:
    found = compare([cell(8.0), cell(12.0)] * 3, [cell(10.0)] * 6, SERIAL, "4")
    assert f.load_verdicts(found, LBCI, LBCI_ARM) == {"4": Verdict.NOISE}


def ratio_of(low: float, value: float, high: float, n: int = 5, goal: float = 1.0) -> Figure:
    return f.ratio_figure(
        f.TIME_RATIO, LBCI_ARM, SERIAL, Interval(value, low, high, n), LABELS, goal=goal
    )


def test_more_visits_are_wanted_until_a_ratio_is_decided_or_known_well() -> None:
    assert f.decided([ratio_of(0.38, 0.4, 0.42), ratio_of(1.99, 2.0, 2.01)])
    assert not f.decided([ratio_of(0.38, 0.4, 0.42), ratio_of(0.9, 1.0, 1.2)])
    assert not f.decided([ratio_of(0.8, 0.9, 0.99)])  # met, but whoever looks again needs more
    assert f.decided([ratio_of(0.985, 1.0, 1.02)])  # within two per cent: nobody would wait
    assert not f.decided([ratio_of(0.985, 1.0, 1.02, n=4)])  # extremes of a few are no interval
    open_ = f.ratio_figure(f.TAIL_RATIO, LBCI_ARM, SERIAL, Interval(1.0, 0.5, 2.0, 5), LABELS)
    assert f.decided([open_])  # has no aim


@pytest.mark.parametrize("visits", [1, 4])
def test_a_few_visits_decide_nothing(visits: int) -> None:
    found = compare([cell(1.0)] * visits, [cell(9.0)] * visits, SERIAL, "1")
    (ratio,) = [g for g in found if g.name == f.TIME_RATIO]
    assert ratio.labels["verdict"] == Verdict.NOISE


def test_memory_is_looked_at_once() -> None:
    once = Interval(0.6, 0.6, 0.6, 1)
    ratio = f.ratio_figure(f.MEMORY_RATIO, LBCI_ARM, SERIAL, once, LABELS, goal=0.7)
    assert ratio.labels["verdict"] == Verdict.MET


def test_so_many_loads_are_met_missed_or_undecided() -> None:
    met, missed, noise = Verdict.MET, Verdict.MISSED, Verdict.NOISE
    assert f.enough([met, met, met, missed], 3) == met
    assert f.enough([met, met, noise, missed], 3) == noise
    assert f.enough([met, met, missed, missed], 3) == missed


def test_a_load_is_judged_beside_some_of_the_rivals() -> None:
    ours = [cell(9.0)] * 5
    found = compare(ours, [cell(8.0)] * 5, SERIAL, "2")
    found += compare(ours, [cell(30.0)] * 5, BATCHSIZE, "2")
    assert f.load_verdicts(found, LBCI, LBCI_ARM) == {"2": Verdict.MISSED}
    assert f.load_verdicts(found, LBCI, LBCI_ARM, [BATCHSIZE]) == {"2": Verdict.MET}


def test_throughput_in_an_open_loop_says_what_is_possible_at_all() -> None:
    """Who answers 10 of the 12 rows that come can be beaten by a fifth at most."""
    base = [replace(cell(10.0), due_per_s=12.0)] * 3
    found = {g.name: g for g in compare([cell(9.0)] * 3, base, SERIAL, "1")}
    assert found[f.RATE_RATIO].labels["possible"] == pytest.approx(1.2)
    assert "verdict" not in found[f.RATE_RATIO].labels
    alone = [replace(cell(10.0), due_per_s=0.0)]  # of a single query nothing can be said
    (rate,) = [g for g in compare([cell(9.0)], alone, SERIAL, "1") if g.name == f.RATE_RATIO]
    assert "possible" not in rate.labels


def test_the_run_s_own_noise_leaves_a_ratio_undecided() -> None:
    one = Interval(1.005, 1.0, 1.012, 60)

    def verdict(noise: float) -> str:
        labels = f.ratio_figure(
            f.ALONE_RATIO, "window", "none", one, {}, goal=1.02, noise=noise
        ).labels
        return str(labels["verdict"])

    assert [verdict(0.0), verdict(0.02)] == ["met", "within noise"]


def test_a_share_s_interval_is_that_of_whole_visits() -> None:
    """Late queries come together: five visits of a hundred are five draws, not five hundred."""
    calm = replace(cell(*[1.0] * 100), over=0.0)
    busy = replace(calm, over=0.5)
    found = f.share_over([calm, calm, calm, calm, busy])
    assert found.value == pytest.approx(10.0)
    assert found.n == 5
    assert found.low == 0.0
    assert found.high == pytest.approx(10.0 + 2.776 * 10.0, abs=0.1)  # Student's of five visits
    assert f.share_over([calm, busy]) == Interval(25.0, 0.0, 50.0, 2)
    short = replace(cell(*[1.0] * 10), over=1.0)  # of few queries
    assert f.share_over([calm] * 9 + [short]).value == pytest.approx(1000 / 910)


@pytest.mark.parametrize(
    ("overs", "verdict"),
    [
        ([0.01, 0.02, 0.0, 0.03, 0.01], "met"),
        ([0.3, 0.2, 0.25, 0.3, 0.2], "missed"),
        ([0.0, 0.3, 0.0, 0.0, 0.3], "within noise"),
        ([0.0], "within noise"),
    ],
)
def test_the_share_over_the_bound_is_judged(overs: Sequence[float], verdict: str) -> None:
    cells = [replace(cell(1.0), over=over) for over in overs]
    (over,) = [g for g in f.time_figures(LBCI_ARM, cells, LABELS) if g.name == f.OVER]
    judged = f.over_aim(over, 11.67)
    assert judged.labels["verdict"] == verdict
    assert (judged.value, judged.labels["goal"]) == (over.value, 11.67)


def lossy(*times: float) -> Cell:
    return cell(*times, failed=("OVERLOADED",))


@pytest.mark.parametrize(
    ("ours", "others", "verdict"),
    [
        ([cell(5.0)] * 5, [cell(10.0)] * 5, "met"),
        ([cell(5.0)] * 4 + [lossy(5.0)], [cell(10.0)] * 5, "missed"),
        ([cell(5.0)] * 5, [cell(10.0)] * 4 + [lossy(10.0)], "met"),
        ([cell(15.0)] * 5, [cell(10.0)] * 4 + [lossy(10.0)], "within noise"),
        ([cell(5.0)] * 4 + [lossy()], [cell(10.0)] * 5, "missed"),
    ],
)
def test_nobody_is_faster_by_losing_queries(
    ours: list[Cell], others: list[Cell], verdict: str
) -> None:
    (time,) = [g for g in compare(ours, others, SERIAL, "4") if g.name == f.TIME_RATIO]
    assert time.labels["verdict"] == verdict
    assert time.labels.get("failed", False) is any(c.failed for c in (*ours, *others))


def test_which_queries_were_lost_is_said() -> None:
    assert f.failures(SERIAL, [cell(1.0)]) == ""
    text = f.failures(SERIAL, [cell(1.0), lossy(1.0, 2.0)])
    assert text == "1 of serial's 4 queries failed: OVERLOADED"


def test_the_99th_percentile_has_the_same_aim_where_that_is_wanted() -> None:
    ours, others = [cell(*[1.0] * 9, 90.0)] * 5, [cell(*[20.0] * 10)] * 5

    def found(**aims: Any) -> dict[str, str]:
        figures = f.against(DVABATCH, ours, ZEROBATCH, others, LABELS, {}, **aims)
        return {g.name: g.labels["verdict"] for g in figures if "verdict" in g.labels}

    assert found(goals={}) == {f.TIME_RATIO: "met"}
    assert found(goals={}, tail=True) == {f.TIME_RATIO: "met", f.TAIL_RATIO: "missed"}
    assert found(goals=None, tail=True) == {}
    # It is judged, but nothing is visited again for it: it may be neither for ever.
    wide = f.ratio_figure(f.TAIL_RATIO, "a", "b", Interval(1.0, 0.5, 2.0, 5), {}, goal=1.0)
    assert wide.labels["verdict"] == Verdict.NOISE
    assert f.decided([wide])


def test_a_load_at_which_an_arm_answered_nothing_is_missed() -> None:
    labels = {**LABELS, "load": "2"}
    found = f.time_figures(LBCI_ARM, [lossy()], labels) + f.time_figures(
        SERIAL, [cell(1.0)], labels
    )
    assert f.load_verdicts(found, LBCI, LBCI_ARM) == {"2": Verdict.MISSED}
    assert f.load_verdicts(found, LBCI, LBCI_ARM, [SERIAL]) == {"2": Verdict.MISSED}
    assert f.load_verdicts(found, LBCI, LBCI_ARM, [BATCHSIZE]) == {}  # was not there
    assert f.load_verdicts(found, LBCI, SERIAL) == {}


# --- tables ---------------------------------------------------------------------------------------


def everything() -> list[Figure]:
    out: list[Figure] = []
    for experiment, arms in ((LBCI, (SERIAL, BATCHSIZE, LBCI_ARM)), (LOAD, (ZEROBATCH, DVABATCH))):
        labels = {**LABELS, "experiment": experiment}
        for arm in arms:
            out += f.time_figures(arm, [cell(1.0, 2.0), cell(3.0)], labels)
        out.append(Figure(f.SIMULATED, arms[0], None, None, None, 1.5, "ms", 2, labels=labels))
        pair = [cell(9.0)], [cell(10.0)]
        out += f.against(arms[-1], pair[0], arms[0], pair[1], labels, f.LBCI_PAPER, {}, tail=True)
    over = f.time_figures(LBCI_ARM, [cell(1.0)], {**LABELS, "load": "3"})
    out += [f.over_aim(g, 11.67) for g in over if g.name == f.OVER]
    sizes = {"experiment": LBCI, "load": "small", "largest": 10}
    out += [latency_figure(f.TEST, arm, None, [1000.0], sizes) for arm in (SERIAL, LBCI_ARM)]
    one = Interval(0.8, 0.7, 0.9, 3)
    out.append(f.ratio_figure(f.TEST_RATIO, LBCI_ARM, SERIAL, one, sizes, f.LBCI_PAPER, 0.77))
    searches = {arm: searched(50.0, 40.0, 4) for arm in (ZEROBATCH, DVABATCH)}
    out += peak_figures(LOAD, searches, 300.0, [ZEROBATCH], {DVABATCH: 1.0})
    closed = {"experiment": LBCI, "load": "closed loop"}
    out.append(Figure(f.CLOSED, SERIAL, None, None, None, 30.0, "1/s", 5, labels=closed))
    more = Interval(1.4, 1.3, 1.5, 5)
    goal = f.ratio_figure(f.CLOSED_RATIO, LBCI_ARM, SERIAL, more, closed, goal=1.2, at_least=True)
    out.append(goal)
    tried = {"experiment": LOAD, "delay_ms": 0.0, "rate": 90.0, "over": 1.0, "chosen": True}
    out.append(Figure(f.CANDIDATE, DELAYBATCH, None, None, None, 20.0, "ms", 9, labels=tried))
    served = {"experiment": LOAD}
    out.append(Figure(f.SERVED, "served", 1, None, None, 1.2, "x", 1, labels=served))
    for experiment in (SHARED, HEADS):
        home = {"experiment": experiment, "home": "shared trunk"}
        out.append(Figure(f.SATURATED, "batched", 1, None, None, 20.0, "1/s", 3, labels=home))
        out.append(f.ratio_figure(f.OF_BOUND, "batched", "in process", one, home, goal=0.9))
        for kind in ("weights", "uss", "pss"):
            labels = {"experiment": experiment, "kind": kind}
            size = Figure(f.MEMORY, "shared trunk", None, None, None, 9.0, "MiB", 4, labels=labels)
            out.append(size)
    cost = {"experiment": COST}
    told = {**cost, "verdict": "met", "goal": 50.0, "p99_us": 60.0}
    out += [
        Figure(name, "window", None, None, None, 20.0, "us", 9, labels=told)
        for name in (DECISION, TURN)
    ]
    out.append(f.ratio_figure(f.ALONE_RATIO, "window", "none", one, cost, goal=1.02))
    return [*out, f.note(LBCI, "a note")]


def test_every_table_shows_what_was_measured() -> None:
    found = everything()
    # Those of the reasons have a test of their own.
    for make in (*(m for m in GRIDS if m.__module__ == grids.__name__), grids.note_grid):
        grid = make(found)
        assert grid.rows, grid.title
        assert all(not row or len(row) == len(grid.heads) for row in grid.rows)
        assert make([]).rows in ([], ())
    aims = {row[0]: row[4] for row in grids.aim_grid(found).rows}
    assert aims[f"LBCI: {f.CLOSED_RATIO} {SERIAL}"] == "met"
    # Whatever has a verdict is among the aims, each by what tells it from the others.
    of_loads = {f.TIME_RATIO, f.TAIL_RATIO}
    assert len(aims) >= len([g for g in found if "verdict" in g.labels and g.name not in of_loads])
    assert {
        f"LBCI: {f.TEST_RATIO} small {SERIAL}",
        f"LBCI: {f.OVER} 3, %",
        f"DVABatch: {f.PEAK_RATIO} {LOAD} {ZEROBATCH}",
        f"batched: saturated, of the bound {SHARED}",
        f"batched: saturated, of the bound {HEADS}",
        "window: decision, us",
        "window: turn, us",
        "window: time alone to none",
        f"{LOAD}: DVABatch p99 no longer than the windows",
    } < set(aims)
    assert aims["LBCI as good as in its paper"] == "missed"  # one load cannot be three
    rows = {row[3]: row for row in grids.lbci_grid(found).rows if row}
    assert rows[SERIAL][4:6] == ("2.00", "3.00")
    (row,) = grids.lbci_ratio_grid(found).rows
    assert row[:7] == (LBCI, "1", SERIAL, "-10%", "-10%..-10%", "-26%", "1")
    assert grids.remarks(found) == ["lbci: a note"]


def test_figures_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "batching.jsonl"
    found = everything()
    ResultFile(path, "batching").write(found)
    stored = [Figure.from_dict(line) for line in ResultFile(path, "batching").read()]
    for make in GRIDS:
        assert make(stored).rows == make(found).rows

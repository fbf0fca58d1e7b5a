"""Modular and traditional memory: the thesis's tables 4.5 and 4.6, cell by cell, and the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thesis_rig import context

from blockflow.bench.statistics import Interval
from blockflow.bench.thesis import deployment
from blockflow.bench.thesis.experiment import Settings
from blockflow.bench.thesis.memory_figures import (
    LESS,
    MORE,
    SAME,
    TOO_FEW,
    draw,
    mismatches,
    process_figures,
    process_grid,
    remarks,
    repeated,
    saving_figures,
    saving_grids,
    scenario_grid,
    verdict,
)
from blockflow.bench.thesis.memory_model import (
    FIRST,
    FULL,
    LAST,
    PROCESSES,
    SCENARIOS,
    Counts,
    Fusion,
    Occupancy,
    saving,
)
from blockflow.bench.thesis.memory_tables import RESNET50, TABLES, TASKS, ThesisTable, table_counts

# Whole numbers, so that the sums can be done by hand: o = 1, 2, 3, 4, and C = 10.
BY_HAND = Occupancy(
    "by hand",
    "MiB",
    {(1,): 11.0, (2,): 12.0, (3,): 13.0, (4,): 14.0, FIRST: 13.0, LAST: 17.0, FULL: 20.0},
    10.0,
)


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda t: t.label)
def test_every_cell_of_the_thesis_comes_out_to_its_last_digit(table: ThesisTable) -> None:
    assert round(table.occupancy.traditional(TASKS)) == table.traditional
    for scenario in SCENARIOS:
        for fusion in Fusion:
            mine = table.occupancy.modular(table_counts(scenario.number), fusion)
            meant = table.meant(scenario.number, fusion)
            assert round(mine) == meant.mb, (scenario.number, fusion)
            share = saving(meant.mb, table.traditional)
            assert share == pytest.approx(meant.saving, abs=0.00501), (scenario.number, fusion)


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda t: t.label)
def test_the_misprints_are_those_cells_that_do_not_come_out(table: ThesisTable) -> None:
    wrong = {
        (s.number, fusion)
        for s in SCENARIOS
        for fusion in Fusion
        if round(table.occupancy.modular(table_counts(s.number), fusion))
        != table.printed(s.number, fusion).mb
    }
    assert wrong == set(table.misprints)


def test_the_tables_compare_99_tasks_with_100_in_two_scenarios() -> None:
    totals = {s.number: table_counts(s.number).total for s in SCENARIOS}
    assert {n for n, total in totals.items() if total != TASKS} == {1, 5}
    for s in SCENARIOS:
        if s.number not in {1, 5}:
            assert table_counts(s.number) == s.counts(TASKS)


def test_constants_agree_with_table_4_2() -> None:
    # Memory that torch reserves for a block alone, in MB; table 4.2.
    for block, reserved in zip(((1,), (2,), (3,), (4,)), (26, 26, 56, 110), strict=True):
        assert RESNET50.occupancy.own(block) == reserved


@given(st.sampled_from(SCENARIOS), st.integers(1, 5000))
def test_every_task_is_in_a_class_and_shares_are_kept(scenario: object, tasks: int) -> None:
    counts = scenario.counts(tasks)  # type: ignore[attr-defined]
    weights = scenario.weights  # type: ignore[attr-defined]
    assert counts.total == tasks
    for n, weight in zip((counts.a, counts.b, counts.c), weights, strict=True):
        assert abs(n - tasks * weight / sum(weights)) < 1


def test_memory_is_a_sum_over_processes() -> None:
    counts = Counts(2, 3, 5)
    shared, own = 11 + 12 + 13, 2 * 20 + 3 * (13 + 14) + 5 * 14
    assert BY_HAND.modular(counts, Fusion.NONE) == shared + own
    # Fusing the shared blocks 1 and 2 saves C once, and 3 with 4 once per task of class B.
    assert BY_HAND.modular(counts, Fusion.FIRST) == shared + own - 10
    assert BY_HAND.modular(counts, Fusion.BOTH) == shared + own - 10 - 3 * 10
    assert BY_HAND.traditional(10) == 200
    assert [BY_HAND.predicted(b) for b in PROCESSES] == list(BY_HAND.processes.values())
    assert saving(150, 200) == 25
    assert saving(250, 200) == -25


def test_tables_and_remarks_of_a_machine_beside_the_thesis() -> None:
    machine = Occupancy("resnet50", "MiB", BY_HAND.processes, BY_HAND.context)
    samples = {(): [9.0, 10.0, 12.0]} | {b: [v - 1, v, v + 1] for b, v in machine.processes.items()}
    found = [
        *process_figures(machine, samples),
        *saving_figures([machine] * 5, RESNET50, constants_of_thesis=False),
    ]
    assert process_grid(found).rows[0] == ("without a block (C)", "10.0 (9.00-12.0)", "")
    assert process_grid(found).rows[-1] == ("blocks 1+2+3+4", "20.0 (19.0-21.0)", "20.0")
    hundred, thousand = saving_grids(found)
    assert hundred.title == "resnet50, 100 tasks, all tasks"
    assert thousand.title == "resnet50, 1000 tasks, all tasks"
    assert hundred.rows[0][7:] == ("64503", "-19.23", "")
    # Scenario 3's modular cell is a misprint: what was meant stands there, marked.
    assert ("57689", "-6.63", "*") in [row[7:] for row in hundred.rows if row]
    # The thesis prints no megabytes for 1000 tasks.
    assert thousand.rows[0][7:] == ("", "-19.23", "")
    lines = remarks(found)
    assert "memory of 24 deployments: " in lines[0]
    assert "at best" in lines[0] and "at worst" in lines[0]
    assert mismatches(found) == []


def drawn(whole: Sequence[float]) -> list[Occupancy]:
    """A round per number: the whole model's process takes so much, the blocks the same always."""
    return [
        Occupancy("m", "MiB", {**BY_HAND.processes, FULL: mib}, BY_HAND.context) for mib in whole
    ]


def test_a_saving_has_its_interval_and_is_judged_by_the_runs_noise() -> None:
    # Scenario 4: 5 whole models, 5 times blocks 3 and 4, 90 times block 4, beside 100 models.
    found = saving_figures(drawn([20.0, 20.0, 20.2, 20.0, 20.1]), None, constants_of_thesis=False)
    mine = [f for f in found if f.labels["scenario"] == 4 and f.labels["tasks"] == 100]
    assert [f.n for f in mine] == [5, 5, 5]
    assert mine[0].value == pytest.approx(saving(36 + 5 * 20 + 5 * 27 + 90 * 14, 2000))
    assert mine[0].low is not None and mine[0].high is not None
    assert mine[0].low <= mine[0].value < mine[0].high
    assert mine[0].labels["noise"] == pytest.approx(0.01)
    assert mine[0].labels["verdict"] == LESS
    assert "less memory (95% " in remarks(found)[0]
    assert "differed by up to 1.0% (noise)" in remarks(found)[2]
    row = saving_grids(found)[0].rows[0]
    assert (row[5], row[6]) == (f"{found[0].low:.1f} to {found[0].high:.1f}", MORE)


def test_nothing_is_concluded_from_starts_that_differ_as_much() -> None:
    """Every saving is positive in every round; the whole model is as far apart from itself."""
    found = saving_figures(drawn([24.0, 48.0, 24.0, 48.0, 24.0]), None, constants_of_thesis=False)
    best = max((f for f in found if f.labels["tasks"] == 100), key=lambda f: f.value)
    assert best.low is not None and best.low > 0
    assert {f.labels["verdict"] for f in found} == {SAME}
    said = remarks(found)[0]
    assert "memory of 24 deployments: 24 not told apart" in said
    assert f"not told apart ({best.value:.1f}% less memory, 95% " in said
    few = saving_figures(drawn([20.0] * 4), None, constants_of_thesis=False)
    assert {f.labels["verdict"] for f in few} == {TOO_FEW}
    assert "24 too few rounds to conclude" in remarks(few)[0]


def test_verdicts_lie_beyond_the_noise_with_their_whole_interval() -> None:
    assert verdict(Interval(0.9, 0.88, 0.94, 5), 0.05) == LESS
    assert verdict(Interval(0.9, 0.88, 0.96, 5), 0.05) == SAME
    assert verdict(Interval(1.1, 1.06, 1.2, 5), 0.05) == MORE
    assert verdict(Interval(1.1, 1.04, 1.2, 5), 0.05) == SAME
    assert verdict(Interval(0.5, 0.5, 0.5, 4), 0.0) == TOO_FEW
    assert repeated([20.0]) == 0.0
    assert repeated([20.0, 25.0, 20.0]) == pytest.approx(0.25)


def test_table_4_4_is_shown_with_the_tasks_that_its_shares_make() -> None:
    grid = scenario_grid()
    assert len(grid.rows) == len(SCENARIOS)
    assert {len(row) for row in grid.rows} == {len(grid.heads)}
    assert grid.rows[0] == ("1", *["33"] * 3, "34 + 33 + 33", "334 + 333 + 333", "33 + 33 + 33")
    assert grid.rows[4] == ("5", "1", "4", "95", "1 + 4 + 95", "10 + 40 + 950", "1 + 4 + 94")


def test_one_call_with_the_thesis_constants_reproduces_and_keeps_all_tables(tmp_path: Path) -> None:
    """Tables 4.4, 4.5 and 4.6, whatever model the call is for: nothing is measured."""
    made = context(tmp_path, quick=False, constants="thesis", model="alexnet")
    assert deployment.unfit(made.settings) is None
    found = deployment.run(made)
    assert not found.failed
    titles = [g.title.partition(":")[0] for g in found.tables]
    assert [t for t in titles if t.startswith("Table")] == ["Table 4.4", "Table 4.5", "Table 4.6"]
    cells = {
        row[2] for g in found.tables if g.title.startswith("Table 4.6") for row in g.rows if row
    }
    assert {"69327", "52441"} <= cells
    assert {f.labels["model"] for f in found.figures} == set(TABLES)
    assert {p.stem for p in found.plots} == {"savings-resnet50", "savings-resnet152"}
    assert "resnet50: modular" in found.says and "resnet152: modular" in found.says
    assert "not told apart" not in found.says


def test_which_models_are_measured() -> None:
    assert deployment.unfit(Settings(model="resnet18")) is None
    assert "not cut into four" in str(deployment.unfit(Settings(model="alexnet")))
    assert deployment.models_of(Settings(quick=True, model="alexnet")) == ["resnet18"]
    assert deployment.models_of(Settings(model="resnet152")) == ["resnet152"]
    # The usual call measures what both of the thesis's tables are about.
    assert deployment.models_of(Settings()) == ["resnet50", "resnet152"]
    assert deployment.unfit(Settings()) is None


def test_another_model_stands_without_the_thesis() -> None:
    found = saving_figures([BY_HAND], None, constants_of_thesis=False)
    assert all("thesis" not in f.labels for f in found)
    assert {row[7:] for grid in saving_grids(found) for row in grid.rows if row} == {("", "", "")}
    assert draw(found).axes


def test_a_constant_that_is_off_by_a_megabyte_is_noticed() -> None:
    changed = {**RESNET50.occupancy.processes, LAST: 506.0}
    found = saving_figures(
        [Occupancy("resnet50", "MB", changed, 367.0)], RESNET50, constants_of_thesis=True
    )
    assert len(mismatches(found)) == len(SCENARIOS)
    assert all(line.startswith("table 4.5, scenario ") for line in mismatches(found))

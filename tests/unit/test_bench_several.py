"""Several tasks on one input: as many answers under way in each way, and laid beside each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blockflow.bench.batching import figures as f
from blockflow.bench.batching import grids, several, shared
from blockflow.bench.batching.plan import PER_TASK, SEVERAL
from blockflow.bench.batching.several_figures import (
    ALL,
    ALONE,
    ALONE_RATIO,
    BOUND,
    EACH,
    FULL_MODELS,
    alone_figures,
    rate_figures,
    several_grid,
)
from blockflow.bench.batching.shared import Bound
from blockflow.bench.results import Figure
from tests.unit.test_bench_batching_visits import BRIEF, FakeSystem, rig_of

TASKS = 8
RATES = {ALL: [80.0] * 9, EACH: [16.0] * 9, FULL_MODELS: [10.0] * 9, BOUND: [85.0] * 9}
TIMES = {ALL: [20.0] * 9, EACH: [90.0] * 9, FULL_MODELS: [100.0] * 9}


def figures() -> list[Figure]:
    return [*rate_figures(RATES, "fc", TASKS), *alone_figures(TIMES, "fc", TASKS)]


def test_one_request_for_all_is_laid_beside_the_others() -> None:
    by = {(g.name, g.mode, g.labels.get("base")): g for g in figures()}
    assert by[f.SATURATED_RATIO, ALL, FULL_MODELS].value == 8.0
    assert by[f.SATURATED_RATIO, ALL, EACH].value == 5.0
    assert by[ALONE_RATIO, ALL, FULL_MODELS].value == pytest.approx(0.2)
    share = by[f.OF_BOUND, ALL, BOUND]
    assert share.value == pytest.approx(80 / 85)
    assert (share.labels["goal"], share.labels["verdict"]) == (0.9, "met")
    assert {g.labels["experiment"] for g in figures()} == {SEVERAL}


def test_the_table_has_a_row_per_way() -> None:
    rows = {row[1]: row for row in several_grid(figures()).rows}
    assert list(rows) == [ALL, EACH, FULL_MODELS, BOUND]
    assert rows[ALL][5] == "0.94" and rows[ALL][4] == ""
    assert rows[FULL_MODELS][4].startswith("8.00") and rows[FULL_MODELS][7].startswith("0.20")
    ((aim, *_),) = grids.aim_grid(figures()).rows
    assert aim == "one request for all: saturated, of the bound several fc"
    assert not grids.shared_grid(figures()).rows


class FakeBound:
    """Computes at a fixed rate, on two cores."""

    width = 2

    def __init__(self, *_: Any) -> None: ...

    def answers(self, tasks: int) -> float:
        return 100.0 * tasks


def test_every_way_has_as_many_answers_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "Bound", FakeBound)
    under_way: list[tuple[int, int]] = []
    real = several.saturate

    def seen(client: Any, queries: Any, inputs: Any, count: int, *more: Any, **by: Any) -> float:
        under_way.append((count, len(by["together"])))
        return real(client, queries, inputs, count, *more, **by)

    monkeypatch.setattr(several, "saturate", seen)
    plan = replace(BRIEF, late=replace(BRIEF.trunk, name="late"))
    rig = rig_of(FakeSystem())
    found = several.measure(plan, rig)
    asked: list[Any] = [tasks for tasks, _ in rig.client.sent]  # type: ignore[attr-defined]
    assert {count * max(1, tasks) for count, tasks in under_way} == {2 * PER_TASK * plan.tasks}
    shared = [f"shared{i}" for i in range(plan.tasks)]
    full = [f"full{i}" for i in range(plan.tasks)]
    together = [tuple(tasks) for tasks in asked if not isinstance(tasks, str)]
    assert set(together) == {tuple(shared)}, "the two places where they part have the same names"
    assert {tasks for tasks in asked if isinstance(tasks, str)} == {*shared, *full}
    assert len([g for g in found if g.name == ALONE]) == 2 * 3  # where they part early, and late


def test_the_bound_computes_the_trunk_once_for_all_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = object.__new__(Bound)
    bound._trunks, bound._heads, bound._seconds = "trunks", "heads", 1.0  # type: ignore[assignment]
    rates = {"trunks": 10.0, "heads": 40.0}
    monkeypatch.setattr(shared, "side_by_side", lambda others, rows, seconds: rates[others])
    # an input takes 0.1 s of the trunk and 8 x 0.025 s of heads, for eight answers
    assert bound.answers(8) == pytest.approx(8 / 0.3)

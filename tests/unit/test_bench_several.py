"""Several tasks on one input: as many answers under way in each way, and laid beside each other."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from blockflow.bench.batching import figures as f
from blockflow.bench.batching import grids, several
from blockflow.bench.batching.plan import PER_TASK, SEVERAL
from blockflow.bench.batching.several_costs import (
    CLIENT,
    DISPATCHER,
    WORKER,
    Look,
    Spent,
    line,
    look,
)
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
from blockflow.bench.in_process import Chain
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


class FakeInProcess:
    """Four blocks of the trunk and the heads: a millisecond each."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    def __enter__(self) -> FakeInProcess:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, _rows: int) -> tuple[float, ...]:
        return (1.0,) * (len(self.chain.blocks) + len(self.chain.heads))


def test_every_way_has_as_many_answers_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "InProcess", FakeInProcess)
    bounds: list[Chain] = []

    def computed(others: list[FakeInProcess], rows: int, _seconds: float) -> float:
        bounds.extend(other.chain for other in others)
        return 100.0 * rows

    monkeypatch.setattr(several, "side_by_side", computed)
    monkeypatch.setattr(several.os, "sched_getaffinity", lambda _: {0, 1})
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
    rates = [g.value for g in found if g.name == f.SATURATED and g.mode == BOUND]
    assert rates == [100.0 * PER_TASK * plan.tasks] * 2, "each of its inputs brings all answers"
    *trunk, head = plan.trunk.blocks
    early = tuple(trunk), (head,) * plan.tasks
    assert early in {(chain.blocks, chain.heads) for chain in bounds}


def seen(at: float, worker: float, trunk: list[float], head: list[float]) -> Look:
    cpu = {WORKER: worker, DISPATCHER: at / 20, CLIENT: at / 40}
    return Look(at, cpu, trunk, head)


def test_what_an_input_costs_is_told_beside_the_bound() -> None:
    """Of 10 s on two cores, 20 inputs a second: 100 ms of the cores each."""
    before = seen(0.0, 1.0, [10, 10, 500.0, 5.0], [80, 80, 40.0, 40.0])
    after = seen(10.0, 17.0, [210, 135, 9000.0, 70.0], [1680, 1080, 1040.0, 840.0])
    told = line("fc", [Spent(2, 20.0, before, after)] * 3, 72.04, 0.456)
    assert told == (
        "fc: an input takes 100.0 ms of the cores, 72.0 in the bound: the worker 80.0, the "
        "Dispatcher 2.5, the client 1.2, nobody and all others 16.2; a forward of the trunk has "
        "1.60 rows, 2 in the bound; one of a head takes 1.00 ms, 0.46 in the bound, and 0.50 "
        "besides"
    )


def test_a_visit_without_a_heartbeat_tells_of_no_forwards() -> None:
    none = [0, 0, 0.0, 0.0]
    told = line("fc", [Spent(2, 20.0, seen(0, 1, none, none), seen(10, 17, none, none))], 72, 1)
    assert told.endswith("nobody and all others 16.2")


def test_a_look_adds_up_the_heads_of_its_worker() -> None:
    def kpi(rows: int) -> dict[str, Any]:
        return {
            "rows": rows,
            "batches": 1,
            "compute": {"sum_ms": 2.0 * rows},
            "overhead": {"sum_ms": 0.5},
        }

    stages = [
        {"block": name, "kpi": kpi(i)} for i, name in enumerate(["t1", "t2", "h.0", "h.1"], 1)
    ]
    mine = {"worker": "shared", "pid": os.getpid(), "stages": stages}
    other = {"worker": "full", "pid": os.getpid(), "stages": []}
    status = {"workers": [other, mine], "dispatcher": {"pid": os.getpid()}}
    found = look(status, "shared", "t1", ["h.0", "h.1"])
    assert found.trunk == [1, 1, 2.0, 0.5] and found.head == [7, 2, 14.0, 1.0]
    assert set(found.cpu_s) == {WORKER, DISPATCHER, CLIENT} and min(found.cpu_s.values()) > 0

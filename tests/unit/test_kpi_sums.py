"""The figures of several processes together: each is a sum, a mean or the worst of its own kind."""

from __future__ import annotations

import math
from dataclasses import fields

import control_rig
from control_rig import World

from blockflow.control.kpis import PROCESS_SUMS, SUMS, KpiBook, aggregate, plain, totals
from blockflow.control.views import Views
from blockflow.core.metrics import ProcessKpi, StageKpi
from blockflow.wire.control import Stats

world = control_rig.world

ONE = {"count": 1, "sum_ms": 2.0, "p50_ms": 1.0, "p90_ms": 2.0, "p99_ms": 4.0, "max_ms": 40.0}
MORE = {"count": 3, "sum_ms": 30.0, "p50_ms": 5.0, "p90_ms": 10.0, "p99_ms": 20.0, "max_ms": 30.0}


def test_every_count_and_rate_of_a_block_is_the_sum_over_its_replicas() -> None:
    one = {name: float(3 + n) for n, name in enumerate(SUMS)}
    more = {name: 100.0 * (3 + n) for n, name in enumerate(SUMS)}
    out = aggregate([one, more])
    assert {name: out[name] for name in SUMS} == {n: one[n] + more[n] for n in SUMS}
    assert out["rho"] == out["lam"] / out["mu"]
    assert out["mean_batch_rows"] == (out["rows"] + out["failed_rows"]) / out["batches"]


def test_no_figure_of_a_stage_is_lost_on_its_way_to_the_block() -> None:
    one = {f.name for f in fields(StageKpi)} - {"stage", "block", "engine", "precision"}
    assert aggregate([{"lam": 1.0}]).keys() == one


def test_no_figure_of_a_process_is_left_out_of_the_totals() -> None:
    every = [f.name for f in fields(ProcessKpi)]
    plain = every[: every.index("gpu_util_percent")]
    assert [n for n in plain if n not in PROCESS_SUMS] == ["pid", "cpu_mhz"]


def test_times_of_replicas_are_weighted_or_the_worst() -> None:
    out = aggregate([{"wait": ONE, "overhead": ONE, "compute": MORE}, {"wait": MORE}])
    assert out["wait"] == {
        "count": 4,
        "mean_ms": 8.0,
        "p50_ms": 4.0,
        "p90_ms": 8.0,
        "p99_ms": 20.0,
        "max_ms": 40.0,
        "sum_ms": 32.0,
    }
    assert (out["overhead"]["mean_ms"], out["compute"]["mean_ms"]) == (2.0, 10.0)
    for odd in (True, math.inf, math.nan, "9", None):  # a process's odd figure is none
        out = aggregate([{"wait": ONE}, {"wait": MORE | {"p50_ms": odd, "max_ms": odd}}])
        assert (out["wait"]["p50_ms"], out["wait"]["max_ms"]) == (0.25, 40.0)


def test_what_json_cannot_carry_is_left_out() -> None:
    given = {1: [math.inf, (2, 0.5), {"a": object()}], "b": True, "c": None, "d": "x"}
    assert plain(given) == {"1": [None, [2, 0.5], {"a": None}], "b": True, "c": None, "d": "x"}
    assert plain([[{"a": [1]}]], 3) == [[{"a": None}]]


def test_totals_are_of_all_living_processes_the_dispatcher_among_them(world: World) -> None:
    world.apply(["a", "b"], {"t": ["a", "b"]})
    book = KpiBook()
    for n, life in enumerate(world.brain.crew.lives()):
        figures = {name: 10.0**n * (k + 1) for k, name in enumerate(PROCESS_SUMS)}
        book.add(life.incarnation, life.name, Stats(life.incarnation, world.now, [], figures), 1.0)
    views = Views(world.brain, book, {}, world.now)
    assert views.totals() == {name: 111.0 * (k + 1) for k, name in enumerate(PROCESS_SUMS)}
    assert totals([]) == dict.fromkeys([n for n in PROCESS_SUMS if n != "cpu_percent"], 0)


def test_a_block_counts_who_is_ready_and_its_task_goes_on_with_one(world: World) -> None:
    world.apply([{"name": "a", "replicas": 2}], {"t": ["a"]})
    world.hold_ready.add("a#1")
    world.die("a#1")
    world.pass_time(1.0)
    views = Views(world.brain, KpiBook(), {}, world.now)
    (block,), (task,) = views.blocks(), views.tasks()
    assert (block["state"], block["ready"], block["replicas"]) == ("degraded", 1, 2)
    assert (task["available"], task["missing"]) == (True, [])
    world.hold_ready.add("a#0")
    world.die("a#0")
    views = Views(world.brain, KpiBook(), {}, world.now)
    (block,), (task,) = views.blocks(), views.tasks()
    assert (block["ready"], task["available"], task["missing"]) == (0, False, ["a"])

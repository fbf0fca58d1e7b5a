"""What is told of figures whose sample is old."""

from __future__ import annotations

from typing import Any

import pytest
from control_rig import World

from blockflow.control.kpis import PROCESS_NOW
from tests.views_rig import Told, fits

RATES = {"lam": 2.0, "mu": 4.0, "rho": 0.5, "rows_per_s": 3.0, "queue": 1, "queue_rows": 1}


@pytest.mark.parametrize(("hz", "seconds"), [(0.0, 5.0), (4.0, 5.0), (0.1, 30.0)])
def test_of_an_old_sample_counts_stay_and_rates_go(hz: float, seconds: float) -> None:
    told = Told(World().up())
    told.world.apply([{"name": "a", "replicas": 2}], {"t": ["a"]})
    told.world.brain.crew.hz = hz
    for name in ("a#0", "a#1"):
        told.says(name)
        sample = told.kpis.latest(told.world.incarnation(name))
        assert sample is not None
        sample.stages[0].update(RATES)
    told.says("dispatcher", tasks={"t": {"ok": 5, "per_s": 2.0}})
    begin = told.world.now

    def shown() -> tuple[dict[str, Any], ...]:
        (stage,) = told.worker("a#0")["stages"]
        tasks = told.dispatcher()["kpi"]["tasks"]
        assert told.task("t")["kpi"] == tasks["t"]
        return told.block("a")["kpi"], stage["kpi"], tasks["t"]

    told.world.now = begin + round(seconds * 1e9)
    block, stage, task = shown()
    assert (block["lam"], block["rho"], stage["queue"], task["per_s"]) == (4.0, 0.5, 1, 2.0)
    told.world.now += 1_000_000_000
    block, stage, task = shown()
    assert block["rows"] == 14 and stage["rows"] == 7 and task == {"ok": 5}
    assert not {"per_s", *RATES} & {*block, *stage}
    for process in (told.worker("a#0")["process"], told.dispatcher()["process"]):
        assert process["rss"] == 6 and PROCESS_NOW.isdisjoint(process)
    assert "cpu_percent" not in fits("Totals", told.views.totals())
    assert told.views.totals()["rss"] == 18
    told.says("a#1")  # the other one is silent
    assert told.views.totals()["cpu_percent"] == 2.5
    assert told.worker("a#1")["process"]["cpu_percent"] == 2.5
    sample = told.kpis.latest(told.world.incarnation("a#1"))
    assert sample is not None
    sample.stages[0].update(RATES)
    assert shown()[0]["lam"] == 2.0

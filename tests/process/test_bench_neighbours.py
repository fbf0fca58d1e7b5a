"""What a task that asks too much does to another one, measured on a real system."""

from __future__ import annotations

from functools import partial

import pytest

from blockflow.bench import neighbours
from blockflow.bench.neighbours import BESIDE, WAYS, Plan, measure
from blockflow.control.system import System
from blockflow.launch.base import Launcher

pytestmark = pytest.mark.timeout(120)

PLAN = Plan(pairs=1, seconds=0.2, fill_s=0.1, slow_ms=10.0)


def test_both_conditions_are_measured_and_every_request_counted(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "System", partial(System, launcher=launcher))
    said: list[str] = []
    found = measure(PLAN, said.append)
    assert len(said) == len(WAYS)
    for way in WAYS:
        mine = {(f.name, f.mode): f for f in found if f.mode.startswith(way)}
        assert mine["neighbour, p50", f"{way}: {BESIDE}"].value > 0
        assert mine["neighbour, of alone, p99", way].n == PLAN.pairs
        ended = [f for (name, _), f in mine.items() if name == "slow task"]
        sent = PLAN.times * 1e3 / PLAN.slow_ms * (PLAN.seconds + PLAN.fill_s)
        # What was still under way at the end of the round was cancelled, and is not counted.
        assert 0 < sum(f.value for f in ended) < 2 * sent

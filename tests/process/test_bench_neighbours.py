"""What a task that asks too much does to another one, measured on a real system."""

from __future__ import annotations

from functools import partial

import pytest

from blockflow.bench import neighbours
from blockflow.bench.neighbours import BESIDE, QUICK, WAYS, measure
from blockflow.control.system import System
from blockflow.launch.base import Launcher

pytestmark = pytest.mark.timeout(120)


def test_both_conditions_are_measured_and_every_request_counted(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "System", partial(System, launcher=launcher))
    said: list[str] = []
    found = measure(QUICK, said.append)
    assert len(said) == len(WAYS)
    for way in WAYS:
        mine = {(f.name, f.mode): f for f in found if f.mode.startswith(way)}
        assert mine["neighbour, p50", f"{way}: {BESIDE}"].value > 0
        assert mine["neighbour, of alone, p99", way].n == QUICK.pairs
        ended = [f for (name, _), f in mine.items() if name == "slow task"]
        sent = QUICK.times * 1e3 / QUICK.slow_ms * (QUICK.seconds + QUICK.fill_s)
        # What was still under way at the end of the round was cancelled, and is not counted.
        assert 0 < sum(f.value for f in ended) < 2 * sent

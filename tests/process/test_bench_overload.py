"""The overload benchmark's clients: in a process of their own, every request ends as something."""

from __future__ import annotations

from functools import partial

import pytest

from blockflow.bench import overload
from blockflow.bench.overload import Plan, measure
from blockflow.bench.overload_figures import OUTCOMES
from blockflow.control.system import System
from blockflow.launch.base import Launcher

pytestmark = pytest.mark.timeout(120)


def test_what_is_too_much_is_refused_and_every_request_counted(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload, "System", partial(System, launcher=launcher))
    said: list[str] = []
    loads, memory = measure(Plan((4.0,), seconds=1.5, delay_ms=10.0), said.append)
    (load,) = loads
    assert len(said) == 2
    assert load.offered > 0
    ended = {name: sum(e.outcome == name for e in load.ended) for name in OUTCOMES}
    assert ended["ok"] > 0 and ended["rejected"] > 0 and ended["failed"] == 0
    # As many as were offered, give or take what chance does to their number.
    assert sum(ended.values()) == pytest.approx(load.offered * 1.5, rel=0.3)
    assert all(0 <= e.due_s <= e.done_s and e.lag_s >= 0 for e in load.ended)
    assert load.depths and load.limit > 0 and memory

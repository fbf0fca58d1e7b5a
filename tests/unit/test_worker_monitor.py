"""When a worker's figures are worth a message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blockflow.worker import monitor
from blockflow.worker.monitor import KpiMonitor, Snapshot


@pytest.mark.parametrize(
    ("memory", "again"),
    [
        (None, False),
        (SimpleNamespace(device=None), False),
        (SimpleNamespace(device="cuda:0"), True),
    ],
)
def test_an_idle_worker_says_so_once_a_second(
    monkeypatch: pytest.MonkeyPatch, memory: Any, again: bool
) -> None:
    """A device's clocks and power change by themselves."""
    now = 5_000_000_000
    monkeypatch.setattr(monitor.time, "monotonic_ns", lambda: now)
    made = KpiMonitor(1, {}, {}, "cpu", None, lambda: None, lambda _: None, memory)
    assert made._worth_telling(Snapshot({}, {"threads": 1}), None)
    now += 999_000_000
    assert made._worth_telling(Snapshot({}, {"threads": 1}), None) == again
    assert made._worth_telling(Snapshot({}, {"threads": 2}), None)
    now += 1_000_000_000
    assert made._worth_telling(Snapshot({}, {"threads": 2}), None)

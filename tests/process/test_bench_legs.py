"""The benchmark of the clients' legs: a short run, and what it makes of known times."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from blockflow.bench import legs
from blockflow.bench.legs import BACK, RATIO, THERE, WAYS, WHOLE, LegTimes, figures, run
from blockflow.control.system import System
from blockflow.launch.base import Launcher

KIB = 1024


def test_a_short_run_has_a_row_for_everything(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legs, "System", partial(System, launcher=launcher))
    ways = tuple(w for w in WAYS if w.transport == "ipc")
    seen: list[int] = []
    found = run(tmp_path, (KIB, 256 * KIB), ways, 1, 2, lambda: seen.append(1))
    assert len(seen) == 2
    keys = {(f.name, f.mode, f.labels["bytes"]) for f in found}
    for size in (KIB, 256 * KIB):
        for way in ways:
            assert {(n, way.name, size) for n in (THERE, BACK, WHOLE)} <= keys
        assert {m for n, m, b in keys if (n, b) == (RATIO, size)} == {"slot, ipc", "view, ipc"}


def test_ratios_are_paired_by_round() -> None:
    message = LegTimes({0: [1.0]}, {0: [1.0]}, {0: [2.0], 1: [20.0], 2: [4.0]})
    slot = LegTimes({0: [1.0]}, {0: [1.0]}, {0: [1.0], 1: [10.0], 3: [50.0]})
    found = figures({("message, tcp", KIB): message, ("slot, tcp", KIB): slot})
    (ratio,) = [f for f in found if f.name == RATIO]
    assert (ratio.mode, ratio.value, ratio.n) == ("slot, tcp", pytest.approx(0.5), 2)

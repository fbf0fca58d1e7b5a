"""``blockflow simulate`` in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blockflow.bench.simulation.example import example_profiles
from blockflow.bench.simulation.experiment import Experiment
from blockflow.bench.simulation.system import chain
from blockflow.cli.main import main

SHORT = ("--example", "--seeds", "2", "--duration", "2", "--processes", "1")
POLICIES = ("--policy", "none", "--policy", "window:max_rows=8,max_delay_ms=5")
PLAN = Experiment(
    chain(example_profiles()),
    [{"policy": "none"}, {"policy": "dvabatch"}],
    [20.0],
    duration_s=1.0,
    warmup_s=0.1,
    seeds=range(1, 4),
    check=True,
)


def simulate(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    status = main(["simulate", *args])
    return status, capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    status, out = simulate(capsys, *args, "--json")
    assert status == 0, out
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    status, out = simulate(capsys, *args, "--json")
    assert status == 2, out
    return json.loads(out)["error"]


# --- what it says --------------------------------------------------------------------------------

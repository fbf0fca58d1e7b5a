"""A short chaos run: real processes, real load, faults of every kind that a few seconds have room
for; the long ones are ``make chaos`` and ``make soak``."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockflow.bench.chaos.plan import KINDS
from blockflow.bench.chaos.report import HITS, READY, figures
from blockflow.bench.chaos.run import Traffic, run, run_kills

pytestmark = pytest.mark.timeout(600)

QUICK = {"worker killed", "system update", "client vanishes", "malformed messages"}


def test_every_request_ends_once_whatever_dies(tmp_path: Path) -> None:
    kinds = [k for k in KINDS if k.name in QUICK]
    found = run(
        tmp_path,
        seconds=7.0,
        seed=5,
        gap_s=0.6,
        rate=10.0,
        deadline_s=30.0,
        kinds=kinds,
        quiet_s=1.0,
    )
    assert {f.kind for f in found.faults} >= {"worker killed"}
    assert found.ledger.outcomes()["OK"] > 0
    assert found.violations() == []


def test_processes_of_all_roles_are_killed_in_turn(tmp_path: Path) -> None:
    found = run_kills(tmp_path, kills=3, traffic=Traffic(10.0, 30.0, 5), replicas=1, quiet_s=0.5)
    found.grace_s = 5.0  # being late is no matter of this test
    assert found.violations() == []
    made = {(f.name, f.mode): f for f in figures(found)}
    killed = {mode for name, mode in made if name == HITS}
    assert killed <= {k.name for k in KINDS if k.kills and "killed" in k.name}
    assert len(killed) == 3
    assert all((READY, kind) in made for kind in killed)

"""A short chaos run: real processes, real load, faults of every kind that a few seconds have room
for; the long ones are ``make chaos`` and ``make soak``."""

from __future__ import annotations

from pathlib import Path

from blockflow.bench.chaos.plan import KINDS
from blockflow.bench.chaos.run import run

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

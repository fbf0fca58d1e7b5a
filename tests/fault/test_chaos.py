"""A short chaos run: real processes, real load, faults of every kind that a few seconds have room
for; the long ones are ``make chaos`` and ``make soak``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_rig import Warm

from blockflow.bench.chaos import run as chaos
from blockflow.bench.chaos.load import Traffic
from blockflow.bench.chaos.plan import KINDS
from blockflow.bench.chaos.report import HITS, READY, figures
from blockflow.bench.chaos.run import run, run_kills
from blockflow.repository.repository import BlockRepository

# What is lost now and then is lost: no second try. What a busy machine may do in so short a run (be
# late, refuse much) is not judged here.
pytestmark = [pytest.mark.timeout(600), pytest.mark.flaky(reruns=0)]

SEED = 3
QUICK = {"worker killed", "system update", "client vanishes", "malformed messages"}


@pytest.fixture(scope="module", autouse=True)
def prepared(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[None]:
    """The blocks are exported once, and systems are forked."""
    blocks = tmp_path_factory.mktemp("chaos") / "blocks"
    made = chaos.prepare(BlockRepository(blocks), SEED)

    def copied(repository: BlockRepository, seed: int) -> Any:
        assert seed == SEED
        shutil.copytree(blocks, repository.root, dirs_exist_ok=True)
        return made

    with pytest.MonkeyPatch.context() as patch, warm.spawning():
        patch.setattr(chaos, "prepare", copied)
        yield


def test_every_request_ends_once_whatever_dies(tmp_path: Path) -> None:
    kinds = [k for k in KINDS if k.name in QUICK]
    traffic = Traffic(10.0, 30.0, SEED)
    found = run(tmp_path, traffic, seconds=5.0, gap_s=0.6, kinds=kinds, quiet_s=1.0)
    assert {f.kind for f in found.faults} == QUICK
    assert found.ledger.outcomes()["OK"] > 0
    found.least_ok = 0.5
    assert found.broken() == []


def test_processes_of_all_roles_are_killed_in_turn(tmp_path: Path) -> None:
    found = run_kills(tmp_path, Traffic(10.0, 30.0, SEED), kills=3, replicas=1, quiet_s=0.5)
    found.least_ok = 0.5
    assert found.broken() == []
    made = {(f.name, f.mode): f for f in figures(found)}
    killed = {mode for name, mode in made if name == HITS}
    assert killed <= {k.name for k in KINDS if k.kills and "killed" in k.name}
    assert len(killed) == 3
    assert all((READY, kind) in made for kind in killed)

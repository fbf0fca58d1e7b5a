"""What a Manager makes of the stored topology when it takes over from one that has died."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from control_rig import World, echo_repository

from blockflow.control.journal import Journal, JournalFile
from blockflow.control.settings import ControlSettings
from blockflow.control.stewardship import inherit
from blockflow.control.store import StateStore
from blockflow.launch.ward import Ward
from tests.unit.test_stages import profile

LBCI = {"policy": "lbci", "t_opt_ms": 500}
BODY = {
    "blocks": [{"name": "a", "threads": 1}, {"name": "b", "threads": 1, "batching": LBCI}],
    "tasks": {"t": ["a", "b"]},
}


def in_force(policy: dict[str, Any]) -> Journal:
    """What a Manager has written down whose worker of ``b`` batches by this policy."""
    world = World().up()
    world.apply(["a", "b"], {"t": ["a", "b"]})
    written = world.journal()
    return replace(
        written,
        seats=tuple(replace(s, policies=dict.fromkeys(s.policies, policy)) for s in written.seats),
    )


@pytest.mark.parametrize(
    ("policy", "measured", "gives_way"),
    [
        pytest.param({"policy": "none"}, False, True, id="it gave way before"),
        pytest.param({"policy": "none"}, True, False, id="it can work again"),
        pytest.param(LBCI, False, False, id="it works, by what it was told once"),
    ],
)
def test_a_policy_that_gave_way_does_so_until_it_is_applied_again(
    tmp_path: Path, policy: dict[str, Any], measured: bool, gives_way: bool
) -> None:
    repository = echo_repository(tmp_path / "blocks")
    profile(repository, {"b": (1.0, 0.1)})
    if not measured:
        shutil.rmtree(tmp_path / "blocks" / "b" / "profiles")
    settings = ControlSettings(
        repository=tmp_path / "blocks", state_dir=tmp_path / "state", cores=(0, 1)
    )
    JournalFile(tmp_path).write(json.dumps(asdict(in_force(policy))))
    with StateStore(settings.state_dir) as store:
        digests = {n: repository.info(n).digest for n in "ab"}
        store.commit(1, BODY, BODY, digests)
        found = inherit(settings, store, cast(Ward, SimpleNamespace(run_dir=tmp_path)))
    assert found.topology is not None
    kept = found.topology.blocks["b"].batching.model_dump()
    assert kept == ({"policy": "none"} if gives_way else LBCI)
    told = [n for n in found.notes if "b: without a batching policy until it is applied" in n]
    assert len(told) == gives_way and len(found.notes) == len(told)

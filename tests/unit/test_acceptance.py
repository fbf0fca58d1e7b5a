"""What is wrong with an update is told at once, also what is judged by the plan of its threads."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from control_rig import World, echo_repository

from blockflow.control.accept import Acceptance, stored_lookup
from blockflow.control.manager import Manager
from blockflow.control.profiles import ProfileShelf
from blockflow.core.errors import Problem, RepositoryError, TopologyError
from blockflow.core.topology import Topology
from blockflow.repository.repository import BlockRepository
from tests.unit.test_stages import profile

CHAIN = {"policy": "dvabatch", "stages": "auto"}
CROWDED = [{"name": "b", "threads": 2}, {"name": "c", "threads": 2}]
TASKS = {"t": ["a", "b"], "u": {"path": ["b", "d"], "max_rows": 8}}


@pytest.fixture
def acceptance(tmp_path: Path) -> Acceptance:
    """On two cores; nothing runs."""
    brain = World(cores=2).up().brain
    manager = SimpleNamespace(brain=brain, call=lambda look: look())
    repository = echo_repository(tmp_path)
    return Acceptance(cast(Manager, manager), repository, ProfileShelf(tmp_path))


def body(*blocks: Any, **more: Any) -> dict[str, Any]:
    return {"blocks": list(blocks), "tasks": TASKS, **more}


def refused(acceptance: Acceptance, update: Any, *told: Problem) -> dict[str, str]:
    with pytest.raises(TopologyError) as e:
        acceptance.parse(update, told)
    assert e.value.message.startswith(f"{len(e.value.problems)} problem")
    assert "nothing was changed" in e.value.hint
    return {p.path: p.message for p in e.value.problems}


def test_rows_threads_policies_and_a_name_too_many_are_one_list(acceptance: Acceptance) -> None:
    update = body({"name": "a", "batching": CHAIN}, *CROWDED, {"name": "d", "max_rows": 4}, foo=1)
    found = refused(acceptance, update, Problem("$.tasks.t", "stands twice"))
    assert found.keys() == {
        *("$.foo", "$.tasks.t", "$.tasks.u.max_rows", "$.blocks[0].batching"),
        *("$.blocks[1].threads", "$.blocks[2].threads"),
    }


def test_threads_are_judged_beside_a_block_that_is_not_stored(acceptance: Acceptance) -> None:
    found = refused(acceptance, body("nowhere", "a", *CROWDED, {"name": "d", "batching": CHAIN}))
    assert "$.blocks[0]" in found and any(p.endswith(".threads") for p in found)
    assert all(p.startswith(("$.blocks[2]", "$.blocks[3]")) for p in found if "threads" in p)
    assert "$.blocks[4].batching" not in found  # the plan of threads is not known


def test_threads_beyond_the_cores_may_be_meant(acceptance: Acceptance) -> None:
    topology = acceptance.parse(body("a", *CROWDED, "d", oversubscribe=True))
    assert isinstance(topology, Topology) and topology.oversubscribe
    found = refused(acceptance, body("a", *CROWDED, "d", oversubscribe="yes"))
    assert found.keys() == {"$.oversubscribe"}  # perhaps it was to be allowed


def test_a_profile_that_cannot_be_read_just_now_is_not_to_be_measured_again(
    acceptance: Acceptance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile(BlockRepository(tmp_path), {"a": (1.0, 0.1)})
    update = body({"name": "a", "batching": {"policy": "lbci", "t_opt_ms": 500}}, "b", "c", "d")
    opened, stale = os.open, True

    def fails(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("fp32.json") and stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", fails)
    found = refused(acceptance, update)
    assert found == {"$.blocks": "UNKNOWN_BLOCK: the repository does not answer: Stale file handle"}
    stale = False
    assert isinstance(acceptance.parse(update), Topology)


def test_what_is_right_is_taken_as_it_is(acceptance: Acceptance) -> None:
    topology = acceptance.parse(body("a", "b", "c", "d"))
    assert not topology.oversubscribe and list(topology.blocks) == list("abcd")
    again = acceptance.parse(topology.extended())
    assert again.digests() == topology.digests() and again.to_dict() == topology.to_dict()


def test_what_no_worker_has_loaded_is_looked_at_now(acceptance: Acceptance, tmp_path: Path) -> None:
    repository = BlockRepository(tmp_path)
    info = repository.info("a")
    (artifact,) = [p for p in (tmp_path / "a").iterdir() if not p.name.startswith("manifest")]
    artifact.write_bytes(b"altered")
    stage = SimpleNamespace(info=info)
    replica = SimpleNamespace(wanted=True, spec=SimpleNamespace(stages=[stage]))
    brain = acceptance._manager.brain
    crew = SimpleNamespace(fleet=SimpleNamespace(active=lambda: [replica]))
    acceptance._manager.brain = cast(Any, SimpleNamespace(crew=crew, realm=brain.realm))
    assert acceptance.parse(body("a", "b", "c", "d")).infos["a"] == info
    replica.wanted = False
    found = refused(acceptance, body("a", "b", "c", "d"))
    assert found.keys() == {"$.blocks[0]"} and "DIGEST_MISMATCH" in found["$.blocks[0]"]
    with pytest.raises(TopologyError) as e:
        acceptance.parse(body("a", "b", "c", "d"), digests={"b": "0" * 64})
    assert [p.path for p in e.value.problems] == ["$.blocks[0]", "$.blocks[1]"]


def test_a_stored_topology_means_its_artifacts_as_long_as_they_are_there(tmp_path: Path) -> None:
    repository = echo_repository(tmp_path)
    now = {name: repository.info(name) for name in "ab"}
    digests, notes = {"a": now["a"].digest, "b": "0" * 64, "none": "0" * 64}, list[str]()
    lookup = stored_lookup(repository, digests, notes)
    assert lookup("a").digest == now["a"].digest and lookup("c") == repository.info("c")
    assert notes == []
    assert lookup("b") == now["b"]
    assert notes == [
        "block b: the artifact 000000000000 that was in force is gone; "
        f"version {now['b'].version} ({now['b'].digest[:12]}) runs instead"
    ]
    with pytest.raises(RepositoryError, match="UNKNOWN_BLOCK"):
        lookup("none")

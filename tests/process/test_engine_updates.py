"""Updates as a program makes them: it reads what is in force, changes a part, and posts that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from control_rig import SPEC

from blockflow.client import Client
from blockflow.control.system import System
from blockflow.control.update import Phase
from blockflow.launch.base import Launcher
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from tests import plain_http
from tests.system_rig import idle_system

X = np.zeros((1, 4), np.float32)
BODY = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}


def save(repository: BlockRepository, name: str, add: int, version: str) -> None:
    save_echo(repository, name, SPEC, settings={"add": add}, version=version)


@pytest.fixture
def repository(tmp_path: Path) -> BlockRepository:
    made = BlockRepository(tmp_path / "blocks")
    save(made, "a", 1, "1")
    save(made, "b", 10, "1")
    return made


@pytest.fixture
def system(repository: BlockRepository, tmp_path: Path, launcher: Launcher) -> Iterator[System]:
    with idle_system(repository.root, tmp_path / "state", launcher) as made:
        made.apply(BODY)
        yield made


def post(system: System, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    answer = plain_http.post(f"{system.rest_url}/v1/{path}", json=body, timeout=60)
    return answer.status_code, answer.json()


def read(system: System) -> dict[str, Any]:
    found: dict[str, Any] = plain_http.get(f"{system.rest_url}/v1/topology", timeout=30).json()
    return found


def test_what_a_rollback_brought_back_stays_when_another_task_is_added(
    system: System, repository: BlockRepository
) -> None:
    save(repository, "b", 20, "2")
    system.apply(BODY)
    system.commands.rollback()
    there = read(system)["topology"]
    assert post(system, "system-update?dry_run=true", there)[1]["changed"] is False
    assert post(system, "system-update", there)[1]["update"]["state"] == "unchanged"
    there["tasks"]["u"] = ["b"]
    status, answer = post(system, "system-update", there)
    assert (status, answer["update"]["plan"]["start"]) == (200, [])
    with Client(system.client_endpoint) as client:
        assert client.infer("u", X).value[0, 0] == 10.0
    # Version 1 is overwritten: what runs is stored no more, and cannot be meant.
    save(repository, "b", 99, "1")
    status, answer = post(system, "system-update", there)
    (problem,) = answer["error"]["problems"]
    assert (status, problem["path"]) == (422, "$.blocks[1].digest")
    assert problem["code"] == "ARTIFACT_MISSING"


def test_of_two_updates_of_one_epoch_the_second_is_refused(system: System) -> None:
    there = read(system)
    epoch = there["epoch"]
    mine = {**BODY, "tasks": {**BODY["tasks"], "mine": ["a"]}}
    yours = {**BODY, "tasks": {**BODY["tasks"], "yours": ["b"]}}
    assert post(system, f"system-update?if_epoch={epoch}", mine)[0] == 200
    for path in ("system-update", "rollback"):
        status, answer = post(system, f"{path}?if_epoch={epoch}", yours if "up" in path else {})
        error = answer["error"]
        assert (status, error["code"]) == (409, "EPOCH_MISMATCH")
        assert error["details"] == {"epoch": epoch + 1}
    assert set(read(system)["topology"]["tasks"]) == {"t", "mine"}


def test_the_way_back_from_a_bad_update_does_not_wait_for_a_long_request(
    system: System, repository: BlockRepository
) -> None:
    save_echo(repository, "long", SPEC, settings={"delay_ms": 6000})
    system.apply({"blocks": ["a", "b", "long"], "tasks": {**BODY["tasks"], "l": ["long"]}})
    save(repository, "b", 90, "2")
    bad = {**read(system)["posted"], "blocks": ["a", {"name": "b", "block": "b@2"}, "long"]}
    updates = system.manager.brain.runner.updates

    def begun(path: str, body: Any) -> int:
        """Its routes are in force; it may wait for the requests on the old ones."""
        status, answer = post(system, f"{path}?wait=false", body)
        assert status == 202, answer
        number = int(answer["update"]["id"])
        assert system.manager.wait(lambda: updates[number].phase is Phase.DRAINING or None, 60)
        return number

    with Client(system.client_endpoint) as client:
        long = client.submit("l", X)
        first = begun("system-update", bad)
        assert client.infer("t", X).value[0, 0] == 91.0
        back = begun("rollback", {})
        found = client.infer("t", X)
        assert (found.value[0, 0], found.epoch, long.done()) == (11.0, 4, False)
        assert updates[first].phase is Phase.DRAINING
        assert long.result().epoch == 2
    for update in (first, back):
        done = system.manager.wait_update(update, 30)
        assert done is not None and (done.phase, done.notes) == (Phase.DONE, [])
    assert len(system.status()["workers"]) == 3

"""Versions, canaries, the way back, and updates under load, with real processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plain_http
import pytest
from control_rig import SPEC
from refusals_rig import no_room

from blockflow.bench import updates as bench
from blockflow.cli.main import main as cli
from blockflow.client.sync import Client
from blockflow.control import store
from blockflow.control.system import System
from blockflow.control.update import Kind
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import Contract
from blockflow.core.routing import CanaryRoute, TaskRoute
from blockflow.dispatcher.canary import CanaryTurns
from blockflow.launch.base import Launcher
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from tests.unit.test_stages import profile

X = np.arange(4, dtype=np.float32).reshape(1, 4)
BODY = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}}


Make = Callable[..., System]


@pytest.fixture
def make(tmp_path: Path, launcher: Launcher) -> Make:
    def system(**kw: Any) -> System:
        folders = {"repository": tmp_path / "blocks", "state_dir": tmp_path / "state"}
        return System(**(folders | kw), rest_port=0, client_port=0, launcher=launcher)

    return system


@pytest.fixture
def repository(tmp_path: Path) -> BlockRepository:
    made = BlockRepository(tmp_path / "blocks")
    save(made, "a", 1, "1")
    save(made, "b", 10, "1")
    return made


def save(repository: BlockRepository, name: str, add: float, version: str) -> None:
    save_echo(repository, name, SPEC, settings={"add": add}, version=version)


def added(client: Client, n: int = 1) -> list[float]:
    return [float((client.infer("t", X, deadline_s=30).value - X)[0, 0]) for _ in range(n)]


def test_updates_under_load_fail_and_mix_nothing(tmp_path: Path, make: Make) -> None:
    count = 5
    found = bench.run(tmp_path, count, clients=2, system=make())
    ledger = found.ledger
    assert not ledger.failed and not ledger.mixed
    assert ledger.served == set(range(1, count + 2))
    assert [u["state"] for u in found.updates] == ["done"] * count
    figures = {f.name: f for f in bench.figures(found)}
    assert figures["requests"].value == ledger.answered >= count + 1
    assert figures["flip"].n == count


def test_back_and_forth(make: Make, repository: BlockRepository) -> None:
    with make() as system, Client(system.client_endpoint) as client:
        system.apply(BODY)
        assert added(client) == [11.0]
        save(repository, "b", 20, "2")
        system.apply(BODY)
        assert added(client) == [21.0]
        kept = system.commands.worker("a#0")["pid"]

        preview = system.commands.rollback(dry_run=True)
        assert preview["changed"] and preview["epoch"] == 3
        done = system.commands.rollback()
        assert (done["epoch"], done["update"]["kind"]) == (3, "rollback")
        assert added(client) == [11.0]
        assert system.commands.worker("a#0")["pid"] == kept
        block = system.commands.block("b")
        assert (block["version"], block["state"]) == ("1", "ready")
        # a worker that is replaced gets the artifact of the epoch, not the current one
        system.commands.operate(Kind.RESTART, "b")
        assert added(client) == [11.0]

        assert cli(["rollback", "--url", system.rest_url]) == 0
        assert added(client) == [21.0]
        answer = plain_http.post(f"{system.rest_url}/v1/rollback", json={"to": 1}, timeout=60)
        assert (answer.status_code, answer.json()["epoch"]) == (200, 5)
        assert added(client) == [11.0]
        again = plain_http.post(f"{system.rest_url}/v1/rollback", json={"to": 3}, timeout=60)
        assert again.json()["update"]["state"] == "unchanged"

        # version 1 is overwritten: its epochs cannot come back, and nothing changes
        system.commands.rollback(2)
        save(repository, "b", 99, "1")
        with pytest.raises(BlockFlowError) as e:
            system.commands.rollback(3)
        assert e.value.code == "INVALID_TOPOLOGY"
        assert "$.blocks[1]: ARTIFACT_MISSING" in str(e.value) and "'b'" in str(e.value)
        assert added(client) == [21.0]
        epochs = plain_http.get(f"{system.rest_url}/v1/history", timeout=30).json()["epochs"]
        assert [(p["epoch"], p["how"], p["missing"]) for p in epochs] == [
            (6, "rollback", []),
            (5, "rollback", ["b"]),
            (4, "rollback", []),
            (3, "rollback", ["b"]),
            (2, "system-update", []),
            (1, "system-update", ["b"]),
        ]
        assert [p["in_force"] for p in epochs] == [True] + [False] * 5
        for wrong, status in (({"to": 77}, 404), ({"to": "1"}, 400), ({"from": 1}, 400)):
            refused = plain_http.post(f"{system.rest_url}/v1/rollback", json=wrong, timeout=30)
            assert refused.status_code == status

    with make() as system, Client(system.client_endpoint) as client:
        # the current version is another by now; the epoch comes back with what it had
        assert system.commands.epoch()["epoch"] == 6
        assert added(client) == [21.0]
        assert system.status()["warnings"] == []
        assert system.commands.rollback(4)["update"]["state"] == "unchanged"


def test_a_restored_epoch_whose_artifact_is_gone_says_so(
    make: Make, repository: BlockRepository
) -> None:
    with make() as system:
        system.apply(BODY)
    save(repository, "b", 50, "1")
    with make() as system, Client(system.client_endpoint) as client:
        (warning,) = system.status()["warnings"]
        assert "block b" in warning and "is gone" in warning
        assert added(client) == [51.0]
        # Who applies it again means what runs: nothing starts, and the epoch can come back.
        assert system.commands.preview(BODY)["changed"]
        update = system.apply(BODY)["update"]
        assert (update["state"], update["epoch"], update["plan"]["start"]) == ("done", 2, [])
        assert system.status()["warnings"] == []
        assert system.apply(BODY)["update"]["state"] == "unchanged"
        assert [p["missing"] for p in system.commands.history()] == [[], ["b"]]
    with make() as system:
        assert system.status()["warnings"] == []


def test_a_running_artifact_that_is_overwritten_is_told_before_its_worker_ends(
    make: Make, repository: BlockRepository
) -> None:
    with make() as system, Client(system.client_endpoint) as client:
        system.apply(BODY)
        assert system.status()["warnings"] == []
        save(repository, "b", 50, "2")
        assert system.status()["warnings"] == []
        save(repository, "b", 90, "1")
        (warning,) = system.status()["warnings"]
        assert "block b" in warning and "cannot be replaced" in warning and "again" in warning
        assert added(client) == [11.0]
        (worker,) = [w for w in system.commands.workers() if w["name"] == "b#0"]
        os.kill(worker["pid"], signal.SIGKILL)

        def given_up() -> dict[str, Any] | None:
            (block,) = [b for b in system.manager.views().workers() if b["name"] == "b#0"]
            return block if block["given_up"] else None

        crash = system.manager.wait(given_up, 30)["crash"]
        assert "no stored version of block 'b'" in crash["cause"]
        assert "the system update again" in crash["error"]["hint"]
        system.apply(BODY)
        assert system.status()["warnings"] == []
        assert added(client) == [91.0]


def test_a_restored_policy_whose_profile_is_gone_gives_way(
    make: Make, repository: BlockRepository
) -> None:
    """As after an update of torch: no profile holds, and the system serves without it."""
    block = {"name": "b", "threads": 1, "batching": {"policy": "lbci", "t_opt_ms": 500}}
    body = {"blocks": [block], "tasks": {"t": ["b"]}}
    profile(repository, {"b": (1.0, 0.1)}, (1,))
    with make() as system:
        system.apply(body)
    for file in (repository.root / "b" / "profiles").iterdir():
        file.unlink()
    with make() as system, Client(system.client_endpoint) as client:
        (warning,) = system.status()["warnings"]
        assert "b: without a batching policy" in warning and "blockflow profile b" in warning
        assert added(client) == [10.0]
        profile(repository, {"b": (1.0, 0.1)}, (1,))
        assert system.apply(body)["update"]["plan"]["keep"] == ["b#0"]
        assert system.commands.topology()["topology"]["blocks"][0]["batching"]["policy"] == "lbci"
        assert added(client) == [10.0]


def test_a_canary_takes_its_share_and_is_promoted(
    make: Make, repository: BlockRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    save(repository, "b", 20, "2")
    share, n = 0.25, 60
    blocks = ["a", "b@1", "b@2"]
    task = {"path": ["a", "b@1"], "canary": {"path": ["a", "b@2"], "share": share}}
    with make() as system, Client(system.client_endpoint) as client:
        system.apply({"blocks": blocks, "tasks": {"t": task}})
        results = [client.infer("t", X, deadline_s=30) for _ in range(n)]
        turns = CanaryTurns()
        route = TaskRoute("t", ("a",), Contract(SPEC, SPEC), canary=CanaryRoute(("b",), share))
        expected = [turns.turn(route) for _ in range(n)]
        assert [r.canary for r in results] == expected
        for r in results:
            assert float((r.value - X)[0, 0]) == (21.0 if r.canary else 11.0)
            assert [t.block for t in r.timings] == ["a", "b@2" if r.canary else "b@1"]

        def counted() -> Any:
            variants = system.manager.views().tasks()[0]["kpi"].get("variants") or {}
            total = sum(v["answered"] for v in variants.values())
            return variants if total == n else None

        variants = system.manager.wait(counted, 30.0)
        assert variants["canary"]["ok"] == sum(expected)
        assert variants["stable"]["latency"]["count"] == n - sum(expected)
        assert cli(["status", "--url", system.rest_url]) == 0
        shown = capsys.readouterr().out
        assert "canary 25%" in shown and "stable 75%" in shown

        # a canary that cannot run costs no answer
        system.commands.operate(Kind.DRAIN, "b@2")
        assert added(client, 8) == [11.0] * 8
        # promoted: the worker that was tried runs on
        pid = system.commands.worker("b@2#0")["pid"]
        promoted = {"blocks": ["a", "b@2"], "tasks": {"t": ["a", "b@2"]}}
        system.apply(promoted)
        assert added(client, 3) == [21.0] * 3
        assert system.commands.worker("b@2#0")["pid"] == pid
        document = json.loads(plain_http.get(f"{system.rest_url}/v1/tasks", timeout=30).text)
        assert document["tasks"][0]["canary"] is None


def test_a_canary_that_dies_costs_no_answer(make: Make, repository: BlockRepository) -> None:
    save_echo(repository, "b", SPEC, settings={"crash_on_value": 666}, version="2")
    task = {"path": ["a", "b@1"], "canary": {"path": ["a", "b@2"], "share": 1}}
    poison = np.full((1, 4), 665, np.float32)  # block a adds 1
    with make() as system, Client(system.client_endpoint) as client:
        system.apply({"blocks": ["a", "b@1", "b@2"], "tasks": {"t": task}})
        assert client.infer("t", X, deadline_s=30).canary
        result = client.infer("t", poison, deadline_s=30)
        assert not result.canary
        assert float((result.value - poison)[0, 0]) == 11.0


def test_a_full_disk_is_507_and_leaves_state_and_service(
    make: Make, repository: BlockRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make() as system, Client(system.client_endpoint) as client:
        system.apply(BODY)
        before = (tmp_path / "state" / store.CURRENT).read_bytes()
        save(repository, "b", 20, "2")
        monkeypatch.setattr(store, "write_file", no_room)
        answer = plain_http.post(f"{system.rest_url}/v1/system-update", json=BODY, timeout=60)
        assert answer.status_code == 507, answer.text
        assert answer.json()["error"]["code"] == "NO_SPACE"
        assert (tmp_path / "state" / store.CURRENT).read_bytes() == before
        assert added(client) == [11.0]
        monkeypatch.undo()
        assert system.apply(BODY)["epoch"] == 2
        assert added(client) == [21.0]
